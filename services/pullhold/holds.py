"""Held pulls: who waits for what, who wakes when a queue has new messages. Pure; time is passed in.

A hold is WAITING, then PULLING whenever there may be something for it, then DONE; it is answered
exactly once, by whoever calls :meth:`Holds.end` or gets it from a method that says "ended".

What is known of a queue (its generation and readable maximum) is what its broker told last on the
arrival watch. Invariants:

- A WAITING hold of a known queue wants an offset at or above the maximum, of the present generation
  or of none: else it would be PULLING. So no arrival can be missed. (One of a newer generation
  waits too: the watch is about to tell of that one, and a change of generation wakes all.)
- A queue that nothing is known of (its watch is not answered yet, or broke) wakes nobody. Its holds
  wait for at most ``grace_s``; then they are told that the broker cannot be reached.
- The tags that came with an arrival are those of all messages above the maximum known before it: a
  hold that wants none of them moves on without a pull.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cometmq.errors import InvalidRequest
from services.pullhold.clients import Clients
from services.pullhold.deadlines import Deadlines
from services.pullhold.model import Due, Hold, HoldLimits, HoldState, QueueKey, Session, Want
from services.pullhold.queues import Queue, Queues

ANY: frozenset[int] = frozenset()
PASSED_S_MAX = 3.0  # a hold that has passed messages is answered by then: the position is committed
EMPTY_PULLS_MAX = 3  # pulls in a row that found nothing where the watch told of something


class Holds:
    """All holds of a process. What it wants to be pulled or answered it returns."""

    def __init__(self, limits: HoldLimits, *, grace_s: float = 1.0) -> None:
        self.queues = Queues(limits.queues_per_broker_max)
        self.clients = Clients(limits)
        self._grace_s = grace_s
        self._deadlines = Deadlines()
        self._graces = Deadlines()

    def __len__(self) -> int:
        """Holds that are not answered yet."""
        return self.clients.hold_count

    # --- what clients say -------------------------------------------------------------------------

    def open(self, client: str, inbox: Any = None) -> Session:
        """A new call of a client. LimitExceeded."""
        return self.clients.open(client, inbox)

    def close(self, session: Session, now_s: float) -> None:
        """The call is over; its holds are forgotten without an answer."""
        for hold in list(session.holds.values()):
            self.end(hold, now_s)
        self.clients.close(session)

    def park(self, session: Session, hold_id: int, want: Want, now_s: float) -> Hold:
        """Hold a pull. PULLING when there may be something at once. LimitExceeded; InvalidRequest
        for a number that an open hold of the call has.
        """
        if hold_id in session.holds:
            raise InvalidRequest(f"hold_id: {hold_id} is held already")
        self.clients.check_room(session)
        queue = self.queues.get(want.key, now_s)
        hold = Hold(session, hold_id, want, now_s)
        self.clients.add(hold)
        queue.holds[hold] = None
        self._deadlines.push(hold.deadline_s, hold, len(self))
        if queue.known is None:
            self._give_grace(hold, queue)
        elif hold.may_find(queue.known) or hold.is_above(queue.known):
            hold.state = HoldState.PULLING
        return hold

    def end(self, hold: Hold, now_s: float) -> bool:
        """The hold is over: answered, or taken back. False: it was already."""
        if hold.state is HoldState.DONE:
            return False
        hold.state = HoldState.DONE
        self.clients.remove(hold)
        queue = self.queues[hold.key]
        del queue.holds[hold]
        if not queue.holds:
            queue.idle_since_s = now_s
        return True

    def drain(self, now_s: float) -> list[Hold]:
        """All holds, ended."""
        every = [hold for queue in self.queues.all() for hold in queue.holds]
        for hold in every:
            self.end(hold, now_s)
        return every

    # --- what brokers say -------------------------------------------------------------------------

    def told(
        self, key: QueueKey, generation: int, maximum: int, codes: frozenset[int], now_s: float
    ) -> list[Hold]:
        """How a queue stands now, and which tags came (empty: could be any). Who is to be pulled,
        in order of parking.
        """
        queue = self.queues.find(key)
        if queue is None:
            return []  # forgotten meanwhile
        before = queue.known
        if before is None:
            codes = ANY  # what came before this watch is not among them
        elif before[0] == generation and maximum <= before[1]:
            return []  # told before
        queue.known = (generation, maximum)
        queue.arrived()
        moved = before is not None and before[0] != generation
        woken = [h for h in queue.holds if h.state is HoldState.WAITING]
        woken = [
            h
            for h in woken
            if moved
            or self._wakes(h, (generation, maximum), codes, now_s)
            or (before is None and h.is_above((generation, maximum)))
        ]
        for hold in woken:
            hold.state = HoldState.PULLING
        return woken

    def pulled(self, hold: Hold, generation: int, next_offset: int, now_s: float) -> HoldState:
        """A pull gave nothing up to ``next_offset``: what the hold is now.

        PULLING: pull again there. WAITING: parked once more. DONE, with ``end`` still to come from
        the caller: the broker denies what it told, so let the client ask it. A hold that has ended
        meanwhile must not come here.
        """
        assert hold.state is HoldState.PULLING
        hold.empty_pulls = hold.empty_pulls + 1 if next_offset == hold.offset else 0
        hold.generation = generation
        self._pass(hold, next_offset, now_s)
        queue = self.queues[hold.key]
        if queue.known is None:
            self._give_grace(hold, queue)
        elif generation <= queue.known[0] and hold.may_find(queue.known):
            # A newer generation than the known one is about to be told: that wakes.
            return HoldState.PULLING if hold.empty_pulls < EMPTY_PULLS_MAX else HoldState.DONE
        hold.state = HoldState.WAITING
        return hold.state

    def lost(self, broker_group: str, now_s: float) -> None:
        """Nothing is known of the group's queues any more: their watch broke."""
        for queue in self.queues.of(broker_group).values():
            if queue.known is not None:
                queue.lose(now_s)
                for hold in queue.holds:
                    self._give_grace(hold, queue)

    def gone(self, key: QueueKey, now_s: float) -> list[Hold]:
        """The watch of a queue ended: forgets it. Its holds, ended, in order of parking."""
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
        """When to call :meth:`due`; None: nothing is held."""
        times = [deadlines.next_s() for deadlines in (self._deadlines, self._graces)]
        return min((time_s for time_s in times if time_s is not None), default=None)

    def due(self, now_s: float) -> Iterator[tuple[Hold, Due]]:
        """The holds whose time is over, ended. One that is being pulled has its deadline too."""
        for hold in self._graces.pop_due(now_s):
            queue = self.queues[hold.key]
            unreachable = queue.known is None and now_s >= queue.unknown_since_s + self._grace_s
            if unreachable and hold.state is HoldState.WAITING:
                self.end(hold, now_s)
                yield hold, Due.UNREACHABLE
        for hold in self._deadlines.pop_due(now_s):
            self.end(hold, now_s)
            yield hold, Due.DEADLINE

    def _give_grace(self, hold: Hold, queue: Queue) -> None:
        assert queue.known is None
        self._graces.push(queue.unknown_since_s + self._grace_s, hold, len(self))

    def _wakes(
        self, hold: Hold, known: tuple[int, int], codes: frozenset[int], now_s: float
    ) -> bool:
        """Whether a WAITING hold has to be pulled; one that wants none of these tags moves on."""
        if not hold.may_find(known):
            return False
        if codes and hold.codes and codes.isdisjoint(hold.codes):
            self._pass(hold, known[1], now_s)
            return False
        return True

    def _pass(self, hold: Hold, offset: int, now_s: float) -> None:
        """Moves a hold past messages that its filter does not want. Its client learns it soon, and
        commits: a group that wants few messages has no lag for those that it skips.
        """
        deadline_s = now_s + PASSED_S_MAX
        if offset > hold.offset and deadline_s < hold.deadline_s:
            hold.deadline_s = deadline_s
            self._deadlines.push(deadline_s, hold, len(self))
        hold.offset = offset

    def validate(self) -> None:
        """The invariants; for tests."""
        self.clients.validate()
        assert len(self) == sum(len(queue.holds) for queue in self.queues.all())
        for queue in self.queues.all():
            for hold in queue.holds:
                assert hold.state is not HoldState.DONE
                assert hold.session.holds[hold.hold_id] is hold
                if hold.state is HoldState.WAITING and queue.known is not None:
                    newer = hold.generation > queue.known[0]
                    assert newer or not hold.may_find(queue.known)
