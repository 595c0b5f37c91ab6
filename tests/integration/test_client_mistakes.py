"""Mistakes that would be taken silently are refused where they are made, in words that say what was
meant.
"""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import pytest

from cometmq.client import (
    ConsumeFrom,
    Message,
    Position,
    Producer,
    ProducerOptions,
    PullConsumer,
    PullConsumerOptions,
    PushConsumer,
    PushConsumerOptions,
    QueueRef,
    ReceivedMessage,
)
from cometmq.client.consuming.listener import check_listener
from cometmq.errors import (
    CometError,
    ConfigInvalid,
    FilterInvalid,
    GroupNameInvalid,
    InvalidRequest,
    TopicNameInvalid,
)
from cometmq.format.record import encode

NAMESRV = "127.0.0.1:1"
QUEUE = QueueRef("T", 0, "g1")
RECORD = encode(b"T", 0, b"", b"", born_time_ms=1, born_host=bytes(8), store_host=bytes(8))


def any_of(kind: Any) -> Any:
    """A class without its types, which would forbid what is tried here."""
    return kind


async def listener(messages: list[ReceivedMessage]) -> None: ...


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"keys": "o-42"}, r"keys must be a collection of texts: \('o-42',\), not 'o-42'"),
        ({"keys": 42}, "keys must be a tuple of texts, not 42"),
        ({"keys": (42,)}, r"each of keys must be a text \(str\), not int: 42"),
        ({"body": "text"}, r"must be bytes, not str: body.encode\(\)"),
        ({"body": None}, "must be bytes, not NoneType"),
        ({"topic": b"T"}, "topic must be a text"),
        ({"tag": ["a"]}, "tag must be a text"),
        ({"tag": None}, "tag must be a text"),
        ({"properties": {"amount": 5}}, r"Property 'amount': .* write str\(5\)"),
        ({"properties": {"paid": None}}, "Property 'paid': "),
        ({"properties": {5: "a"}}, "Property 5: "),
        ({"properties": [("a", "b")]}, "properties must be a dict"),
        ({"flag": "1"}, "flag must be a whole number"),
        ({"flag": 2**31}, "flag must be a whole number"),
        ({"queue": 3}, r"A queue is a QueueRef\(.*not 3"),
        ({"queue": QueueRef("T", -1)}, "queue_id counts from 0, it cannot be -1"),
        ({"queue": QueueRef("U", 0)}, "The message is for topic 'T', its queue of 'U'"),
    ],
)
def test_a_message_is_of_its_kind_when_it_is_made(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        Message(**{"topic": "T", "body": b"", **fields})


def test_what_is_meant_well_passes() -> None:
    keys: Any = ["a", "b"]
    made = Message("T", b"", "tag", keys, {"a": "b"}, -1, QueueRef("T", 3))
    assert made == Message("T", b"", "tag", keys, {"a": "b"}, -1, QueueRef("T", 3))
    assert Message("T", b"").properties is not Message("T", b"").properties


def plain(messages: list[ReceivedMessage]) -> None: ...


async def two(messages: list[ReceivedMessage], more: int) -> None: ...


async def generator(messages: list[ReceivedMessage]) -> Any:
    yield None


class Handler:
    async def __call__(self, messages: list[ReceivedMessage]) -> None: ...

    async def method(self, messages: list[ReceivedMessage]) -> None: ...

    def plain(self, messages: list[ReceivedMessage]) -> None: ...


@functools.wraps(listener)
def wrapper(messages: list[ReceivedMessage]) -> Any:
    return listener(messages)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (generator, "generator is a generator"),
        (functools.partial(generator), "is a generator"),
        (two, "one argument, the list of messages"),
        (Handler, "must be a function"),
        (None, "must be a function, not None"),
        ("listener", "must be a function"),
        (listener([]), "must be a function"),
    ],
)
def test_what_cannot_be_a_listener_is_refused(given: Any, words: str) -> None:
    try:
        with pytest.raises(InvalidRequest, match=words):
            PushConsumer(NAMESRV, "G", given)
    finally:
        if asyncio.iscoroutine(given):
            given.close()


@pytest.mark.parametrize(
    "given", [listener, Handler(), Handler().method, functools.partial(two, more=1), wrapper, plain]
)
def test_every_form_of_a_function_is_a_listener(given: Any) -> None:
    assert check_listener(given) is given


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: any_of(Producer)("127.0.0.1"), ConfigInvalid, "'127.0.0.1' is not host:port"),
        (lambda: any_of(Producer)("http://a:1"), ConfigInvalid, "not host:port"),
        (lambda: any_of(Producer)("a:1,b:2"), ConfigInvalid, "not host:port"),
        (lambda: any_of(Producer)(["a:1"]), ConfigInvalid, "a text, 'host:port;host:port'"),
        (
            lambda: any_of(Producer)(),
            ConfigInvalid,
            "give namesrv='host:port', or set COMETMQ_NAMESRV",
        ),
        (lambda: any_of(Producer)(""), ConfigInvalid, "No name server is known"),
        (lambda: any_of(Producer)(NAMESRV, options={}), ConfigInvalid, "must be a ProducerOptions"),
        (
            lambda: any_of(PushConsumer)(NAMESRV, "G", listener, options=PullConsumerOptions()),
            ConfigInvalid,
            "must be a PushConsumerOptions",
        ),
        (
            lambda: any_of(PushConsumer)(NAMESRV, listener, "G"),
            GroupNameInvalid,
            "is not a group name",
        ),
        (lambda: any_of(PushConsumer)(NAMESRV, listener=listener), GroupNameInvalid, "'' is not"),
        (lambda: any_of(PullConsumer)(NAMESRV, 5), GroupNameInvalid, "5 is not a group name"),
        (lambda: any_of(PullConsumerOptions)(consume_from="FIRST"), ConfigInvalid, "consume_from"),
        (lambda: any_of(PushConsumerOptions)(client_id=""), ConfigInvalid, "client_id"),
        (lambda: any_of(PushConsumerOptions)(client_id="a\nb"), ConfigInvalid, "client_id"),
        (lambda: any_of(ProducerOptions)(batch_checksum="no"), ConfigInvalid, "batch_checksum"),
        (lambda: any_of(ProducerOptions)(selector=3), ConfigInvalid, "selector"),
    ],
)
def test_clients_are_made_rightly_or_not_at_all(
    make: Any, error: type[CometError], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COMETMQ_NAMESRV", raising=False)
    with pytest.raises(error, match=words):
        make()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("T", "not str"),
        (None, "not NoneType"),
        ([Message("T", b"")], "not list"),
        ({"topic": "T", "body": b""}, "not dict"),
        (ReceivedMessage(RECORD, QUEUE), "not ReceivedMessage"),
    ],
)
async def test_a_producer_sends_messages_alone(given: Any, words: str) -> None:
    async with Producer(NAMESRV) as producer:
        for send in (producer.send, producer.send_and_wait):
            with pytest.raises(InvalidRequest, match=f"One Message.* {words}"):
                await any_of(send)(given)


