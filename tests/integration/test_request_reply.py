"""Requests and their replies: over real brokers, through restarts, and what is refused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from cometmq.client import (
    Message,
    Producer,
    ProducerOptions,
    PullConsumer,
    PullConsumerOptions,
    PushConsumer,
    PushConsumerOptions,
    QueueRef,
    ReceivedMessage,
    sync,
)
from cometmq.client.received import decode_received
from cometmq.client.requests import requester
from cometmq.client.requests.replier import SKEW_MS, Replier
from cometmq.errors import (
    ClientClosed,
    ClientIdInUse,
    CometError,
    InvalidRequest,
    LimitExceeded,
    PeerUnavailable,
    ReplyInvalid,
    RequestExpired,
    RequestTimeout,
    TooManyRequests,
    TopicNotFound,
)
from cometmq.format import request_reply
from cometmq.model import ReplicationMode
from cometmq.rpc.interceptors import error_from
from cometmq.v1 import broker_pb2 as pb
from services.broker import replies
from tests.support.cluster.broker import (
    BrokerClient,
    LaterClock,
    LiveBroker,
    WrongClock,
    batch,
    refusal,
    running_broker,
    running_namesrv,
)
from tests.support.cluster.live_group import live_group
from tests.support.cluster.pullhold import sample
from tests.support.waiting import until, until_async

GROUP = "g1"
TOPIC = request_reply.reply_topic("DefaultCluster")
QUICK = ProducerOptions(retry_backoff_ms=5, retry_backoff_max_ms=20)
Reply = Callable[[ReceivedMessage, bytes], Awaitable[object]]


@asynccontextmanager
async def cluster(tmp_path: Path, **options: Any) -> AsyncIterator[tuple[str, LiveBroker]]:
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,), **options) as broker,
    ):
        await broker.put_topic("T", 4)
        yield namesrv, broker


@asynccontextmanager
async def server(
    namesrv: str, answer: Callable[[ReceivedMessage], bytes | None]
) -> AsyncIterator[PushConsumer]:
    """A group that replies to each request, unless the answer is None."""

    async def listener(messages: list[ReceivedMessage]) -> None:
        for message in messages:
            body = answer(message)
            if body is not None:
                await consumer.reply(message, body)

    options = PushConsumerOptions(
        rebalance_delay_ms=1, poll_backoff_ms=2, poll_backoff_max_ms=5, retry_in_place=True
    )
    consumer = PushConsumer(namesrv, "S", listener, options=options)
    async with consumer:
        await consumer.subscribe("T")
        yield consumer


async def count_of(broker: LiveBroker, outcome: str) -> float:
    return await sample(broker.metrics_address, "cometmq_replies_total", f'outcome="{outcome}"')


async def has_counted(broker: LiveBroker, outcome: str, count: int) -> bool:
    return await count_of(broker, outcome) == count


def upper(message: ReceivedMessage) -> bytes:
    return message.body.upper()


async def test_each_requester_gets_its_replies_also_many_at_a_time(tmp_path: Path) -> None:
    async with (
        cluster(tmp_path) as (namesrv, broker),
        server(namesrv, upper),
        Producer(namesrv) as one,
        Producer(namesrv) as other,
    ):
        first = await one.request(Message("T", b"first", properties={"a": "b"}), timeout_s=20)
        assert (first.body, first.queue) == (b"FIRST", QueueRef(TOPIC, 0, GROUP))
        bodies = [b"%d x" % n for n in range(200)]
        asked = [
            producer.request(Message("T", body), timeout_s=20)
            for body in bodies
            for producer in (one, other)
        ]
        got = [reply.body for reply in await asyncio.gather(*asked)]
        assert got == [body.upper() for body in bodies for _ in (one, other)]
        called: asyncio.Queue[tuple[ReceivedMessage | None, CometError | None]] = asyncio.Queue()
        await one.request_then(Message("T", b"later"), lambda *ended: called.put_nowait(ended), 20)
        reply, error = await called.get()
        assert (reply.body if reply else None, error) == (b"LATER", None)
        assert await count_of(broker, "pushed") == 402


async def test_a_consumer_that_polls_replies_and_so_does_a_producer(tmp_path: Path) -> None:
    async with (
        cluster(tmp_path) as (namesrv, _),
        PullConsumer(namesrv, "P") as consumer,
        Producer(namesrv) as producer,
    ):
        await consumer.assign(await consumer.queues("T"))
        for replier in (consumer, producer):
            asked = asyncio.create_task(producer.request(Message("T", b"?"), 20))
            while not (messages := await consumer.poll(100)):
                pass
            receipt = await replier.reply(messages[0], b"!")
            reply = await asked
            assert (reply.body, reply.message_id) == (b"!", receipt.message_id)
            assert reply.keys == (reply.properties[request_reply.CORRELATION_ID],)


async def test_a_reply_leaves_the_namespace_of_its_request(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (namesrv, broker):
        await broker.put_topic("shop%T", 1)
        async with (
            Producer(namesrv, options=ProducerOptions(namespace="shop")) as producer,
            PullConsumer(namesrv, "P", options=PullConsumerOptions(namespace="shop")) as consumer,
        ):
            await consumer.assign(await consumer.queues("T"))
            asked = asyncio.create_task(producer.request(Message("T", b"?"), 20))
            while not (messages := await consumer.poll(100)):
                pass
            await consumer.reply(messages[0], b"!")
            assert (await asked).queue == QueueRef(TOPIC, 0, GROUP)


async def test_both_sides_end_with_the_time_and_late_replies_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requester, "TELL_LATE_S", 0.01)
    seen: list[ReceivedMessage] = []

    def keep(message: ReceivedMessage) -> None:
        seen.append(message)

    async with (
        cluster(tmp_path) as (namesrv, broker),
        server(namesrv, keep) as consumer,
        Producer(namesrv) as producer,
    ):
        with pytest.raises(RequestTimeout):
            await producer.request(Message("T", b"?"), timeout_s=0.3)
        called: asyncio.Queue[tuple[ReceivedMessage | None, CometError | None]] = asyncio.Queue()
        await producer.request_then(Message("T", b"?"), lambda *end: called.put_nowait(end), 0.3)
        assert isinstance((await called.get())[1], RequestTimeout)
        await until(lambda: len(seen) == 2)
        await consumer.reply(seen[0], b"late")
        await until_async(lambda: has_counted(broker, "late", 1))
        clock = LaterClock()
        clock.later_ms = 300 + SKEW_MS
        replier = Replier(namesrv, "later", clock)
        replier.is_open = True
        with pytest.raises(RequestExpired):
            await replier.reply(seen[0], b"too late")


@pytest.mark.parametrize("wrong_s", [20, 600, 3_500, -20, -3_600, -1_700_000_000])
async def test_a_replier_whose_clock_is_wrong_replies(tmp_path: Path, wrong_s: int) -> None:
    seen: list[ReceivedMessage] = []
    async with (
        cluster(tmp_path) as (namesrv, _),
        server(namesrv, seen.append),
        Producer(namesrv) as producer,
    ):
        replier = Replier(namesrv, "wrong", WrongClock(wrong_s * 1000))
        replier.is_open = True
        asked = asyncio.create_task(producer.request(Message("T", b"?"), timeout_s=20.0))
        await until(lambda: bool(seen))
        await replier.reply(seen[0], b"yes")
        assert (await asked).body == b"yes"
        await replier.close()


async def test_a_reply_after_a_restart_of_the_broker_finds_its_requester(tmp_path: Path) -> None:
    async with running_namesrv(tmp_path) as namesrv, Producer(namesrv, options=QUICK) as producer:
        async with running_broker(tmp_path, namesrv=(namesrv,)) as broker:
            await broker.put_topic("T", 1)
            asked = [
                asyncio.create_task(producer.request(Message("T", b"%d" % n), 30)) for n in range(9)
            ]
            await until_async(lambda: has_messages(broker, "T", 9))
        async with (
            running_broker(tmp_path, namesrv=(namesrv,)) as broker,
            server(namesrv, upper),
        ):
            assert [r.body for r in await asyncio.gather(*asked)] == [b"%d" % n for n in range(9)]


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Says whether requesters can open streams."""
    is_away, call = False, requester.Requests.call

    def call_unless_away(self: requester.Requests, address: str) -> requester.RepliesStream:
        if is_away:
            raise PeerUnavailable("the network is broken")
        return call(self, address)

    def set_away(wanted: bool) -> None:
        nonlocal is_away
        is_away = wanted

    monkeypatch.setattr(requester.Requests, "call", call_unless_away)
    return set_away


