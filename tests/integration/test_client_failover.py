"""Clients of a broker group whose writer goes, changes, or is far away: against brokers and name
servers that do as ordered.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cometmq.client import (
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
from cometmq.client.cluster import routes
from cometmq.client.cluster.connections import Connections
from cometmq.errors import NotWriter, PeerUnavailable, TopicNotFound
from cometmq.rpc import channel_pool
from cometmq.rpc.retry import Backoff, BackoffPolicy
from cometmq.rpc.tasks import Tasks
from tests.support.cluster.fake_cluster import FakeBroker, FakeNameServer
from tests.support.cluster.names import Names, Relay, dialled_by, silent_socket
from tests.support.waiting import until

QUEUE = QueueRef("T", 0, "g1")
QUICK: dict[str, Any] = {"retry_backoff_ms": 2, "retry_backoff_max_ms": 10}
POLL: dict[str, Any] = {"poll_backoff_ms": 2, "poll_backoff_max_ms": 10}


class Group:
    """A name server, a writer with topic T of one queue, and a follower that has all it has."""

    def __init__(self, namesrv: FakeNameServer, writer: FakeBroker, follower: FakeBroker) -> None:
        self.namesrv = namesrv
        self.writer = writer
        self.follower = follower

    async def tell(self, *members: FakeBroker) -> None:
        """The route names these members."""
        await self.namesrv.put("T", *members, queues=1)

    async def take_over(self) -> None:
        """The follower writes; the name server has heard of it."""
        self.follower.role, self.follower.epoch = self.writer.role, self.writer.epoch + 1
        await self.tell(self.follower)

    def hide_last(self, count: int) -> Callable[[], None]:
        """Nobody gets the last messages before what is returned has been called."""
        queue = self.writer.queues["T", 0]
        hidden = queue[-count:]
        del queue[-count:]
        return lambda: queue.extend(hidden)

    async def fill(self, *bodies: bytes) -> None:
        async with Producer(self.namesrv.address) as producer:
            for body in bodies:
                await producer.send(Message("T", body))


@asynccontextmanager
async def group() -> AsyncIterator[Group]:
    namesrv = await FakeNameServer().start()
    writer, follower = await FakeBroker().start(), await FakeBroker().start()
    made = Group(namesrv, writer, follower.copy_of(writer))
    try:
        await made.tell(writer, follower)
        yield made
    finally:
        for server in (namesrv, writer, follower):
            await server.stop()


@asynccontextmanager
async def reading(namesrv: str, **changes: Any) -> AsyncIterator[PullConsumer]:
    """A consumer that has read queue 0 of T up to its end."""
    options = PullConsumerOptions(**{**QUICK, **POLL, **changes})
    async with PullConsumer(namesrv, "G", options=options) as consumer:
        await consumer.assign([QUEUE])
        await consumer.poll()
        yield consumer


async def bodies(consumer: PullConsumer) -> list[bytes]:
    return [message.body for message in await consumer.poll()]


# --- reading --------------------------------------------------------------------------------------


async def test_a_consumer_follows_what_brokers_suggest_and_comes_back() -> None:
    async with group() as on:
        await on.fill(*(b"%d" % n for n in range(30)))
        on.writer.suggests = 1
        on.follower.suggests = 1
        async with reading(on.namesrv.address, pull_count_max=1) as consumer:
            for number in range(1, 20):
                assert await bodies(consumer) == [b"%d" % number]
            assert len(on.writer.pulls) == 1, "the first answer has sent it away"
            on.follower.suggests = on.writer.suggests = None
            for number in range(20, 30):
                assert await bodies(consumer) == [b"%d" % number]
        assert len(on.writer.pulls) > 1
        assert not on.follower.commits


async def test_a_suggested_member_that_is_not_there_is_passed_over() -> None:
    async with group() as on:
        await on.fill(b"0", b"1", b"2")
        on.writer.suggests = 7
        async with reading(on.namesrv.address, pull_count_max=1) as consumer:
            assert [await bodies(consumer) for _ in range(2)] == [[b"1"], [b"2"]]
        assert not on.follower.pulls


async def test_a_follower_that_refuses_is_left_for_the_writer() -> None:
    async with group() as on:
        await on.fill(b"0", b"1", b"2")
        on.writer.suggests = 1
        on.follower.pull_errors = [NotWriter("before what it has"), TopicNotFound("not yet")]
        async with reading(on.namesrv.address, pull_count_max=1) as consumer:
            assert [await bodies(consumer) for _ in range(2)] == [[b"1"], [b"2"]]


async def test_without_a_writer_a_follower_is_read_and_commits_wait() -> None:
    async with group() as on:
        await on.fill(b"0", b"1", b"2")
        show = on.hide_last(2)
        async with reading(on.namesrv.address, request_timeout_ms=200) as consumer:
            await on.tell(on.follower)
            await until(lambda: on.follower.pulls)
            show()
            got: list[bytes] = []
            while len(got) < 2:
                got += await bodies(consumer)
            with pytest.raises(PeerUnavailable):
                await consumer.commit()
            assert got == [b"1", b"2"]
            assert not on.follower.commits
            consumer._timeout_s = 20.0
            committing = asyncio.create_task(consumer.commit())
            await asyncio.sleep(0.05)
            assert not committing.done()
            await on.tell(on.writer, on.follower)
            assert await committing == {QUEUE: Position(1, 3)}


async def test_a_writer_that_died_unseen_is_passed_over() -> None:
    """Its route stands until name servers miss it, or somebody takes over."""
    async with group() as on:
        await on.fill(b"0", b"1")
        show = on.hide_last(1)
        async with reading(on.namesrv.address) as consumer:
            await on.writer.stop()
            show()
            assert await bodies(consumer) == [b"1"]
            assert on.follower.pulls


async def test_a_writer_that_comes_back_is_read_again_at_once() -> None:
    async with group() as on:
        await on.fill(b"0")
        async with reading(on.namesrv.address) as consumer:
            fetching = asyncio.create_task(consumer.poll())
            await on.writer.stop()
            await until(lambda: on.follower.pulls)
            await on.take_over()
            await on.fill(b"1")
            assert [message.body for message in await fetching] == [b"1"]
            assert await consumer.commit() == {QUEUE: Position(1, 2)}


async def test_commits_of_a_push_consumer_wait_for_a_writer() -> None:
    seen: list[bytes] = []
    without_writer = asyncio.Event()

    async def listener(messages: list[ReceivedMessage]) -> None:
        seen.extend(message.body for message in messages)
        if b"0" not in seen[-len(messages) :]:
            await without_writer.wait()

    options = PushConsumerOptions(
        **QUICK, **POLL, rebalance_delay_ms=1, commit_interval_ms=5, rebalance_interval_ms=50
    )
    async with group() as on:
        await on.fill(b"0")
        consumer = PushConsumer(on.namesrv.address, "G", listener, options=options)
        async with consumer:
            await consumer.subscribe("T")
            await until(lambda: on.writer.committed.get(("G", ("T", 0))) == (1, 1))
            await on.fill(b"1", b"2")
            await on.tell(on.follower)
            await until(lambda: on.follower.pulls)
            without_writer.set()
            await until(lambda: len(seen) == 3)
            assert consumer.assigned == [QUEUE], "a group without a writer keeps its queues"
            await on.take_over()
            await until(lambda: on.follower.committed.get(("G", ("T", 0))) == (1, 3))
            await until(lambda: on.follower.members.get("G"))
    assert seen == [b"0", b"1", b"2"]


async def test_what_was_done_in_a_queue_that_was_given_up_is_committed_later() -> None:
    done = asyncio.Event()

    async def listener(messages: list[ReceivedMessage]) -> None:
        done.set()

    options = PushConsumerOptions(
        **QUICK, **POLL, rebalance_delay_ms=1, commit_interval_ms=20, rebalance_interval_ms=50
    )
    async with group() as on:
        await on.fill(b"0")
        consumer = PushConsumer(on.namesrv.address, "G", listener, options=options)
        async with consumer:
            await consumer.subscribe("T")
            await done.wait()
            await on.tell(on.follower)
            await until(lambda: consumer._routes.writer("g1") is None)
            await consumer._queues.revoke([QUEUE])
            assert not on.follower.commits
            await on.take_over()
            await until(lambda: on.follower.committed.get(("G", ("T", 0))) == (1, 1))
            await until(lambda: not consumer._queues._left)


# --- sending --------------------------------------------------------------------------------------


@asynccontextmanager
async def sending(namesrv: str) -> AsyncIterator[Producer]:
    async with Producer(namesrv, options=ProducerOptions(**QUICK)) as producer:
        await producer.send_and_wait(Message("T", b"first"))
        yield producer


@pytest.mark.parametrize("stops", [True, False])
async def test_a_take_over_gets_the_same_bytes(stops: bool) -> None:
    """Whether the old writer's connection breaks or, as when its machine is gone, says nothing."""
    async with group() as on, sending(on.namesrv.address) as producer:
        on.writer.answering.clear()
        future = await producer.send(Message("T", b"second"))
        await until(lambda: len(on.writer.batches) == 2)
        on.follower.queues = {}
        if stops:
            await on.writer.stop()
        await on.take_over()
        await future
        assert [batch.records for batch in on.follower.batches] == [on.writer.batches[1].records]
        assert future.result().queue.broker_group == "g1"


