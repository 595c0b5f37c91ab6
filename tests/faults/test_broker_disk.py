"""A full disk, a disk that fails, and folders that are not a broker's to open."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from cometmq.errors import (
    CometError,
    ConfigInvalid,
    DiskFull,
    StoreFailed,
    StoreLocked,
)
from cometmq.store.writer import MessageStore
from cometmq.v1 import broker_pb2 as pb
from tests.support.cluster.broker import (
    SYNC,
    BrokerProcess,
    LiveBroker,
    SendLane,
    batch,
    refusal,
    running_broker,
)
from tests.support.stores.small_disk import fill, small_disk
from tests.support.stores.small_stores import read_queue
from tests.support.waiting import until

DISK_BYTES = 3 * 1024 * 1024


async def send_until_full(lane: SendLane, sent: list[bytes]) -> CometError:
    """Send until a batch is refused; what was acknowledged is added to ``sent``."""
    while True:
        body = b"%d:" % len(sent) + os.urandom(20_000)
        records, segments = batch(("T", 0, [body]))
        result = await lane.exchange(records, segments)
        if result.HasField("error"):
            return await lane.refused(records, segments)  # and it stays so
        sent.append(body)


async def test_full_disk(tmp_path: Path) -> None:
    """Sends get DISK_FULL, reads go on; with room again sends work, and nothing is lost."""
    sent: list[bytes] = []
    with small_disk(tmp_path / "disk", DISK_BYTES) as disk:
        async with running_broker(disk) as broker:
            await broker.put_topic("T", 1)
            lane = await broker.lane()
            for _ in range(3):
                filler = fill(disk)
                assert isinstance(await send_until_full(lane, sent), DiskFull)
                assert isinstance(await refusal(broker.send("T", 0, b"x" * 200_000)), DiskFull)
                assert await broker.bodies("T", 0) == sent
                filler.unlink()
                await lane.send(("T", 0, [b"again"]))
                sent.append(b"again")
            broker.crash()
        async with running_broker(disk) as broker:
            assert await broker.bodies("T", 0) == sent


async def test_full_disk_while_queue_files_are_due(tmp_path: Path) -> None:
    """Small messages: the log has room, the queues' files have none."""
    sent: list[bytes] = []
    with small_disk(tmp_path / "disk", DISK_BYTES) as disk:
        async with running_broker(disk) as broker:
            await broker.put_topic("T", 1, SYNC)
            lane = await broker.lane()
            await lane.send(("T", 0, [b"first"]))
            sent.append(b"first")
            filler = fill(disk)
            refused = 0
            for number in range(100):
                records, segments = batch(("T", 0, [b"%d" % number]))
                if (await lane.exchange(records, segments)).HasField("error"):
                    refused += 1
                else:
                    sent.append(b"%d" % number)
            assert refused
            assert await broker.bodies("T", 0) == sent
            filler.unlink()
            await lane.send(("T", 0, [b"last"]))
        async with running_broker(disk) as broker:
            assert await broker.bodies("T", 0) == [*sent, b"last"]


async def test_offsets_and_topics_on_a_full_disk(tmp_path: Path) -> None:
    """Commits count at once, and are answered when the log has room; topics are refused."""
    with small_disk(tmp_path / "disk", DISK_BYTES) as disk:
        async with running_broker(disk) as broker:
            await broker.put_topic("T", 1)
            sent: list[bytes] = []
            await broker.commit("g", ("T", 0, 0, 0))
            filler = fill(disk)
            await send_until_full(await broker.lane(), sent)
            await _fill_log(broker)
            end = len(await broker.bodies("T", 0))
            assert isinstance(await refusal(broker.commit("g", ("T", 0, 0, end))), DiskFull)
            assert isinstance(await refusal(broker.put_topic("U", 1)), DiskFull)
            filler.unlink()
            await broker.put_topic("U", 1)
        async with running_broker(disk) as broker:
            position = await broker.committed("g", "T", 0)
            assert position is not None
            assert position.offset == end


async def _fill_log(broker: LiveBroker) -> None:
    """Smaller and smaller batches, until not even the smallest has room."""
    lane = await broker.lane()
    for size in (4_000, 500, 0):
        while not (await lane.exchange(*batch(("T", 0, [b"." * size])))).HasField("error"):
            pass


async def test_stopping_on_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    sent: list[bytes] = []
    with small_disk(tmp_path / "disk", DISK_BYTES) as disk:
        store = disk / "store"
        async with BrokerProcess(tmp_path, store=store) as process:
            await process.client.put_topic("T", 1)
            filler = fill(disk)
            assert isinstance(await send_until_full(await process.client.lane(), sent), DiskFull)
            assert await process.stop() in (0, 1)  # what it could not write it must say
            assert "Traceback" not in process.output()
            filler.unlink()
            await process.start()
            assert await process.client.bodies("T", 0) == sent


