from __future__ import annotations

from pathlib import Path

import pytest

from cometmq.store.disk.files import OsFiles
from cometmq.store.disk.segment import Segment


@pytest.fixture
def segment(tmp_path: Path) -> Segment:
    return Segment(OsFiles().create(tmp_path / "x", 100), 300, 100)


def test_offsets_are_those_of_the_row(segment: Segment) -> None:
    segment.pwrite(398, b"ab")
    assert segment.file.pread(2, 98) == b"ab"
    assert segment.pread(397, 3) == b"\0ab"
    assert segment.pread(397, 3, nowait=True) == b"\0ab"


@pytest.mark.parametrize(("offset", "size"), [(299, 1), (398, 3), (400, 1), (350, -1)])
def test_nothing_outside_is_touched(segment: Segment, offset: int, size: int) -> None:
    with pytest.raises(AssertionError):
        segment.pread(offset, size)
    if size > 0:
        with pytest.raises(AssertionError):
            segment.pwrite(offset, bytes(size))


def test_a_start_is_a_multiple_of_the_size(tmp_path: Path) -> None:
    file = OsFiles().create(tmp_path / "x", 100)
    for start, size in ((250, 100), (-100, 100), (0, 0)):
        with pytest.raises(AssertionError):
            Segment(file, start, size)