async def test_an_older_writer_takes_nobody_away() -> None:
    """A name server that was cut off may still tell of it."""
    async with group() as on, sending(on.namesrv.address) as producer:
        await on.take_over()
        await until(lambda: on.follower.streams)
        await on.tell(on.writer)
        await until(lambda: producer._routes.writer("g1") == on.writer.address)
        await producer.send_and_wait(Message("T", b"second"))
    assert len(on.writer.batches) == 1


async def test_a_writer_that_moved_is_found_as_soon_as_it_is_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its pod was replaced: the same name, another address, and the old one says nothing."""
    async with Names() as names, group() as on:
        monkeypatch.setattr(channel_pool, "open_channel", dialled_by(names))
        names.move("writer.test", "127.0.0.1")
        on.writer.advertised_host = "writer.test"
        await on.tell(on.writer)
        options = ProducerOptions(**QUICK, delivery_timeout_ms=60_000)
        async with Producer(on.namesrv.address, options=options) as producer:
            await producer.send_and_wait(Message("T", b"first"))
            port = on.writer.port
            await on.writer.stop()
            with silent_socket("127.0.0.1", port):
                sent = await producer.send(Message("T", b"second"))
                await asyncio.sleep(0.3)
                assert not sent.done()
                on.writer.epoch += 1
                await on.writer.start(port, "127.0.0.2")
                names.move("writer.test", "127.0.0.2")
                await on.tell(on.writer)
                async with asyncio.timeout(15.0):  # gRPC looks again after 30 s
                    await sent
    assert on.writer.bodies("T")[-1] == b"second"


# --- name servers ---------------------------------------------------------------------------------


@asynccontextmanager
async def two_name_servers() -> AsyncIterator[tuple[FakeNameServer, FakeNameServer, str]]:
    """In the order in which clients ask them, and how to name both."""
    both = [await FakeNameServer().start(), await FakeNameServer().start()]
    first, second = sorted(both, key=lambda server: server.address)
    try:
        yield first, second, f"{first.address};{second.address}"
    finally:
        for server in both:
            await server.stop()


async def test_with_all_name_servers_gone_everything_goes_on() -> None:
    async with group() as on, reading_and_sending(on) as (consumer, producer):
        await on.namesrv.stop()
        for number in range(20):
            await producer.send_and_wait(Message("T", b"%d" % number))
            assert await bodies(consumer) == [b"%d" % number]
            await consumer.commit()
        assert on.writer.committed["G", ("T", 0)] == (1, 21)


@asynccontextmanager
async def reading_and_sending(on: Group) -> AsyncIterator[tuple[PullConsumer, Producer]]:
    async with (
        sending(on.namesrv.address) as producer,
        reading(on.namesrv.address) as consumer,
    ):
        yield consumer, producer


async def test_without_name_servers_members_tell_who_writes() -> None:
    """All name servers and the writer were on the node that is lost."""
    seen: list[bytes] = []

    async def listener(messages: list[ReceivedMessage]) -> None:
        seen.extend(message.body for message in messages)

    options = PushConsumerOptions(
        **QUICK, **POLL, rebalance_delay_ms=1, commit_interval_ms=5, rebalance_interval_ms=50
    )
    async with (
        group() as on,
        reading_and_sending(on) as (consumer, producer),
        PushConsumer(on.namesrv.address, "P", listener, options=options) as pushed,
    ):
        await pushed.subscribe("T")
        await until(lambda: on.writer.committed.get(("P", ("T", 0))) == (1, 1))
        await on.namesrv.stop()
        await on.writer.stop()
        sent = await producer.send(Message("T", b"second"))
        await asyncio.sleep(0.1)
        assert not sent.done()
        on.follower.role, on.follower.epoch = on.writer.role, on.writer.epoch + 1
        await asyncio.wait_for(sent, 20)
        assert await bodies(consumer) == [b"second"]
        assert await consumer.commit() == {QUEUE: Position(1, 2)}
        await until(lambda: seen == [b"first", b"second"])
        await until(lambda: on.follower.committed.get(("P", ("T", 0))) == (1, 2))


async def test_a_name_server_that_says_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes connections and questions, and its event loop stands still."""
    monkeypatch.setattr(routes, "ANSWER_S_MAX", 0.3)
    async with group() as on, two_name_servers() as (first, second, both):
        first.silent = True
        await second.put("T", on.writer, queues=1)
        async with sending(both) as producer:
            assert producer._routes.writer("g1") == on.writer.address
        assert first.asked == ["T", "TBW102"]


