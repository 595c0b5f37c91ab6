"""A real broker process: kill -9, SIGTERM, and what its command line refuses."""

from __future__ import annotations

import asyncio
import json
import zlib
from pathlib import Path

import grpc
import pytest

from cometmq.errors import PositionFenced
from cometmq.v1 import broker_pb2 as pb
from tests.support.cluster.broker import ASYNC, SYNC, BrokerProcess, batch, refusal
from tests.support.faults.forgeries import FORGERIES, TOPIC, Forgery
from tests.support.waiting import until

# Log files that hold even the largest forgery, so that it is refused for what it is.
FILE_BYTES = (
    *("--mapped_file_size_commit_log", str(8 * 1024 * 1024)),
    *("--max_hash_slot_num", "1000", "--max_index_num", "4000"),
)


async def forge(process: BrokerProcess, forgery: Forgery) -> None:
    """Throw one forged batch at the broker."""
    lane = await process.client.lane()
    checksum = zlib.crc32(forgery.records)
    error = await lane.refused(forgery.records, forgery.proto_segments, checksum)
    assert error.name() == forgery.error, (forgery.name, str(error))


async def test_forged_batches_and_kill_9(tmp_path: Path) -> None:
    """Good messages between all forgeries, then kill -9: the good ones are read back."""
    async with BrokerProcess(tmp_path, *FILE_BYTES) as process:
        await process.client.put_topic(TOPIC, 2)
        lane = await process.client.lane()
        expected: list[bytes] = []
        for forgery in FORGERIES:
            expected.append(forgery.name.encode())
            await lane.send((TOPIC, 0, [expected[-1]]))
            await forge(process, forgery)
        await process.restart()
        assert await process.client.bodies(TOPIC, 0) == expected
        await process.client.send(TOPIC, 0, b"after")
        assert await process.client.bodies(TOPIC, 0) == [*expected, b"after"]


async def test_commits_that_were_answered_survive_kill_9(tmp_path: Path) -> None:
    """Killed as soon as the last commit is answered, whatever flush mode the topic has."""
    groups = [f"g{number}" for number in range(5)]
    async with BrokerProcess(tmp_path) as process:
        for topic, flush in (("A", ASYNC), ("S", SYNC)):
            await process.client.put_topic(topic, 1, flush)
            await process.client.send(topic, 0, *[b"."] * 20)
            assert len(await process.client.read_queue(topic, 0)) == 20
        for group in groups:  # groups are on the disk before their first commit is
            await process.client.commit(group, ("A", 0, 0, 1), ("S", 0, 0, 1))
        for life in range(2, 5):
            broker = process.client
            async with asyncio.TaskGroup() as tasks:
                for group in groups:
                    tasks.create_task(broker.commit(group, ("A", 0, 0, life), ("S", 0, 0, life)))
            broker = await process.restart()
            for group in groups:
                for topic in ("A", "S"):
                    position = await broker.committed(group, topic, 0)
                    assert position is not None
                    assert position.offset == life, (group, topic)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_each_forged_batch_and_kill_9(tmp_path: Path) -> None:
    """The same with a kill -9 after each: everything before and after it is read back."""
    expected: list[bytes] = []
    async with BrokerProcess(tmp_path, *FILE_BYTES) as process:
        await process.client.put_topic(TOPIC, 2)
        for forgery in FORGERIES:
            before, after = f"before {forgery.name}".encode(), f"after {forgery.name}".encode()
            await process.client.send(TOPIC, 0, before)
            await forge(process, forgery)
            await process.restart()
            await process.client.send(TOPIC, 0, after)
            expected += [before, after]
            assert await process.client.bodies(TOPIC, 0) == expected


