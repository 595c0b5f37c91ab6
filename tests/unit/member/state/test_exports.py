from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from cometmq.member.state.exports import Exporter
from cometmq.messaging import rocketmq_tables
from cometmq.messaging.rocketmq_tables import SnapshotMark
from cometmq.messaging.state import BrokerState
from cometmq.model import TopicConfig

FILES = {"a.json": b"one", "b.json": b"two"}


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_files_and_their_predecessors(tmp_path: Path) -> None:
    exporter = Exporter(tmp_path / "config")
    exporter.write(FILES)
    assert content(tmp_path / "config") == FILES
    exporter.write({"a.json": b"new"})
    assert content(tmp_path / "config") == {
        "a.json": b"new",
        "a.json.bak": b"one",
        "b.json": b"two",
    }


def test_a_file_gets_its_name_only_when_its_bytes_are_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty file after a power cut would look like RocketMQ's and keep the store shut."""
    exporter = Exporter(tmp_path)
    exporter.write(FILES)
    seen: list[tuple[int, bool]] = []

    def fsync(descriptor: int) -> None:
        named = any(p.read_bytes() == b"new" for p in tmp_path.glob("*.json"))
        status = os.fstat(descriptor)
        seen.append((-1 if stat.S_ISDIR(status.st_mode) else status.st_size, named))

    monkeypatch.setattr(os, "fsync", fsync)
    exporter.write({"a.json": b"new"})
    assert seen == [(3, False), (-1, True)], "and the folder when it has the name"


def test_a_file_is_never_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older backup, RocketMQ's perhaps, would count in its place."""
    exporter = Exporter(tmp_path)
    exporter.write({"a.json": b"one"})
    replaced = Path.replace

    def watched(self: Path, target: Path) -> Path:
        assert (tmp_path / "a.json").read_bytes() == b"one"
        return replaced(self, target)

    monkeypatch.setattr(Path, "replace", watched)
    exporter.write({"a.json": b"new"})
    assert (tmp_path / "a.json.bak").read_bytes() == b"one"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.json.bak"]


def test_a_full_disk_leaves_the_files_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = Exporter(tmp_path)
    exporter.write(FILES)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        exporter.write({"a.json": b"new"})
    assert (tmp_path / "a.json").read_bytes() == b"one"
    monkeypatch.undo()
    exporter.write({"a.json": b"new"})
    assert (tmp_path / "a.json").read_bytes() == b"new"


def test_writers_come_one_after_the_other(tmp_path: Path) -> None:
    exporter = Exporter(tmp_path)
    versions = [{name: b"%d" % n for name in FILES} for n in range(8)]
    threads = [threading.Thread(target=exporter.write, args=(files,)) for files in versions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = content(tmp_path)
    assert found["a.json"] == found["b.json"]
    assert not [name for name in found if name.endswith(".tmp")]


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    state = BrokerState()
    state.apply(state.plan_topic(TopicConfig("T", 3, 3)))
    Exporter(tmp_path).write(rocketmq_tables.export(state, SnapshotMark(4, 2), 99))
    table = rocketmq_tables.parse((tmp_path / "topics.json").read_bytes())
    assert rocketmq_tables.mark_of(table) == SnapshotMark(4, 2)
    assert table["topicConfigTable"]["T"]["readQueueNums"] == 3
