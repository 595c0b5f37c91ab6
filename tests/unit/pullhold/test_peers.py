"""Pulls on a stream: in order, each with its own error, none left behind when the stream breaks."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from cometmq.errors import PeerUnavailable, TopicNotFound
from cometmq.rpc.interceptors import to_proto
from cometmq.v1 import broker_pb2, common_pb2, member_pb2
from services.pullhold import peers
from services.pullhold.model import ClusterQueue
from services.pullhold.peers import ArrivalStream, Change, PullLane


class FakeCall:
    """A stream whose other end is the test."""

    def __init__(self) -> None:
        self.written: list[Any] = []
        self.answers: asyncio.Queue[Any] = asyncio.Queue()
        self.cancelled = False

    async def write(self, message: Any) -> None:
        self.written.append(message)

    async def read(self) -> Any:
        return await self.answers.get()

    def cancel(self) -> None:
        self.cancelled = True


def found(count: int) -> member_pb2.PullStreamResponse:
    return member_pb2.PullStreamResponse(response=broker_pb2.PullResponse(count=count))


async def start(lane: PullLane, count: int) -> list[asyncio.Task[broker_pb2.PullResponse]]:
    """Pulls that have been written."""
    pulled = [broker_pb2.PullRequest(max_count=n) for n in range(count)]
    requests = [member_pb2.PullStreamRequest(pull=pull) for pull in pulled]
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


# --- arrivals -------------------------------------------------------------------------------------


async def read_one(**messages: Any) -> peers.ArrivalUpdate:
    """An arrival of offsets 5 and 6 with these messages."""
    call = FakeCall()
    arrival = member_pb2.Arrival(
        queue=common_pb2.QueueRef(topic="t"),
        generation=1,
        max_offset=7,
        messages=member_pb2.InlineMessages(**messages),
    )
    call.answers.put_nowait(member_pb2.WatchArrivalsResponse(arrivals=[arrival]))
    (told,) = await ArrivalStream("g", call).read()
    return told


GOOD = {"first_offset": 5, "records": b"aabbb", "sizes": [2, 3], "tag_codes": [0, 9]}


async def test_messages_come_with_an_arrival() -> None:
    inline_messages = (await read_one(**GOOD, min_offset=2)).inline_messages
    assert inline_messages is not None
    assert (inline_messages.first_offset, inline_messages.min_offset, inline_messages.records) == (
        5,
        2,
        b"aabbb",
    )
    assert (list(inline_messages.sizes), list(inline_messages.codes)) == ([2, 3], [0, 9])


@pytest.mark.parametrize(
    "wrong",
    [
        {"first_offset": 4},
        {"records": b"aabb"},
        {"sizes": [5]},
        {"sizes": [1, 4]},
        {"tag_codes": [0]},
    ],
)
async def test_messages_that_do_not_fit_together_are_pulled(wrong: dict[str, Any]) -> None:
    told = await read_one(**{**GOOD, **wrong})
    assert told.inline_messages is None
    assert told.maximum == 7


async def test_a_change_says_everything_in_one_request() -> None:
    call, key = FakeCall(), ClusterQueue("g", "t", 3)
    delivered = member_pb2.InlineDelivery(topic="t", group="c", message_count=1, record_bytes=9)
    await ArrivalStream("g", call).change(Change([key], [key], [key], [delivered]))
    queue = common_pb2.QueueRef(topic="t", queue_id=3)
    assert call.written == [
        member_pb2.WatchArrivalsRequest(
            add=[queue], remove=[queue], inline_wanted=[queue], inline_deliveries=[delivered]
        )
    ]
