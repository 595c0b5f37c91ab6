"""A batch: records of one broker group with the futures of their messages. Pure but for the futures
that it carries.

It is one bytes field and its segments: runs of records of one queue.
"""

from __future__ import annotations

from asyncio import Future
from collections.abc import Collection
from itertools import pairwise

from cometmq.client.messages import SendReceipt
from cometmq.model import QueueRef


class Segment:
    """A run of records of one queue. ``pinned``: the application chose the queue, so no other will
    do. ``delay_level`` 0: the messages do not wait. ``wait_store`` False: they are acknowledged
    when they are appended.
    """

    __slots__ = (
        "count",
        "delay_level",
        "first_counter",
        "id_stream",
        "pinned",
        "queue",
        "wait_store",
    )

    def __init__(
        self,
        queue: QueueRef,
        pinned: bool,
        id_stream: str,
        first_counter: int,
        delay_level: int = 0,
        wait_store: bool = True,
    ) -> None:
        self.queue = queue
        self.pinned = pinned
        self.delay_level = delay_level
        self.wait_store = wait_store
        self.id_stream = id_stream  # of the unique ids: hexadecimal digits before the counter
        self.first_counter = first_counter  # the others of the segment follow without gaps
        self.count = 0


class Batch:
    """Records with the futures of their messages. Closed = nothing is added any more; then
    ``records`` is fixed.
    """

    __slots__ = (
        "deadline_s",
        "expired",
        "first",
        "futures",
        "last",
        "may_be_stored",
        "parts",
        "records",
        "segments",
        "sequence",
        "size",
        "starts",
    )

    def __init__(self, sequence: int, deadline_s: float) -> None:
        self.sequence = sequence  # order of sending within the sender
        self.first = 0  # of what remains of a batch: the place of its first message in the whole
        self.deadline_s = deadline_s  # monotonic; the first message's
        self.parts: list[bytes] = []  # of the records, in any number of pieces
        self.records = b""
        self.starts: list[int] = []  # byte offset of each record
        self.segments: list[Segment] = []
        self.last: Segment | None = None  # that records are being added to
        self.futures: list[Future[SendReceipt]] = []
        self.size = 0  # bytes of all records
        self.expired = False  # its futures have failed; an answer is of no use any more
        self.may_be_stored = False  # it was sent, and what became of it is not known

    def close(self) -> None:
        """Joins the records; from here on the bytes never change, however often they are sent."""
        assert self.parts
        assert len(self.futures) == len(self.starts) == sum([s.count for s in self.segments])
        self.records = b"".join(self.parts)
        self.parts = []
        assert len(self.records) == self.size

    def replace(self, parts: list[bytes]) -> None:
        """Other bytes for the same messages, in the same order."""
        assert len(parts) == len(self.futures)
        self.parts = parts
        self.starts = []
        self.size = 0
        for part in parts:
            self.starts.append(self.size)
            self.size += len(part)
        self.close()

    @property
    def in_order(self) -> bool:
        """Whether it may not be stored before what was sent before it: it has messages of which
        the application chose the queue, or by a key."""
        return any(segment.pinned for segment in self.segments)

    def split(self, chosen: Collection[int]) -> tuple[list[Batch], list[Batch]]:
        """Batches in place of this one: (the chosen segments, the others). Each has neighbours
        only, so that its ids follow each other: else the broker would not know it again.
        """
        assert self.records
        halves: tuple[list[Batch], list[Batch]] = [], []
        ends = [*self.starts, self.size]
        first, half = 0, None
        for index, segment in enumerate(self.segments):
            last = first + segment.count
            side = halves[0] if index in chosen else halves[1]
            if half is None or side[-1:] != [half]:
                half = self._like(first)
                side.append(half)
            half.segments.append(segment)
            half.futures += self.futures[first:last]
            half.parts += [self.records[ends[n] : ends[n + 1]] for n in range(first, last)]
            first = last
        for half in (*halves[0], *halves[1]):
            half.replace(half.parts)
        return halves

    def split_at(self, count: int) -> tuple[Batch, Batch]:
        """Two batches in place of this one: the first ``count`` messages, and the others."""
        assert 0 < count < len(self.futures)
        first, rest = self._like(0), self._like(count)
        left = count
        for segment in self.segments:
            taken = min(left, segment.count)
            left -= taken
            for half, skip, some in ((first, 0, taken), (rest, taken, segment.count - taken)):
                if some:
                    part = Segment(
                        segment.queue,
                        segment.pinned,
                        segment.id_stream,
                        segment.first_counter + skip,
                        segment.delay_level,
                        segment.wait_store,
                    )
                    part.count = some
                    half.segments.append(part)
        ends = [*self.starts, self.size]
        parts = [self.records[at:end] for at, end in pairwise(ends)]
        first.futures, rest.futures = self.futures[:count], self.futures[count:]
        first.replace(parts[:count])
        rest.replace(parts[count:])
        return first, rest

    def _like(self, first: int) -> Batch:
        twin = Batch(self.sequence, self.deadline_s)
        twin.first = self.first + first
        twin.expired = self.expired
        twin.may_be_stored = self.may_be_stored
        return twin
