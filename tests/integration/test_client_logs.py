"""What the SDK logs under plain ``logging.basicConfig``: each line says who, where, why."""

from __future__ import annotations

import ast
import asyncio
import io
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cometmq.client import (
    ConsumeMode,
    ConsumeResult,
    Message,
    Position,
    Producer,
    ProducerOptions,
    PullConsumer,
    PushConsumer,
    PushConsumerOptions,
    QueueRef,
    ReceivedMessage,
)
from cometmq.errors import FlowControl, TopicNotFound
from cometmq.v1 import broker_pb2 as pb
from tests.support.cluster.broker import running_broker, running_namesrv
from tests.support.cluster.fake_cluster import fake_cluster
from tests.support.waiting import until

CLIENT = Path(__file__).parents[2] / "cometmq" / "client"
NOBODY = "127.0.0.1:1"
WAIT_S = 30.0
FAST: dict[str, Any] = {
    "rebalance_delay_ms": 1,
    "retry_backoff_ms": 2,
    "retry_backoff_max_ms": 10,
    "redeliver_backoff_ms": 2,
    "redeliver_backoff_max_ms": 10,
    "drain_timeout_ms": 1,
}


class Log:
    """What a program with ``logging.basicConfig(level=INFO)`` writes."""

    def __init__(self) -> None:
        self.stream = io.StringIO()
        self.handler = logging.StreamHandler(self.stream)
        self.handler.setFormatter(logging.Formatter(logging.BASIC_FORMAT))

    def line(self, begins: str) -> str:
        """The first line of this event, else nothing."""
        return next((li for li in self.stream.getvalue().splitlines() if begins in li), "")

    async def told(self, begins: str, *facts: str) -> None:
        await until(lambda: self.line(begins), WAIT_S)
        line = self.line(begins)
        missing = [fact for fact in facts if fact not in line]
        assert not missing, line


@pytest.fixture
def log() -> Iterator[Log]:
    log, package = Log(), logging.getLogger("cometmq.client")
    package.addHandler(log.handler)
    before, package.level = package.level, logging.INFO
    package.setLevel(logging.INFO)
    yield log
    package.setLevel(before)
    package.removeHandler(log.handler)


async def test_a_producers_life_can_be_read(log: Log) -> None:
    async with fake_cluster() as (namesrv, [broker]):
        broker.refuse = [FlowControl("too much at once")]
        options = ProducerOptions(retry_backoff_ms=2, retry_backoff_max_ms=10)
        async with Producer(f"{NOBODY};{namesrv.address}", options=options) as producer:
            await producer.send_and_wait(Message("T", b"1"))
            await log.told(
                "INFO:cometmq.client.sending.broker_sender:batch refused", "broker_group=g1"
            )
            await log.told("batch refused for now", "FLOW_CONTROL: too much at once", "again_s=")
            address = broker.address
            await broker.stop()
            await log.told("send stream ended", "broker_group=g1", f"address={address}", "error=")
        await log.told("name server left", f"address={NOBODY}", "PEER_UNAVAILABLE")


async def test_a_consumers_life_can_be_read(log: Log) -> None:
    wrong: list[Any] = [ValueError("no such customer"), "nonsense", ConsumeResult.LATER]

    async def listener(messages: list[ReceivedMessage]) -> Any:
        if wrong:
            verdict = wrong.pop(0)
            if isinstance(verdict, Exception):
                raise verdict
            return verdict
        return None

    async with fake_cluster(queues=1) as (namesrv, [broker]):
        async with Producer(namesrv.address) as producer:
            await producer.send_and_wait(Message("T", b"0"))
        broker.committed["G", ("T", 0)] = (1, 0)
        options = PushConsumerOptions(**FAST)
        async with PushConsumer(namesrv.address, "G", listener, options=options) as consumer:
            await consumer.subscribe("T")
            await consumer.subscribe("Mispelt")
            where = ("topic=T", "queue=g1/0", "offset=0")
            await log.told("listener failed", *where, "attempt=1", "ValueError: no such customer")
            await log.told("listener answered", *where, "attempt=2", "answer='nonsense'")
            await log.told(
                "WARNING:cometmq.client.group.share:nothing to read",
                *("topic=Mispelt", "group=G", "cometmq topic create"),
            )
            await namesrv.put("Mispelt", broker)
            await log.told("the topic is there", "topic=Mispelt")
            await broker.stop()
            await log.told("membership ended", "group=G", "broker_group=g1", "PEER_UNAVAILABLE")
            await log.told("pull refused", "topic=", "queue=g1/", "PEER_UNAVAILABLE")
            await namesrv.stop()
            await log.told("name server left", f"address={namesrv.address}")
            await log.told("no list of pullholds", f"address={namesrv.address}", "error=")
        assert "Traceback" in log.stream.getvalue()


