"""The push consumer against a broker that does as ordered."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cometmq.client import (
    ConsumeFrom,
    ConsumeResult,
    Message,
    Producer,
    PushConsumer,
    PushConsumerOptions,
    QueueRef,
    ReceivedMessage,
)
from cometmq.client.group import membership
from cometmq.errors import (
    ClientClosed,
    ConfigInvalid,
    FilterInvalid,
    FlowControl,
    GroupNameInvalid,
)
from cometmq.v1 import common_pb2
from tests.support.cluster.fake_cluster import FakeBroker, fake_cluster
from tests.support.waiting import until

FAST: dict[str, Any] = {
    "rebalance_delay_ms": 1,
    "poll_backoff_ms": 2,
    "poll_backoff_max_ms": 10,
    "retry_backoff_ms": 2,
    "retry_backoff_max_ms": 10,
    "redeliver_backoff_ms": 2,
    "redeliver_backoff_max_ms": 10,
    "retry_in_place": True,
}


class Listener:
    """Keeps what it gets. ``verdict`` says what to answer, ``gate`` (when cleared) holds calls."""

    def __init__(self) -> None:
        self.got: list[ReceivedMessage] = []
        self.sizes: list[int] = []
        self.running = self.most_running = 0
        self.gate = asyncio.Event()
        self.gate.set()

    def verdict(self, message: ReceivedMessage) -> ConsumeResult | None:
        return None

    async def __call__(self, messages: list[ReceivedMessage]) -> ConsumeResult | None:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self.gate.wait()
            self.got += messages
            self.sizes.append(len(messages))
            return self.verdict(messages[0])
        finally:
            self.running -= 1

    @property
    def bodies(self) -> list[bytes]:
        return sorted(message.body for message in self.got)


async def fill(namesrv: Any, count: int, **fields: Any) -> None:
    async with Producer(namesrv.address) as producer:
        for n in range(count):
            await producer.send(Message("T", b"%05d" % n, **fields))


def consumer(namesrv: Any, listener: Any, **changes: Any) -> PushConsumer:
    options = PushConsumerOptions(**{**FAST, **changes})
    return PushConsumer(namesrv.address, "G", listener, options=options)


@asynccontextmanager
async def consuming(
    count: int, *names: str, **changes: Any
) -> AsyncIterator[tuple[PushConsumer, Listener, list[FakeBroker], Any]]:
    """A consumer of T, where ``count`` messages lie already."""
    listener = Listener()
    async with fake_cluster(*names) as (namesrv, brokers):
        await fill(namesrv, count)
        async with consumer(namesrv, listener, **changes) as push:
            await push.subscribe("T")
            yield push, listener, brokers, namesrv


def ends(broker: FakeBroker) -> dict[tuple[str, int], int]:
    return {key: len(records) for key, records in broker.queues.items() if records}


def committed(broker: FakeBroker) -> dict[tuple[str, int], int]:
    return {key: offset for (_, key), (_, offset) in broker.committed.items() if offset}


async def test_a_topic_is_unsubscribed_at_any_time() -> None:
    async with consuming(0) as (push, listener, [broker], namesrv):
        await namesrv.put("U", broker, queues=2)
        await push.subscribe("U")
        async with Producer(namesrv.address) as producer:
            await producer.send_and_wait(Message("U", b"before", queue=QueueRef("U", 0)))
            await until(lambda: listener.bodies == [b"before"])
            await push.unsubscribe("U")
            assert committed(broker) == {("U", 0): 1}
            assert "U" not in {queue.topic for queue in push.assigned}
            [member] = broker.members["G"]
            joined = broker.members["G"]
            await until(lambda: {s.topic for s in joined[member].subscriptions} == {"T"})
            await producer.send_and_wait(Message("U", b"after", queue=QueueRef("U", 0)))
            await producer.send_and_wait(Message("T", b"other"))
            await until(lambda: listener.bodies == [b"before", b"other"])
        await push.unsubscribe("nothing")


async def test_every_message_comes_once_and_all_is_committed_at_the_end() -> None:
    async with consuming(5000, "g1", "g2") as (_, listener, brokers, _):
        await until(lambda: len(listener.got) >= 5000)
    assert listener.bodies == [b"%05d" % n for n in range(5000)]
    assert [committed(broker) for broker in brokers] == [ends(broker) for broker in brokers]


async def test_what_another_consumer_committed_does_not_come_again() -> None:
    async with fake_cluster() as (namesrv, [broker]):
        await fill(namesrv, 100)
        for key, records in broker.queues.items():
            broker.committed["G", key] = (1, len(records))
        await fill(namesrv, 7)
        listener = Listener()
        async with consumer(namesrv, listener) as push:
            await push.subscribe("T")
            await until(lambda: len(listener.got) == 7)
    assert len(broker.stored("T")) == 107


async def test_a_new_group_may_begin_with_the_last() -> None:
    async with consuming(50, consume_from=ConsumeFrom.LAST) as (_, listener, [broker], namesrv):
        await until(lambda: len({p.queue.queue_id for p in broker.pulls}) == 4)
        await fill(namesrv, 3)
        await until(lambda: len(listener.got) == 3)


async def test_only_wanted_tags_come_and_the_rest_is_committed_too() -> None:
    async with fake_cluster() as (namesrv, [broker]):
        await fill(namesrv, 50, tag="A")
        await fill(namesrv, 50, tag="B")
        await fill(namesrv, 50, tag="C")
        listener = Listener()
        async with consumer(namesrv, listener, commit_interval_ms=5) as push:
            await push.subscribe("T", "A || B")
            await until(lambda: committed(broker) == ends(broker))
    assert {message.tag for message in listener.got} == {"A", "B"}
    assert len(listener.got) == 100


@pytest.mark.parametrize("raises", [False, True])
async def test_what_is_not_done_comes_again_and_holds_the_commit(raises: bool) -> None:
    refused: list[bytes] = []

    def verdict(message: ReceivedMessage) -> ConsumeResult | None:
        if message.body != b"00007" or message.attempt > 3:
            return ConsumeResult.SUCCESS
        refused.append(message.body)
        if raises:
            raise ValueError("not now")
        return ConsumeResult.LATER

    async with consuming(0) as (_, listener, _, namesrv):
        listener.verdict = verdict  # type: ignore[method-assign]
        await fill(namesrv, 20)
        await until(lambda: len(listener.got) == 23)
    assert refused == [b"00007"] * 3


async def test_a_message_that_is_never_done_is_never_committed() -> None:
    async with consuming(0) as (_, listener, [broker], namesrv):
        listener.verdict = lambda message: ConsumeResult.LATER  # type: ignore[method-assign]
        await fill(namesrv, 8)
        await until(lambda: len(listener.got) > 20)
    assert committed(broker) == {}


async def test_no_more_calls_run_than_allowed() -> None:
    async with consuming(100, concurrency=3) as (_, listener, _, _):
        listener.gate.clear()
        await until(lambda: listener.running == 3)
        listener.gate.set()
        await until(lambda: len(listener.got) == 100)
    assert listener.most_running == 3


async def test_batches_hold_messages_of_one_queue_in_order() -> None:
    batches: list[list[ReceivedMessage]] = []

    async def listener(messages: list[ReceivedMessage]) -> None:
        batches.append(messages)

    async with fake_cluster() as (namesrv, _):
        await fill(namesrv, 200)
        async with consumer(namesrv, listener, batch_count=16) as push:
            await push.subscribe("T")
            await until(lambda: sum(map(len, batches)) == 200)
    for messages in batches:
        offsets = [message.queue_offset for message in messages]
        assert len({message.queue for message in messages}) == 1
        assert offsets == list(range(offsets[0], offsets[0] + len(offsets)))
    assert max(map(len, batches)) == 16


@pytest.mark.parametrize(
    "limit", [{"queue_count_max": 10}, {"queue_bytes_max": 1_024}, {"queue_span_max": 10}]
)
async def test_a_queue_that_is_full_of_unfinished_work_is_not_pulled(limit: dict[str, int]) -> None:
    async with consuming(0, pull_count_max=5, **limit) as (_, listener, [broker], ns):
        listener.gate.clear()
        async with Producer(ns.address) as producer:
            for n in range(100):
                await producer.send(Message("T", b"%d" % n, queue=QueueRef("T", 0)))
        await until(lambda: any(p.position.offset == 5 for p in broker.pulls))
        broker.pulls.clear()
        await until(lambda: len(broker.pulls) > 20)  # of the empty queues
        assert {p.queue.queue_id for p in broker.pulls} == {1, 2, 3}
        listener.gate.set()
        await until(lambda: len(listener.got) == 100)


async def test_queues_are_divided_with_the_other_members() -> None:
    async with consuming(0, client_id="b") as (push, _, [broker], _):
        await until(lambda: len(push.assigned) == 4)
        await broker.add_member("G", "a", "T")
        await until(lambda: push.assigned == [QueueRef("T", 2, "g1"), QueueRef("T", 3, "g1")])
        await broker.add_member("G", "c", "other topic")
        await broker.add_member("G", "d", "T")
        await until(lambda: push.assigned == [QueueRef("T", 2, "g1")])


async def test_a_revoked_queue_is_committed() -> None:
    async with consuming(40, client_id="b", batch_count=4) as (push, listener, [broker], _):
        await until(lambda: len(listener.got) == 40)
        await broker.add_member("G", "a", "T")
        await until(lambda: push.assigned == [QueueRef("T", 2, "g1"), QueueRef("T", 3, "g1")])
        revoked = {key: end for key, end in ends(broker).items() if key[1] < 2}
        await until(lambda: committed(broker) == revoked)


async def test_leaving_waits_for_running_calls_and_commits_them() -> None:
    async with fake_cluster() as (namesrv, [broker]):
        await fill(namesrv, 4)
        listener = Listener()
        listener.gate.clear()
        push = await consumer(namesrv, listener).__aenter__()
        await push.subscribe("T")
        await until(lambda: listener.running == 4)
        leaving = asyncio.create_task(push.__aexit__(None, None, None))
        await until(lambda: push.assigned == [])
        assert not leaving.done()
        listener.gate.set()
        await leaving
        assert committed(broker) == ends(broker)
        await until(lambda: broker.members["G"] == {})  # the broker hears of it a moment later


async def test_calls_that_never_end_do_not_keep_the_consumer_open() -> None:
    async with fake_cluster() as (namesrv, [broker]):
        await fill(namesrv, 4)
        listener = Listener()
        listener.gate.clear()
        async with consumer(namesrv, listener, drain_timeout_ms=20) as push:
            await push.subscribe("T")
            await until(lambda: listener.running == 4)
        assert listener.running == 0
        assert committed(broker) == {}
        names = [task.get_name() for task in asyncio.all_tasks()]
        assert not [name for name in names if "push consumer" in name]


async def test_refused_pulls_are_tried_again() -> None:
    async with consuming(0) as (_, listener, [broker], namesrv):
        broker.pull_errors = [FlowControl("busy")] * 5
        await fill(namesrv, 10)
        await until(lambda: len(listener.got) == 10)


async def test_a_fence_sends_the_consumer_back_to_it() -> None:
    async with consuming(0) as (_, listener, [broker], namesrv):
        async with Producer(namesrv.address) as producer:
            for n in range(10):
                await producer.send_and_wait(Message("T", b"%d" % n, queue=QueueRef("T", 0)))
        await until(lambda: len(listener.got) == 10)
        broker.generations["T"] = 2
        del broker.queues["T", 0][6:]
        broker.fences["T", 0] = (2, 6)
        await until(lambda: broker.pulls[-1].position.generation == 2 and not broker.fences)
        async with Producer(namesrv.address) as producer:
            await producer.send_and_wait(Message("T", b"new", queue=QueueRef("T", 0)))
        await until(lambda: listener.got[-1].body == b"new")
    assert broker.committed["G", ("T", 0)] == (2, 7)


async def test_a_fenced_commit_sends_the_consumer_back_too() -> None:
    async with consuming(0, commit_interval_ms=5, queue_count_max=1) as (_, listener, [broker], ns):
        listener.gate.clear()
        async with Producer(ns.address) as producer:
            for n in range(4):
                await producer.send_and_wait(Message("T", b"%d" % n, queue=QueueRef("T", 0)))
        await until(lambda: listener.running >= 1)
        broker.fences["T", 0] = (2, 0)
        listener.gate.set()
        await until(lambda: not broker.fences)
        await until(lambda: [m.body for m in listener.got].count(b"0") >= 2)


async def test_an_offset_outside_the_queue_moves() -> None:
    async with fake_cluster() as (namesrv, [broker]):
        await fill(namesrv, 40)
        for key in list(broker.queues):
            broker.min_offsets[key] = 5
            broker.committed["G", key] = (1, 2)
        expected = sum(max(0, end - 5) for end in ends(broker).values())
        listener = Listener()
        async with consumer(namesrv, listener) as push:
            await push.subscribe("T")
            await until(lambda: len(listener.got) == expected)
    assert min(message.queue_offset for message in listener.got) == 5


async def test_a_broker_that_restarts_is_joined_and_read_again() -> None:
    async with consuming(10) as (push, listener, [broker], namesrv):
        await until(lambda: len(listener.got) == 10)
        await broker.stop()
        await until(lambda: len(push.assigned) == 4)
        await broker.start()
        await namesrv.put("T", broker)
        await fill(namesrv, 5)
        await until(lambda: len(listener.got) == 15)
        await until(lambda: len(broker.members["G"]) == 1)


@pytest.mark.parametrize("rejoin_s", [3600.0, 0.01])
@pytest.mark.parametrize("was_in_no_route", [False, True])
async def test_a_member_has_time_to_join_a_broker_that_restarts(
    monkeypatch: pytest.MonkeyPatch, rejoin_s: float, was_in_no_route: bool
) -> None:
    monkeypatch.setattr(membership, "REJOIN_S_MAX", rejoin_s)
    async with consuming(0, client_id="b") as (push, _, [broker], namesrv):
        await broker.add_member("G", "a", "T")
        half = [QueueRef("T", 2, "g1"), QueueRef("T", 3, "g1")]
        await until(lambda: push.assigned == half)
        await broker.stop()
        if was_in_no_route:
            broker.role = common_pb2.MEMBER_ROLE_FOLLOWER
            await namesrv.put("T", broker)
            await asyncio.sleep(0.3)  # for many times what a rebalance takes
            broker.role = common_pb2.MEMBER_ROLE_WRITER
        del broker.members["G"]["a"]
        await broker.start()
        await namesrv.put("T", broker)
        await until(lambda: "b" in broker.members.get("G", {}))
        if rejoin_s < 1:
            await until(lambda: len(push.assigned) == 4)
        else:
            await asyncio.sleep(0.3)  # for many times what a rebalance takes
            assert push.assigned == half


async def test_bad_names_and_filters_are_refused_at_once() -> None:
    async with fake_cluster() as (namesrv, _):
        with pytest.raises(GroupNameInvalid):
            PushConsumer(namesrv.address, "no blanks", Listener())
        push = consumer(namesrv, Listener())
        with pytest.raises(ClientClosed):
            await push.subscribe("T")
        async with push:
            with pytest.raises(FilterInvalid):
                await push.subscribe("T", "* || A")


async def test_a_blocking_listener_is_suspended_and_gets_more_threads() -> None:
    """The calls have to meet, which needs as many threads."""
    together = threading.Barrier(3, timeout=10)
    got: list[bytes] = []

    def listener(messages: list[ReceivedMessage]) -> None:
        together.wait()
        got.append(messages[0].body)

    async with fake_cluster() as (namesrv, _):
        await fill(namesrv, 6)
        async with consumer(namesrv, listener, concurrency=1) as consuming:
            consuming.suspend()
            await consuming.subscribe("T")
            await until(lambda: consuming.assigned)
            with pytest.raises(ConfigInvalid, match="concurrency must be a whole number from 1"):
                consuming.set_concurrency(0)
            consuming.set_concurrency(3)
            await asyncio.sleep(0.05)
            assert together.n_waiting == 0
            consuming.resume()
            await until(lambda: len(got) == 6)
        with pytest.raises(ClientClosed):
            consuming.set_concurrency(3)
    assert sorted(got) == [b"%05d" % n for n in range(6)]


async def test_a_listener_unsubscribes_without_waiting_for_its_own_call() -> None:
    left = asyncio.Event()

    async def listener(messages: list[ReceivedMessage]) -> None:
        await push.unsubscribe("T")
        left.set()

    async with fake_cluster() as (namesrv, [broker]):
        await fill(namesrv, 1)
        async with consumer(namesrv, listener, drain_timeout_ms=60_000) as push:
            await push.subscribe("T")
            await asyncio.wait_for(left.wait(), 10)
            await until(lambda: sum(committed(broker).values()) == 1)
