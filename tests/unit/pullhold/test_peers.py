"""Pulls on a stream: in order, each with its own error, none left behind when the stream breaks."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from cometmq.errors import PeerUnavailable, TopicNotFound
from cometmq.rpc.interceptors import to_proto
from cometmq.v1 import broker_pb2, member_pb2
from services.pullhold import peers
from services.pullhold.peers import PullLane


class FakeCall:
    """A stream whose other end is the test."""

    def __init__(self) -> None:
        self.written: list[member_pb2.PullStreamRequest] = []
        self.answers: asyncio.Queue[Any] = asyncio.Queue()
        self.cancelled = False

    async def write(self, message: member_pb2.PullStreamRequest) -> None:
        self.written.append(message)

    async def read(self) -> Any:
        return await self.answers.get()

    def cancel(self) -> None:
        self.cancelled = True


def found(count: int) -> member_pb2.PullStreamResponse:
    return member_pb2.PullStreamResponse(response=broker_pb2.PullResponse(count=count))


async def start(lane: PullLane, count: int) -> list[asyncio.Task[broker_pb2.PullResponse]]:
    """Pulls that have been written."""
    requests = [broker_pb2.PullRequest(max_count=n) for n in range(count)]
    pulls = [asyncio.create_task(lane.pull(request)) for request in requests]
    await asyncio.sleep(0)
    assert len(lane) == count
    return pulls


async def test_answers_go_to_the_pulls_in_the_order_sent() -> None:
    call = FakeCall()
    lane = PullLane(call)
    pulls = await start(lane, 3)
    for count in range(3):
        call.answers.put_nowait(found(count))
    assert [answer.count for answer in await asyncio.gather(*pulls)] == [0, 1, 2]
    assert [message.pull.max_count for message in call.written] == [0, 1, 2]
    assert len(lane) == 0
    await lane.close()


async def test_an_error_belongs_to_its_pull() -> None:
    call = FakeCall()
    lane = PullLane(call)
    pulls = await start(lane, 2)
    call.answers.put_nowait(member_pb2.PullStreamResponse(error=to_proto(TopicNotFound("gone"))))
    call.answers.put_nowait(found(1))
    refused, answered = await asyncio.gather(*pulls, return_exceptions=True)
    assert isinstance(refused, TopicNotFound)
    assert isinstance(answered, broker_pb2.PullResponse)
    assert not lane.broken
    await lane.close()


async def test_a_pull_that_was_given_up_does_not_shift_the_others() -> None:
    call = FakeCall()
    lane = PullLane(call)
    first, second = await start(lane, 2)
    first.cancel()
    call.answers.put_nowait(found(0))
    call.answers.put_nowait(found(1))
    assert (await second).count == 1
    await lane.close()


async def test_the_end_of_the_stream_fails_all_that_wait() -> None:
    call = FakeCall()
    lane = PullLane(call)
    pulls = await start(lane, 2)
    call.answers.put_nowait(grpc.aio.EOF)
    results = await asyncio.gather(*pulls, return_exceptions=True)
    assert [type(result) for result in results] == [PeerUnavailable, PeerUnavailable]
    assert lane.broken
    await lane.close()


async def test_an_answer_that_nobody_asked_for_breaks_the_lane() -> None:
    call = FakeCall()
    lane = PullLane(call)
    call.answers.put_nowait(found(1))
    async with asyncio.timeout(5):
        await lane._reading
    assert lane.broken
    await lane.close()


async def test_silence_breaks_the_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "CALL_DEADLINE_S", 0.02)
    call = FakeCall()
    lane = PullLane(call)
    results = await asyncio.gather(*await start(lane, 2), return_exceptions=True)
    assert [type(result) for result in results] == [PeerUnavailable, PeerUnavailable]
    assert lane.broken
    assert call.cancelled
    await lane.close()
