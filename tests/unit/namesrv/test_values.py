"""The key-value table and its file."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.errors import (
    CometError,
    DiskFull,
    InvalidRequest,
    LimitExceeded,
    StoreDamaged,
    StoreFailed,
)
from services.namesrv import values
from services.namesrv.values import Values, decode_table, encode_table, read_table

NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "kvConfig.json"


async def _reloaded(path: Path) -> Values:
    table = Values(path)
    await table.load()
    return table


async def test_a_value_survives(path: Path) -> None:
    table = await _reloaded(path)
    await table.put("ns", "b", "1")
    await table.put("ns", "a", "тест\n")
    await table.put("other", "x", "")

    again = await _reloaded(path)
    assert again.of("ns") == {"a": "тест\n", "b": "1"}
    assert list(again.of("ns")) == ["a", "b"]
    assert again.of("other") == {"x": ""}
    assert again.of("nothing") == {}


async def test_a_deleted_value_is_gone(path: Path) -> None:
    table = Values(path)
    await table.put("ns", "a", "1")
    await table.delete("ns", "a")
    await table.delete("ns", "a")

    assert (await _reloaded(path)).of("ns") == {}
    assert read_table(path) == {}


async def test_changes_at_once_all_hold(path: Path) -> None:
    table = Values(path)
    await asyncio.gather(*(table.put("ns", f"k{n}", str(n)) for n in range(20)))
    assert len((await _reloaded(path)).of("ns")) == 20


def test_the_file_looks_as_rocketmq_writes_it() -> None:
    text = encode_table({"ORDER_TOPIC_CONFIG": {"t": "a:4;b:4"}}).decode()
    assert (
        text
        == '{\n\t"configTable":{\n\t\t"ORDER_TOPIC_CONFIG":{\n\t\t\t"t":"a:4;b:4"\n\t\t}\n\t}\n}'
    )


@given(st.dictionaries(NAMES, st.dictionaries(NAMES, st.text(st.characters(codec="utf-8")))))
def test_tables_survive_their_file(table: dict[str, dict[str, str]]) -> None:
    assert decode_table(encode_table(table)) == table


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"{}", b'{"configTable":[]}', b'{"configTable":{"n":{"k":1}}}', b"\xff"],
)
def test_what_is_no_table_is_refused(path: Path, data: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(data)
    with pytest.raises(StoreDamaged, match=r"kvConfig\.json"):
        read_table(path)
    assert path.read_bytes() == data


def _damage(path: Path) -> None:
    path.write_bytes(b"\0" * 40)


async def test_a_damaged_file_is_read_from_its_copy(path: Path) -> None:
    table = Values(path)
    await table.put("ns", "a", "1")
    await table.put("ns", "a", "2")
    _damage(path)
    assert (await _reloaded(path)).of("ns") == {"a": "1"}


@pytest.mark.parametrize(
    ("namespace", "key", "value"),
    [
        ("", "k", ""),
        ("n", "", ""),
        ("n" * 256, "k", ""),
        ("n", "ы" * 128, ""),
        ("n", "k", "v" * 65_537),
    ],
)
async def test_bad_names_and_values_are_refused(
    path: Path, namespace: str, key: str, value: str
) -> None:
    with pytest.raises(InvalidRequest):
        await Values(path).put(namespace, key, value)
    assert read_table(path) == {}


async def test_bad_names_are_refused_when_reading_and_deleting(path: Path) -> None:
    with pytest.raises(InvalidRequest):
        Values(path).of("")
    with pytest.raises(InvalidRequest):
        await Values(path).delete("n", "")


async def test_the_table_has_a_limit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "TABLE_BYTES_MAX", 100)
    table = Values(path)
    with pytest.raises(LimitExceeded):
        await table.put("ns", "k", "v" * 100)
    assert table.of("ns") == {}


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, DiskFull), (errno.EIO, StoreFailed)])
async def test_a_failed_write_changes_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[CometError]
) -> None:
    table = Values(path)
    await table.put("ns", "a", "1")

    def fail(path: Path, data: bytes) -> None:
        raise OSError(number, "no")

    monkeypatch.setattr(values, "write_file", fail)
    with pytest.raises(kind):
        await table.put("ns", "a", "2")
    assert table.of("ns") == {"a": "1"}
    assert (await _reloaded(path)).of("ns") == {"a": "1"}