async def test_positions_after_kill_9(tmp_path: Path) -> None:
    """Generations rise: below the start of the new one old positions hold, above it they are
    fenced.
    """
    async with BrokerProcess(tmp_path) as process:
        await process.client.put_topic("T", 2)
        sent = await process.client.send("T", 0, b"a", b"b", b"c")
        old = sent.sent[0].position.generation
        assert await process.client.bodies("T", 0) == [b"a", b"b", b"c"]
        await process.client.commit("g", ("T", 0, old, 2))
        await process.restart()
        client = process.client
        assert (await client.status("T", 0)).generation > old
        new = (await client.status("T", 0)).generation
        answer = await client.pull("T", 0, 1, old)
        assert (answer.count, answer.next_position.generation) == (2, new)
        assert (await client.pull("T", 0, 3, old)).status == pb.PULL_STATUS_NOT_FOUND
        error = await refusal(client.pull("T", 0, 4, old))
        assert (type(error), error.fence) == (PositionFenced, (new, 3))
        assert (await client.pull("T", 0, 4, 0)).status == pb.PULL_STATUS_OFFSET_MOVED
        [result] = await client.commit("g", ("T", 0, old, 4))
        assert (result.error.name, result.error.fence.offset) == ("POSITION_FENCED", 3)
        [result] = await client.commit("g", ("T", 0, old, 3))
        assert (result.position.generation, result.position.offset) == (new, 3)
        # What comes after the crash stands above the fence.
        assert (await client.send("T", 0, b"d")).sent[0].position.offset == 3
        assert isinstance(await refusal(client.pull("T", 0, 4, old)), PositionFenced)


async def test_a_stop_in_order_leaves_a_clean_mark_and_raises_nothing(tmp_path: Path) -> None:
    store = tmp_path / "store"
    async with BrokerProcess(tmp_path) as process:
        await process.client.put_topic("T", 1, SYNC)
        sent = await process.client.send("T", 0, b"a")
        await process.client.commit("g", ("T", 0, 0, 1))
        assert json.loads((store / "cometmq.json").read_text())["clean"] is None
        assert (store / "abort").exists()
        lane = await process.client.lane()  # an open stream does not hold up the end
        assert await process.stop() == 0
        assert await lane.call.code() is not None
        assert not (store / "abort").exists()
        assert json.loads((store / "cometmq.json").read_text())["clean"]["end"] > 0
        await process.start()
        generation = (await process.client.status("T", 0)).generation
        assert generation == sent.sent[0].position.generation
        about = await process.client.admin.DescribeBroker(pb.DescribeBrokerRequest())
        assert about.epoch == 2  # the epoch counts every opening
        position = await process.client.committed("g", "T", 0)
        assert position is not None
        assert position.offset == 1


async def test_a_stop_in_the_middle_of_sending_answers_all_that_it_took(tmp_path: Path) -> None:
    async with BrokerProcess(tmp_path) as process:
        await process.client.put_topic("S", 1, SYNC)
        lane = await process.client.lane()
        sent: list[bytes] = []
        for number in range(40):
            sent.append(b"%d" % number)
            await lane.put(*batch(("S", 0, [sent[-1]])))
        first = await lane.result()
        assert list(first.queue_offsets) == [0]
        process.terminate()
        answers = [first]
        while isinstance(response := await lane.call.read(), pb.SendStreamResponse):
            answers.append(response.result)
        taken = [a for a in answers if not a.HasField("error")]
        assert answers[: len(taken)] == taken, "after the first refusal nothing is taken any more"
        assert {a.error.name for a in answers[len(taken) :]} <= {"BROKER_DRAINING"}
        assert await lane.call.code() is grpc.StatusCode.OK
        assert await process.stop() == 0
        await process.start()
        assert await process.client.bodies("S", 0) == sent[: len(taken)]


@pytest.mark.parametrize(
    ("flags", "error", "text"),
    [
        (["--flush_disk_typ", "SYNC_FLUSH"], "CONFIG_UNKNOWN_KEY", "flush_disk_type"),
        (["--flush_disk_type", "NOW"], "CONFIG_INVALID", "flush_disk_type"),
        (["--port", "70000"], "CONFIG_INVALID", "port"),
        (["--broker_group", "../x"], "CONFIG_INVALID", "broker_group"),
        (["--namesrv", "nowhere"], "CONFIG_INVALID", "nowhere"),
        (["--mapped_file_size_consume_queue", "30"], "CONFIG_INVALID", "multiple of 20"),
        (["--cpu_affinity", "100000"], "CONFIG_INVALID", "cpu_affinity"),
        (["--advertised_host", "no.such.host.invalid"], "CONFIG_INVALID", "advertised_host"),
    ],
)
async def test_a_bad_command_line(tmp_path: Path, flags: list[str], error: str, text: str) -> None:
    process = BrokerProcess(tmp_path)
    running = process.spawn(*flags)
    await until(lambda: running.poll() is not None)
    said = process.output()
    assert running.returncode == 1
    assert error in said
    assert text in said
    assert "Traceback" not in said
    assert not (tmp_path / "store").exists(), "a bad option touches no store"
