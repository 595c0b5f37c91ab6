"""The queues that holds wait for, and what is known of each. Pure; time is passed in."""

from __future__ import annotations

from cometmq.errors import LimitExceeded
from services.pullhold.model import Hold, QueueKey

WANTED_ARRIVALS = 16  # that a broker sends with their messages, each time that it is asked


class Queue:
    """``known`` is (generation, maximum); None: nothing since ``unknown_since_s``."""

    __slots__ = ("_wanted", "answer_bytes", "holds", "idle_since_s", "known", "unknown_since_s")

    def __init__(self, now_s: float) -> None:
        self.known: tuple[int, int] | None = None
        self.unknown_since_s = now_s
        self.idle_since_s = now_s  # when it lost its last hold
        self.holds: dict[Hold, None] = {}  # in order of parking
        self.answer_bytes: int | None = None  # what a pull of it got last
        self._wanted = 0  # arrivals that are still to come with their messages, we believe

    def want(self) -> bool:
        """Somebody waits here who can be answered with the messages of an arrival: whether to ask
        for them again. So often that they do not end while that goes on, and seldom.
        """
        if self._wanted > WANTED_ARRIVALS // 2:
            return False
        self._wanted = WANTED_ARRIVALS
        return True

    def arrived(self) -> None:
        """An arrival was told, with its messages or without."""
        self._wanted = max(0, self._wanted - 1)

    def lose(self, now_s: float) -> None:
        """Its watch broke."""
        self.known = None
        self.unknown_since_s = now_s
        self._wanted = 0


class Queues:
    """All queues, by broker group. A queue is here a little longer than it is waited for."""

    def __init__(self, per_broker_max: int) -> None:
        self._per_broker_max = per_broker_max
        self._groups: dict[str, dict[QueueKey, Queue]] = {}

    def __len__(self) -> int:
        return sum(map(len, list(self._groups.values())))  # also asked by the metrics' thread

    def find(self, key: QueueKey) -> Queue | None:
        return self._groups.get(key.broker_group, {}).get(key)

    def __getitem__(self, key: QueueKey) -> Queue:
        return self._groups[key.broker_group][key]

    def get(self, key: QueueKey, now_s: float) -> Queue:
        """The queue, made when there is none. LimitExceeded."""
        queue = self.find(key)
        if queue is None:
            queues = self._groups.setdefault(key.broker_group, {})
            if len(queues) >= self._per_broker_max:
                raise LimitExceeded(f"{len(queues)} queues of {key.broker_group} are waited for")
            queue = queues[key] = Queue(now_s)
        return queue

    def of(self, broker_group: str) -> dict[QueueKey, Queue]:
        """The queues of a group."""
        return self._groups.get(broker_group, {})

    def all(self) -> list[Queue]:
        return [queue for queues in self._groups.values() for queue in queues.values()]

    def waited_for(self, broker_group: str) -> list[QueueKey]:
        """Those of a known state that somebody waits for: what the safety check asks about."""
        queues = self.of(broker_group).items()
        return [key for key, queue in queues if queue.holds and queue.known is not None]

    def behind(self, key: QueueKey, generation: int, maximum: int) -> bool:
        """Whether less is known of a queue that somebody waits for."""
        queue = self.find(key)
        if queue is None or queue.known is None or not queue.holds:
            return False
        return queue.known < (generation, maximum)

    def known(self, key: QueueKey) -> tuple[int, int]:
        """(generation, maximum); zeros when nothing is known."""
        queue = self.find(key)
        return queue.known if queue is not None and queue.known is not None else (0, 0)

    def drop_idle(self, broker_group: str, now_s: float, linger_s: float) -> list[QueueKey]:
        """Forgets the queues that nobody has waited for since ``linger_s``; which they were."""
        queues = self.of(broker_group).items()
        idle = [k for k, q in queues if not q.holds and now_s - q.idle_since_s >= linger_s]
        for key in idle:
            self.forget(key)
        return idle

    def forget(self, key: QueueKey) -> None:
        """A queue without holds goes."""
        queues = self._groups[key.broker_group]
        assert not queues[key].holds
        del queues[key]
        if not queues:
            del self._groups[key.broker_group]
