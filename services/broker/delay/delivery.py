"""Delivers messages that have waited for a delay level or for a time of their own: appends those
that are due, in one batch, to the topics that they are meant for.

Those of our form are relayed together, without a look at each. What is damaged, dropped or of
another form gets a look of its own.
"""

from __future__ import annotations

import logging
from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate, compress
from typing import NamedTuple, Protocol

from cometmq.clock import Clock
from cometmq.errors import MessageNotFound, PropertiesTooLarge, StoreDamaged
from cometmq.format import delayed, timers
from cometmq.format.record import Record
from cometmq.format.relay import Relayed, relay
from cometmq.format.relay_run import RelayRun, delivery_targets
from cometmq.member.read.records import read_each, read_joined
from cometmq.member.relay import RelayWriter, batch_bytes_max
from cometmq.member.state.keeper import StateKeeper
from cometmq.member.storage.member_storage import MemberStorage
from cometmq.model import QueueKey
from cometmq.store.log.commitlog import Span
from cometmq.telemetry import fields

log = logging.getLogger(__name__)

TURN_COUNT_MIN = 16
TURN_BYTES_MAX = 1 << 20
EACH_COUNT_MAX = 256  # of messages that have to be looked at one by one


class TurnLimits(NamedTuple):
    """``count_max``: messages of a turn. ``loop_s``: what it is to take of the event loop."""

    count_max: int
    loop_s: float


# Short turns make sends wait less, long ones deliver more a second. All is to be readable 1 s after
# its time: what is later than half of that comes first.
SHORT_TURN = TurnLimits(384, 0.001)
LONG_TURN = TurnLimits(1024, 0.005)
LATE_MS = 500


class Delivered(NamedTuple):
    """The first ``done_count`` messages wait no more; ``appended_count`` of them were appended."""

    done_count: int
    appended_count: int


class Gone(Protocol):
    """Which messages of the queues are not delivered, as ``messaging.timers.TimerTable`` and
    ``messaging.delay.LevelDrops`` know.
    """

    @property
    def skips(self) -> Mapping[int, int]:
        """By their offsets: those that were recalled."""
        ...

    @property
    def dropped(self) -> Collection[str]:
        """Topics that were created while messages waited, which may be for older ones."""
        ...

    def is_dropped(self, topic: str, queue_id: int, offset: int) -> bool:
        """Whether the message for the topic, which waits at this offset, was stored before."""
        ...