async def test_a_reply_after_a_fail_over_finds_its_requester(
    tmp_path: Path, away: Callable[[bool], None]
) -> None:
    """Also one that the new writer has stored before the requester hears it: the request was
    stored, and its receipt came, long before.
    """
    quick = {"lease_duration_s": 1.0, "in_sync_lag_s_max": 0.5}
    copied: dict[str, Any] = {**quick, "replication_mode": ReplicationMode.APPENDED}
    async with (
        running_namesrv(tmp_path) as namesrv,
        live_group(tmp_path, namesrv=(namesrv,), **copied) as group,
        Producer(namesrv, options=QUICK) as producer,
    ):
        await group.all_in_sync(0, 1)
        await group[0].client.put_topic("T", 1)
        first = asyncio.create_task(producer.request(Message("T", b"first"), 30))
        await until_async(lambda: has_messages(group[0].client, "T", 1))
        await group.in_step()
        away(True)
        await group[0].crash()
        await group[1].until_role("writer")
        async with server(namesrv, upper):
            await until_async(lambda: has_messages(group[1].client, TOPIC, 1))
            assert not first.done()
            away(False)
            assert (await first).body == b"FIRST"
            assert (await producer.request(Message("T", b"next"), 30)).body == b"NEXT"


async def has_messages(broker: BrokerClient, topic: str, count: int) -> bool:
    return len(await broker.read_queue(topic, 0)) == count


