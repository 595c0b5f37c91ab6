from __future__ import annotations

from pathlib import Path

import pytest

from cometmq.format import record
from cometmq.store.disk.files import OsFiles
from cometmq.store.disk.segments import Segments
from cometmq.store.layout import offset_name
from cometmq.store.metadata.recovery_point import QueueTotals, RecoveryPoint

SIZE = 1000
LAST = b"the last record"


def log(directory: Path, content: bytes) -> Segments:
    (directory / offset_name(SIZE)).write_bytes(content.ljust(SIZE, b"\0"))
    segments = Segments(directory, SIZE)
    segments.load(OsFiles())
    return segments


def mark(end: int, at: int = SIZE + 100) -> RecoveryPoint:
    return RecoveryPoint.of(end, at, LAST, QueueTotals(1, 2))


def test_a_mark_holds_while_its_record_is_there(tmp_path: Path) -> None:
    segments = log(tmp_path, bytes(100) + LAST)
    end = SIZE + 100 + len(LAST)
    assert mark(end).holds(segments)
    assert mark(end).last_record(segments) == LAST
    assert not mark(end + 1).holds(segments), "something else stands in between"
    assert not mark(end + 1, SIZE + 101).holds(segments)
    assert not mark(9 * SIZE, 9 * SIZE - 50).holds(segments), "outside of the log"


def test_a_mark_may_end_with_the_file(tmp_path: Path) -> None:
    rest = SIZE - 100 - len(LAST)
    segments = log(tmp_path, bytes(100) + LAST + record.blank(rest))
    assert mark(2 * SIZE).holds(segments)
    assert not mark(2 * SIZE - 8).holds(segments)


def test_an_empty_log_has_a_mark_too(tmp_path: Path) -> None:
    assert RecoveryPoint(0, 0, 0, 0).holds(Segments(tmp_path / "none", SIZE))


@pytest.mark.parametrize(("tally", "known"), [(QueueTotals(), False), (QueueTotals(0, 0), True)])
def test_what_is_not_counted_is_not_known(tally: QueueTotals, known: bool) -> None:
    assert tally.is_known == known
    assert RecoveryPoint.of(0, 0, b"", tally).tally == tally
