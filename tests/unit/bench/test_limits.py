"""The bare loops count what they move, and nothing else."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TypeAlias

import pytest
from grpc import aio

from bench import limits
from cometmq.v1 import broker_pb2, broker_pb2_grpc

Stub: TypeAlias = "broker_pb2_grpc.BrokerServiceAsyncStub"  # only the type checker knows it


@pytest.fixture
async def stub() -> AsyncIterator[Stub]:
    server, port = limits.new_server()
    await server.start()
    async with aio.insecure_channel(f"127.0.0.1:{port}", options=limits.CHANNEL_OPTIONS) as channel:
        yield broker_pb2_grpc.BrokerServiceStub(channel)
    await server.stop(None)


async def test_every_chunk_is_answered_before_a_run_ends(stub: Stub) -> None:
    stream = limits.BareStream(stub, bytes(1000), window=3)
    await stream.open()
    assert await stream.run(0.0) == 3  # the window, and nothing after it
    assert await stream.run(0.02) > 3
    await stream.close()


async def test_answers_say_what_the_broker_would(stub: Stub) -> None:
    call = stub.SendStream()
    assert isinstance(opened := await call.read(), broker_pb2.SendStreamResponse)
    assert opened.opened.broker_group == "bare"
    for batch_id, offset in ((1, 0), (2, 3)):
        await call.write(broker_pb2.SendStreamRequest(batch_id=batch_id, records=b"abc"))
        assert isinstance(answer := await call.read(), broker_pb2.SendStreamResponse)
        assert (answer.result.batch_id, answer.result.log_offset) == (batch_id, offset)
    await call.done_writing()


async def test_pulls_bring_as_many_bytes_as_asked_for(stub: Stub) -> None:
    request = broker_pb2.PullRequest(max_bytes=5000, max_count=7)
    answer = await stub.Pull(request)
    assert (len(answer.records), answer.count) == (5000, 7)
    assert await limits.pull_for(stub, request, 0.02) > 0


def test_the_disk_loop_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "DISK_FILE_BYTES", 2 * 1024 * 1024)
    path = tmp_path / "disk.bin"
    arguments = argparse.Namespace(path=path, chunk_bytes=4096, chunk_messages=10, seconds=0.02)
    line = limits.measure_disk(arguments)
    assert int(line["messages"]) % 10 == 0
    assert int(line["messages"]) > 0
    assert not path.exists()
