"""A batch: records of one broker group with the waiters for their messages. Pure but for the
futures that it carries.

It is one bytes field and its segments: runs of records of one queue.
"""

from __future__ import annotations

from array import array
from asyncio import Future
from collections.abc import Collection, Iterator
from typing import TypeAlias

from cometmq.client.messages import SendReceipt, StoredRun
from cometmq.client.sending.send_many import MessageRange
from cometmq.client.sending.stored_form import PLAIN, StoredForm
from cometmq.errors import CometError
from cometmq.model import QueueRef

# For one message, or for consecutive ones of a `send_many` or of an open run.
Waiter: TypeAlias = "Future[SendReceipt] | MessageRange"


class Segment:
    """A run of records of one queue. ``pinned``: the application chose the queue, so no other will
    do. ``stored``: in which form. ``times``: what each message names that waits for a time of its
    own, in ms.
    """

    __slots__ = (
        "count",
        "first_counter",
        "id_stream",
        "pinned",
        "queue",
        "stored",
        "times",
    )

    def __init__(
        self,
        queue: QueueRef,
        pinned: bool,
        id_stream: str,
        first_counter: int,
        stored: StoredForm = PLAIN,
    ) -> None:
        self.queue = queue
        self.pinned = pinned
        self.stored = stored
        self.times = array("q")
        self.id_stream = id_stream  # of the unique ids: hexadecimal digits before the counter
        self.first_counter = first_counter  # the others of the segment follow without gaps
        self.count = 0

    def part(self, first: int, end: int) -> Segment:
        """The messages from ``first`` up to ``end``."""
        part = Segment(
            self.queue,
            self.pinned,
            self.id_stream,
            self.first_counter + first,
            self.stored,
        )
        part.count = end - first
        part.times = self.times[first:end]
        return part


