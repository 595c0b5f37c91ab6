"""Few new messages of a queue, as they travel with the arrival; what pulls of them
would find.

Invariant: :meth:`InlineMessages.pull` answers as a pull at the queue itself does, since both choose
by :mod:`cometmq.messaging.pull`. What is not among these messages it does not answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from cometmq.filters import sql
from cometmq.format.queueunit import LOST_SIZE, UNIT
from cometmq.messaging import pull
from cometmq.messaging.pull import Choice

COUNT_MAX = 32
BYTES_MAX = 16 * 1024
WANTED_ARRIVALS = 32  # of a queue that come with their messages, each time that they are asked for


@dataclass(frozen=True, slots=True)
class InlineMessages:
    """Every message from ``first_offset`` on, up to the readable maximum of its time. ``records``
    are encoded, end to end; ``codes`` are the low 32 bits of their tag hashes.
    """

    first_offset: int
    min_offset: int  # of the queue
    records: bytes
    sizes: Sequence[int]  # of each record, in bytes
    codes: Sequence[int]

    @property
    def end_offset(self) -> int:
        """One more than the last message's offset."""
        return self.first_offset + len(self.sizes)

    @property
    def whole(self) -> bool:
        """Whether the parts fit together; for one that came over the network."""
        return (
            len(self.sizes) == len(self.codes)
            and min(self.sizes, default=0) > LOST_SIZE
            and sum(self.sizes) == len(self.records)
        )

    def __contains__(self, offset: int) -> bool:
        return self.first_offset <= offset < self.end_offset

    def _is_whole(
        self,
        offset: int,
        max_count: int,
        max_bytes: int,
        codes: frozenset[int],
        program: sql.Program | None,
    ) -> bool:
        """Whether a pull gets all of them: the usual case."""
        return (
            offset == self.first_offset
            and program is None
            and len(self.sizes) <= max_count
            and len(self.records) <= max_bytes
            and (not codes or codes.issuperset(self.codes))
        )

    def pull(
        self,
        offset: int,
        max_count: int,
        max_bytes: int,
        codes: frozenset[int],
        program: sql.Program | None = None,
    ) -> tuple[bytes, Choice]:
        """The records that a pull at ``offset``, which is among these messages, gets, and where it
        goes on. The limits are those of a request after ``pull.clamp``.
        """
        assert offset in self
        if self._is_whole(offset, max_count, max_bytes, codes, program):
            whole = [(0, len(self.records))]
            return self.records, Choice(whole, len(self.sizes), self.end_offset)
        first = offset - self.first_offset
        starts = [0, *accumulate(self.sizes)]
        if program is not None:
            records, sizes = self.records[starts[first] :], self.sizes[first:]
            return pull.choose_matching(program, records, sizes, [], offset, max_count, max_bytes)
        units = map(UNIT.pack, starts[first:-1], self.sizes[first:], self.codes[first:])
        choice = pull.choose(b"".join(units), offset, max_count, max_bytes, codes)
        return b"".join([self.records[at : at + size] for at, size in choice.spans]), choice