async def test_a_disk_that_fails_to_sync_stops_the_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No acknowledgement after a failed sync, and no clean mark."""
    really_flush = MessageStore.flush_log
    broken, appended = threading.Event(), threading.Event()

    def flush_log(store: MessageStore) -> int:
        if broken.is_set():
            assert appended.wait(30)
            raise store._failed(StoreFailed("fdatasync: Input/output error"))
        return really_flush(store)

    monkeypatch.setattr(MessageStore, "flush_log", flush_log)
    monkeypatch.setattr(MessageStore, "flush_log_while_wanted", lambda *_: False)
    answers: list[asyncio.Task[pb.SendBatchResult]] = []

    async def live() -> None:
        async with running_broker(tmp_path) as broker:
            await broker.put_topic("T", 1, SYNC)
            lane = await broker.lane()
            await lane.send(("T", 0, [b"kept"]))
            broken.set()
            await lane.put(*batch(("T", 0, [b"lost"])))
            answers.append(asyncio.create_task(lane.result()))
            await until(lambda: broker.store.queue_bounds("T", 0)[1] == 2)
            appended.set()
            await asyncio.Event().wait()  # until the broker gives up by itself

    with pytest.raises(ExceptionGroup) as stopped:
        await live()
    assert stopped.group_contains(StoreFailed)
    assert (await answers[0]).error.name == "STORE_FAILED"
    monkeypatch.undo()
    async with running_broker(tmp_path) as broker:
        assert not broker.store.clean_start
        assert (await broker.bodies("T", 0))[0] == b"kept"


# --- folders that are not to be opened ----------------------------------------------------------


async def cannot_open(directory: Path, **options: Any) -> CometError:
    """The error that a broker refuses to start with."""
    found: list[CometError] = []
    try:
        async with running_broker(directory, **options):
            pass
    except* CometError as errors:
        found += [e for e in errors.exceptions if isinstance(e, CometError)]
    [error] = found
    return error


async def test_a_folder_in_use(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        assert isinstance(await cannot_open(tmp_path), StoreLocked)
        await broker.send("T", 0, b"x")
        assert await broker.bodies("T", 0) == [b"x"]
    async with running_broker(tmp_path) as broker:
        assert broker.store.clean_start


async def test_a_folder_in_use_by_another_process(tmp_path: Path) -> None:
    async with BrokerProcess(tmp_path) as process:
        assert isinstance(await cannot_open(tmp_path), StoreLocked)
        second = process.spawn()
        await until(lambda: second.poll() is not None)
        assert second.returncode == 1
        assert "STORE_LOCKED" in process.output()
        assert "Traceback" not in process.output()
        await process.client.put_topic("T", 1)


@pytest.mark.parametrize("name", ["consumerOffset.json", "subscriptionGroup.json"])
async def test_a_snapshot_of_rocketmq_is_taken_over(tmp_path: Path, name: str) -> None:
    """Its tables are another program's; the messages are as they were."""
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        await broker.send("T", 0, b"a", b"b")
    path = tmp_path / "store/config" / name
    path.write_text('{"dataVersion":{"counter":1}}')
    async with running_broker(tmp_path) as broker:
        assert len(await asyncio.to_thread(read_queue, broker.store, "T", 0)) == 2


async def test_the_store_path_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("x")
    assert isinstance(await cannot_open(tmp_path), StoreFailed)


async def test_ports_that_are_taken(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        taken = int(broker.metrics_address.rpartition(":")[2])
        other = tmp_path / "other"
        assert isinstance(await cannot_open(other, metrics_port=taken), ConfigInvalid)
        port = int(broker.address.rpartition(":")[2])
        assert isinstance(await cannot_open(other, port=port), ConfigInvalid)
    async with running_broker(other) as broker:
        assert broker.store.clean_start, "what did not start has closed what it opened"


@pytest.mark.parametrize("in_order", [True, False])
async def test_a_broker_starts_on_a_full_disk(tmp_path: Path, in_order: bool) -> None:
    """Else nobody would remove what is too old: that is done by a broker that runs."""
    sent: list[bytes] = []
    with small_disk(tmp_path / "disk", DISK_BYTES) as disk:
        async with BrokerProcess(tmp_path, store=disk / "store") as process:
            await process.client.put_topic("T", 1)
            lane = await process.client.lane()
            for number in range(20):
                sent.append(b"%d" % number)
                await lane.send(("T", 0, sent[-1:]))
            await (process.stop() if in_order else process.kill())
            filler = fill(disk)
            await process.start()
            assert await process.client.bodies("T", 0) == sent
            filler.unlink()