@pytest.mark.slow
async def test_a_name_server_whose_packets_are_dropped_is_left_within_5_s() -> None:
    async with (
        group() as on,
        two_name_servers() as (first, second, _),
        Relay(first.address) as to_first,
        Relay(second.address) as to_second,
    ):
        for server in (first, second):
            await server.put("T", on.writer, queues=1)
        async with sending(f"{to_first.address};{to_second.address}"):
            watched, other = (first, second) if first.asked else (second, first)
            assert not other.asked
            cut_s = time.monotonic()
            (to_first if watched is first else to_second).cut()
            await until(lambda: other.asked, 30.0)
            assert time.monotonic() - cut_s < 10.0  # 5 s where a machine is not busy


async def test_a_name_server_that_tells_of_the_dead_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(routes, "DOUBT_AFTER_S", 0.02)
    async with group() as on, two_name_servers() as (first, second, both):
        await first.put("T", on.writer, queues=1)
        async with sending(both) as producer:
            await on.writer.stop()
            on.follower.role, on.follower.epoch = on.writer.role, 2
            await second.put("T", on.follower, queues=1)
            await producer.send_and_wait(Message("T", b"second"))
    assert on.follower.bodies("T")[-1] == b"second"


async def test_the_route_of_a_topic_that_has_gone_names_no_writer_any_more() -> None:
    """It was deleted while nobody told this client of it; then its group's writer changed."""
    async with group() as on, two_name_servers() as (first, second, both):
        for topic in ("U", "T"):
            await first.put(topic, on.writer, queues=1)
        async with sending(both) as producer:
            await producer.send_and_wait(Message("U", b""))
            await on.take_over()
            await second.put("T", on.follower, queues=1)
            await first.stop()
            await until(lambda: producer._routes.writer("g1") == on.follower.address)
            assert producer._routes._missing
            await producer.send_and_wait(Message("T", b"second"))


