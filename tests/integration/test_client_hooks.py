"""Hooks of producers and consumers, against a broker that does as ordered."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from cometmq.client import (
    ConsumeContext,
    ConsumeResult,
    Message,
    Producer,
    ProducerOptions,
    PullConsumer,
    PullConsumerOptions,
    PushConsumer,
    PushConsumerOptions,
    ReceivedMessage,
    SendContext,
)
from cometmq.errors import BodyTooLarge, ConfigInvalid, PropertyReserved
from tests.support.cluster.fake_cluster import fake_cluster
from tests.support.waiting import until


class Broken:
    """Raises whatever it is asked."""

    def __getattr__(self, name: str) -> Any:
        def fail(*_: object) -> None:
            raise ZeroDivisionError(name)

        return fail

    before_send = after_send = before_consume = after_consume = wants = property(
        lambda self: self.__getattr__("hook")
    )


class Sends:
    """Writes down what it is told."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log
        self.contexts: list[SendContext] = []

    def before_send(self, context: SendContext) -> None:
        self.log.append(f"{self.name} before")
        context.values[self] = context.message.body
        context.message.properties[self.name] = "seen"

    def after_send(self, context: SendContext) -> None:
        self.log.append(f"{self.name} after")
        assert context.values[self] == context.message.body
        self.contexts.append(context)


class Consumes:
    def __init__(self) -> None:
        self.contexts: list[ConsumeContext] = []
        self.before = 0

    def before_consume(self, context: ConsumeContext) -> None:
        self.before += 1
        context.values[self] = self.before

    def after_consume(self, context: ConsumeContext) -> None:
        assert self in context.values
        self.contexts.append(context)


class Even:
    def wants(self, message: ReceivedMessage) -> bool:
        return int(message.body) % 2 == 0


async def test_send_hooks_are_called_around_each_message_and_break_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log: list[str] = []
    first, last = Sends("first", log), Sends("last", log)
    options = ProducerOptions(hooks=(first, Broken(), last))
    async with (
        fake_cluster() as (namesrv, [broker]),
        Producer(namesrv.address, options=options) as producer,
    ):
        receipt = await producer.send_and_wait(Message("T", b"0"))
        assert log == ["first before", "last before", "last after", "first after"]
        broker.refuse = [PropertyReserved("no")]
        with pytest.raises(PropertyReserved):
            await producer.send_and_wait(Message("T", b"1"))
        with pytest.raises(BodyTooLarge):
            await producer.send(Message("T", bytes(5 << 20)))
        futures = [await producer.send(Message("T", b"%d" % n)) for n in range(2, 100)]
        await asyncio.gather(*futures)
    assert [record.properties["last"] for record in broker.stored("T")] == ["seen"] * 99
    assert len(first.contexts) == len(last.contexts) == 101
    stored, refused, raised = first.contexts[:3]
    assert (stored.receipt, stored.error) == (receipt, None)
    assert isinstance(refused.error, PropertyReserved)
    assert isinstance(raised.error, BodyTooLarge)
    assert refused.receipt is None
    told = [r for r in caplog.records if r.getMessage().startswith("hook failed")]
    assert len(told) == 1, "once a minute"


@pytest.mark.parametrize("is_async", [True, False])
async def test_consume_hooks_are_called_around_each_call_and_break_none(is_async: bool) -> None:
    hook, attempts = Consumes(), 0

    def decide(messages: Sequence[ReceivedMessage]) -> ConsumeResult | None:
        nonlocal attempts
        attempts += 1
        if attempts == 2:
            raise ValueError("no")
        return ConsumeResult.LATER if attempts == 3 else None

    async def listener(messages: list[ReceivedMessage]) -> ConsumeResult | None:
        return decide(messages)

    options = PushConsumerOptions(
        consume_hooks=(Broken(), hook), retry_in_place=True, redeliver_backoff_ms=1, concurrency=1
    )
    async with fake_cluster() as (namesrv, _):
        async with Producer(namesrv.address) as producer:
            for number in range(3):
                await producer.send_and_wait(Message("T", b"%d" % number))
        chosen = listener if is_async else decide
        async with PushConsumer(namesrv.address, "g", chosen, options=options) as consumer:
            await consumer.subscribe("T")
            await until(lambda: len(hook.contexts) == 5)
    assert hook.before == 5
    good, raised, later = hook.contexts[:3]
    assert (good.is_success, good.group, good.queue.topic) == (True, "g", "T")
    assert isinstance(raised.error, ValueError)
    assert (later.is_success, later.answer) == (False, ConsumeResult.LATER)
    assert sum(context.is_success for context in hook.contexts) == 3


async def test_messages_that_a_filter_hook_does_not_want_are_passed_by() -> None:
    got: list[int] = []

    async def listener(messages: list[ReceivedMessage]) -> None:
        got.extend(int(message.body) for message in messages)

    hooks = (Broken(), Even())
    async with fake_cluster() as (namesrv, [broker]):
        async with Producer(namesrv.address) as producer:
            for number in range(40):
                await producer.send_and_wait(Message("T", b"%d" % number))
        ends = {key: len(records) for key, records in broker.queues.items()}

        def are_passed_by() -> bool:
            committed = {key: offset for (_, key), (_, offset) in broker.committed.items()}
            return committed.items() >= ends.items()

        push = PushConsumerOptions(filter_hooks=hooks, commit_interval_ms=10)
        async with PushConsumer(namesrv.address, "g", listener, options=push) as consumer:
            await consumer.subscribe("T")
            await until(are_passed_by)
        assert sorted(got) == list(range(0, 40, 2))
        pull = PullConsumerOptions(filter_hooks=hooks)
        async with PullConsumer(namesrv.address, "h", options=pull) as puller:
            await puller.assign(await puller.queues("T"))
            polled: list[int] = []
            while len(polled) < 20:
                polled += [int(message.body) for message in await puller.poll()]
    assert sorted(polled) == list(range(0, 40, 2))


@pytest.mark.parametrize("hooks", [[Broken()], (object(),), (Sends,), "abc"])
def test_what_is_no_hook_is_refused(hooks: Any) -> None:
    for options, name in (
        (ProducerOptions, "hooks"),
        (PushConsumerOptions, "consume_hooks"),
        (PullConsumerOptions, "filter_hooks"),
    ):
        with pytest.raises(ConfigInvalid):
            options(**{name: hooks})
