"""The index that the store writes, read by a reader that knows docs/format/indexfile.md alone."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.independent.files import Row
from tests.support.independent.index import IndexFile, Keyed, KeyIndex, Shape, key_hash, keyed
from tests.support.independent.log import MAGIC_BLANK
from tests.support.independent.record import Broken, Message, decode
from tests.support.stores.small_stores import (
    INDEX_SIZES,
    WallClock,
    append,
    append_keyed,
    find_by_key,
    open_store,
)

pytestmark = pytest.mark.usefixtures("implementation")

DOCUMENT = Path(__file__).parents[2] / "docs" / "format" / "indexfile.md"
SHAPE = Shape(INDEX_SIZES.hash_slots, INDEX_SIZES.entries)
KEYS = ("a", "b", "Aa", "BB", "ü", "cuikacpk", "a b", "  a   c ")


def test_the_example_of_the_document(tmp_path: Path) -> None:
    example = DOCUMENT.read_text(encoding="utf-8").split("```")[1]
    words = re.findall(r"\b[0-9A-F]{8}(?:[0-9A-F]{8})?\b", example)
    path = tmp_path / "20231114221320000"
    path.write_bytes(bytes.fromhex("".join(words)) + bytes(80))
    file = IndexFile(path, Shape(4, 8))
    hashes = [key_hash("A", key) for key in "bcf"]
    file.expect_keys(
        [
            Keyed(hashes[0], 1000, 5000),
            Keyed(hashes[1], 1000, 5000),
            Keyed(hashes[2], 2000, 7999),
        ]
    )
    assert file.places(hashes[2], 0, 10**6) == [2000]
    assert key_hash("T", "cuikacpk") == 0


def records(row: Row) -> Iterator[Message]:
    """All records of a log that was closed in order."""
    for start, view in row.files():
        at = 0
        while any(view[at : at + 8]) and view[at + 4 : at + 8] != MAGIC_BLANK:
            message = decode(view, at, start + at)
            yield message
            at += message.size


@pytest.fixture
def folder(tmp_path: Path, rng: random.Random) -> Path:
    """A store with messages of two topics, which was closed, opened and closed, and its answers."""
    clock = WallClock()
    for _ in range(2):
        store = open_store(tmp_path, clock=clock)
        for _ in range(60):
            clock.now_ms += rng.choice([0, 1, 700, 2500])
            topic = rng.choice(["T", "BB"])
            append_keyed(store, topic, 0, *rng.choices(KEYS, k=rng.randint(1, 3)))
            append(store, (topic, 1, [bytes(rng.randrange(400))]))
        store.close()
    return tmp_path


def read(folder: Path) -> tuple[KeyIndex, list[Message]]:
    """The index, which must be that of the log; Broken."""
    row = Row(folder / "commitlog")
    messages = list(records(row))
    row.close()
    index = KeyIndex(folder / "index", SHAPE, clean=True)
    index.expect_log([key for message in messages for key in keyed(message)], log_start=0)
    return index, messages


def test_the_index_is_what_the_document_says(folder: Path) -> None:
    index, messages = read(folder)
    assert len(index.files) > 10
    store = open_store(folder)
    for topic in ("T", "BB"):
        for key in ("a", "Aa", "ü", "cuikacpk"):
            wanted = [one.message.log_offset for one in find_by_key(store, topic, key)]
            sure = {m.log_offset for m in messages if m.topic == topic and key in m.keys}
            places = dict.fromkeys(index.places(topic, key))
            assert [at for at in places if at in sure] == wanted
            assert len(wanted) == len(sure) > 0
    store.abandon()


def _files(folder: Path) -> list[Path]:
    return sorted((folder / "index").iterdir())


def _change(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


ENTRIES_AT = 40 + 4 * SHAPE.slots
DAMAGES: dict[str, Callable[[Path], object]] = {
    "begin time": lambda folder: _change(_files(folder)[0], 7),
    "end offset": lambda folder: _change(_files(folder)[1], 31),
    "slots in use": lambda folder: _change(_files(folder)[0], 35),
    "next entry": lambda folder: _change(_files(folder)[-1], 39),
    "a slot": lambda folder: _change(_files(folder)[0], 43),
    "a hash": lambda folder: _change(_files(folder)[0], ENTRIES_AT + 23),
    "an offset": lambda folder: _change(_files(folder)[0], ENTRIES_AT + 31),
    "seconds": lambda folder: _change(_files(folder)[0], ENTRIES_AT + 35),
    "what is before": lambda folder: _change(_files(folder)[0], ENTRIES_AT + 39),
    "entry 0": lambda folder: _change(_files(folder)[0], ENTRIES_AT),
    "a name": lambda folder: _files(folder)[0].rename(folder / "index" / "1"),
    "a length": lambda folder: _files(folder)[0].write_bytes(bytes(SHAPE.file_bytes - 1)),
    "the first file": lambda folder: _files(folder)[0].unlink(),
    "a file": lambda folder: _files(folder)[3].unlink(),
    "the last file": lambda folder: _files(folder)[-1].unlink(),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_damage_is_seen(folder: Path, what: str) -> None:
    DAMAGES[what](folder)
    with pytest.raises(Broken):
        read(folder)
