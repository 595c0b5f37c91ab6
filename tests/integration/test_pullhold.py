"""A real name server, broker and pullhold in one loop."""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from cometmq import errors
from cometmq.messaging import inline_messages
from cometmq.messaging.inline_messages import WANTED_ARRIVALS
from cometmq.rpc import background
from cometmq.rpc.interceptors import from_proto
from cometmq.v1 import broker_pb2 as pb
from cometmq.v1 import common_pb2, hold_pb2, namesrv_pb2, namesrv_pb2_grpc
from services.pullhold.broker_link import Link
from services.pullhold.hold_service import HoldService
from services.pullhold.peers import BrokerPeer
from tests.support.cluster.broker import (
    LiveBroker,
    encoded,
    refusal,
    running_broker,
    running_namesrv,
)
from tests.support.cluster.pullhold import (
    HoldLane,
    LivePullhold,
    hold_request,
    rpc_count,
    running_pullhold,
    sample,
)
from tests.support.waiting import until, until_async

FOUND, NOT_FOUND = pb.PULL_STATUS_FOUND, pb.PULL_STATUS_NOT_FOUND
ARRIVAL_BYTES = "cometmq_arrival_bytes_total"
LARGE = bytes(inline_messages.BYTES_MAX)  # a body that does not come along with its arrival


@asynccontextmanager
async def cluster(tmp_path: Path, **options: Any) -> AsyncIterator[tuple[LiveBroker, LivePullhold]]:
    """A broker with topic t (2 queues) and a pullhold beside it."""
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
        running_pullhold(namesrv, **options) as pullhold,
    ):
        await broker.put_topic("t")
        yield broker, pullhold
        assert pullhold.safety_finds == 0


async def parked(pullhold: LivePullhold, *wants: tuple[Any, ...], **options: Any) -> HoldLane:
    """A stream with these holds, numbered from 1, whose queues' state is known."""
    lane = pullhold.lane()
    for hold_id, want in enumerate(wants, 1):
        await lane.hold(hold_id, *want, **options)
    await until(lambda: pullhold.waiting == len(wants) and pullhold.all_known)
    return lane


async def until_known(pullhold: LivePullhold, maximum: int) -> None:
    await until(lambda: pullhold.known("t", 0) == maximum)


async def send_tagged(broker: LiveBroker, tag: str, body: bytes = b"x") -> None:
    lane = await broker.lane()
    records = encoded("t", 0, body, tag=tag)
    segment = pb.Segment(topic="t", queue_id=0, count=1)
    await lane.exchange(records, [segment], zlib.crc32(records))
    lane.call.cancel()


# --- waking ---------------------------------------------------------------------------------------