@pytest.mark.parametrize("mode", [pb.CONSUME_MODE_PULL, pb.CONSUME_MODE_POP])
async def test_a_failed_listener_names_the_message_wherever_it_is_read(
    log: Log, tmp_path: Path, mode: pb.ConsumeMode.ValueType
) -> None:
    """Its first topic, id, keys, and which try of how many it was; a retry has another topic."""
    tries = 0

    async def listener(messages: list[ReceivedMessage]) -> None:
        nonlocal tries
        tries += 1
        raise ValueError("no such customer")

    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
    ):
        await broker.put_topic("Payments", 1)
        policy = pb.RetryPolicy(kind=pb.RETRY_POLICY_KIND_CUSTOMIZED, steps_ms=[1])
        settings = pb.GroupSettings(group="G", retry_policy=policy, retry_times_max=2, mode=mode)
        await broker.admin.PutGroup(pb.PutGroupRequest(settings=settings))
        async with Producer(namesrv) as producer:
            sent = await producer.send_and_wait(Message("Payments", b"0", keys=("order-7", "eu")))
        receives = mode == pb.CONSUME_MODE_POP
        changes: dict[str, Any] = {"consume_mode": ConsumeMode.POP} if receives else {}
        options = PushConsumerOptions(**FAST, **changes)
        async with PushConsumer(namesrv, "G", listener, options=options) as consumer:
            await consumer.subscribe("Payments")
            await until(lambda: tries == 3, WAIT_S)
    lines = [li for li in log.stream.getvalue().splitlines() if "listener failed" in li]
    assert len(lines) == 3
    for number, line in enumerate(lines, 1):
        facts = ("topic=Payments", 'keys="order-7 eu"', f"unique_id={sent.unique_id}")
        assert [fact for fact in (*facts, f'try="{number} of 3"') if fact not in line] == [], line
        assert f"message_id={sent.message_id} " in line, "the id of its receipt"
        assert ("read_from=%RETRY%G" in line) is (not receives and number > 1)


async def test_moves_say_from_where_to_where(log: Log) -> None:
    queue = QueueRef("T", 0, "g1")
    async with fake_cluster(queues=1) as (namesrv, [broker]):
        async with Producer(namesrv.address) as producer:
            await producer.send_and_wait(Message("T", b"0"))
        async with PullConsumer(namesrv.address, "G") as consumer:
            await consumer.assign([queue])
            await consumer.seek(queue, Position(1, 99))
            await consumer.poll(10)
            await log.told("offset moved", "topic=T", "queue=g1/0", "offset=99", "goes_on_at=1")
            broker.fences["T", 0] = (2, 0)
            await consumer.seek(queue, Position(1, 1))
            await consumer.poll(1000)
            await log.told("position fenced", "offset=1", "goes_on_at=0", "goes_on_in=2")


async def test_without_any_name_server_a_consumer_does_not_wait_in_silence(log: Log) -> None:
    async def listener(messages: list[ReceivedMessage]) -> None: ...

    options = PushConsumerOptions(**FAST)
    async with PushConsumer(NOBODY, "G", listener, options=options) as consumer:
        await consumer.subscribe("T")
        await log.told(
            "WARNING:cometmq.client.cluster.routes:no name server answers", f"namesrv={NOBODY}"
        )
        await asyncio.sleep(0)
    assert log.stream.getvalue().count("WARNING") == 1, "once a minute, not once a try"


async def test_a_mistake_in_a_listener_has_one_traceback(log: Log) -> None:
    calls = 0

    async def listener(messages: list[ReceivedMessage]) -> None:
        nonlocal calls
        calls += 1
        raise KeyError("amount")

    async with fake_cluster(queues=1) as (namesrv, _):
        async with Producer(namesrv.address) as producer:
            for n in range(50):
                await producer.send(Message("T", b"%d" % n))
        options = PushConsumerOptions(**FAST)
        async with PushConsumer(namesrv.address, "G", listener, options=options) as consumer:
            await consumer.subscribe("T")
            await until(lambda: calls > 100, WAIT_S)
    assert log.stream.getvalue().count("Traceback") == 1
    assert log.line("listener failed").endswith("error=\"KeyError: 'amount'\"")


async def test_a_listener_that_something_cancels_has_failed_and_goes_on(log: Log) -> None:
    calls = 0

    async def listener(messages: list[ReceivedMessage]) -> None:
        nonlocal calls
        calls += 1
        if calls < 3:
            raise asyncio.CancelledError  # as a task of the application's that it awaits

    async with fake_cluster(queues=1) as (namesrv, [broker]):
        async with Producer(namesrv.address) as producer:
            await producer.send_and_wait(Message("T", b"0"))
        options = PushConsumerOptions(**{**FAST, "concurrency": 1})
        async with PushConsumer(namesrv.address, "G", listener, options=options) as consumer:
            await consumer.subscribe("T")
            await until(lambda: calls == 3, WAIT_S)
        assert broker.committed["G", ("T", 0)] == (1, 1)
    await log.told("listener failed", "attempt=1", "error=CancelledError")


def test_no_line_of_the_sdk_leaves_its_facts_in_extra() -> None:
    for path in sorted(CLIENT.glob("*.py")):
        source = path.read_text("utf-8")
        assert "getLogger" not in source, f"{path.name}: loggers come from cometmq.telemetry.logger"
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("_log."):
                assert "fields(" in ast.unparse(node), f"{path.name}:{node.lineno} tells no facts"


def test_an_error_of_the_catalogue_is_named() -> None:
    stream = Log()
    logger = logging.getLogger("cometmq.client.sending.broker_sender")
    logger.addHandler(stream.handler)
    try:
        logger.warning("x", extra={"fields": {"error": TopicNotFound("no topic\nX")}})
    finally:
        logger.removeHandler(stream.handler)
    assert 'x error="TOPIC_NOT_FOUND: no topic' in stream.line("x error")
    assert "\n" not in stream.stream.getvalue().strip(), "no name can forge a line"