async def test_what_came_while_the_requester_was_away_is_found_when_it_is_back(
    tmp_path: Path, away: Callable[[bool], None]
) -> None:
    seen: list[ReceivedMessage] = []
    async with (
        cluster(tmp_path) as (namesrv, broker),
        server(namesrv, lambda message: seen.append(message)) as consumer,
        Producer(namesrv, options=QUICK) as producer,
    ):
        asked = asyncio.create_task(producer.request(Message("T", b"?"), 30))
        await until(lambda: seen)
        away(True)
        client_id = seen[0].properties[request_reply.REPLY_TO_CLIENT]
        rival = await open_stream(broker, client_id)  # the requester's stream ends
        await consumer.reply(seen[0], b"!")
        assert await bodies_of(rival, 1) == [b"!"]
        assert not asked.done()
        away(False)
        assert (await asked).body == b"!"
        assert isinstance(await end_of(rival), ClientIdInUse)
        assert await count_of(broker, "found") == 1


# --- bare stubs -----------------------------------------------------------------------------------


async def open_stream(broker: LiveBroker, client_id: str, *ids: str) -> Any:
    call = broker.stub.Replies()
    await call.write(pb.RepliesRequest(client_id=client_id, correlation_ids=ids))
    response: Any = await call.read()
    assert response.opened == pb.RepliesOpened(broker_group=GROUP, topic=TOPIC)
    return call


