"""The pull consumer against a broker that does as ordered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cometmq.client import (
    Bounds,
    Message,
    Position,
    Producer,
    PullConsumer,
    PullConsumerOptions,
    PullOutcome,
    QueueRef,
)
from cometmq.errors import (
    ClientClosed,
    FilterInvalid,
    FlowControl,
    InvalidRequest,
    PositionFenced,
    QueueNotFound,
    TopicNotFound,
)
from tests.support.cluster.fake_cluster import FakeBroker, fake_cluster
from tests.support.waiting import until

QUEUE = QueueRef("T", 0, "g1")
FAST: dict[str, Any] = {
    "poll_backoff_ms": 2,
    "poll_backoff_max_ms": 10,
    "retry_backoff_ms": 2,
    "retry_backoff_max_ms": 10,
}


@asynccontextmanager
async def pulling(
    count: int, **changes: Any
) -> AsyncIterator[tuple[PullConsumer, FakeBroker, Any]]:
    """A consumer, and a topic with ``count`` messages in its queue 0."""
    options = PullConsumerOptions(**{**FAST, **changes})
    async with fake_cluster() as (namesrv, [broker]):
        await fill(namesrv, count)
        async with PullConsumer(namesrv.address, "G", options=options) as consumer:
            yield consumer, broker, namesrv


async def fill(namesrv: Any, count: int, tag: str = "") -> None:
    async with Producer(namesrv.address) as producer:
        for n in range(count):
            await producer.send(Message("T", b"%05d" % n, tag, queue=QueueRef("T", 0)))


async def test_a_pull_answers_what_is_there_and_where_to_go_on() -> None:
    async with pulling(10) as (consumer, _, _):
        assert await consumer.queues("T") == [QueueRef("T", n, "g1") for n in range(4)]
        batch = await consumer.pull(QUEUE, Position(0, 3), count_max=4)
        assert [message.body for message in batch.messages] == [b"%05d" % n for n in range(3, 7)]
        assert batch.next_position == Position(1, 7)
        assert (batch.outcome, batch.min_offset, batch.max_offset) == (PullOutcome.FOUND, 0, 10)


async def test_a_pull_says_what_it_did_not_find() -> None:
    async with pulling(3) as (consumer, broker, _):
        outcomes = [
            (await consumer.pull(QUEUE, Position(1, offset), tags=tags)).outcome
            for offset, tags in ((3, []), (99, []), (0, ["A"]))
        ]
        broker.fences["T", 0] = (2, 1)
        with pytest.raises(PositionFenced) as caught:
            await consumer.pull(QUEUE, Position(1, 3))
    assert outcomes == [PullOutcome.NOT_FOUND, PullOutcome.OFFSET_MOVED, PullOutcome.NO_MATCH]
    assert caught.value.fence == (2, 1)


async def test_polling_commits_by_itself_what_the_application_has_done() -> None:
    async with pulling(20, pull_count_max=8, commit_interval_ms=10) as (consumer, broker, _):
        await consumer.assign([QUEUE])
        first = await consumer.poll()
        await asyncio.sleep(0.1)
        assert not broker.committed, "nobody knows whether these are done"
        second = await consumer.poll()
        await until(lambda: broker.committed.get(("G", ("T", 0))) == (1, len(first)))
        commits = len(broker.commits)
        await asyncio.sleep(0.1)
        assert len(broker.commits) == commits, "nothing new"
        assert await consumer.position(QUEUE) == Position(1, len(first) + len(second))
    assert broker.committed["G", ("T", 0)] == (1, len(first) + len(second))


async def test_what_was_polled_before_a_failure_is_not_committed() -> None:
    async with pulling(20, pull_count_max=8) as (_, broker, namesrv):
        options = PullConsumerOptions(commit_interval_ms=60_000, pull_count_max=8)

        async def fail_at_the_second() -> None:
            async with PullConsumer(namesrv.address, "G", options=options) as consumer:
                await consumer.assign([QUEUE])
                assert len(await consumer.poll()) == 8
                await consumer.poll()
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail_at_the_second()
        assert broker.committed["G", ("T", 0)] == (1, 8)


async def test_seeking_to_both_ends_and_what_the_next_poll_begins_with() -> None:
    async with pulling(5) as (consumer, _, _):
        await consumer.assign([QUEUE])
        await consumer.seek_to_end()
        assert await consumer.position(QUEUE) == Position(1, 5)
        assert await consumer.poll(timeout_ms=50) == []
        await consumer.seek_to_begin([QUEUE])
        assert len(await consumer.poll()) == 5
        await consumer.commit()
        assert await consumer.position(QUEUE) == Position(1, 5), "not where the prefetch is"
        with pytest.raises(QueueNotFound):
            await consumer.seek_to_begin([QueueRef("T", 3, "g1")])


async def test_a_paused_queue_hands_out_nothing() -> None:
    async with pulling(3) as (consumer, _, namesrv):
        other = QueueRef("T", 1, "g1")
        await consumer.assign([QUEUE, other])
        consumer.pause([QUEUE])
        assert await consumer.poll(timeout_ms=50) == []
        async with Producer(namesrv.address) as producer:
            await producer.send_and_wait(Message("T", b"other", queue=QueueRef("T", 1)))
        assert [message.body for message in await consumer.poll()] == [b"other"]
        polling = asyncio.create_task(consumer.poll(timeout_ms=20_000))
        await asyncio.sleep(0.05)
        consumer.resume([QUEUE])
        assert len(await polling) == 3


async def test_polling_reads_on_and_commits_what_was_handed_out() -> None:
    async with pulling(50, pull_count_max=8) as (consumer, broker, _):
        await consumer.assign(await consumer.queues("T"))
        got: list[bytes] = []
        while len(got) < 24:
            got += [message.body for message in await consumer.poll()]
        assert await consumer.position(QUEUE) == Position(1, len(got))
        answers = await consumer.commit()
        assert answers[QUEUE] == Position(1, len(got))
        assert broker.committed["G", ("T", 0)] == (1, len(got))
        assert (await consumer.committed([QUEUE]))[QUEUE] == Position(1, len(got))
    assert got == [b"%05d" % n for n in range(len(got))]


async def test_a_commit_of_a_queue_that_is_not_read_counts_for_nothing_later() -> None:
    """A group that was reset stayed behind: what was done again was held to be committed."""
    async with pulling(5) as (consumer, broker, _):
        await consumer.commit({QUEUE: Position(1, 5)})
        broker.committed["G", ("T", 0)] = (1, 0)
        await consumer.assign([QUEUE])
        assert len(await consumer.poll()) == 5
        assert await consumer.commit() == {QUEUE: Position(1, 5)}
        assert broker.committed["G", ("T", 0)] == (1, 5)


async def test_polling_waits_for_what_comes_later() -> None:
    async with pulling(0) as (consumer, _, namesrv):
        await consumer.assign([QUEUE])
        assert await consumer.poll(timeout_ms=20) == []
        await fill(namesrv, 1)
        assert [message.body for message in await consumer.poll()] == [b"00000"]


async def test_seeking_forgets_what_was_fetched() -> None:
    async with pulling(20, pull_count_max=5) as (consumer, _, _):
        await consumer.assign([QUEUE])
        assert (await consumer.poll())[0].queue_offset == 0
        await consumer.seek(QUEUE, Position(0, 17))
        assert [message.queue_offset for message in await consumer.poll()] == [17, 18, 19]


async def test_assigning_begins_where_the_group_is() -> None:
    async with pulling(20) as (consumer, broker, _):
        broker.committed["G", ("T", 0)] = (1, 12)
        await consumer.assign([QUEUE])
        assert (await consumer.poll())[0].queue_offset == 12


async def test_only_wanted_tags_are_polled() -> None:
    async with pulling(5) as (consumer, _, namesrv):
        await fill(namesrv, 5, tag="A")
        await consumer.assign([QUEUE], tags=["A"])
        assert [message.queue_offset for message in await consumer.poll()] == [5, 6, 7, 8, 9]


async def test_a_fence_is_followed_by_poll(caplog: pytest.LogCaptureFixture) -> None:
    async with pulling(10) as (consumer, broker, _):
        await consumer.assign([QUEUE])
        await consumer.seek(QUEUE, Position(1, 8))
        broker.fences["T", 0] = (2, 4)
        assert [message.queue_offset for message in await consumer.poll()] == [4, 5, 6, 7, 8, 9]
    assert moves_told(caplog) == ["position fenced"]


async def test_a_position_outside_the_queue_is_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with pulling(10) as (consumer, *_):
        await consumer.assign([QUEUE])
        await consumer.seek(QUEUE, Position(1, 99))
        while not moves_told(caplog):
            assert await consumer.poll(10) == []
        assert await consumer.poll(10) == []
    assert moves_told(caplog) == ["offset moved"]


def moves_told(caplog: pytest.LogCaptureFixture) -> list[str]:
    told = [record.message.split(" topic=")[0] for record in caplog.records]
    return [what for what in told if what in ("position fenced", "offset moved")]


async def test_what_may_pass_is_tried_again_and_what_may_not_is_raised() -> None:
    async with pulling(1) as (consumer, broker, _):
        await consumer.assign([QUEUE])
        broker.pull_errors = [FlowControl("busy"), FilterInvalid("no")]
        with pytest.raises(FilterInvalid):
            await consumer.poll()
        assert len(await consumer.poll()) == 1


async def test_bounds_and_errors_of_single_queues() -> None:
    async with pulling(6) as (consumer, broker, _):
        broker.min_offsets["T", 0] = 2
        assert await consumer.bounds([QUEUE]) == {QUEUE: Bounds(1, 2, 6)}
        with pytest.raises(QueueNotFound):
            await consumer.bounds([QueueRef("T", 99, "g1")])


async def test_misuse_is_told() -> None:
    async with pulling(0, request_timeout_ms=100) as (consumer, _, namesrv):
        with pytest.raises(InvalidRequest):
            await consumer.poll()
        with pytest.raises(QueueNotFound):
            await consumer.seek(QUEUE, Position(0, 0))
        with pytest.raises(TopicNotFound):
            await consumer.queues("nowhere")
        closed = PullConsumer(namesrv.address, "G")
    with pytest.raises(ClientClosed):
        await closed.queues("T")