class Batch:
    """Records with the waiters for their messages. Closed = nothing is added any more; then
    ``records`` is fixed.
    """

    __slots__ = (
        "buffer",
        "deadline_s",
        "expired",
        "first",
        "is_marked",
        "last",
        "may_be_stored",
        "may_be_stored_elsewhere",
        "records",
        "refusal",
        "segments",
        "sequence",
        "starts",
        "waiters",
    )

    def __init__(self, sequence: int, deadline_s: float) -> None:
        self.sequence = sequence  # order of sending within the sender
        self.first = 0  # of what remains of a batch: the place of its first message in the whole
        self.deadline_s = deadline_s  # monotonic; the first message's
        self.buffer = bytearray()  # the records, until it is closed
        self.records = b""  # from then on
        self.starts = array("I")  # byte offset of each record
        self.segments: list[Segment] = []
        self.last: Segment | None = None  # that records are being added to
        self.waiters: list[Waiter] = []  # in the order of the messages
        self.is_marked = False  # one of its messages has the property TRACE_ON
        self.expired = False  # its messages have failed; an answer is of no use any more
        self.may_be_stored = False  # it was sent, and what became of it is not known
        self.may_be_stored_elsewhere = False  # the same, of a broker group that had it before
        self.refusal: CometError | None = None  # of the last try

    @property
    def is_unsure(self) -> bool:
        """Whether some broker group may have stored it."""
        return self.may_be_stored or self.may_be_stored_elsewhere

    @property
    def count(self) -> int:
        """Messages."""
        return len(self.starts)

    @property
    def size(self) -> int:
        """Bytes of all records."""
        return len(self.records) or len(self.buffer)

    def close(self) -> None:
        """From here on the bytes never change, however often they are sent."""
        assert self.buffer
        assert self.count == sum([s.count for s in self.segments])
        self.records = bytes(self.buffer)
        self.buffer = bytearray()

    def replace(self, parts: list[bytes]) -> None:
        """Other bytes for the same messages, in the same order."""
        self.records = b"".join(parts)
        self.starts = array("I")
        at = 0
        for part in parts:
            self.starts.append(at)
            at += len(part)
        assert self.count == sum([s.count for s in self.segments])

    @property
    def in_order(self) -> bool:
        """Whether it may not be stored before what was sent before it: it has messages of which
        the application chose the queue, or by a key."""
        return any(segment.pinned for segment in self.segments)

    # --- what became of it ------------------------------------------------------------------------

    def stored(self, runs: list[StoredRun]) -> None:
        """Each message gets its receipt; ``runs`` has one run for each segment."""
        pieces = self._cut_waiters([segment.count for segment in self.segments])
        for run, waiters in zip(runs, pieces, strict=True):
            index = 0
            for waiter in waiters:
                if isinstance(waiter, MessageRange):
                    waiter.stored(run, index)
                    index += waiter.count
                else:
                    if not waiter.done():
                        waiter.set_result(SendReceipt(run, index))
                    index += 1

    def failed(self, error: CometError) -> None:
        """No message of it is stored, as far as is known."""
        for waiter in self.waiters:
            if isinstance(waiter, MessageRange) or not waiter.done():
                waiter.set_exception(error)

    # --- in parts ---------------------------------------------------------------------------------

    def split(self, chosen: Collection[int]) -> tuple[list[Batch], list[Batch]]:
        """Batches in place of this one: (the chosen segments, the others). Each has neighbours
        only, so that its ids follow each other: else the broker would not know it again.
        """
        halves: tuple[list[Batch], list[Batch]] = [], []
        runs: list[tuple[list[Batch], list[Segment]]] = []
        for index, segment in enumerate(self.segments):
            half = halves[0] if index in chosen else halves[1]
            if runs and runs[-1][0] is half:
                runs[-1][1].append(segment)
            else:
                runs.append((half, [segment]))
        for (half, _), part in zip(runs, self._parts([run for _, run in runs]), strict=True):
            half.append(part)
        return halves

    def split_at(self, count: int) -> tuple[Batch, Batch]:
        """Two batches in place of this one: the first ``count`` messages, and the others."""
        assert 0 < count < self.count
        halves: tuple[list[Segment], list[Segment]] = [], []
        left = count
        for segment in self.segments:
            taken = min(left, segment.count)
            left -= taken
            if taken:
                halves[0].append(segment.part(0, taken))
            if taken < segment.count:
                halves[1].append(segment.part(taken, segment.count))
        first, rest = self._parts(halves)
        return first, rest

    def _parts(self, runs: Collection[list[Segment]]) -> Iterator[Batch]:
        """Batches in place of this one, with so many of its messages each as the segments have."""
        assert self.records
        counts = [sum(segment.count for segment in segments) for segments in runs]
        first = 0
        for segments, count, waiters in zip(runs, counts, self._cut_waiters(counts), strict=True):
            part = Batch(self.sequence, self.deadline_s)
            part.first = self.first + first
            part.is_marked = self.is_marked
            part.expired = self.expired
            part.may_be_stored = self.may_be_stored
            part.may_be_stored_elsewhere = self.may_be_stored_elsewhere
            part.refusal = self.refusal
            part.segments, part.waiters = segments, waiters
            end = first + count
            begin = self.starts[first]
            part.records = self.records[begin : self.starts[end] if end < self.count else None]
            part.starts = array("I", [start - begin for start in self.starts[first:end]])
            first = end
            yield part

    def _cut_waiters(self, counts: list[int]) -> Iterator[list[Waiter]]:
        """The waiters for the first ``counts[0]`` messages, the next ``counts[1]``, and so on."""
        if len(self.waiters) == self.count:  # each for one message
            at = 0
            for count in counts:
                yield self.waiters[at : at + count]
                at += count
            return
        left = self.waiters[::-1]
        for count in counts:
            piece: list[Waiter] = []
            while count:
                waiter = left.pop()
                if isinstance(waiter, MessageRange) and waiter.count > count:
                    waiter, rest = waiter.split_at(count)
                    left.append(rest)
                count -= waiter.count if isinstance(waiter, MessageRange) else 1
                piece.append(waiter)
            yield piece