async def end_of(call: Any) -> CometError:
    """Why the stream ends."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return error_from(error)
    raise AssertionError("it ended in order")


async def bodies_of(call: Any, count: int) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < count:
        response = await call.read()
        records = decode_received(response.records, QueueRef(TOPIC, 0, GROUP), None)
        found += [record.body for record in records]
    return found


def reply_of(client_id: str, correlation_id: str, body: bytes) -> pb.OutgoingMessage:
    pairs = request_reply.request_properties(client_id, correlation_id, 1000)
    return pb.OutgoingMessage(
        topic=TOPIC,
        body=body,
        keys=[correlation_id],
        properties={**pairs, request_reply.MSG_TYPE: request_reply.REPLY},
    )


async def test_a_stream_gets_its_replies_each_once_whenever_they_came(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        first = await open_stream(broker, "a")  # makes the reply topic
        sent = [reply_of("a", "1", b"a1"), reply_of("b", "1", b"b1"), reply_of("b", "2", b"b2")]
        await broker.stub.Send(pb.SendRequest(messages=sent))
        assert await bodies_of(first, 1) == [b"a1"]
    async with running_broker(tmp_path) as broker:
        stream = await open_stream(broker, "b", "2", "3")
        assert await bodies_of(stream, 1) == [b"b2"]
        await broker.stub.Send(pb.SendRequest(messages=[reply_of("b", "3", b"b3")]))
        assert await bodies_of(stream, 1) == [b"b3"]
        await stream.write(pb.RepliesRequest(correlation_ids=["1", "3", "unknown", ""]))
        assert await bodies_of(stream, 1) == [b"b1"], "b3 was handed out as it came"
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF


async def test_replies_to_nobody_and_bad_streams_are_refused(tmp_path: Path) -> None:
    async with running_broker(tmp_path, streams_per_peer_max=2) as broker:
        await open_stream(broker, "a")
        for bad in (
            pb.OutgoingMessage(topic=TOPIC, body=b"."),
            pb.OutgoingMessage(topic=TOPIC, properties={request_reply.MSG_TYPE: "reply"}),
            reply_of("", "1", b"."),
            reply_of("a", "", b"."),
        ):
            bad.ClearField("keys")
            properties = {k: v for k, v in bad.properties.items() if v}
            bad.properties.clear()
            bad.properties.update(properties)
            sent = pb.SendRequest(messages=[reply_of("a", "1", b"good"), bad])
            error = await refusal(broker.stub.Send(sent))
            assert isinstance(error, ReplyInvalid), error
            assert error.segment == 0
        for waits in ({"producer_group": "P"}, {"delay_level": 3}, {"delay_ms": 60_000}):
            early = reply_of("a", "1", b"not yet")
            early.MergeFrom(pb.OutgoingMessage(**waits))
            error = await refusal(broker.stub.Send(pb.SendRequest(messages=[early])))
            assert isinstance(error, ReplyInvalid), waits
        lane = await broker.lane()
        await broker.put_topic("T", 1)
        refused = await lane.refused(*batch(("T", 0, [b"."]), (TOPIC, 0, [b"."])))
        assert (type(refused), refused.segment) == (ReplyInvalid, 1)
        assert await broker.read_queue(TOPIC, 0) == []
        for request in (
            pb.RepliesRequest(),
            pb.RepliesRequest(client_id="x" * 256),
            pb.RepliesRequest(client_id="b", correlation_ids=["1"] * (replies.IDS_MAX + 1)),
        ):
            call = broker.stub.Replies()
            await call.write(request)
            assert isinstance(await end_of(call), InvalidRequest | LimitExceeded)
        await open_stream(broker, "c")
        too_many = broker.stub.Replies()
        await too_many.write(pb.RepliesRequest(client_id="d"))
        with pytest.raises(grpc.aio.AioRpcError, match="streams_per_peer_max"):
            await too_many.read()


# --- what the SDK refuses -------------------------------------------------------------------------


async def test_what_is_no_request_or_no_reply_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requester, "OUTSTANDING_MAX", 2)
    async with cluster(tmp_path) as (namesrv, broker):
        plain = Message("T", b".", properties={"KEEP": "1"})
        hasty = ProducerOptions(route_timeout_ms=50)
        async with Producer(namesrv, options=hasty) as producer:

            async def is_told_that_no_broker_has_it() -> bool:
                with pytest.raises((TopicNotFound, PeerUnavailable)) as refused:
                    await producer.request(Message("absent", b"."), 20)
                return refused.type is TopicNotFound

            await until_async(is_told_that_no_broker_has_it)  # once the name server has answered
        async with Producer(namesrv) as producer:
            for timeout_s in (0, -1, 86_401, "1", True, float("nan")):
                with pytest.raises(InvalidRequest, match="timeout_s"):
                    await producer.request(plain, timeout_s)  # type: ignore[arg-type]
            delays = {"delay_level": 1, "delay_ms": 60_000, "deliver_at_ms": 4_000_000_000_000}
            for name, delay in delays.items():
                with pytest.raises(InvalidRequest, match=name):
                    await producer.request(Message("T", b".", **{name: delay}))  # type: ignore[arg-type]
            for callback in (None, stored):  # nothing, a coroutine function
                with pytest.raises(InvalidRequest, match="callback"):
                    await producer.request_then(plain, callback)  # type: ignore[arg-type]
            asked = [asyncio.create_task(producer.request(plain, 20)) for _ in range(2)]
            await until_async(lambda: stored(broker, "T", 2))
            with pytest.raises(TooManyRequests):
                await producer.request(plain)
            asked[0].cancel()
            await asyncio.wait(asked[:1])
            asked[0] = asyncio.create_task(producer.request(plain, 20))
            await until_async(lambda: stored(broker, "T", 3))
        for task in asked:
            with pytest.raises(ClientClosed):
                await task
        assert plain.properties == {"KEEP": "1"}
        async with PullConsumer(namesrv, "P") as consumer, Producer(namesrv) as producer:
            for ttl in ("0", "-1", "x", "86400001"):
                pairs = request_reply.request_properties("a", "1", 1) | {"TTL": ttl}
                await producer.send_and_wait(Message("T", b"bad", properties=pairs))
            await producer.send_and_wait(Message("T", b"bad"))
            await consumer.assign(await consumer.queues("T"))
            got: list[ReceivedMessage] = []
            while len(got) < 5:
                got += [message for message in await consumer.poll() if message.body == b"bad"]
            for message in got:
                with pytest.raises(ReplyInvalid):
                    await consumer.reply(message, b"!")
        with pytest.raises(ClientClosed):
            await consumer.reply(got[0], b"!")


async def stored(broker: LiveBroker, topic: str, count: int) -> bool:
    return sum([len(await broker.read_queue(topic, n)) for n in range(4)]) == count


async def test_without_asyncio(tmp_path: Path) -> None:
    def ask(namesrv: str) -> list[bytes]:
        came: list[bytes] = []
        ended = threading.Event()

        def note(reply: ReceivedMessage | None, _: CometError | None) -> None:
            came.append(reply.body if reply is not None else b"")
            ended.set()

        def listener(messages: list[ReceivedMessage]) -> None:
            for message in messages:
                consumer.reply(message, message.body.upper())

        options = PushConsumerOptions(rebalance_delay_ms=1, poll_backoff_ms=2)
        consumer = sync.PushConsumer(namesrv, "S", listener, options=options)
        with consumer, sync.Producer(namesrv) as producer:
            consumer.subscribe("T")
            came.append(producer.request(Message("T", b"one"), 20).body)
            producer.request_then(Message("T", b"two"), note, 20)
            came.append(producer.request(Message("T", b"three"), 20).body)
            assert ended.wait(20)
        return came

    async with cluster(tmp_path) as (namesrv, _):
        assert sorted(await asyncio.to_thread(ask, namesrv)) == [b"ONE", b"THREE", b"TWO"]
