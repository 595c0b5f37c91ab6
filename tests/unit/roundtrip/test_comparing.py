"""A difference of one byte is found, wherever it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.roundtrip.comparing import compare, first_difference, write_back
from examples.roundtrip.sources import SourceFile


@given(st.binary(), st.binary())
def test_first_difference_is_where_the_common_beginning_ends(left: bytes, right: bytes) -> None:
    place = first_difference(left, right)
    if place is None:
        assert left == right
    else:
        assert left[:place] == right[:place]
        assert left[place : place + 1] != right[place : place + 1]


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    original, copy = tmp_path / "original", tmp_path / "copy"
    for name, content in {"a/b.py": b"one\r\n", "empty": b"", "x%20y": b"no end"}.items():
        write_back(original, name, content)
        write_back(copy, name, content)
    return original, copy


FILES = [SourceFile("a/b.py", 1, 5), SourceFile("empty", 0, 0), SourceFile("x%20y", 1, 6)]


def test_equal_folders(folders: tuple[Path, Path]) -> None:
    assert compare(FILES, *folders) == []


def test_one_wrong_byte_is_named(folders: tuple[Path, Path]) -> None:
    (folders[1] / "a" / "b.py").write_bytes(b"one\n")
    assert compare(FILES, *folders) == ["a/b.py differs from byte 3 on"]


def test_a_longer_copy_differs(folders: tuple[Path, Path]) -> None:
    (folders[1] / "empty").write_bytes(b"\n")
    assert compare(FILES, *folders) == ["empty differs from byte 0 on"]


def test_a_missing_file_is_named(folders: tuple[Path, Path]) -> None:
    (folders[1] / "x y").unlink()
    assert compare(FILES, *folders) == ["x y did not come back"]
