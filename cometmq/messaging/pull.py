"""What a read of a queue answers: RocketMQ's status table, and which messages fit.

Pure arithmetic over the 20-byte units of a consume queue (``docs/format/queueunit.md``). The order
of work of a pull: :func:`clamp` the request, :func:`decide`, read :func:`units_wanted` units,
:func:`choose`, read the spans of the log.
"""

from __future__ import annotations

import struct
import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate

from cometmq.errors import BatchMalformed, InvalidRequest, NotWriter, StoreDamaged
from cometmq.filters import sql
from cometmq.format.queueunit import LOST_SIZE
from cometmq.native import accelerator

COUNT_DEFAULT = 32
COUNT_MAX = 4096
BYTES_DEFAULT = 256 * 1024
BYTES_MAX = 4 * 1024 * 1024
SCAN_COUNT_MAX = 800  # units that a filtered pull looks at, unless it asks for more messages
SQL_SCAN_COUNT_MAX = 8_192  # messages that a pull with an SQL filter looks at,
SQL_SCAN_BYTES_MAX = 1024 * 1024  # and bytes of their records

Span = tuple[int, int]  # log offset, bytes

# A unit is log offset int64, size int32, tag hash int64. The layout is the queue's; what is read of
# it here is the first two fields, and the third's low 32 bits, which are what filters compare.
_UNIT = struct.Struct(">qi8x")
_UNIT_WORDS, _SIZE_WORD, _TAG_WORD = 5, 2, 4
_SIZES_END = 0x7FFF_FFFF  # in units in front of a queue's first message; above: negative

assert array("I").itemsize * _UNIT_WORDS == _UNIT.size


class PullStatus(Enum):
    """The values are those of ``cometmq.v1.PullStatus``."""

    FOUND = 1  # there are messages
    NO_MATCHED_MESSAGE = (
        2  # there are, but none of those looked at passes the filter: pull on at once
    )
    NOT_FOUND = 3  # nothing there yet: wait, then pull the same position
    OFFSET_MOVED = 4  # the position lies outside the queue: go on where the answer says


@dataclass(frozen=True, slots=True)
class Choice:
    """The messages of an answer. ``spans`` are in queue order, neighbours in the log joined; after
    an SQL filter they are of all messages that were looked at.
    """

    spans: list[Span]
    count: int  # messages that pass
    next_offset: int  # queue offset to pull next; the units before it were looked at

    @property
    def status(self) -> PullStatus:
        """``FOUND`` or ``NO_MATCHED_MESSAGE``."""
        return PullStatus.FOUND if self.count else PullStatus.NO_MATCHED_MESSAGE


def clamp(max_count: int, max_bytes: int) -> tuple[int, int]:
    """The limits of a request: 0 means the default, more than the limit means the limit.

    Raises ``InvalidRequest``.
    """
    if max_count < 0 or max_bytes < 0:
        raise InvalidRequest("max_count and max_bytes count from 0, which means the default")
    return min(max_count or COUNT_DEFAULT, COUNT_MAX), min(max_bytes or BYTES_DEFAULT, BYTES_MAX)


def decide(
    offset: int, min_offset: int, readable_max: int, appended_max: int
) -> tuple[PullStatus, int]:
    """The status of a pull at ``offset`` before anything is read, and where to pull next.

    ``FOUND`` means: read from ``offset`` on. Between the readable and the appended maximum messages
    exist that a crash could still take back: the reader waits there and is never moved.
    """
    assert min_offset <= appended_max
    assert readable_max <= appended_max
    if offset < min_offset:
        return PullStatus.OFFSET_MOVED, min_offset
    if offset < readable_max:
        return PullStatus.FOUND, offset
    if offset <= appended_max:
        return PullStatus.NOT_FOUND, offset
    return PullStatus.OFFSET_MOVED, max(min_offset, readable_max)


def decide_at_copy(
    offset: int, min_offset: int, readable_max: int, appended_max: int
) -> tuple[PullStatus, int]:
    """As :func:`decide`, for a follower. It may have less than its writer at both ends of a queue,
    so it never moves a reader: behind its end the reader waits. Raises ``NotWriter`` in front of
    its beginning: there may be messages, or only the writer can say where the queue goes on.
    """
    if offset < min_offset:
        raise NotWriter(
            f"offset {offset} lies before {min_offset}, the first that this follower has"
        )
    status, next_offset = decide(offset, min_offset, readable_max, appended_max)
    if status is PullStatus.OFFSET_MOVED:
        return PullStatus.NOT_FOUND, offset
    return status, next_offset


def units_wanted(max_count: int, codes: frozenset[int] | None) -> int:
    """How many units :func:`choose` can use; a filtered pull looks at 800 or at ``max_count``."""
    return max(SCAN_COUNT_MAX, max_count) if codes else max_count


