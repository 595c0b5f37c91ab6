"""The batches of one sender on their way: waiting, in flight, answered. A state machine without
I/O; time is passed in.

Invariants (asserted): batch ids of one stream rise by one from 1; answers come in the order sent;
waiting batches are in sequence order, and a batch that comes back (broken stream, refused for now)
goes to its old place, so that a retry sends the same bytes in the same order.

When a batch in order is refused, the broker refuses those behind it too (docs/protocol.md). All of
them are answered before anything is sent again.
"""

from __future__ import annotations

from bisect import insort

from cometmq.client.sending.batch import Batch
from cometmq.errors import InternalError

LAST_ANSWER_S = 0.5  # that a last try may take beyond the deadline


def _sequence(batch: Batch) -> tuple[int, int]:
    return batch.sequence, batch.first


class InFlightBatches:
    """At most ``in_flight_max`` batches are sent and unanswered at a time."""

    def __init__(self, in_flight_max: int) -> None:
        assert in_flight_max > 0
        self.in_flight_max = in_flight_max
        self.waiting: list[Batch] = []
        self.in_flight: dict[int, Batch] = {}  # by batch id, in the order sent
        self._next_id = 1
        self._sent_s: dict[int, float] = {}  # when each batch in flight was sent
        self.refused_id = 0  # the newest batch in order on this stream that was refused
        self._awaited_id = 0  # nothing is sent before this one is answered

    @property
    def open(self) -> bool:
        """Whether a further batch may be sent now."""
        in_flight = self.in_flight
        return not in_flight or (
            len(in_flight) < self.in_flight_max and next(iter(in_flight)) > self._awaited_id
        )

    def push(self, batch: Batch) -> None:
        """Takes a closed batch, new or coming back."""
        insort(self.waiting, batch, key=_sequence)

    def take(self, now_s: float) -> tuple[int, Batch] | None:
        """The next batch to send with its id on this stream, or None when none waits or the window
        is full.
        """
        if not self.waiting or not self.open:
            return None
        batch = self.waiting.pop(0)
        batch_id = self._next_id
        self._next_id += 1
        self.in_flight[batch_id] = batch
        self._sent_s[batch_id] = now_s
        return batch_id, batch

    def answered(self, batch_id: int) -> tuple[Batch, float]:
        """Takes the answered batch out; when it was sent. An answer out of order is a fault of the
        server: InternalError.
        """
        expected = next(iter(self.in_flight), None)
        if batch_id != expected:
            raise InternalError(f"The broker answered batch {batch_id}; expected was {expected}.")
        return self.in_flight.pop(batch_id), self._sent_s.pop(batch_id)

    def refused(self, batch_id: int) -> None:
        """A batch in order was not stored whole, by its own fault: the broker refuses what was sent
        behind it."""
        assert batch_id > self.refused_id
        self.refused_id = batch_id
        self._awaited_id = self._next_id - 1

    def restart(self) -> None:
        """The stream is gone: what was in flight waits again, in order; the next stream counts from
        1.
        """
        for batch in self.in_flight.values():
            if not batch.expired:
                batch.may_be_stored = True
                self.push(batch)
        self.in_flight.clear()
        self._sent_s.clear()
        self._next_id = 1
        self.refused_id = self._awaited_id = 0

    def waits_s(self, now_s: float) -> float:
        """How long the oldest batch in flight has waited for its answer; 0 = none is."""
        return now_s - next(iter(self._sent_s.values()), now_s)

    def expire(self, now_s: float) -> list[Batch]:
        """Batches past their deadline, marked so. The waiting ones are forgotten; those in flight
        keep their place, because their answers still come. A batch that was refused before and is
        being tried once more gets a moment: its answer says that it is not stored.
        """
        late = []
        for batch_id, batch in self.in_flight.items():
            until_s = batch.deadline_s
            if batch.refusal is not None:
                until_s = max(until_s, min(self._sent_s[batch_id], until_s) + LAST_ANSWER_S)
            if until_s <= now_s and not batch.expired:
                batch.may_be_stored = True
                late.append(batch)
        late += [b for b in self.waiting if b.deadline_s <= now_s]
        if late:
            self.waiting = [b for b in self.waiting if b.deadline_s > now_s]
        for batch in late:
            batch.expired = True
        return late

    def drain(self) -> list[Batch]:
        """Empties the window: every batch whose messages have no answer yet."""
        self.restart()
        left, self.waiting = self.waiting, []
        return left
