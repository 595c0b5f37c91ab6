from __future__ import annotations

import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.errors import StoreDamaged
from cometmq.store.disk.files import OsFiles
from cometmq.store.metadata import epochs
from cometmq.store.metadata.epochs import Epoch

PATH = Path("cometmq.epochs")


@st.composite
def epoch_lists(draw: st.DrawFn) -> list[Epoch]:
    numbers = sorted(draw(st.sets(st.integers(1, 2**60), max_size=8)))
    size = len(numbers)
    starts = sorted(draw(st.sets(st.integers(0, 2**60), min_size=size, max_size=size)))
    return [Epoch(*pair) for pair in zip(numbers, starts, strict=True)]


@given(epoch_lists())
def test_what_is_encoded_is_decoded(known: list[Epoch]) -> None:
    assert epochs.decode(epochs.encode(known), PATH) == known


def test_the_text_is_the_documents() -> None:
    text = epochs.encode([Epoch(1, 0), Epoch(4, 1234)])
    assert text == b"cometmq-epochs 1\n1 0\n4 1234\ncrc32 d41d3895\n"


def test_every_changed_byte_is_noticed() -> None:
    content = epochs.encode([Epoch(1, 0), Epoch(4, 1234)])
    for at in range(len(content)):
        with pytest.raises(StoreDamaged):
            epochs.decode(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :], PATH)
        with pytest.raises(StoreDamaged):
            epochs.decode(content[:at], PATH)


def test_a_newer_version_is_not_guessed() -> None:
    text = b"cometmq-epochs 2\n"
    content = text + b"crc32 %08x\n" % zlib.crc32(text)
    with pytest.raises(StoreDamaged, match="version"):
        epochs.decode(content, PATH)


def test_trimming_keeps_epochs_with_bytes() -> None:
    known = [Epoch(1, 0), Epoch(2, 10), Epoch(5, 20)]
    assert epochs.trim(known, 0, 20) == known[:2]
    assert epochs.trim(known, 0, 21) == known
    assert epochs.trim(known, 0, 0) == []
    assert epochs.trim(known, 9, 30) == known
    assert epochs.trim(known, 10, 30) == known[1:], "the first one's last byte was 9"
    assert epochs.trim(known, 29, 30) == known[2:]
    assert epochs.trim(known, 30, 30) == []
    assert epochs.trim([], 0, 30) == []


def test_numbers_are_never_used_again() -> None:
    assert epochs.next_number([], 0) == 1
    assert epochs.next_number([Epoch(3, 0), Epoch(7, 10)], 0) == 8
    assert epochs.next_number([Epoch(3, 0)], 40) == 41


def test_the_file(tmp_path: Path) -> None:
    files, path = OsFiles(), tmp_path / "cometmq.epochs"
    assert epochs.load(files, path) == []
    epochs.save(files, path, [Epoch(1, 0)])
    assert epochs.load(files, path) == [Epoch(1, 0)]