async def test_a_group_that_a_new_name_server_does_not_know_yet_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = await FakeBroker("g2").start()
    try:
        async with group() as on, two_name_servers() as (first, second, both):
            await first.put("T", on.writer, other, queues=1)
            await second.put("T", on.writer, queues=1)
            async with PullConsumer(both, "G", options=PullConsumerOptions(**QUICK)) as consumer:
                everything = [QUEUE, QueueRef("T", 0, "g2")]
                assert await consumer.queues("T") == everything
                await first.stop()
                await until(lambda: consumer._routes._missing)
                assert await consumer.queues("T") == everything
                monkeypatch.setattr(routes, "MISSING_S_MAX", 0.0)
                await second.put("T", on.writer, queues=2)  # anything that it has to tell
                await until(lambda: not consumer._routes._missing)
                assert {q.broker_group for q in await consumer.queues("T")} == {"g1"}
    finally:
        await other.stop()


async def test_an_answer_that_changes_no_route_wakes_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(routes, "SILENCE_S", 0.01)
    async with group() as on:
        connections, tasks = Connections(on.namesrv.address), Tasks("test")
        watcher = routes.RouteWatcher(
            connections, Backoff(BackoffPolicy(0.01, 0.01), random.Random(1)), lambda _: None
        )
        watcher.start(tasks)
        try:
            await watcher.wait_for("T", 5.0)
            waiting = asyncio.create_task(watcher.wait_change(60.0))
            while len(on.namesrv.asked) < 5:
                watcher.doubt("g1")
                await asyncio.sleep(0.01)
            assert not waiting.done(), "a producer would give up its back-off for it"
            await on.take_over()
            assert await waiting
        finally:
            await tasks.stop()
            await connections.close()
