"""Where a group begins in queues that appear after it has begun, or after it has subscribed: one
test for each cell of the table in docs/client.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cometmq.client import (
    ConsumeFrom,
    ConsumeMode,
    Later,
    MessageModel,
    PullConsumer,
    PullConsumerOptions,
    PushConsumer,
    PushConsumerOptions,
    ReceivedMessage,
    SimpleConsumer,
    SimpleConsumerOptions,
)
from cometmq.errors import HandleInvalid, TopicNotFound
from cometmq.rpc.tasks import stop_all
from tests.support.cluster.broker import LiveBroker, running_broker, running_namesrv
from tests.support.waiting import until

QUICK: dict[str, Any] = {"poll_backoff_ms": 2, "poll_backoff_max_ms": 10, "retry_backoff_ms": 2}
AGAIN = b"again"  # fails once
OLD, NEW = b"old", [b"new 0", b"new 1", b"new 2"]


@dataclass
class Group:
    """The group under test. ``start``: its options."""

    namesrv: str
    folder: Path
    start: dict[str, Any] = field(default_factory=dict)
    seen: list[bytes] = field(default_factory=list)

    def listener(self, messages: list[ReceivedMessage]) -> None:
        self.seen += [message.body for message in messages]


class Member:
    """A running member: it subscribes; a topic that is not there is subscribed to again."""

    def __init__(self, consumer: PushConsumer | PullConsumer | SimpleConsumer) -> None:
        self._consumer = consumer
        self.is_subscribed = False

    @property
    def knows_absence(self) -> bool:
        """Whether the name server has told it that there is no topic."""
        return self._consumer._routes.was_absent("T")

    async def subscribe(self) -> None:
        try:
            await self._consumer.subscribe("T")
        except TopicNotFound:
            return
        self.is_subscribed = True


@asynccontextmanager
async def push(group: Group, **options: Any) -> AsyncIterator[Member]:
    made = PushConsumerOptions(
        **{"rebalance_delay_ms": 1, "commit_interval_ms": 10, **QUICK, **group.start, **options}
    )

    async def listener(messages: list[ReceivedMessage]) -> Later | None:
        group.listener(messages)
        return (
            Later(delay_level=1) if messages[0].body == AGAIN and messages[0].attempt < 2 else None
        )

    async with PushConsumer(group.namesrv, "G", listener, options=made) as consumer:
        yield Member(consumer)


@asynccontextmanager
async def polling(receive: Callable[[], Awaitable[None]], member: Member) -> AsyncIterator[Member]:
    async def loop() -> None:
        while True:
            with suppress(TopicNotFound, HandleInvalid):  # of the topic that is made again
                if member.is_subscribed:
                    await receive()
            await asyncio.sleep(0.002)

    task = asyncio.create_task(loop())
    try:
        yield member
    finally:
        await stop_all([task])


@asynccontextmanager
async def pull(group: Group) -> AsyncIterator[Member]:
    options = PullConsumerOptions(
        rebalance_delay_ms=1, commit_interval_ms=10, **{**QUICK, **group.start}
    )
    async with PullConsumer(group.namesrv, "G", options=options) as consumer:

        async def receive() -> None:
            group.listener([message for message in await consumer.poll(timeout_ms=10)])

        async with polling(receive, Member(consumer)) as member:
            yield member


@asynccontextmanager
async def simple(group: Group) -> AsyncIterator[Member]:
    options = SimpleConsumerOptions(request_timeout_ms=500, **{**QUICK, **group.start})
    async with SimpleConsumer(group.namesrv, "G", options=options) as consumer:

        async def receive() -> None:
            messages = await consumer.receive(wait_ms=100)
            group.listener(messages)
            if messages:
                await consumer.ack_many(messages)

        async with polling(receive, Member(consumer)) as member:
            yield member


def pop(group: Group) -> AbstractAsyncContextManager[Member]:
    return push(group, consume_mode=ConsumeMode.POP)


def broadcast(group: Group) -> AbstractAsyncContextManager[Member]:
    file = str(group.folder / "offsets.json")
    return push(group, message_model=MessageModel.BROADCASTING, offset_file=file)


def broadcast_at_broker(group: Group) -> AbstractAsyncContextManager[Member]:
    return push(
        group,
        message_model=MessageModel.BROADCASTING,
        broadcast_offsets_at_broker=True,
        client_id="one",
    )


@dataclass
class Scene:
    """Two broker groups. ``g1`` has the topic with an old message, unless a way says otherwise."""

    group: Group
    g1: LiveBroker
    g2: LiveBroker
    reader: Callable[[Group], AbstractAsyncContextManager[Member]]

    async def has_begun(self) -> None:
        """Waits until the group's beginning is kept, and what is old was read where it is to be."""
        if self.group.start["consume_from"] is ConsumeFrom.FIRST:
            await until(lambda: self.group.seen == [OLD])
        file = self.group.folder / "offsets.json"
        kept = self.g1.state.offsets
        await until(lambda: any(one.topic == "T" for one in kept) or file.exists())

    async def makes_old_topic(self) -> None:
        await self.g1.put_topic("T", 1)
        answer = await self.g1.send("T", 0, OLD)
        if self.group.start["consume_from"] is ConsumeFrom.TIMESTAMP:
            self.group.start["consume_from_time_ms"] = answer.store_time_ms + 1


@asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[tuple[str, LiveBroker, LiveBroker]]:
    async with (
        running_namesrv(folder) as namesrv,
        running_broker(folder / "1", namesrv=(namesrv,)) as g1,
        running_broker(folder / "2", namesrv=(namesrv,), broker_group="g2") as g2,
    ):
        yield namesrv, g1, g2


async def made(scene: Scene) -> None:
    """The topic is made while the group waits for it."""
    async with scene.reader(scene.group) as member:
        await member.subscribe()
        await until(lambda: member.knows_absence)
        await scene.g1.put_topic("T", 1)
        await scene.g1.send("T", 0, *NEW)
        if not member.is_subscribed:
            await member.subscribe()
        await has_all(scene, NEW, old=0)


async def grown(scene: Scene) -> None:
    """It gets queues at the same broker group."""
    await scene.makes_old_topic()
    async with scene.reader(scene.group) as member:
        await member.subscribe()
        await scene.has_begun()
        await scene.g1.put_topic("T", 2)
        await scene.g1.send("T", 1, *NEW)
        await has_all(scene, NEW)


async def second(scene: Scene) -> None:
    """It gets queues at a second broker group."""
    await scene.makes_old_topic()
    async with scene.reader(scene.group) as member:
        await member.subscribe()
        await scene.has_begun()
        await scene.g2.put_topic("T", 1)
        await scene.g2.send("T", 0, *NEW)
        await has_all(scene, NEW)


async def remade(scene: Scene) -> None:
    """It is deleted, and made again."""
    await scene.makes_old_topic()
    async with scene.reader(scene.group) as member:
        await member.subscribe()
        await scene.has_begun()
        await scene.g1.drop_topic("T")
        await scene.g1.put_topic("T", 1)
        await scene.g1.send("T", 0, *NEW)
        await has_all(scene, NEW)


async def away(scene: Scene) -> None:
    """It gets queues at both broker groups while no member runs."""
    await scene.makes_old_topic()
    async with scene.reader(scene.group) as member:
        await member.subscribe()
        await scene.has_begun()
    await scene.g1.put_topic("T", 2)
    await scene.g2.put_topic("T", 1)
    await scene.g1.send("T", 1, *NEW[:2])
    await scene.g2.send("T", 0, *NEW[2:])
    async with scene.reader(scene.group) as member:
        await member.subscribe()
        await has_all(scene, NEW)


