"""Writers and followers in one loop: the wire, what is visible where, hand-over and deposition."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from cometmq import errors
from cometmq.errors import CometError
from cometmq.member.config import PromoteAsync
from cometmq.member.state.follower import FollowerStorage
from cometmq.model import ReplicationMode
from cometmq.replication.watermarks import HighWatermarks
from cometmq.rpc.interceptors import error_from
from cometmq.store.disk.files import OsFiles
from cometmq.v1 import broker_pb2 as pb
from cometmq.v1 import member_pb2
from services.broker.replication import handover
from services.broker.replication.insync import InSyncSet
from tests.support.cluster.broker import ASYNC, SYNC, refusal, running_namesrv
from tests.support.cluster.live_group import LiveGroup, LiveMember, live_group
from tests.support.waiting import until, until_async

NEVER_MS = 3_600_000
UNFLUSHED = {
    "flush_interval_commit_log": NEVER_MS,
    "flush_commit_log_thorough_interval": NEVER_MS,
    "flush_interval_consume_queue": NEVER_MS,
    "replication_mode": ReplicationMode.ASYNC,
}


async def checksum(member: LiveMember, to: int, start: int = 0) -> str:
    request = member_pb2.ChecksumLogRequest(from_offset=start, to_offset=to)
    return (await member.members.ChecksumLog(request)).sha256


async def assert_equal_logs(group: LiveGroup) -> None:
    await group.in_step()
    store = group[0].store
    assert store is not None
    end = store.appended_offset
    assert await checksum(group[0], end) == await checksum(group[1], end)


async def step_down(member: LiveMember, to: int | None = None) -> member_pb2.StepDownResponse:
    return await member.members.StepDown(member_pb2.StepDownRequest(member_id=to))


# --- copies ---------------------------------------------------------------------------------------


async def test_a_follower_has_the_same_bytes_and_the_same_answers(tmp_path: Path) -> None:
    async with live_group(tmp_path) as group:
        writer, follower = group[0], group[1]
        await writer.client.put_topic("T", 2, SYNC)
        for number in range(20):
            await writer.client.send("T", number % 2, *[b"%d" % number * 50] * 10)
        await writer.client.commit("G", ("T", 0, 0, 7))
        await assert_equal_logs(group)
        await until_async(lambda: shows(follower, "T", 0, 100))
        assert await follower.client.bodies("T", 0) == await writer.client.bodies("T", 0)
        found = await writer.client.pull("T", 0, 0, max_count=500)
        assert (await follower.client.pull("T", 0, 0, max_count=500)).records == found.records

        async def committed() -> bool:
            kept = await follower.client.committed("G", "T", 0)
            return kept is not None and kept.offset == 7

        await until_async(committed)


async def test_a_follower_in_step_makes_its_files_ahead(tmp_path: Path) -> None:
    async with live_group(tmp_path) as group:
        await group[0].client.put_topic("T", 1, SYNC)
        for _ in range(3):
            await group[0].client.send("T", 0, bytes(50_000))  # more than half of a file
        folders = [group[number].config.store_path / "commitlog" for number in (0, 1)]
        await until(lambda: all(len(list(folder.iterdir())) == 2 for folder in folders))


async def shows(member: LiveMember, topic: str, queue_id: int, count: int) -> bool:
    try:
        return (await member.client.status(topic, queue_id)).max_offset == count
    except grpc.aio.AioRpcError:  # the topic is not visible yet
        return False


async def test_a_follower_shows_nothing_that_the_writer_could_lose(tmp_path: Path) -> None:
    async with live_group(tmp_path, **UNFLUSHED) as group:
        writer, follower = group[0], group[1]
        await writer.client.put_topic("T", 1, ASYNC)
        await until_async(lambda: shows(follower, "T", 0, 0))
        await writer.client.send("T", 0, b"a", b"b")
        await group.in_step()
        status = await follower.client.status("T", 0)
        assert (status.max_offset, status.appended_offset) == (0, 2)
        waiting = await follower.client.pull("T", 0, 0)
        assert waiting.status == pb.PULL_STATUS_NOT_FOUND
        assert not await shows(follower, "T", 0, 2), "our own sync alone shows nothing"
        await writer.client.pull("T", 0, 0)  # somebody waits at the writer: it syncs
        await until_async(lambda: shows(follower, "T", 0, 2))
        assert await follower.client.bodies("T", 0) == [b"a", b"b"]


async def test_topics_come_and_go_on_a_follower_too(tmp_path: Path) -> None:
    async with live_group(tmp_path) as group:
        writer, follower = group[0], group[1]
        for life in range(3):
            await writer.client.put_topic("T", 1, SYNC)
            await writer.client.send("T", 0, b"life %d" % life)
            await until_async(lambda: shows(follower, "T", 0, 1))
            expected = await writer.client.status("T", 0)
            assert (await follower.client.status("T", 0)).generation == expected.generation
            assert await follower.client.bodies("T", 0) == [b"life %d" % life]
            await writer.client.drop_topic("T")

            async def gone() -> bool:
                return isinstance(await refusal_or_none(follower), errors.TopicNotFound)

            await until_async(gone)


async def refusal_or_none(member: LiveMember) -> CometError | None:
    try:
        await member.client.status("T", 0)
    except grpc.aio.AioRpcError as error:
        return error_from(error)
    return None


def erase_behind(store_path: Path, file_bytes: int, end: int) -> None:
    """Let the log end there, as if the machine had stopped before the rest was on the disk."""
    for path in (store_path / "commitlog").iterdir():
        keep = min(max(0, end - int(path.name)), file_bytes)
        with path.open("r+b") as file:
            file.seek(keep)
            file.write(bytes(file_bytes - keep))


async def test_a_follower_cuts_what_its_writer_has_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A follower that is electable would lead instead.
    async with live_group(tmp_path, **UNFLUSHED, promote_async=PromoteAsync.NEVER) as group:
        writer, follower = group[0], group[1]
        await writer.client.put_topic("T", 1, ASYNC)
        await writer.client.send("T", 0, b"kept")
        assert writer.store is not None
        writer.store.flush_log()
        flushed = writer.store.flushed_offset
        await writer.client.send("T", 0, b"lost " * 100)
        await group.in_step()
        await writer.crash()
        erase_behind(writer.config.store_path, 256 * 1024, flushed)
        monkeypatch.setattr(OsFiles, "boot_id", lambda _: "after the stop")
        await writer.start("writer")
        await until(lambda: [c.reason for c in follower.changes] == ["cut"])
        await follower.until_role("follower")
        await writer.client.send("T", 0, b"again")
        await assert_equal_logs(group)
        await writer.client.pull("T", 0, 2)
        await until_async(lambda: shows(follower, "T", 0, 2))
        assert await follower.client.bodies("T", 0) == [b"kept", b"again"]


# --- the wire -------------------------------------------------------------------------------------


def hello(**fields: Any) -> member_pb2.ReplicateRequest:
    return member_pb2.ReplicateRequest(
        hello=member_pb2.FollowerHello(
            **{
                "protocol_version": 3,
                "format_version": 1,
                "cluster": "DefaultCluster",
                "broker_group": "g1",
                "member_id": 5,
                "last_record_offset": -1,
                **fields,
            }
        )
    )


async def test_a_follower_that_has_to_cut_is_told_where_and_let_go(tmp_path: Path) -> None:
    async with live_group(tmp_path, members=1) as group:
        call = group[0].members.Replicate()
        await call.write(
            hello(
                epochs=[member_pb2.EpochStart(epoch=1, start_offset=0)],
                log_end_offset=10**6,
                last_record_offset=10**6 - 100,
            )
        )
        first = await call.read()
        assert isinstance(first, member_pb2.ReplicateResponse)
        assert group[0].store is not None
        assert first.hello.start_offset == group[0].store.appended_offset
        assert await call.read() is grpc.aio.EOF


async def test_checksums_are_of_what_is_there(tmp_path: Path) -> None:
    async with live_group(tmp_path, members=1) as group:
        for start, to in [(-1, 0), (5, 4), (0, 10**9)]:
            refused = await refusal(checksum(group[0], to, start))
            assert isinstance(refused, errors.OffsetInvalid)


# --- hand-over ------------------------------------------------------------------------------------


async def hand_over(member: LiveMember) -> member_pb2.StepDownResponse:
    """As soon as there is a follower."""
    done: list[member_pb2.StepDownResponse] = []

    async def handed_over() -> bool:
        try:
            done.append(await step_down(member))
        except grpc.aio.AioRpcError as error:
            if not isinstance(error_from(error), errors.NoFollower):
                raise
        return bool(done)

    await until_async(handed_over)
    return done[0]


async def test_the_role_goes_to_and_fro(tmp_path: Path) -> None:
    async with (
        running_namesrv(tmp_path) as namesrv,
        live_group(tmp_path, namesrv=(namesrv,)) as group,
    ):
        await group[0].client.put_topic("T", 1, SYNC)
        await group[0].client.send("T", 0, b"0")
        generation = (await group[0].client.status("T", 0)).generation
        for turn in range(4):
            old, new = group[turn % 2], group[1 - turn % 2]
            await old.client.commit("G", ("T", 0, 0, turn + 1))
            assert (await hand_over(old)).member_id == 1 - turn % 2
            await new.until_role("writer")
            await old.until_role("follower")
            assert new.changes[-1].reason == "handover"
            assert (await new.client.status("T", 0)).generation == generation
            kept = await new.client.committed("G", "T", 0)
            assert kept is not None
            assert kept.offset == turn + 1
            await new.client.send("T", 0, b"%d" % (turn + 1))
            assert await new.client.bodies("T", 0) == [b"%d" % n for n in range(turn + 2)]
        await assert_equal_logs(group)


async def test_a_crash_of_a_follower_is_nothing_to_those_who_read(tmp_path: Path) -> None:
    """What it lost it has copied again before it takes over; only a writer's crash takes back."""
    async with live_group(tmp_path) as group:
        await group[0].client.put_topic("T", 1, SYNC)
        await group[0].client.send("T", 0, b"x")
        generation = (await group[0].client.status("T", 0)).generation
        await group[1].crash()
        await group[1].start("follower")
        await hand_over(group[0])
        await group[1].until_role("writer")
        assert (await group[1].client.status("T", 0)).generation == generation