def choose(
    units: bytes, offset: int, max_count: int, max_bytes: int, codes: frozenset[int] | None = None
) -> Choice:
    """Which messages a pull answers.

    ``units``: whole units of the queue from ``offset`` on, none of them beyond the readable
    maximum. ``codes``: low 32 bits of the tag hashes wanted; None or empty = every message. The
    first message that passes is always answered, whatever its size. Raises ``StoreDamaged`` when a
    unit names no record.
    """
    assert len(units) % _UNIT.size == 0
    if accelerator is not None:
        wanted = array("I", codes or ())
        window = units[: units_wanted(max_count, codes) * _UNIT.size]
        found = accelerator.choose(window, max_count, max_bytes, wanted)
        if found is not None:
            spans, count, looked_at = found
            return Choice(spans, count, offset + looked_at)
    if codes:
        return _choose_filtered(units, offset, max_count, max_bytes, codes)
    return _choose_all(units[: max_count * _UNIT.size], offset, max_bytes)


def choose_matching(
    program: sql.Program,
    records: bytes,
    sizes: Sequence[int],
    spans: list[Span],
    offset: int,
    max_count: int,
    max_bytes: int,
) -> tuple[bytes, Choice]:
    """The records that a pull with an SQL filter answers, and the choice.

    ``records`` were read from ``spans`` and lie end to end; the first has ``offset`` in its queue.
    ``sizes`` are those of the records. The first one that passes is always answered, whatever its
    size. Raises ``BatchMalformed``.
    """
    verdicts = sql.matches(program, records)
    if len(verdicts) != len(sizes):
        raise BatchMalformed(f"{len(verdicts)} records where {len(sizes)} should be")
    starts = list(accumulate(sizes, initial=0))
    chosen: list[bytes] = []
    index, left = verdicts.find(1), max_bytes
    while index >= 0:
        size = sizes[index]
        if len(chosen) == max_count or (chosen and size > left):
            break
        chosen.append(records[starts[index] : starts[index] + size])
        left -= size
        index = verdicts.find(1, index + 1)
    looked_at = len(sizes) if index < 0 else index
    return b"".join(chosen), Choice(spans, len(chosen), offset + looked_at)


def tag_codes(units: bytes) -> frozenset[int]:
    """Low 32 bits of the tag hashes in whole units."""
    return frozenset(_words(units)[_TAG_WORD::_UNIT_WORDS])


def sizes_and_codes(units: bytes) -> tuple[list[int], list[int]]:
    """Of each whole unit the record's size in bytes and the low 32 bits of the tag hash."""
    words = _words(units)
    return words[_SIZE_WORD::_UNIT_WORDS].tolist(), words[_TAG_WORD::_UNIT_WORDS].tolist()


def _choose_all(units: bytes, offset: int, max_bytes: int) -> Choice:
    if not units:
        return Choice([], 0, offset)
    sizes = _words(units)[_SIZE_WORD::_UNIT_WORDS].tolist()
    count = _fit(sizes, max_bytes)
    entries = _UNIT.iter_unpack(memoryview(units)[: count * _UNIT.size])
    return Choice(_join(entries), count, offset + count)


def _choose_filtered(
    units: bytes, offset: int, max_count: int, max_bytes: int, codes: frozenset[int]
) -> Choice:
    tags = _words(units[: units_wanted(max_count, codes) * _UNIT.size])[_TAG_WORD::_UNIT_WORDS]
    matches = [index for index, tag in enumerate(tags) if tag in codes]
    if not matches:
        return Choice([], 0, offset + len(tags))
    entries = [_UNIT.unpack_from(units, index * _UNIT.size) for index in matches[:max_count]]
    count = _fit([size for _, size in entries], max_bytes)
    # The next pull begins at the first match that found no room here; what is before was looked at.
    next_index = matches[count] if count < len(matches) else len(tags)
    return Choice(_join(entries[:count]), count, offset + next_index)


def _words(units: bytes) -> array[int]:
    """The units as unsigned 32-bit words: slices are columns, without a loop over units."""
    words = array("I", units)
    if sys.byteorder == "little":
        words.byteswap()
    return words


def _fit(sizes: Sequence[int], max_bytes: int) -> int:
    """How many of the records, at least one, ``max_bytes`` allows."""
    if min(sizes) <= LOST_SIZE or max(sizes) >= _SIZES_END:
        raise StoreDamaged("a queue unit that should be readable names no record")
    return bisect_right(list(accumulate(sizes)), max_bytes) or 1


def _join(entries: Iterable[tuple[int, int]]) -> list[Span]:
    """One span for each run of records that lie end to end in the log."""
    spans: list[Span] = []
    start = end = -1
    for log_offset, size in entries:
        if log_offset != end:
            if end >= 0:
                spans.append((start, end - start))
            start = log_offset
        end = log_offset + size
    spans.append((start, end - start))
    return spans