async def two_at_once(scene: Scene) -> None:
    """A new topic at two broker groups, with old messages at both."""
    await scene.g2.put_topic("T", 1)
    await scene.g2.send("T", 0, OLD)
    await scene.makes_old_topic()
    is_first = scene.group.start["consume_from"] is ConsumeFrom.FIRST
    async with scene.reader(scene.group) as member:
        await member.subscribe()
        if is_first:
            await until(lambda: scene.group.seen == [OLD, OLD])
        else:
            await scene.has_begun()
            await until(lambda: begun_at_both(scene))
        await scene.g1.send("T", 0, *NEW[:1])
        await scene.g2.send("T", 0, *NEW[1:])
        await has_all(scene, NEW, old=2)


def begun_at_both(scene: Scene) -> bool:
    file = scene.group.folder / "offsets.json"
    if file.exists():
        return '"g2"' in file.read_text()
    return any(one.topic == "T" for one in scene.g2.state.offsets)


async def has_all(scene: Scene, wanted: list[bytes], old: int = 1) -> None:
    """All new messages come once, and the old ones where the group begins at the first."""
    seen = scene.group.seen
    await until(lambda: set(wanted) <= set(seen))
    is_first = scene.group.start["consume_from"] is ConsumeFrom.FIRST
    assert sorted(seen) == sorted([*wanted, *([OLD] * old if is_first else [])])


READERS = [push, pull, pop, simple, broadcast, broadcast_at_broker]
WAYS = [made, grown, second, remade, away, two_at_once]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("start", list(ConsumeFrom))
@pytest.mark.parametrize("reader", READERS)
async def test_a_group_begins_at_the_first_message_of_queues_that_appear_later(
    tmp_path: Path,
    reader: Callable[[Group], AbstractAsyncContextManager[Member]],
    start: ConsumeFrom,
    way: Callable[[Scene], Awaitable[None]],
) -> None:
    async with cluster(tmp_path) as (namesrv, g1, g2):
        group = Group(namesrv, tmp_path, {"consume_from": start})
        await way(Scene(group, g1, g2, reader))


@pytest.mark.parametrize("start", list(ConsumeFrom))
@pytest.mark.parametrize("reader", [push, pop])
async def test_a_retry_topic_is_read_from_its_first_message(
    tmp_path: Path,
    reader: Callable[[Group], AbstractAsyncContextManager[Member]],
    start: ConsumeFrom,
) -> None:
    """At the broker group where a message failed, also while the other one has no such topic."""
    async with cluster(tmp_path) as (namesrv, g1, g2):
        scene = Scene(Group(namesrv, tmp_path, {"consume_from": start}), g1, g2, reader)
        await scene.makes_old_topic()
        async with reader(scene.group) as member:
            await member.subscribe()
            await scene.has_begun()
            await g2.put_topic("T", 1)
            await g2.send("T", 0, AGAIN)
            await until(lambda: scene.group.seen.count(AGAIN) == 2)


@pytest.mark.parametrize("reader", [push, pull, pop, simple])
async def test_members_that_start_together_begin_everywhere_at_the_end(
    tmp_path: Path, reader: Callable[[Group], AbstractAsyncContextManager[Member]]
) -> None:
    """A commit of one of them at one broker group does not make the other one a later one."""
    async with cluster(tmp_path) as (namesrv, g1, g2), AsyncExitStack() as members:
        for broker in (g1, g2):
            await broker.put_topic("T", 2)
            for queue_id in (0, 1):
                await broker.send("T", queue_id, OLD)
        scene = Scene(Group(namesrv, tmp_path, {"consume_from": ConsumeFrom.LAST}), g1, g2, reader)
        some = [await members.enter_async_context(reader(scene.group)) for _ in range(3)]
        await asyncio.gather(*(member.subscribe() for member in some))
        await scene.has_begun()
        await until(lambda: begun_at_both(scene))
        await g1.send("T", 0, *NEW[:1])
        await g2.send("T", 1, *NEW[1:])
        await has_all(scene, NEW)