async def test_the_environment_names_the_name_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMETMQ_NAMESRV", "127.0.0.1:1;127.0.0.1:2")
    clients: list[Any] = [
        Producer(),
        PullConsumer(group="G"),
        PushConsumer(group="G", listener=listener),
    ]
    assert {c._connections.namesrv for c in clients} == {"127.0.0.1:1;127.0.0.1:2"}
    assert Producer("127.0.0.1:3")._connections.namesrv == "127.0.0.1:3"
    assert ConsumeFrom.FIRST is PullConsumerOptions().consume_from


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda c: c.queues(5), TopicNameInvalid, "5 is not a topic name"),
        (lambda c: c.assign(QUEUE), InvalidRequest, r"\[queue\] for one"),
        (lambda c: c.assign("T"), InvalidRequest, "A collection of queues is wanted"),
        (lambda c: c.assign(["T"]), InvalidRequest, "A queue is a QueueRef"),
        (lambda c: c.assign([QueueRef("T", 0)]), InvalidRequest, "names no broker group"),
        (lambda c: c.assign([QueueRef("T", -1, "g")]), InvalidRequest, "queue_id counts from 0"),
        (lambda c: c.assign([QUEUE], tags="new"), InvalidRequest, r"tags must be a .*\('new',\)"),
        (lambda c: c.assign([QUEUE], tags=["a|b"]), FilterInvalid, "holds '|'"),
        (lambda c: c.pull(QUEUE, 5), InvalidRequest, r"A position is a Position\(.*, not 5"),
        (lambda c: c.pull(QUEUE, Position(1, -1)), InvalidRequest, "offset of a position counts"),
        (lambda c: c.pull(QUEUE, Position(2**64, 0)), InvalidRequest, "generation"),
        (lambda c: c.pull(QUEUE, Position(1, 0), tags="a"), InvalidRequest, "tags must be"),
        (lambda c: c.pull(QUEUE, Position(1, 0), count_max=-1), ConfigInvalid, "pull_count_max"),
        (lambda c: c.pull(QUEUE, Position(1, 0), bytes_max=0), ConfigInvalid, "pull_bytes_max"),
        (lambda c: c.commit({QUEUE: 5}), InvalidRequest, "A position is a Position"),
        (lambda c: c.commit("T"), InvalidRequest, "a dict of QueueRef to Position.* not 'T'"),
        (lambda c: c.commit([QUEUE]), InvalidRequest, "a dict of QueueRef to Position"),
        (lambda c: c.commit({"T": Position(1, 0)}), InvalidRequest, "A queue is a QueueRef"),
        (lambda c: c.bounds([3]), InvalidRequest, "A queue is a QueueRef"),
        (lambda c: c.poll("5"), InvalidRequest, "timeout_ms is a number"),
    ],
)
async def test_a_pull_consumer_refuses_before_it_asks(
    call: Any, error: type[CometError], words: str
) -> None:
    async with PullConsumer(NAMESRV, "G") as consumer:
        with pytest.raises(error, match=words):
            await call(consumer)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (("T", "amount > 5"), FilterInvalid, "SQL92 is given as sql="),
        (("T", "a, b"), FilterInvalid, "tags with '||' between"),
        (("T", 5), InvalidRequest, "tags must be a tuple of texts"),
        (("T", ["a", 5]), InvalidRequest, "each of tags must be a text"),
        ((5,), TopicNameInvalid, "5 is not a topic name"),
    ],
)
async def test_a_subscription_is_understood_or_refused(
    arguments: Any, error: type[CometError], words: str
) -> None:
    async with PushConsumer(NAMESRV, "G", listener) as consumer:
        with pytest.raises(error, match=words):
            await consumer.subscribe(*arguments)
        await consumer.subscribe("T", ["tags that no expression, can name", "b"])


async def test_a_client_is_opened_once() -> None:
    """The second time nothing would send or read, and nobody would say so."""
    for client in (
        Producer(NAMESRV),
        PullConsumer(NAMESRV, "G"),
        PushConsumer(NAMESRV, "G", listener),
    ):
        async with client:
            with pytest.raises(InvalidRequest, match="opened once"):
                await client.__aenter__()
        with pytest.raises(InvalidRequest, match="opened once"):
            await client.__aenter__()