async def test_a_parked_pull_is_answered_when_a_message_comes(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (broker, pullhold):
        lane = await parked(pullhold, ("t", 0, 0), ("t", 1, 0))
        await broker.send("t", 0, b"one", b"two")
        answer = await lane.answer()
        assert answer.hold_id == 1
        assert answer.response.pull.status == FOUND
        assert answer.response.pull.count == 2
        assert answer.response.pull.next_position.offset == 2
        assert pullhold.waiting == 1


async def test_what_is_there_already_is_answered_at_once(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (broker, pullhold):
        await broker.send("t", 0, b"one")
        await broker.read_queue("t", 0)
        lane = pullhold.lane()
        await lane.hold(1, "t", 0, 0)
        assert (await lane.answer()).response.pull.status == FOUND
        await lane.hold(2, "t", 0, 0)  # the queue is known by now
        assert (await lane.answer()).response.pull.status == FOUND


async def test_a_hold_for_arrivals_is_answered_without_messages(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (broker, pullhold):
        lane = await parked(
            pullhold, *([("t", 0, 0)] * 3), ("t", 1, 0), arrivals_of="G", answers_max=8
        )
        await broker.send("t", 0, b"one")
        first = await lane.answer()
        assert (first.hold_id, first.goes_on) == (1, False)
        assert first.response.pull.status == FOUND
        assert (first.response.pull.count, first.response.pull.records) == (0, b"")
        assert pullhold.waiting == 3
        await broker.send("t", 0, b"two")
        assert (await lane.answer()).hold_id == 2
        await broker.read_queue("t", 0)
        await lane.hold(9, "t", 0, 1, arrivals_of="H")  # something is there already
        assert (await lane.answer()).hold_id == 9
        await lane.hold(10, "t", 0, 2, arrivals_of="H", hold_ms=50)
        last = await lane.answer()
        assert (last.hold_id, last.response.pull.status) == (10, NOT_FOUND)


async def test_a_hold_goes_on_as_often_as_its_client_wants(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (broker, pullhold):
        lane = await parked(pullhold, ("t", 0, 0), answers_max=2)
        for end, goes_on in ((1, True), (2, False)):
            await broker.send("t", 0, b"one")
            answer = await lane.answer()
            pulled = answer.response.pull
            assert (answer.hold_id, answer.goes_on) == (1, goes_on)
            assert (pulled.count, pulled.next_position.offset) == (1, end)
        assert pullhold.waiting == 0


async def test_a_hold_of_a_busy_queue_ends_with_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.pullhold.answers.BUSY_COUNT", 2)
    async with cluster(tmp_path) as (broker, pullhold):
        lane = await parked(pullhold, ("t", 0, 0), answers_max=9)
        await broker.send("t", 0, b"one", b"two")
        answer = await lane.answer()
        assert (answer.response.pull.count, answer.goes_on, pullhold.waiting) == (2, False, 0)


async def test_a_hold_that_goes_on_can_be_taken_back(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (broker, pullhold):
        lane = await parked(pullhold, ("t", 0, 0), answers_max=9)
        await broker.send("t", 0, b"one")
        assert (await lane.answer()).goes_on
        await lane.cancel(1)
        await until(lambda: pullhold.waiting == 0)


async def test_messages_with_other_tags_wake_nobody(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (broker, pullhold):
        lane = await parked(pullhold, ("t", 0, 0), tags=("red",))
        for _ in range(3):
            await send_tagged(broker, "blue")
        await until(lambda: pullhold.known("t", 0) == 3)
        assert pullhold.pulls == 0
        await send_tagged(broker, "red", b"wanted")
        pulled = (await lane.answer()).response.pull
        assert (pulled.status, pulled.count, pulled.next_position.offset) == (FOUND, 1, 4)
        assert pullhold.direct + pullhold.pulls == 1


async def test_a_backlog_without_wanted_tags_moves_the_hold_on(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (broker, pullhold):
        for _ in range(3):
            await send_tagged(broker, "blue")
        await broker.read_queue("t", 0)
        lane = pullhold.lane()
        await lane.hold(1, "t", 0, 0, tags=("red",), hold_ms=300)
        pulled = (await lane.answer()).response.pull
        assert (pulled.status, pulled.next_position.offset) == (NOT_FOUND, 3)
        assert pulled.next_position.generation > 0


async def test_a_watched_queue_is_synced_without_waiting_for_the_interval(tmp_path: Path) -> None:
    slow: dict[str, Any] = {
        "flush_interval_commit_log": 60_000,
        "flush_commit_log_thorough_interval": 60_000,
    }
    async with AsyncExitStack() as stack:
        namesrv = await stack.enter_async_context(running_namesrv(tmp_path))
        running = running_broker(tmp_path, namesrv=(namesrv,), **slow)
        broker = await stack.enter_async_context(running)
        pullhold = await stack.enter_async_context(running_pullhold(namesrv))
        await broker.put_topic("t")
        await broker.send("t", 0, b"before anybody watches")
        lane = pullhold.lane()
        await lane.hold(1, "t", 0, 0)
        assert (await lane.answer()).response.pull.count == 1
        await lane.hold(2, "t", 0, 1)
        await broker.send("t", 0, b"after")
        assert (await lane.answer()).response.pull.count == 1


# --- the end of a hold ----------------------------------------------------------------------------


async def test_at_the_deadline_the_position_comes_back(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (broker, pullhold):
        await broker.send("t", 0, b"one")
        generation = (await broker.status("t", 0)).generation
        lane = pullhold.lane()
        await lane.hold(1, "t", 0, 1, generation=generation, hold_ms=100)
        pulled = (await lane.answer()).response.pull
        assert pulled.status == NOT_FOUND
        assert pulled.next_position == common_pb2.Position(generation=generation, offset=1)
        assert pullhold.metric("cometmq_hold_duration_seconds_count", outcome="not_found") == 1


async def test_a_hold_that_was_taken_back_is_not_answered(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (broker, pullhold):
        lane = await parked(pullhold, ("t", 0, 0), ("t", 0, 0))
        await lane.cancel(1)
        await lane.cancel(99)  # unknown: no error
        await until(lambda: pullhold.waiting == 1)
        await broker.send("t", 0, b"one")
        assert (await lane.answer()).hold_id == 2


async def test_holds_go_with_their_client(tmp_path: Path) -> None:
    async with cluster(tmp_path, watch_linger_s=0.05) as (_, pullhold):
        lane = await parked(pullhold, ("t", 0, 0), ("t", 1, 0))
        assert pullhold.metric("cometmq_hold_queues") == 2
        lane.call.cancel()
        await until(lambda: pullhold.waiting == 0)
        assert pullhold.metric("cometmq_hold_clients") == 0
        await until(lambda: pullhold.metric("cometmq_hold_queues") == 0)
        await until(lambda: pullhold.metric("cometmq_hold_watch_streams") == 0)


async def test_half_closed_a_stream_ends_with_its_last_answer(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (broker, pullhold):
        lane = await parked(pullhold, ("t", 0, 0))
        await lane.call.done_writing()
        await broker.send("t", 0, b"one")
        assert (await lane.answer()).hold_id == 1
        assert await lane.ended() is grpc.StatusCode.OK


async def test_drain_answers_everything_and_ends_the_streams(tmp_path: Path) -> None:
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
    ):
        await broker.put_topic("t")
        async with running_pullhold(namesrv) as pullhold:
            lane = await parked(pullhold, ("t", 0, 0), ("t", 1, 0))
            unary = asyncio.create_task(refusal_or_answer(pullhold, hold_request("t", 0, 0)))
            await until(lambda: pullhold.waiting == 3)
            draining = asyncio.create_task(pullhold.stop())
            answers = [(await lane.answer()).response.pull for _ in range(2)]
            assert {a.next_position.offset for a in answers} == {0}
            assert {a.status for a in answers} == {NOT_FOUND}
            assert await lane.ended() is grpc.StatusCode.UNAVAILABLE
            assert (await unary).status == NOT_FOUND
            await draining
        assert await listed(namesrv) == []


async def test_a_position_beyond_the_queue_is_moved_at_once(tmp_path: Path) -> None:
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
    ):
        await broker.put_topic("t")
        async with running_pullhold(namesrv) as pullhold:
            answer = await refusal_or_answer(pullhold, hold_request("t", 0, 1_000))
            assert answer.status == pb.PULL_STATUS_OFFSET_MOVED
            assert answer.next_position.offset == 0
            assert pullhold.waiting == 0


async def refusal_or_answer(pullhold: LivePullhold, request: hold_pb2.HoldRequest) -> Any:
    return (await pullhold.stub.Hold(request)).pull


async def listed(namesrv: str, cluster_name: str = "") -> list[str]:
    async with grpc.aio.insecure_channel(namesrv) as channel:
        stub = namesrv_pb2_grpc.NameServiceStub(channel)
        response = await stub.ListPullholds(namesrv_pb2.ListPullholdsRequest(cluster=cluster_name))
        return list(response.addresses)


async def test_a_pullhold_is_listed_while_it_lives(tmp_path: Path) -> None:
    async with running_namesrv(tmp_path) as namesrv:
        async with running_pullhold(namesrv, cluster="c1") as pullhold:
            assert await listed(namesrv) == [pullhold.address]
            assert await listed(namesrv, "c1") == [pullhold.address]
            assert await listed(namesrv, "c2") == []
        assert await listed(namesrv) == []


# --- the unary form -------------------------------------------------------------------------------


async def test_a_unary_hold(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (broker, pullhold):
        held = asyncio.create_task(refusal_or_answer(pullhold, hold_request("t", 0, 0)))
        await until(lambda: pullhold.waiting == 1)
        await broker.send("t", 0, b"one")
        assert (await held).count == 1
        nothing = await refusal_or_answer(pullhold, hold_request("t", 0, 1, hold_ms=50))
        assert nothing.status == NOT_FOUND


@pytest.mark.parametrize(
    ("request_", "kind"),
    [
        (hold_request("t", 0, 0, hold_ms=60_001), errors.InvalidRequest),
        (hold_request("t", 0, 0, hold_ms=-1), errors.InvalidRequest),
        (hold_request("t", 0, 0, answers_max=65), errors.InvalidRequest),
        (hold_request("t", 0, 0, answers_max=-1), errors.InvalidRequest),
        (hold_request("t", 0, 0, group=""), errors.InvalidRequest),
        (hold_request("", 0, 0), errors.InvalidRequest),
        (hold_request("t", 0, 0, tags=("a|b",)), errors.FilterInvalid),
        (hold_request("t", 0, 0, sql="price >"), errors.FilterInvalid),
        (hold_request("t", 0, 0, tags=("a",), sql="price > 5"), errors.FilterInvalid),
        (hold_request("t", 0, -1), errors.OffsetInvalid),
        (hold_request("t", 0, 0, generation=10_000), errors.PositionFenced),
        (hold_request("t", 9, 0), errors.QueueNotFound),
        (hold_request("nowhere", 0, 0), errors.TopicNotFound),
        (hold_request("t", 0, 0, group="nobody"), errors.RouteNotFound),
    ],
)
async def test_what_a_hold_is_refused_with(
    tmp_path: Path, request_: hold_pb2.HoldRequest, kind: type[errors.CometError]
) -> None:
    async with cluster(tmp_path, unreachable_grace_s=0.1) as (broker, pullhold):
        await broker.send("t", 0, b"one")
        await broker.read_queue("t", 0)
        assert type(await refusal(pullhold.stub.Hold(request_))) is kind
        lane = pullhold.lane()
        await lane.call.write(hold_pb2.HoldStreamRequest(hold_id=5, hold=request_))
        answer = await lane.answer()
        assert answer.hold_id == 5
        assert type(from_proto(answer.error)) is kind


# --- limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "limit", [{"holds_max": 2}, {"holds_per_client_max": 2}, {"holds_per_stream_max": 2}]
)
async def test_limits_are_answered_in_the_hold(tmp_path: Path, limit: dict[str, int]) -> None:
    async with cluster(tmp_path, **limit) as (broker, pullhold):
        lane = await parked(pullhold, ("t", 0, 0), ("t", 1, 0))
        await lane.hold(3, "t", 0, 0)
        answer = await lane.answer()
        assert answer.hold_id == 3
        assert type(from_proto(answer.error)) is errors.LimitExceeded
        assert pullhold.metric("cometmq_holds_refused_total", error="LIMIT_EXCEEDED") == 1
        await broker.send("t", 0, b"one")
        assert (await lane.answer()).hold_id == 1
        await lane.hold(4, "t", 0, 1)
        await until(lambda: pullhold.waiting == 2)


async def test_a_number_that_is_held_already_ends_the_stream(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (_, pullhold):
        lane = await parked(pullhold, ("t", 0, 0))
        await lane.hold(1, "t", 1, 0)
        assert await lane.ended() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_client_that_takes_no_answers_gets_no_more_records(tmp_path: Path) -> None:
    async with cluster(tmp_path, unsent_bytes_per_stream_max=1) as (broker, pullhold):
        await broker.send("t", 0, b"x" * 100_000)
        await broker.read_queue("t", 0)
        lane = pullhold.lane()
        count = 400  # far more than the windows of HTTP/2 take
        for hold_id in range(1, count + 1):
            await lane.hold(hold_id, "t", 0, 0)
        await until(lambda: pullhold.answered == count)
        assert pullhold.metric("cometmq_hold_unsent_bytes") < 100 * 110_000
        statuses = [(await lane.answer()).response.pull.status for _ in range(count)]
        assert {FOUND, NOT_FOUND} == set(statuses)
        await until(lambda: pullhold.metric("cometmq_hold_unsent_bytes") == 0)


async def test_refusals_wait_for_their_client_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.pullhold.answers.ANSWERS_MAX", 5)
    async with cluster(tmp_path) as (_, pullhold):
        lane = pullhold.lane()
        for hold_id in range(100):
            await lane.hold(hold_id, "", 0, 0)
        answers = [await lane.answer() for _ in range(100)]
        assert [answer.hold_id for answer in answers] == list(range(100))


async def test_a_herd_is_answered_in_order_a_few_pulls_at_a_time(tmp_path: Path) -> None:
    async with cluster(tmp_path, pulls_per_broker_max=3) as (broker, pullhold):
        lane = await parked(pullhold, *[("t", 0, 0)] * 100)
        await broker.send("t", 0, LARGE)
        most, order = 0, []
        for _ in range(100):
            order.append((await lane.answer()).hold_id)
            most = max(most, int(pullhold.metric("cometmq_hold_pulls_in_flight")))
        assert 0 < most <= 3
        assert all(abs(hold_id - place) <= 6 for place, hold_id in enumerate(order, 1))


async def test_large_answers_come_a_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is on its way from a broker is memory that no client's room counts yet."""
    monkeypatch.setattr("services.pullhold.pulls.COMING_BYTES_MAX", 3 * len(LARGE))
    async with cluster(tmp_path) as (broker, pullhold):
        lane = await parked(pullhold, *[("t", 0, 0)] * 60)
        await broker.send("t", 0, LARGE)
        most = 0
        for _ in range(60):
            await lane.answer()
            most = max(most, int(pullhold.metric("cometmq_hold_pulls_in_flight")))
        assert 0 < most <= 2


# --- messages that come along with their arrival --------------------------------------------------


async def test_small_messages_need_no_pull_and_count_at_the_broker(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (broker, pullhold):
        lane = await parked(pullhold, ("t", 0, 0))
        for offset in range(40):  # longer than the broker sends messages for one request
            await until(lambda: pullhold.waiting == 1)
            await broker.send("t", 0, b"one")
            pulled = (await lane.answer()).response.pull
            assert (pulled.count, pulled.next_position.offset) == (1, offset + 1)
            await lane.hold(1, "t", 0, offset + 1, generation=pulled.next_position.generation)
        assert pullhold.direct + pullhold.pulls == 40
        assert pullhold.direct > 20

        async def counted() -> bool:
            name = "rocketmq_messages_out_total"
            return await sample(broker.metrics_address, name, 'topic="t"') == 40

        await until_async(counted)


async def test_holds_are_answered_as_pulls_are(tmp_path: Path) -> None:
    """Whatever they ask for, out of the arrival or by a pull."""
    async with cluster(tmp_path) as (broker, pullhold):
        asked: list[dict[str, Any]] = [
            {**wanted, "max_count": count, "max_bytes": size, "form": form}
            for wanted in (
                {},
                {"tags": ("red",)},
                {"tags": ("blue", "red")},
                {"sql": "TAGS = 'blue' OR TAGS STARTSWITH 'r'"},
            )
            for count in (0, 1, 2)
            for size in (0, 1, 200)
            for form in (pb.MESSAGE_FORM_RECORDS, pb.MESSAGE_FORM_MESSAGES)
        ]
        lane = pullhold.lane()
        for hold_id, options in enumerate(asked):
            await lane.hold(hold_id, "t", 0, 0, **options)
        await until(lambda: pullhold.waiting == len(asked) and pullhold.all_known)
        records = [encoded("t", 0, b"x", tag=tag) for tag in ("red", "blue", "red", "green")]
        sender = await broker.lane()
        batch = b"".join(records)
        await sender.exchange(
            batch, [pb.Segment(topic="t", queue_id=0, count=4)], zlib.crc32(batch)
        )
        sender.call.cancel()
        for _ in asked:
            answer = await lane.answer()
            request = hold_request("t", 0, 0, **asked[answer.hold_id]).pull
            assert answer.response.pull == await broker.stub.Pull(request)
        assert pullhold.direct == len(asked) / 2
        assert pullhold.pulls == len(asked) / 2


async def test_what_may_not_be_read_does_not_come_along(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (broker, pullhold):
        lane = await parked(pullhold, ("t", 0, 0))
        topic = common_pb2.TopicConfig(name="t", permission=2)
        await broker.admin.PutTopic(pb.PutTopicRequest(topic=topic))
        await broker.send("t", 0, b"secret")
        assert isinstance(from_proto((await lane.answer()).error), errors.NoPermission)
        assert await sample(broker.metrics_address, ARRIVAL_BYTES) == 0


async def test_a_busy_queue_whose_holds_are_gone_soon_sends_nothing_along(tmp_path: Path) -> None:
    async with cluster(tmp_path, watch_linger_s=60.0) as (broker, pullhold):
        lane = await parked(pullhold, ("t", 0, 0))
        await broker.send("t", 0, b"one")
        await lane.answer()
        wanted = 2 * WANTED_ARRIVALS
        for count in range(2, wanted + 2):
            await broker.send("t", 0, b"one")
            await until_known(pullhold, count)
        sent = await sample(broker.metrics_address, ARRIVAL_BYTES)
        await broker.send("t", 0, b"one")
        await until_known(pullhold, wanted + 2)
        assert await sample(broker.metrics_address, ARRIVAL_BYTES) == sent > 0


async def test_many_groups_on_one_queue_share_what_came(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (broker, pullhold):
        lane = await parked(pullhold, *[("t", 0, 0)] * 1_000)
        await broker.send("t", 0, b"one")
        answers = [await lane.answer() for _ in range(1_000)]
        assert [answer.hold_id for answer in answers] == list(range(1, 1_001))
        assert {answer.response.pull.count for answer in answers} == {1}
        assert (pullhold.direct, pullhold.pulls) == (1_000, 0)


# --- brokers that go and come ---------------------------------------------------------------------


async def test_holds_outlive_a_restart_of_the_broker(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        namesrv = await stack.enter_async_context(running_namesrv(tmp_path))
        pullhold = await stack.enter_async_context(
            running_pullhold(namesrv, unreachable_grace_s=15)
        )
        async with running_broker(tmp_path, namesrv=(namesrv,)) as broker:
            await broker.put_topic("t")
            lane = await parked(pullhold, ("t", 0, 0), ("t", 1, 0))
        async with running_broker(tmp_path, namesrv=(namesrv,)) as broker:
            await broker.send("t", 1, b"while nobody watched, or just after")
            assert (await lane.answer()).hold_id == 2
            await broker.send("t", 0, b"later")
            assert (await lane.answer()).hold_id == 1
        assert pullhold.safety_finds == 0


async def test_without_a_broker_holds_are_told_so_after_the_grace_time(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        namesrv = await stack.enter_async_context(running_namesrv(tmp_path))
        options = {"unreachable_grace_s": 0.2}
        pullhold = await stack.enter_async_context(running_pullhold(namesrv, **options))
        async with running_broker(tmp_path, namesrv=(namesrv,)) as broker:
            await broker.put_topic("t")
            lane = await parked(pullhold, ("t", 0, 0))
        error = from_proto((await lane.answer()).error)
        assert isinstance(error, errors.PeerUnavailable | errors.RouteNotFound)


async def test_a_deleted_topic_ends_its_holds(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (broker, pullhold):
        lane = await parked(pullhold, ("t", 0, 0), ("t", 1, 0))
        await broker.drop_topic("t")
        kinds = {type(from_proto((await lane.answer()).error)) for _ in range(2)}
        assert kinds == {errors.TopicNotFound}
        await broker.put_topic("t")
        await lane.hold(3, "t", 0, 0)
        await broker.send("t", 0, b"anew")
        assert (await lane.answer()).response.pull.count == 1


async def test_the_safety_check_finds_what_an_arrival_did_not_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.pullhold.broker_link.SUSPICION_S", 0.05)
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
        running_pullhold(namesrv, safety_check_interval_s=0.1) as pullhold,
    ):
        await broker.put_topic("t")
        lane = await parked(pullhold, ("t", 0, 0))
        # The arrival is lost.
        monkeypatch.setattr("cometmq.member.storage.arrivals.Watch.note", lambda *_: None)
        await broker.send("t", 0, b"one")
        assert (await lane.answer()).response.pull.count == 1
        assert pullhold.safety_finds == 1


async def test_holds_of_groups_that_are_not_there_write_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A client may name any number of groups."""
    caplog.set_level(logging.INFO, "services.pullhold.broker_link")
    async with running_namesrv(tmp_path) as namesrv, running_pullhold(namesrv) as pullhold:
        lane = pullhold.lane()
        for number in range(20):
            await lane.hold(number + 1, "t", 0, 0, group=f"nowhere-{number}")
        await until(lambda: "broker group not reached" in caplog.text)
        for _ in range(20):
            assert (await lane.answer()).HasField("error")
    lines = [one for one in caplog.records if one.name == "services.pullhold.broker_link"]
    assert len(lines) == 1


async def test_many_queues_are_told_and_asked_for_in_few_messages(tmp_path: Path) -> None:
    async with cluster(tmp_path, safety_check_interval_s=0.1) as (broker, pullhold):
        await broker.put_topic("wide", queues=600)
        lane = pullhold.lane()
        for queue_id in range(600):
            await lane.hold(queue_id + 1, "wide", queue_id, 0)
        await until(lambda: pullhold.waiting == 600 and pullhold.all_known)
        await broker.send("wide", 599, b"one")
        assert (await lane.answer()).hold_id == 600

        before = await rpc_count(broker.metrics_address, "QueryQueues")

        async def asked_again() -> bool:
            return await rpc_count(broker.metrics_address, "QueryQueues") >= before + 2

        await until_async(asked_again)
        assert pullhold.direct + pullhold.pulls == 1


# --- faults of ours -------------------------------------------------------------------------------


@pytest.mark.parametrize(("part", "task"), [(Link, "broker link"), (HoldService, "holds")])
async def test_a_failure_of_background_work_ends_no_pullhold(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    part: Any,
    task: str,
) -> None:
    """The work begins again, and holds are answered."""
    run, begun = part.run, list[int]()

    async def fails_first(of: Any) -> None:
        begun.append(len(begun))
        assert len(begun) > 1, "a fault"
        await run(of)

    monkeypatch.setattr(background, "AGAIN_S_MIN", 0.001)
    monkeypatch.setattr(part, "run", fails_first)
    async with cluster(tmp_path) as (broker, pullhold):
        lane = await parked(pullhold, ("t", 0, 0))
        await lane.hold(2, "t", 1, 0, hold_ms=50)
        await broker.send("t", 0, b"x")
        answers = [await lane.answer() for _ in range(2)]
        assert {answer.hold_id for answer in answers} == {1, 2}
        metric = "cometmq_background_failures_total"
        assert pullhold.metric(metric, task=task) == 1
    [told] = [one for one in caplog.records if "begins again" in one.getMessage()]
    assert vars(told)["fields"]["task"] == task


async def test_a_pull_that_fails_is_answered_and_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pull, pulled = BrokerPeer.pull, list[int]()

    async def fails_first(peer: BrokerPeer, *call: Any) -> pb.PullResponse:
        pulled.append(len(pulled))
        assert len(pulled) > 1, "a fault"
        return await pull(peer, *call)

    monkeypatch.setattr(BrokerPeer, "pull", fails_first)
    async with cluster(tmp_path, pulls_per_broker_max=1) as (broker, pullhold):
        lane = await parked(pullhold, ("t", 0, 0), ("t", 1, 0))
        await broker.send("t", 0, LARGE)
        await broker.send("t", 1, LARGE)
        first, second = [await lane.answer() for _ in range(2)]
        assert isinstance(from_proto(first.error), errors.InternalError)
        assert second.response.pull.status == FOUND
    assert "a pull failed" in caplog.text