async def test_a_crash_of_a_writer_is_remembered(tmp_path: Path) -> None:
    async with live_group(tmp_path, members=1) as group:
        member = group[0]
        await member.client.put_topic("T", 1, SYNC)
        await member.client.send("T", 0, b"x")
        generation = (await member.client.status("T", 0)).generation
        await member.crash()
        held = group.lease.read_text()
        group.lease.write_text("nobody can read this")
        await member.start("follower")
        await member.stop()
        group.lease.write_text(held)
        await member.start("writer")
        assert (await member.client.status("T", 0)).generation > generation


async def test_a_writer_that_cannot_prove_its_right_takes_nothing_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reports marks of 0 to its followers. They keep what they have shown; a follower that
    restarts shows nothing yet, and moves no reader.
    """
    provable, heard, kept = asyncio.Event(), list[HighWatermarks](), list[bool]()
    may_acknowledge, raise_marks = InSyncSet.may_acknowledge, FollowerStorage.raise_marks

    def hear(storage: FollowerStorage, visible: HighWatermarks, flush_to: int) -> None:
        heard.append(visible)
        before = storage.watermarks.shown
        raise_marks(storage, visible, flush_to)
        kept.append(all(map(int.__le__, before, storage.watermarks.shown)))

    def prove(in_sync: InSyncSet) -> bool:
        return provable.is_set() and may_acknowledge(in_sync)

    monkeypatch.setattr(FollowerStorage, "raise_marks", hear)
    monkeypatch.setattr(InSyncSet, "may_acknowledge", prove)
    provable.set()
    async with live_group(tmp_path, replication_mode=ReplicationMode.ASYNC) as group:
        writer, follower = group[0], group[1]
        await writer.client.put_topic("T", 1, SYNC)
        await writer.client.send("T", 0, b"1", b"2")
        await until_async(lambda: shows(follower, "T", 0, 2))
        await writer.stop()
        provable.clear()
        heard.clear()
        await writer.start("writer")
        sending = asyncio.create_task(writer.client.send("T", 0, b"3"))
        await until(lambda: writer.opened.queue_bounds("T", 0)[1] == 3)
        await group.in_step()
        await until(lambda: len(heard) > 1)
        for member in (writer, follower):
            assert await shows(member, "T", 0, 2)
            assert (await member.client.pull("T", 0, 0)).count == 2
        await follower.stop()
        await follower.start("follower")
        known = len(heard)
        await until(lambda: len(heard) > known)
        assert set(heard) == {HighWatermarks()}
        assert all(kept), "a follower steps back"
        assert await shows(follower, "T", 0, 0)
        found = await follower.client.pull("T", 0, 2)
        assert (found.status, found.next_position.offset) == (pb.PULL_STATUS_NOT_FOUND, 2)
        assert not sending.done()
        provable.set()
        await sending
        await until_async(lambda: shows(follower, "T", 0, 3))
        for member in (writer, follower):
            assert await member.client.bodies("T", 0) == [b"1", b"2", b"3"]


async def test_a_broker_without_a_follower_goes_on(tmp_path: Path) -> None:
    async with live_group(tmp_path, members=1) as group:
        await group[0].client.put_topic("T", 1, SYNC)
        assert isinstance(await refusal(step_down(group[0])), errors.NoFollower)
        await group[0].client.send("T", 0, b"x")


async def test_a_follower_that_does_not_sync_takes_nothing_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "CATCH_UP_S_MAX", 0.3)
    async with live_group(tmp_path, members=1) as group:
        writer = group[0]
        await writer.client.put_topic("T", 1, SYNC)
        call = writer.members.Replicate()
        await call.write(hello())
        assert isinstance(await call.read(), member_pb2.ReplicateResponse)
        stepping = asyncio.create_task(refusal(step_down(writer)))

        async def refused_for_now() -> bool:
            try:
                await writer.client.send("T", 0, b"x")
            except grpc.aio.AioRpcError as error:
                return isinstance(error_from(error), errors.BrokerDraining)
            return False

        await until_async(refused_for_now)
        assert isinstance(await refusal(step_down(writer)), errors.BrokerDraining)
        assert isinstance(
            await refusal(writer.client.commit("G", ("T", 0, 0, 0))), errors.BrokerDraining
        )
        assert isinstance(await stepping, errors.NoFollower)
        await writer.client.send("T", 0, b"on we go")
        assert writer.role == "writer"
        call.cancel()


async def test_a_member_without_a_lease_leads(tmp_path: Path) -> None:
    async with live_group(tmp_path, members=1, lease="") as group:
        assert [change.reason for change in group[0].changes] == ["alone"]
        assert isinstance(await refusal(step_down(group[0])), errors.NoFollower)
