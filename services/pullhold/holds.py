"""The state machine of held pulls: what they wait for, and which wake when messages arrive. Pure;
time is passed in.

A hold is WAITING, then PULLING whenever there may be something for it, then DONE. The caller of
:meth:`Holds.end`, or of a method that returns the hold "ended", answers it exactly once. A hold
that may give several answers goes on after all but the last.

What comes to a group that receives wakes a few of its holds in a queue; the others are IN_LINE. The
members that were woken may have died, or have room for fewer messages. So those in line wake, one
after the other, until a member parks that has looked at everything.

A queue is *known* by its generation and readable maximum, as its broker reported them last on the
watch. Invariants, which :meth:`Holds.validate` checks:

- A WAITING hold of a known queue wants an offset at or above the maximum, of the present generation
  or of none: else it would be PULLING. So no arrival can be missed. (A hold of a newer generation
  waits too: the watch is about to report it, and a change of generation wakes all.)
- A WAITING hold for arrivals has looked up to the newest return of messages to its group.
- A hold IN_LINE is of a known queue, which has a time when the next one of its group wakes.
- An unknown queue (its watch is not answered yet, or broke) wakes no hold. Its holds wait for at
  most ``grace_s``, then end: the broker cannot be reached.
- The tags that came with an arrival are those of all messages above the maximum known before it: a
  hold that wants none of them moves on without a pull.
- A hold that has not ended is in its queue, in its session, in the counts of its client, and in the
  heap of deadlines, at its own or before it; while its queue is unknown, in the heap of grace times
  too.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cometmq.errors import InvalidRequest, LimitExceeded
from cometmq.rpc.shares import Shares, address_of
from services.pullhold.model import (
    WAITS,
    ClusterQueue,
    Due,
    Hold,
    HoldLimits,
    HoldSpec,
    HoldState,
    Queue,
    Session,
)

ANY: frozenset[int] = frozenset()
PASSED_S_MAX = 3.0  # a hold that has passed messages is answered by then: the position is committed
EMPTY_PULLS_MAX = 3  # pulls in a row that found nothing where the watch reported something
MESSAGES_PER_WAKE = 32  # that one member of a group receives: so many arrivals wake one
TAKE_S = 1.0  # within it a member that was woken has received, and waits again if it found nothing
STALE_MAX = 1_024  # deadlines above twice the number of holds; then one of each hold is kept


class Holds:
    """All holds of a process. Methods return the holds to pull for or to answer."""

    def __init__(self, limits: HoldLimits, *, grace_s: float = 1.0) -> None:
        self.queues = Queues(limits.queues_per_broker_max)
        self.clients = Clients(limits)
        self._grace_s = grace_s
        self._deadlines = Deadlines()
        self._graces = Deadlines()
        # When a hold IN_LINE of a group in a queue wakes, the first time first; some are stale.
        self._untaken: deque[tuple[float, Queue, str]] = deque()

    def at_sooner(self, notify: Callable[[], None]) -> None:
        """``notify`` is called whenever :meth:`next_due_s` comes sooner than it did."""
        self._deadlines.sooner = self._graces.sooner = notify

    def __len__(self) -> int:
        """Holds that have not ended."""
        return self.clients.hold_count

    # --- calls of clients -------------------------------------------------------------------------

    def open(self, client: str, inbox: Any = None) -> Session:
        """A new call of a client. LimitExceeded."""
        return self.clients.open(client, inbox)

    def close(self, session: Session, now_s: float) -> None:
        """The call is over; its holds are forgotten without an answer."""
        for hold in list(session.holds.values()):
            self.end(hold, now_s)
        self.clients.close(session)

    def park(self, session: Session, hold_id: int, spec: HoldSpec, now_s: float) -> Hold:
        """Holds a pull. PULLING when there may be something at once. LimitExceeded; InvalidRequest
        if an open hold of the call has the number.
        """
        if hold_id in session.holds:
            raise InvalidRequest(f"hold_id: {hold_id} is held already")
        self.clients.check_room(session)
        queue = self.queues.ensure(spec.key, now_s)
        hold = Hold(session, hold_id, spec, queue, now_s)
        self.clients.add(hold)
        queue.holds[hold] = None
        self._deadlines.push(hold.deadline_s, hold, len(self))
        self._begin(hold, queue)
        return hold

    def _begin(self, hold: Hold, queue: Queue) -> None:
        if queue.known is None:
            self._give_grace(hold, queue)
        elif hold.may_find(queue.known) or hold.is_above(queue.known) or queue.has_returned(hold):
            hold.state = HoldState.PULLING
        elif hold.arrival_group in queue.untaken_s:  # its member has looked behind all that came
            self._taken(queue, hold.arrival_group)

    def go_on(self, hold: Hold, generation: int, offset: int, now_s: float) -> None:
        """The hold, which has been answered and has answers left, waits for what comes from
        ``offset`` on. PULLING when there may be something at once.
        """
        assert hold.state is not HoldState.DONE
        assert hold.answers_left > 1
        hold.answers_left -= 1
        hold.generation, hold.offset, hold.empty_pulls = generation, offset, 0
        # Its place in the heap stays: `due` moves it when its earlier time comes.
        hold.parked_s, hold.deadline_s = now_s, now_s + hold.hold_s
        hold.state = HoldState.WAITING
        self._begin(hold, hold.queue)

    def end(self, hold: Hold, now_s: float) -> bool:
        """Ends a hold, which is answered or cancelled. False: it had ended already."""
        if hold.state is HoldState.DONE:
            return False
        hold.state = HoldState.DONE
        self.clients.remove(hold)
        queue = hold.queue
        del queue.holds[hold]
        if not queue.holds:
            queue.idle_since_s = now_s
        return True

    def drain(self, now_s: float) -> list[Hold]:
        """Ends all holds and returns them."""
        every = [hold for queue in self.queues.all() for hold in queue.holds]
        for hold in every:
            self.end(hold, now_s)
        return every

    # --- reports of brokers -----------------------------------------------------------------------

    def observe_arrival(
        self, key: ClusterQueue, generation: int, maximum: int, codes: frozenset[int], now_s: float
    ) -> list[Hold]:
        """A queue has this generation and maximum now; ``codes`` are the tags that came (empty: any
        tag). Returns the holds to pull for, in order of parking.
        """
        queue = self.queues.find(key)
        if queue is None:
            return []  # forgotten meanwhile
        before = queue.known
        if before is None:
            codes = ANY  # messages before this watch may have others
        elif before[0] == generation and maximum <= before[1]:
            return []  # known already
        known = queue.known = (generation, maximum)
        queue.note_arrival()
        arrival = _Arrival(before, known, codes)
        woken = []
        for hold in queue.holds:
            if hold.state not in WAITS:
                continue
            if arrival.concerns(hold):
                if arrival.wakes(hold):
                    hold.state = HoldState.PULLING
                    woken.append(hold)
                else:
                    self._put_in_line(hold, now_s)
            elif hold.state is HoldState.IN_LINE or not hold.may_find(known):
                continue
            elif hold.arrival_group:
                hold.offset = maximum  # nobody of its group wants them
            else:
                self._pass(hold, maximum, now_s)
        return woken

    def observe_return(
        self, key: ClusterQueue, group: str, number: int, count: int, now_s: float
    ) -> list[Hold]:
        """So many messages of a queue came back to a group that receives. Returns the holds to
        answer, in order of parking: those of this group that looked before, as many as for new
        messages.
        """
        queue = self.queues.find(key)
        if queue is None or number <= queue.return_numbers.get(group, 0):
            return []
        queue.return_numbers[group] = number
        wakes_left = -(-count // MESSAGES_PER_WAKE)
        woken = []
        for hold in queue.holds:
            if (
                hold.state not in WAITS
                or hold.arrival_group != group
                or not queue.has_returned(hold)
            ):
                continue
            if wakes_left:
                wakes_left -= 1
                hold.state = HoldState.PULLING
                woken.append(hold)
            else:
                self._put_in_line(hold, now_s)
        return woken

    def _put_in_line(self, hold: Hold, now_s: float) -> None:
        """Others of the hold's group were woken in its place."""
        hold.state = HoldState.IN_LINE
        queue, group = hold.queue, hold.arrival_group
        if group not in queue.untaken_s:
            self._wake_next(queue, group, now_s + TAKE_S)

    def _wake_next(self, queue: Queue, group: str, when_s: float) -> None:
        if not self._untaken:
            self._deadlines.sooner()
        queue.untaken_s[group] = when_s
        self._untaken.append((when_s, queue, group))

    def _taken(self, queue: Queue, group: str) -> None:
        """Nothing is left of what the group's holds IN_LINE wait for."""
        assert queue.known is not None
        del queue.untaken_s[group]
        for hold in queue.in_line(group):
            hold.state = HoldState.WAITING
            hold.offset = max(hold.offset, queue.known[1])
            hold.return_number = queue.return_numbers.get(group, hold.return_number)

    def pulled(self, hold: Hold, generation: int, next_offset: int, now_s: float) -> HoldState:
        """A pull found nothing before ``next_offset``. Returns the hold's state now.

        PULLING: pull again there. WAITING: parked once more. DONE: the broker denies what it
        reported, so the caller ends the hold and the client pulls itself. A hold that has ended
        must not come here.
        """
        assert hold.state is HoldState.PULLING
        hold.empty_pulls = hold.empty_pulls + 1 if next_offset == hold.offset else 0
        hold.generation = generation
        self._pass(hold, next_offset, now_s)
        queue = hold.queue
        if queue.known is None:
            self._give_grace(hold, queue)
        elif generation <= queue.known[0] and hold.may_find(queue.known):
            # A newer generation than the known one waits: the watch is about to report it.
            return HoldState.PULLING if hold.empty_pulls < EMPTY_PULLS_MAX else HoldState.DONE
        hold.state = HoldState.WAITING
        return hold.state

    def lose_watch(self, broker_group: str, now_s: float) -> None:
        """The watch of a group broke: its queues are unknown."""
        for queue in self.queues.of(broker_group).values():
            if queue.known is not None:
                queue.forget_known(now_s)
                for hold in queue.holds:
                    if hold.state is HoldState.IN_LINE:
                        hold.state = HoldState.WAITING  # the next watch has it again
                    self._give_grace(hold, queue)

    def end_queue(self, key: ClusterQueue, now_s: float) -> list[Hold]:
        """The broker ended the watch of a queue. Returns its holds, ended, in order of parking."""
        queue = self.queues.find(key)
        if queue is None:
            return []
        ended = list(queue.holds)
        for hold in ended:
            self.end(hold, now_s)
        self.queues.forget(key)
        return ended

    # --- time -------------------------------------------------------------------------------------

    def next_due_s(self) -> float | None:
        """When to call :meth:`due`; None: there are no holds."""
        times = [deadlines.next_s() for deadlines in (self._deadlines, self._graces)]
        if self._untaken:
            times.append(self._untaken[0][0])
        return min((time_s for time_s in times if time_s is not None), default=None)

    def due(self, now_s: float) -> Iterator[tuple[Hold, Due]]:
        """The holds that are due, ended. A PULLING hold has its deadline too."""
        while self._untaken and self._untaken[0][0] <= now_s:
            when_s, queue, group = self._untaken.popleft()
            if queue.untaken_s.get(group) != when_s:
                continue
            del queue.untaken_s[group]
            in_line = queue.in_line(group)
            if (hold := next(in_line, None)) is None:
                continue
            if next(in_line, None) is not None:
                self._wake_next(queue, group, now_s + TAKE_S)
            self.end(hold, now_s)
            yield hold, Due.UNTAKEN
        for hold in self._graces.pop_due(now_s):
            queue = hold.queue
            if queue.known is not None or hold.state is not HoldState.WAITING:
                continue
            if now_s < queue.unknown_since_s + self._grace_s:  # it was known meanwhile
                self._give_grace(hold, queue)
                continue
            self.end(hold, now_s)
            yield hold, Due.UNREACHABLE
        for hold in self._deadlines.pop_due(now_s):
            if hold.deadline_s > now_s:  # it has gone on since
                self._deadlines.push(hold.deadline_s, hold, len(self))
                continue
            self.end(hold, now_s)
            yield hold, Due.DEADLINE

    def _give_grace(self, hold: Hold, queue: Queue) -> None:
        assert queue.known is None
        self._graces.push(queue.unknown_since_s + self._grace_s, hold, len(self))

    def _pass(self, hold: Hold, offset: int, now_s: float) -> None:
        """Moves a hold past messages that its filter does not want. Its client learns it soon and
        commits, so that a group has no lag for messages that it skips.
        """
        deadline_s = now_s + PASSED_S_MAX
        if offset > hold.offset and deadline_s < hold.deadline_s:
            hold.deadline_s = deadline_s
            self._deadlines.push(deadline_s, hold, len(self))
        hold.offset = offset

    def validate(self) -> None:
        """The invariants; for tests."""
        held = [hold for queue in self.queues.all() for hold in queue.holds]
        assert len(self) == len(held)
        self.clients.validate(held)
        deadlines, graces = self._deadlines.times(), self._graces.times()
        for queue in self.queues.all():
            queue.validate()
            for hold in queue.holds:
                assert hold.state is not HoldState.DONE
                assert hold.session.holds[hold.hold_id] is hold
                assert hold.queue is queue
                assert min(deadlines[hold]) <= hold.deadline_s
                assert hold.answers_left >= 1
                if hold.state is HoldState.IN_LINE:
                    when_s = queue.untaken_s[hold.arrival_group]
                    assert queue.known is not None
                    assert (when_s, queue, hold.arrival_group) in self._untaken
                if hold.state is HoldState.WAITING and queue.known is None:
                    assert min(graces[hold]) <= queue.unknown_since_s + self._grace_s
                elif hold.state is HoldState.WAITING:
                    assert queue.known is not None
                    newer = hold.generation > queue.known[0]
                    assert newer or not hold.may_find(queue.known)
                    assert not queue.has_returned(hold)


