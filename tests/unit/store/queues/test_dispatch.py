from __future__ import annotations

from pathlib import Path

import pytest

from cometmq.errors import DiskFull, StoreForeignFile
from cometmq.format import queueunit
from cometmq.store.disk.files import StrPath
from cometmq.store.layout import StorePaths, offset_name
from cometmq.store.queues.dispatch import Dispatcher
from tests.support.stores.small_stores import FaultyFiles

FILE_BYTES = 160
UNIT = queueunit.pack(0, 10, 0)


def fresh(root: Path, files: FaultyFiles | None = None) -> Dispatcher:
    return Dispatcher(StorePaths(root), files or FaultyFiles(), FILE_BYTES)


def test_queues_come_with_their_first_unit(tmp_path: Path) -> None:
    dispatcher = fresh(tmp_path)
    assert dispatcher.find("T", 1) is None
    dispatcher.dispatch(dispatcher.get("T", 1), UNIT)
    assert [(queue.topic, queue.queue_id) for queue in dispatcher.queues()] == [("T", 1)]
    assert (tmp_path / "consumequeue" / "T" / "1").is_dir()


def test_flush_syncs_each_new_file_and_every_folder_above(tmp_path: Path) -> None:
    files = FaultyFiles()
    dispatcher = fresh(tmp_path, files)
    dispatcher.dispatch(dispatcher.get("T", 1), UNIT * 9)
    dispatcher.reached((90, 5))
    assert dispatcher.flush() == (90, 5)
    queues = tmp_path / "consumequeue"
    folders = {tmp_path, queues, queues / "T", queues / "T" / "1"}
    written = {queues / "T" / "1" / offset_name(start) for start in (0, FILE_BYTES)}
    assert set(map(Path, files.synced)) == folders | written
    files.synced.clear()
    dispatcher.flush()
    assert files.synced == []


def test_what_comes_during_a_flush_waits_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = FaultyFiles()
    dispatcher = fresh(tmp_path, files)
    dispatcher.dispatch(dispatcher.get("T", 1), UNIT)
    dispatcher.reached((10, 5))
    sync_directory = files.sync_directory

    def sync_and_dispatch(path: StrPath) -> None:
        sync_directory(path)
        dispatcher.reached((20, 6))

    monkeypatch.setattr(files, "sync_directory", sync_and_dispatch)
    assert dispatcher.flush() == (10, 5)
    assert dispatcher.flush() == (20, 6)


def test_a_full_disk_holds_the_position_back(tmp_path: Path) -> None:
    files = FaultyFiles(room=0)
    dispatcher = fresh(tmp_path, files)
    queue = dispatcher.get("T", 1)
    dispatcher.dispatch(queue, UNIT)
    dispatcher.reached((10, 5))
    assert dispatcher.dispatched == (0, 0)
    assert queue.read_units(0, 1, nowait=True) == UNIT
    with pytest.raises(DiskFull):
        dispatcher.catch_up()
    files.room = None
    dispatcher.catch_up()
    dispatcher.reached((10, 5))
    assert dispatcher.dispatched == (10, 5)
    assert queue.segments.pread(0, 20) == UNIT


def test_a_dropped_topic_is_gone_and_may_come_back(tmp_path: Path) -> None:
    files = FaultyFiles()
    dispatcher = fresh(tmp_path, files)
    for topic in ("A", "B"):
        dispatcher.dispatch(dispatcher.get(topic, 0), UNIT * 3)
    held = dispatcher.get("A", 0)
    dispatcher.flush()
    files.synced.clear()
    dispatcher.drop("A")
    dispatcher.drop("none")
    assert held.read_units(0, 1, nowait=False) == b"", "a reader that still holds it finds nothing"
    assert [path.name for path in (tmp_path / "consumequeue").iterdir()] == ["B"]
    assert [path.name for path in tmp_path.iterdir()] == ["consumequeue"]
    dispatcher.flush()
    assert str(tmp_path / "consumequeue") in files.synced, "or a power failure brings it back"
    dispatcher.dispatch(dispatcher.get("A", 0), UNIT)
    assert dispatcher.get("A", 0).next_offset == 1


def test_a_dropped_topic_needs_no_room(tmp_path: Path) -> None:
    files = FaultyFiles(room=0)
    dispatcher = fresh(tmp_path, files)
    dispatcher.dispatch(dispatcher.get("A", 0), UNIT)
    dispatcher.drop("A")
    dispatcher.catch_up()


def test_one_queue_can_start_again(tmp_path: Path) -> None:
    dispatcher = fresh(tmp_path)
    for number in (0, 1):
        dispatcher.dispatch(dispatcher.get("A", number), UNIT * 3)
    dispatcher.restart(dispatcher.get("A", 0))
    assert [dispatcher.get("A", number).next_offset for number in (0, 1)] == [0, 3]


def test_loading_finds_every_queue(tmp_path: Path) -> None:
    dispatcher = fresh(tmp_path)
    for number in (0, 3, 12):
        dispatcher.dispatch(dispatcher.get("%RETRY%g", number), UNIT * (number + 1))
    again = fresh(tmp_path)
    again.load(0, 10, durable=10)
    found = {(queue.topic, queue.queue_id): queue.next_offset for queue in again.queues()}
    assert found == {("%RETRY%g", 0): 1, ("%RETRY%g", 3): 4, ("%RETRY%g", 12): 13}


@pytest.mark.parametrize(("durable", "synced"), [(1000, []), (100, ["160"]), (50, ["000", "160"])])
def test_what_may_not_be_on_the_disk_is_synced_after_loading(
    tmp_path: Path, durable: int, synced: list[str]
) -> None:
    writer = fresh(tmp_path)
    positions = b"".join(queueunit.pack(10 * i, 10, 0) for i in range(12))
    writer.dispatch(writer.get("T", 0), positions)
    files = FaultyFiles()
    again = fresh(tmp_path, files)
    again.load(0, 1000, durable=durable)
    again.carry_out()
    again.flush()
    names = [Path(path).name for path in files.synced]
    assert sorted(name[-3:] for name in names if name.isdigit() and len(name) == 20) == synced


@pytest.mark.parametrize("place", ["file", "T/file", "T/x/00000000000000000000", "a.b/0/0"])
def test_what_does_not_belong_is_named(tmp_path: Path, place: str) -> None:
    path = tmp_path / "consumequeue" / place
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(FILE_BYTES))
    with pytest.raises(StoreForeignFile) as refused:
        fresh(tmp_path).load(0, 10, durable=0)
    assert str(tmp_path / "consumequeue" / place.split("/")[0]) in str(refused.value)


def test_a_linked_topic_is_called_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "consumequeue").mkdir()
    (tmp_path / "consumequeue" / "T").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreForeignFile, match="T is a symbolic link where folders"):
        fresh(tmp_path).load(0, 0, 0)