class Delivery:
    """Belongs to the event loop. ``noun``: what the log calls a message. ``count_gone`` gets
    "dropped" or "lost" for each message that is not delivered. ``turn_count``: how many messages
    the next turn should take, so that it keeps the event loop for a moment only.
    """

    def __init__(
        self,
        storage: MemberStorage,
        keeper: StateKeeper,
        relays: RelayWriter,
        clock: Clock,
        noun: str,
        gone: Gone,
        count_gone: Callable[[str], object],
    ) -> None:
        self.turn_count = TURN_COUNT_MIN
        self._message_s = SHORT_TURN.loop_s / TURN_COUNT_MIN  # what one takes of the event loop
        self._storage = storage
        self._keeper = keeper
        self._relays = relays
        self._clock = clock
        self._noun = noun
        self._gone = gone
        self._count_gone = count_gone
        file_bytes = storage.store.log_file_bytes
        self._turn_bytes_max = batch_bytes_max(file_bytes, TURN_BYTES_MAX)
        # What a full store moves must not leave much of each file blank.
        self._move_bytes_max = min(TURN_BYTES_MAX, file_bytes // 16)

    def movable(self, spans: Sequence[Span]) -> int:
        """How many of the first of these records are stored again at once; at least one. Raises
        DiskFull: there is no room.
        """
        count = _fitting(spans, self._move_bytes_max)
        self._storage.check_moving_room(sum([size for _, size in spans[:count]]))
        return count

    async def deliver(
        self,
        spans: Sequence[Span],
        queues: Sequence[QueueKey],
        offsets: Sequence[int],
        late_ms: int,
    ) -> Delivered:
        """Append some of the first of these messages, all or nothing; at least one is done if there
        is one. ``queues``, ``offsets``: where they wait. ``late_ms``: so long ago the first of them
        was due. Raises what ``MemberStorage.append_relayed`` raises, StoreFailed,
        Shortage.
        """
        count = _fitting(spans, self._turn_bytes_max)
        spans, queues, offsets = spans[:count], queues[:count], offsets[:count]
        self._storage.check_delivery_room(sum([size for _, size in spans]))
        begun = await self._deliver_run(spans, queues, offsets)
        if begun is None:
            some = slice(EACH_COUNT_MAX)
            begun = await self._deliver_each(spans[some], queues[some], offsets[some])
        delivered, begun_s = begun
        self._fit_turn(delivered.appended_count, self._clock.monotonic_s() - begun_s, late_ms)
        return delivered

    async def _deliver_run(
        self, spans: Sequence[Span], queues: Sequence[QueueKey], offsets: Sequence[int]
    ) -> tuple[Delivered, float] | None:
        """Those of the first that have our form, and when they had been read. None: the first one
        needs a look.
        """
        found = await read_joined(
            self._storage.store, spans, list(zip(queues, offsets, strict=True))
        )
        if found is None:
            return None
        begun_s = self._clock.monotonic_s()
        sources, places = found
        left: Sequence[int] = range(len(spans))
        if skips := self._gone.skips:  # while they were read some may have been recalled
            is_wanted = [offset not in skips for offset in offsets]
            left, places = [*compress(left, is_wanted)], array("I", compress(places, is_wanted))
        texts, chosen = delivery_targets(sources, places)
        firsts = self._firsts(queues, offsets)
        targets = [self._plain_queue(text, firsts) for text in texts]
        if None in targets:
            closer = {index for index, queue in enumerate(targets) if queue is None}
            del chosen[next(at for at, index in enumerate(chosen) if index in closer) :]
        done = left[len(chosen)] if len(chosen) < len(left) else len(spans)
        if not done and spans:
            return None
        if chosen:
            self._relays.append_run(_run(sources, places[: len(chosen)], chosen, targets))
        return Delivered(done, len(chosen)), begun_s

    def _firsts(self, queues: Sequence[QueueKey], offsets: Sequence[int]) -> dict[int, int]:
        """By queue id, the first of these offsets; nothing while all topics are as old as what
        waits.
        """
        if not self._gone.dropped:
            return {}
        if len(set(queues)) == 1:  # as of timers always
            return {queues[0][1]: min(offsets)}
        firsts: dict[int, int] = {}
        for (_, queue_id), offset in zip(queues, offsets, strict=True):
            firsts[queue_id] = min(offset, firsts.get(queue_id, offset))
        return firsts

    def _plain_queue(self, text: bytes, firsts: Mapping[int, int]) -> QueueKey | None:
        """The queue that all messages with this target go to; None: each needs a look."""
        target = delayed.target_of_text(text)
        if any(self._gone.is_dropped(target[0], *first) for first in firsts.items()):
            return None
        queue = self._queue(target)
        return None if isinstance(queue, str) else queue

    async def _deliver_each(
        self, spans: Sequence[Span], queues: Sequence[QueueKey], offsets: Sequence[int]
    ) -> tuple[Delivered, float]:
        """The same, one by one."""
        found = await self.read(spans, queues, offsets)
        begun_s = self._clock.monotonic_s()
        relayed: list[Relayed] = []
        for (place, _), offset, one in zip(spans, offsets, found, strict=True):
            if offset in self._gone.skips:  # recalled while it was read
                continue
            if not isinstance(one, Record):
                self.lose(place, str(one))
            elif queue := self.target(one):
                try:
                    relayed.append(relay(one, *queue, self._relays.host))
                except (StoreDamaged, PropertiesTooLarge) as error:
                    self.lose(one.log_offset, str(error))
        if relayed:
            self._relays.append(relayed)
        return Delivered(len(spans), len(relayed)), begun_s

    async def read(
        self, spans: Sequence[Span], queues: Sequence[QueueKey], offsets: Sequence[int]
    ) -> list[Record | StoreDamaged | MessageNotFound]:
        """The records, or why one cannot be read. A queue that names a wrong place for one is
        mended. Raises StoreFailed, Shortage.
        """
        places = list(zip(queues, offsets, strict=True))
        return await read_each(self._storage.store, spans, places)

    # --- where a message goes ---------------------------------------------------------------------

    def target(self, found: Record) -> QueueKey | None:
        """The queue that a message goes to; None: none, it is dropped."""
        if timers.recalls(found.raw_properties):  # a tombstone: its work is done
            return None
        target = delayed.target_of(found.raw_properties)
        queue = "it names no topic" if target is None else self._queue(target, found)
        if not isinstance(queue, str):
            return queue
        log.warning("%s is dropped", self._noun, extra=fields(at=found.log_offset, reason=queue))
        self._count_gone("dropped")
        return None

    def _queue(self, target: QueueKey, found: Record | None = None) -> QueueKey | str:
        """The queue for messages that are meant for ``target``, or why there is none.
        ``found``: one of them, which may be older than its topic.
        """
        topic, queue_id = target
        config = self._keeper.state.topics.find(topic)
        if config is None or topic in self._keeper.closing:
            return f"topic {topic} is gone"
        if found and self._gone.is_dropped(topic, found.queue_id, found.queue_offset):
            return f"topic {topic} was deleted since, and created again"
        delivery_queue_id = config.delivery_queue_id(queue_id)
        if delivery_queue_id is None:
            return f"topic {topic} has no queue"
        return topic, delivery_queue_id

    def lose(self, log_offset: int, reason: str) -> None:
        """A message is damaged or gone."""
        log.error("%s is lost", self._noun, extra=fields(at=log_offset, reason=reason))
        self._count_gone("lost")

    def _fit_turn(self, count: int, spent_s: float, late_ms: int) -> None:
        limits = LONG_TURN if late_ms >= LATE_MS else SHORT_TURN
        if count >= self.turn_count // 2:
            self._message_s = max(spent_s, 1e-4) / count
        fitting = int(limits.loop_s / self._message_s)
        self.turn_count = min(limits.count_max, max(TURN_COUNT_MIN, fitting))


def _fitting(spans: Sequence[Span], bytes_max: int) -> int:
    """How many of the first of these records have so many bytes; at least one."""
    ends = list(accumulate([size for _, size in spans]))
    return max(1, bisect_right(ends, bytes_max))


def _run(
    sources: bytes, places: array[int], chosen: array[int], queues: Sequence[QueueKey | None]
) -> RelayRun:
    """``queues`` may come twice, and some may get nothing."""
    numbers: dict[QueueKey, int] = {}
    for index in dict.fromkeys(chosen):
        queue = queues[index]
        assert queue is not None, index
        numbers.setdefault(queue, len(numbers))
    renumbered = [-1 if queue is None else numbers.get(queue, -1) for queue in queues]
    chosen = array("I", map(renumbered.__getitem__, chosen))
    return RelayRun(sources, places, chosen, tuple(numbers))