class _Arrival:
    """Which holds of a queue wake, asked in order of parking. ``before``, ``known``: its generation
    and maximum.
    """

    def __init__(
        self, before: tuple[int, int] | None, known: tuple[int, int], codes: frozenset[int]
    ) -> None:
        self._before = before
        self._known = known
        self._codes = codes
        self._has_moved = before is not None and before[0] != known[0]
        count = known[1] - (before[1] if before is not None and not self._has_moved else 0)
        self._wakes_each = -(-count // MESSAGES_PER_WAKE)
        self._woken: Counter[str] = Counter()  # holds for arrivals, by group

    def concerns(self, hold: Hold) -> bool:
        """Whether there may be something for the hold."""
        if self._has_moved:
            return True
        if not hold.may_find(self._known):
            return self._before is None and hold.is_above(self._known)
        return not (self._codes and hold.codes and self._codes.isdisjoint(hold.codes))

    def wakes(self, hold: Hold) -> bool:
        """Whether a hold that it concerns wakes, or enough others of its group."""
        if self._has_moved or not hold.arrival_group or not hold.may_find(self._known):
            return True
        self._woken[hold.arrival_group] += 1
        return self._woken[hold.arrival_group] <= self._wakes_each


# --- queues: what is known of each, and its holds -------------------------------------------------


class Queues:
    """All queues, by broker group. A queue stays for a little while after its last hold."""

    def __init__(self, per_broker_max: int) -> None:
        self._per_broker_max = per_broker_max
        self._groups: dict[str, dict[ClusterQueue, Queue]] = {}

    def __len__(self) -> int:
        return sum(map(len, list(self._groups.values())))  # the metrics' thread calls it too

    def find(self, key: ClusterQueue) -> Queue | None:
        return self._groups.get(key.broker_group, {}).get(key)

    def __getitem__(self, key: ClusterQueue) -> Queue:
        return self._groups[key.broker_group][key]

    def ensure(self, key: ClusterQueue, now_s: float) -> Queue:
        """The queue, made if it is missing. LimitExceeded."""
        queue = self.find(key)
        if queue is None:
            queues = self._groups.setdefault(key.broker_group, {})
            if len(queues) >= self._per_broker_max:
                raise LimitExceeded(f"{len(queues)} queues of {key.broker_group} are waited for")
            queue = queues[key] = Queue(now_s)
        return queue

    def of(self, broker_group: str) -> dict[ClusterQueue, Queue]:
        """The queues of a group."""
        return self._groups.get(broker_group, {})

    def all(self) -> list[Queue]:
        return [queue for queues in self._groups.values() for queue in queues.values()]

    def waited_for(self, broker_group: str) -> list[ClusterQueue]:
        """The known queues with holds: the safety check asks for their maxima."""
        queues = self.of(broker_group).items()
        return [key for key, queue in queues if queue.holds and queue.known is not None]

    def behind(self, key: ClusterQueue, generation: int, maximum: int) -> bool:
        """Whether a known queue with holds is known by less than that."""
        queue = self.find(key)
        if queue is None or queue.known is None or not queue.holds:
            return False
        return queue.known < (generation, maximum)

    def known(self, key: ClusterQueue) -> tuple[int, int]:
        """(generation, maximum); zeros when the queue is unknown."""
        queue = self.find(key)
        return queue.known if queue is not None and queue.known is not None else (0, 0)

    def drop_idle(self, broker_group: str, now_s: float, linger_s: float) -> list[ClusterQueue]:
        """Removes the queues without holds for ``linger_s``, and returns them."""
        queues = self.of(broker_group).items()
        idle = [k for k, q in queues if not q.holds and now_s - q.idle_since_s >= linger_s]
        for key in idle:
            self.forget(key)
        return idle

    def forget(self, key: ClusterQueue) -> None:
        """Removes a queue without holds."""
        queues = self._groups[key.broker_group]
        assert not queues[key].holds
        del queues[key]
        if not queues:
            del self._groups[key.broker_group]


# --- clients and their limits ---------------------------------------------------------------------


class _Client:
    __slots__ = ("hold_count", "session_count")

    def __init__(self) -> None:
        self.hold_count = 0
        self.session_count = 0


class Clients:
    """All clients that have an open call."""

    def __init__(self, limits: HoldLimits) -> None:
        self._limits = limits
        self._clients: dict[str, _Client] = {}
        self._streams = Shares(
            limits.streams_per_peer_max, "calls that hold", "streams_per_peer_max"
        )
        self._holds = Shares(limits.holds_per_peer_max, "held pulls", "holds_per_peer_max")
        self.hold_count = 0  # of all clients

    def __len__(self) -> int:
        return len(self._clients)

    def open(self, client: str, inbox: Any) -> Session:
        """A new call of a client. LimitExceeded."""
        if client not in self._clients and len(self._clients) >= self._limits.clients_max:
            raise LimitExceeded(f"{self._limits.clients_max} clients are here (clients_max)")
        session = Session(client, address_of(client), inbox)
        self._streams.take(session.address)
        self._clients.setdefault(client, _Client()).session_count += 1
        return session

    def close(self, session: Session) -> None:
        """The call is over; its holds have ended."""
        assert not session.holds
        self._streams.give_back(session.address)
        client = self._clients[session.client]
        client.session_count -= 1
        if not client.session_count:
            assert not client.hold_count
            del self._clients[session.client]

    def check_room(self, session: Session) -> None:
        """LimitExceeded unless the call may hold one more."""
        limits = self._limits
        if self.hold_count >= limits.holds_max:
            raise LimitExceeded(f"{limits.holds_max} pulls are held (holds_max)")
        if self._clients[session.client].hold_count >= limits.holds_per_client_max:
            limit = limits.holds_per_client_max
            raise LimitExceeded(f"{limit} pulls of the client are held (holds_per_client_max)")
        if len(session.holds) >= limits.holds_per_stream_max:
            limit = limits.holds_per_stream_max
            raise LimitExceeded(f"{limit} pulls of the stream are held (holds_per_stream_max)")
        self._holds.check(session.address)

    def add(self, hold: Hold) -> None:
        """Counts a new hold, after :meth:`check_room`."""
        self._holds.take(hold.session.address)
        hold.session.holds[hold.hold_id] = hold
        self._clients[hold.session.client].hold_count += 1
        self.hold_count += 1

    def remove(self, hold: Hold) -> None:
        """Stops counting a hold that has ended."""
        self._holds.give_back(hold.session.address)
        del hold.session.holds[hold.hold_id]
        self._clients[hold.session.client].hold_count -= 1
        self.hold_count -= 1

    def validate(self, held: Sequence[Hold]) -> None:
        """The counts are those of the holds that have not ended."""
        assert self.hold_count == len(held)
        counts = Counter(hold.session.client for hold in held)
        for name, client in self._clients.items():
            assert client.session_count > 0, name
            assert client.hold_count == counts[name], name


# --- deadlines ------------------------------------------------------------------------------------


def _nothing() -> None:
    pass


class Deadlines:
    """A heap. A hold may be in it several times, and stays in it when it ends, until its time comes
    or the heap is cleaned. ``sooner`` is called when a time comes in that is earlier than all
    others.
    """

    def __init__(self) -> None:
        self.sooner: Callable[[], None] = _nothing
        self._heap: list[tuple[float, int, Hold]] = []
        self._numbers = itertools.count()  # holds of the same time in the order in which they came

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, when_s: float, hold: Hold, hold_count: int) -> None:
        """``hold_count``: holds that have not ended."""
        if not self._heap or when_s < self._heap[0][0]:
            self.sooner()
        heapq.heappush(self._heap, (when_s, next(self._numbers), hold))
        if len(self._heap) > 2 * hold_count + STALE_MAX:
            self._clean()

    def _clean(self) -> None:
        """Keep the earliest time of each hold that has not ended."""
        first: dict[Hold, tuple[float, int, Hold]] = {}
        for entry in sorted(self._heap):
            if entry[2].state is not HoldState.DONE:
                first.setdefault(entry[2], entry)
        self._heap = list(first.values())

    def next_s(self) -> float | None:
        """The earliest time; None: there is none."""
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now_s: float) -> Iterator[Hold]:
        """The holds whose time has come and that have not ended."""
        while self._heap and self._heap[0][0] <= now_s:
            hold = heapq.heappop(self._heap)[2]
            if hold.state is not HoldState.DONE:
                yield hold

    def times(self) -> dict[Hold, set[float]]:
        """All times of each hold; for tests."""
        found: dict[Hold, set[float]] = defaultdict(set)
        for when_s, _, hold in self._heap:
            found[hold].add(when_s)
        return found
