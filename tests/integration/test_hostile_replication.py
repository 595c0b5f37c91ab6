"""Peers of replication that lie: a client that plays slave, a server that plays writer. What they
say is refused and counted, and changes nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import grpc
import pytest

from cometmq import errors
from cometmq.errors import CometError
from cometmq.format import properties, record
from cometmq.messaging.state import CHANGE, STATE_QUEUE_ID, STATE_TOPIC
from cometmq.replication.versions import FORMAT_VERSION, PROTOCOL_MAX, PROTOCOL_MIN
from cometmq.rpc.interceptors import error_from
from cometmq.v1 import member_pb2, member_pb2_grpc
from tests.support.cluster.broker import SYNC
from tests.support.cluster.live_group import LiveGroup, LiveMember, live_group
from tests.support.cluster.pullhold import sample
from tests.support.stores.small_stores import HOST
from tests.support.waiting import until, until_async

Call = Any  # grpc.aio.StreamStreamCall of the method's messages


async def refused(member: LiveMember, reason: str) -> int:
    name = "cometmq_replication_refused_total"
    return int(await sample(member.metrics_address, name, f'reason="{reason}"'))


# --- a client that plays slave --------------------------------------------------------------------


def hello(**fields: Any) -> member_pb2.FollowerHello:
    usual = {
        "protocol_version": PROTOCOL_MIN,
        "format_version": FORMAT_VERSION,
        "cluster": "DefaultCluster",
        "broker_group": "g1",
        "member_id": 5,
        "store_id": "5" * 32,
        "last_record_offset": -1,
    }
    return member_pb2.FollowerHello(**{**usual, **fields})


async def opened(writer: LiveMember, **fields: Any) -> tuple[Call, member_pb2.LogChunk]:
    """A stream, and the first chunk that came on it."""
    call: Call = writer.members.Replicate()
    await call.write(member_pb2.ReplicateRequest(hello=hello(**fields)))
    await call.read()
    chunk = (await call.read()).chunk
    assert chunk.data
    return call, chunk


async def tell(
    call: Call, appended: int, flushed: int, answers_ms: int, no_election_ms: int = 0
) -> None:
    ack = member_pb2.ReplicaAck(
        appended_offset=appended,
        flushed_offset=flushed,
        answers_boot_ms=answers_ms,
        no_election_ms=no_election_ms,
    )
    await call.write(member_pb2.ReplicateRequest(ack=ack))


async def ending(call: Call) -> CometError:
    """What the stream ends with."""
    try:
        async with asyncio.timeout(10):
            while (await call.read()) is not grpc.aio.EOF:
                pass
    except grpc.aio.AioRpcError as error:
        return error_from(error)
    raise AssertionError("the stream ended in order")


@asynccontextmanager
async def writing(directory: Path, **options: Any) -> AsyncIterator[LiveGroup]:
    """A group of one member, with something to copy."""
    async with live_group(directory, members=1, **options) as group:
        await group[0].client.put_topic("T", 1, SYNC)
        await group[0].client.send("T", 0, b"x" * 100)
        yield group


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"protocol_version": PROTOCOL_MAX + 1}, "version"),
        ({"protocol_version_max": PROTOCOL_MIN - 1}, "version"),
        ({"protocol_version_max": PROTOCOL_MAX, "state_kinds": ["k" * 65]}, "version"),
        ({"format_version": 0}, "version"),
        ({"cluster": "another"}, "cluster"),
        ({"cluster": ""}, "cluster"),
        ({"broker_group": "g2"}, "group"),
        ({"member_id": 0}, "member"),
        ({"member_id": 1001}, "member"),
        ({"log_min_offset": 5}, "log"),
        ({"log_end_offset": 10, "last_record_offset": 10}, "log"),
        ({"epochs": [member_pb2.EpochStart(epoch=99)], "log_end_offset": 10}, "epoch"),
        ({"epochs": [member_pb2.EpochStart(epoch=1, start_offset=9)]}, "epoch"),
    ],
)
async def test_a_hello_that_lies(tmp_path: Path, fields: dict[str, Any], reason: str) -> None:
    async with writing(tmp_path) as group:
        lease = json.loads(group.lease.read_text())["record"]
        call = group[0].members.Replicate()
        await call.write(member_pb2.ReplicateRequest(hello=hello(**fields)))
        await ending(call)
        assert await refused(group[0], reason) == 1
        after = json.loads(group.lease.read_text())["record"]
        for name in ("in_sync", "electable", "holder_id"):
            assert after[name] == lease[name]
        await opened(group[0])


async def test_a_member_that_is_none_of_the_peers(tmp_path: Path) -> None:
    async with writing(tmp_path) as group:
        await group[0].stop()
        peers = (f"0@{group[0].internal_address}", "5@127.0.0.1:5")
        group[0].config = replace(group[0].config, peers=peers)
        await group[0].start("writer")
        call = group[0].members.Replicate()
        await call.write(member_pb2.ReplicateRequest(hello=hello(member_id=7)))
        assert "peers" in str(await ending(call))
        assert await refused(group[0], "member") == 1
        await opened(group[0])


FAKES: dict[str, Callable[[member_pb2.LogChunk], tuple[int, ...]]] = {
    "more than was sent": lambda c: (c.offset + len(c.data) + 1, 0, c.sent_boot_ms),
    "more on the disk than in memory": lambda c: (c.offset, c.offset + 1, c.sent_boot_ms),
    "less than at the start": lambda c: (c.offset - 1, 0, c.sent_boot_ms),
    "a frame of tomorrow": lambda c: (c.offset, 0, c.sent_boot_ms + 86_400_000),
    "a frame of before": lambda c: (c.offset, 0, -1),
    "a negative disk": lambda c: (c.offset, -1, c.sent_boot_ms),
    "a negative promise": lambda c: (c.offset, 0, c.sent_boot_ms, -1),
}


@pytest.mark.parametrize("fake", FAKES)
async def test_an_ack_that_lies(tmp_path: Path, fake: str) -> None:
    async with writing(tmp_path) as group:
        call, chunk = await opened(group[0])
        await tell(call, *FAKES[fake](chunk))
        assert isinstance(await ending(call), errors.InvalidRequest)
        assert await refused(group[0], "ack") == 1
        await group[0].client.send("T", 0, b"y")


async def test_a_second_hello_ends_the_stream(tmp_path: Path) -> None:
    async with writing(tmp_path) as group:
        call, _ = await opened(group[0])
        await call.write(member_pb2.ReplicateRequest(hello=hello()))
        assert isinstance(await ending(call), errors.InvalidRequest)
        call = group[0].members.Replicate()
        await tell(call, 0, 0, 0)
        assert isinstance(await ending(call), errors.InvalidRequest)
        assert await refused(group[0], "order") == 2


async def test_the_number_of_a_follower_that_answers_is_taken(tmp_path: Path) -> None:
    async with live_group(tmp_path, members=2) as group:
        await group[0].client.put_topic("T", 1, SYNC)
        await group.in_step()

        async def taken() -> bool:
            call = group[0].members.Replicate()
            fields = {"member_id": 1, "store_id": "another"}
            await call.write(member_pb2.ReplicateRequest(hello=hello(**fields)))
            return isinstance(await ending(call), errors.MemberIdTaken)

        await until_async(taken)
        assert await refused(group[0], "member") >= 1
        call = group[0].members.Replicate()
        await call.write(member_pb2.ReplicateRequest(hello=hello(member_id=1, store_id="another")))
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()  # no hello: whoever gets one takes the writer's epochs over
        await group[0].client.send("T", 0, b"the follower is still there")
        await group.in_step()


# --- a server that plays writer -------------------------------------------------------------------


class Impostor(member_pb2_grpc.MemberServiceServicer):
    """Greets each stream with ``lies``, and says on the newest what is put into ``frames``."""

    def __init__(self) -> None:
        self.stream_count = 0
        self.frames: asyncio.Queue[member_pb2.LogChunk] = asyncio.Queue()
        self.lies: dict[str, Any] = {}
        self.first_answers: list[Any] = []  # on each stream

    async def Replicate(  # type: ignore[override]  # answers with context.write
        self, request_iterator: Any, context: Any
    ) -> None:
        follower = (await context.read()).hello
        frames = self.frames = asyncio.Queue()
        self.stream_count += 1
        await context.write(greeting(follower, **self.lies))
        self.first_answers.append(await context.read())
        while True:  # until the follower leaves
            await context.write(member_pb2.ReplicateResponse(chunk=await frames.get()))


def greeting(follower: member_pb2.FollowerHello, **lies: Any) -> member_pb2.ReplicateResponse:
    usual = {
        "protocol_version": PROTOCOL_MIN,
        "format_version": FORMAT_VERSION,
        "epochs": follower.epochs,
        "start_offset": follower.log_end_offset,
        "log_file_bytes": 256 * 1024,
    }
    return member_pb2.ReplicateResponse(hello=member_pb2.WriterHello(**{**usual, **lies}))


@asynccontextmanager
async def led_astray(
    directory: Path,
) -> AsyncIterator[tuple[LiveMember, Impostor, member_pb2.LogChunk]]:
    """A follower that copies from an impostor, and the chunk that it should get next."""
    async with live_group(directory, lease_duration_s=3600.0) as group:
        writer, follower = group[0], group[1]
        await writer.client.put_topic("T", 1, SYNC)
        await group.in_step()
        await follower.stop()
        assert writer.store is not None
        end = writer.store.appended_offset
        await writer.client.send("T", 0, b"y" * 100)
        found = writer.store.read_chunk(end, 1 << 20)
        assert found is not None
        epoch = writer.store.epoch
        await writer.stop()
        impostor = Impostor()  # type: ignore[abstract]  # it serves one method
        server = grpc.aio.server()
        member_pb2_grpc.add_MemberServiceServicer_to_server(impostor, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        content = json.loads(group.lease.read_text())
        content["version"] = "another"
        content["record"] |= {"holder_address": f"127.0.0.1:{port}", "released": False}
        group.lease.write_text(json.dumps(content))
        await follower.start("follower")
        yield follower, impostor, chunk_of(epoch, end, found.data)
        await follower.stop()
        await server.stop(None)


def chunk_of(epoch: int, offset: int, data: bytes) -> member_pb2.LogChunk:
    return member_pb2.LogChunk(
        epoch=epoch,
        offset=offset,
        data=data,
        data_crc32=crc32(data),
        writer_end_offset=offset + len(data),
    )


def changed(chunk: member_pb2.LogChunk, **fields: Any) -> member_pb2.LogChunk:
    found = member_pb2.LogChunk()
    found.CopyFrom(chunk)
    for name, value in fields.items():
        setattr(found, name, value)
    if "data" in fields:
        found.data_crc32 = crc32(found.data)
    return found


def state_record(log_offset: int, body: bytes) -> bytes:
    return record.encode(
        STATE_TOPIC.encode(),
        STATE_QUEUE_ID,
        body,
        properties.encode({properties.TAGS: CHANGE}),
        born_time_ms=0,
        born_host=HOST,
        store_host=HOST,
        log_offset=log_offset,
        store_time_ms=2**41,
    )


Change = Callable[[member_pb2.LogChunk], member_pb2.LogChunk]
BAD_CHUNKS: list[tuple[str, Change]] = [
    ("checksum", lambda c: changed(c, data_crc32=c.data_crc32 ^ 1)),
    ("records", lambda c: changed(c, data=c.data[:-1])),
    ("records", lambda c: changed(c, data=c.data.replace(b"yyyy", b"yyxy", 1))),
    ("records", lambda c: changed(c, data=b"z" * len(c.data))),
    ("records", lambda c: changed(c, data=state_record(c.offset, b"no state"))),
    ("state", lambda c: changed(c, data=state_record(c.offset, b'{"v":1,"c":[{"k":"next"}]}'))),
    ("offset", lambda c: changed(c, offset=c.offset + 8, writer_end_offset=1 << 40)),
    ("offset", lambda c: changed(c, offset=c.offset - 8)),
    ("offset", lambda c: changed(c, writer_end_offset=c.offset)),
    ("epoch", lambda c: changed(c, epoch=c.epoch - 1)),
    ("epoch", lambda c: changed(c, epoch=c.epoch + 1)),
]


async def test_a_chunk_that_lies(tmp_path: Path) -> None:
    async with led_astray(tmp_path) as (follower, impostor, good):
        assert follower.store is not None
        await until(lambda: impostor.stream_count == 1)
        for reason, change in BAD_CHUNKS:
            before, count = await refused(follower, reason), impostor.stream_count
            impostor.frames.put_nowait(change(good))
            await until(lambda count=count: impostor.stream_count > count)  # type: ignore[misc]
            assert await refused(follower, reason) == before + 1
            assert follower.store.appended_offset == good.offset
        impostor.frames.put_nowait(good)
        end = good.offset + len(good.data)
        await until(lambda: follower.store is not None and follower.store.appended_offset == end)


async def test_frames_of_one_stream_are_not_answered_on_the_next(tmp_path: Path) -> None:
    """They may have been another writer's, whose clock says something else."""
    async with led_astray(tmp_path) as (_, impostor, good):
        await until(lambda: impostor.stream_count == 1)
        impostor.frames.put_nowait(changed(good, sent_boot_ms=5_000))
        impostor.frames.put_nowait(changed(good, epoch=99))  # it comes again
        await until(lambda: len(impostor.first_answers) == 2)
        assert [one.ack.answers_boot_ms for one in impostor.first_answers] == [0, 0]


BAD_GREETINGS: list[tuple[str, dict[str, Any]]] = [
    ("epoch", {"epochs": []}),
    ("epoch", {"epochs": [member_pb2.EpochStart(epoch=n) for n in (8, 9)]}),
    ("offset", {"start_offset": -1}),
]


async def test_a_greeting_that_lies(tmp_path: Path) -> None:
    async with led_astray(tmp_path) as (follower, impostor, good):
        assert follower.store is not None
        await until(lambda: impostor.stream_count == 1)
        for reason, lies in BAD_GREETINGS:
            impostor.lies = lies
            before, count = await refused(follower, reason), impostor.stream_count
            impostor.frames.put_nowait(changed(good, epoch=99))  # it comes again
            await until(lambda count=count: impostor.stream_count > count + 1)  # type: ignore[misc]
            assert await refused(follower, reason) > before
            assert follower.store.appended_offset == good.offset
            assert [change.reason for change in follower.changes] == []
            impostor.lies = {}
            count = impostor.stream_count
            await until(lambda count=count: impostor.stream_count > count)  # type: ignore[misc]
