from __future__ import annotations

from pathlib import Path

import pytest

from cometmq.errors import MessageNotFound, QueueNotFound, StoreDamaged, StoreForeignFile
from cometmq.store.layout import offset_name
from cometmq.store.repair import dump
from tests.support.stores.small_stores import START_MS, append, open_store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store = open_store(tmp_path)
    for number in range(30):
        append(store, ("A", number % 3, [b"%d" % number + bytes(1000)]), tag="x")
    store.close()
    return tmp_path


def test_describe_tells_all_without_touching_anything(folder: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    told = dump.describe(folder, scan=True)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    assert told["in_use_or_crashed"] is False
    assert told["epochs"] == [{"number": 1, "start": 0}]
    log = told["log"]
    assert isinstance(log, dict)
    assert (log["records"], log["last_store_time_ms"]) == (30, START_MS)
    assert log["end_reason"] == "nothing is written there"
    assert told["queues"] == [
        {"topic": "A", "queue_id": queue, "min_offset": 0, "next_offset": 10} for queue in range(3)
    ]


def test_records_come_in_order_from_any_of_them(folder: Path) -> None:
    found = list(dump.records(folder))
    assert [r.body.rstrip(b"\0") for r in found] == [b"%d" % n for n in range(30)]
    rest = list(dump.records(folder, start=found[20].log_offset))
    assert [r.log_offset for r in rest] == [r.log_offset for r in found[20:]]


def test_units_point_to_the_records(folder: Path) -> None:
    records = [r for r in dump.records(folder) if r.queue_id == 2]
    found = list(dump.units(folder, "A", 2, start=4))
    assert [(u.queue_offset, u.log_offset, u.size) for u in found] == [
        (r.queue_offset, r.log_offset, r.size) for r in records[4:]
    ]


def test_an_open_store_can_be_looked_at(folder: Path) -> None:
    store = open_store(folder)
    assert dump.describe(folder)["in_use_or_crashed"] is True
    store.close()


def test_what_is_not_there_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(QueueNotFound):
        next(dump.units(folder, "A", 9))
    with pytest.raises(StoreForeignFile):
        dump.describe(tmp_path / "none")


def test_records_that_end_at_damage_do_not_look_like_all(folder: Path) -> None:
    found = list(dump.records(folder))
    broken, behind = found[3].log_offset, found[4].log_offset
    path = folder / "commitlog" / offset_name(0)
    content = bytearray(path.read_bytes())
    content[broken + 4] ^= 1
    path.write_bytes(content)
    listed = dump.records(folder)
    assert [next(listed).log_offset for _ in range(3)] == [r.log_offset for r in found[:3]]
    with pytest.raises(StoreDamaged, match=f"at {broken} .*--from {behind}"):
        next(listed)
    assert next(dump.records(folder, start=behind)).log_offset == behind


def test_records_from_where_none_starts_are_refused(folder: Path) -> None:
    with pytest.raises(MessageNotFound, match="no record starts at 5 "):
        next(dump.records(folder, start=5))
    assert list(dump.records(folder, start=end_of(folder))) == []


def end_of(folder: Path) -> int:
    last = list(dump.records(folder))[-1]
    return last.log_offset + last.size
