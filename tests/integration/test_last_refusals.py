"""What an application gets when the client has tried until the time was over: the last refusal, and
whether a message is certainly not stored.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cometmq.admin.connection import Connection
from cometmq.client import Message, Producer, ProducerOptions, QueueRef
from cometmq.errors import (
    BrokerDraining,
    BrokerStarting,
    ClientClosed,
    CometError,
    DiskFull,
    FlowControl,
    InternalError,
    InvalidRequest,
    PeerUnavailable,
    RequestTimeout,
    SendTimeout,
    SlaveNotAvailable,
    TopicNotFound,
)
from tests.support.cluster.broker import running_namesrv
from tests.support.cluster.fake_cluster import FakeBroker, fake_cluster
from tests.support.waiting import until

QUICK: dict[str, Any] = {
    "retry_backoff_ms": 5,
    "retry_backoff_max_ms": 20,
    "delivery_timeout_ms": 1_500,  # a third of it is what one answer may take
}
REFUSALS = [
    DiskFull("the volume is 97.0 % full"),
    SlaveNotAvailable("1 of 2 is in sync"),
    FlowControl("too much waits"),
    BrokerDraining("another member writes"),
    BrokerStarting("not ready"),
]


def producing(address: str, **changes: Any) -> Producer:
    return Producer(address, options=ProducerOptions(**QUICK | changes))


def always(broker: FakeBroker, refusal: CometError) -> None:
    broker.refuse = [refusal] * 10_000


@pytest.mark.parametrize(
    ("refusal", "fields"),
    [
        *((refusal, {}) for refusal in REFUSALS),
        (REFUSALS[0], {"sharding_key": "k"}),
        (REFUSALS[0], {"queue": QueueRef("T", 1, "g1")}),
    ],
    ids=lambda one: one.name() if isinstance(one, CometError) else "",
)
async def test_a_refused_message_says_why_and_that_it_is_not_stored(
    refusal: CometError, fields: dict[str, Any]
) -> None:
    async with fake_cluster() as (namesrv, [broker]), producing(namesrv.address) as producer:
        always(broker, refusal)
        messages = [Message("T", b"%d" % n, **fields) for n in range(3)]
        futures = [await producer.send(message) for message in messages]
        await asyncio.wait(futures)
        for future in futures:
            error = future.exception()
            assert isinstance(error, SendTimeout)
            assert type(error.__cause__) is type(refusal)
            assert not error.may_be_stored
            for text in (refusal.name(), refusal.message, refusal.advice, "is not stored"):
                assert text in str(error)
            assert "may or may not" not in str(error)
        with pytest.raises(SendTimeout, match=refusal.name()):
            await producer.send_many_and_wait(messages)
    assert broker.bodies("T") == []


async def test_a_message_without_an_answer_may_be_stored() -> None:
    async with fake_cluster() as (namesrv, [broker]), producing(namesrv.address) as producer:
        broker.answering.clear()
        with pytest.raises(SendTimeout, match="may or may not") as late:
            await producer.send_and_wait(Message("T", b"0"))
        assert late.value.may_be_stored
        broker.answering.set()


async def test_a_message_whose_answer_was_lost_may_be_stored_whatever_refuses_it_later() -> None:
    async with fake_cluster() as (namesrv, [broker]), producing(namesrv.address) as producer:
        broker.lose_answers = 1
        sent = await producer.send(Message("T", b"0"))
        await until(lambda: broker.bodies("T") == [b"0"])
        always(broker, DiskFull("full"))
        with pytest.raises(SendTimeout, match="DISK_FULL: full") as late:
            await sent
    assert late.value.may_be_stored
    assert "may or may not" in str(late.value)


async def test_a_message_that_was_never_sent_is_not_stored() -> None:
    async with fake_cluster() as (namesrv, [broker]), producing(namesrv.address) as producer:
        await producer.send_and_wait(Message("T", b"opens the stream"))
        await broker.stop()
        await until(lambda: not producer._senders["g1"].connected)
        with pytest.raises(SendTimeout, match="PEER_UNAVAILABLE") as late:
            await producer.send_and_wait(Message("T", b"0"))
        assert not late.value.may_be_stored
        await broker.start()


async def test_a_message_that_may_be_stored_at_another_broker_group_may_be_stored() -> None:
    """It moves once its group has no writer and half of its time is over."""
    async with (
        fake_cluster("g1", "g2") as (namesrv, brokers),
        producing(namesrv.address) as producer,
    ):
        for _ in range(8):
            await producer.send_and_wait(Message("T", b"opens the streams"))
        for broker in brokers:
            broker.lose_answers = 1
        sent = await producer.send(Message("T", b"0"))
        await until(lambda: any(broker.lose_answers == 0 for broker in brokers))
        first, other = sorted(brokers, key=lambda broker: broker.lose_answers)
        other.lose_answers = 0
        always(other, DiskFull("full there"))
        await first.stop()
        await namesrv.put("T", other)
        with pytest.raises(SendTimeout, match="full there") as late:
            await sent
        assert late.value.may_be_stored
        await first.start()


async def test_a_broker_that_never_opens_a_stream_is_named_with_its_refusal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refuse(self: FakeBroker, request_iterator: Any, context: Any) -> None:
        raise BrokerStarting("the store is being read")

    monkeypatch.setattr(FakeBroker, "SendStream", refuse)
    async with fake_cluster() as (namesrv, _), producing(namesrv.address) as producer:
        with pytest.raises(PeerUnavailable, match="BROKER_STARTING: the store is being read"):
            await producer.send_and_wait(Message("T", b"0"))


async def test_a_closed_producer_says_why_messages_were_not_stored() -> None:
    async with fake_cluster() as (namesrv, [broker]):
        always(broker, SlaveNotAvailable("alone"))
        rarely = {"retry_backoff_ms": 60_000, "retry_backoff_max_ms": 60_000}
        never = producing(namesrv.address, delivery_timeout_ms=600_000, **rarely)
        producer = await never.__aenter__()
        sent = await producer.send(Message("T", b"0"))
        await until(lambda: producer._senders["g1"].hindrance is not None)
        cancelled = asyncio.CancelledError()
        await producer.__aexit__(type(cancelled), cancelled, None)
        with pytest.raises(ClientClosed, match="SLAVE_NOT_AVAILABLE: alone") as closed:
            await sent
    assert "It is not stored" in str(closed.value)


async def test_a_request_that_was_not_stored_in_time_says_why() -> None:
    async with (
        fake_cluster() as (namesrv, [broker]),
        producing(namesrv.address, delivery_timeout_ms=60_000) as producer,
    ):
        await producer.send_and_wait(Message("T", b"opens the stream"))
        always(broker, DiskFull("the volume is full"))
        with pytest.raises(RequestTimeout, match="DISK_FULL: the volume is full"):
            await producer.request(Message("T", b"?"), timeout_s=0.5)
        broker.refuse = []


def test_an_error_after_a_refusal_has_the_text_of_both() -> None:
    error = SendTimeout("Nothing was said.").after(TopicNotFound("there is no topic T"))
    assert str(error).startswith("Nothing was said. The last refusal: TOPIC_NOT_FOUND: there is no")
    assert str(error).endswith(SendTimeout.advice)
    assert InternalError("x").after(None).__cause__ is None


async def test_a_broker_in_the_place_of_a_name_server_is_told_from_a_dead_process() -> None:
    async with fake_cluster() as (_, [broker]):
        options = ProducerOptions(**QUICK | {"route_timeout_ms": 500})
        async with Producer(broker.address, options=options) as producer:
            with pytest.raises(PeerUnavailable, match="is no name server") as refused:
                await producer.send(Message("T", b"0"))
        assert broker.address in str(refused.value)
        assert "that the process lives" not in str(refused.value)
        for address in (broker.address, f"{broker.address};127.0.0.1:1"):
            async with Connection(address) as connection:
                with pytest.raises(InvalidRequest, match="a broker where a name server is meant"):
                    await connection.members()


async def test_a_name_server_beside_a_broker_s_address_is_asked(tmp_path: Path) -> None:
    async with fake_cluster() as (namesrv, [broker]), running_namesrv(tmp_path) as real:
        async with Connection(f"{broker.address};{real}") as connection:
            assert await connection.members() == []
        async with producing(f"{broker.address};{namesrv.address}") as producer:
            await producer.send_and_wait(Message("T", b"0"))


@pytest.mark.parametrize(
    ("body", "how"),
    [
        ("text", "body.encode()"),
        ({"a": 1}, "json.dumps(body).encode()"),
        ([1], "json.dumps(body).encode()"),
        (5, "json.dumps(body).encode()"),
        (bytearray(b"x"), "bytes(body)"),
        (None, 'b""'),
        (object(), "as JSON or otherwise"),
    ],
)
def test_a_body_of_another_kind_gets_advice_that_fits(body: Any, how: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Message("T", body)
    assert how in str(refused.value)
    assert "send the request again" not in str(refused.value)
