"""Dead letters: listed, sent again once, purged, by the command's library and over gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cometmq.admin import dead_letters
from cometmq.admin.connection import Connection
from cometmq.admin.views import DeadLetterView, ResentView
from cometmq.client import Later, PushConsumer, PushConsumerOptions, ReceivedMessage
from cometmq.errors import (
    AlreadyResent,
    GroupNotFound,
    LimitExceeded,
    MessageNotFound,
    OffsetInvalid,
    TopicNotFound,
)
from cometmq.rpc.interceptors import from_proto
from cometmq.v1 import broker_pb2 as pb
from cometmq.v1 import common_pb2 as common
from tests.support.cluster.broker import LiveBroker, refusal, running_broker, running_namesrv
from tests.support.waiting import until

DLQ = "%DLQ%G"


async def kill(broker: LiveBroker, *offsets: int) -> None:
    """Make dead letters of messages of T."""
    queue = common.QueueRef(topic="T", queue_id=0)
    items = [
        pb.SendBackItem(queue=queue, position=common.Position(offset=offset), delay_level=-1)
        for offset in offsets
    ]
    await broker.stub.SendBack(pb.SendBackRequest(group="G", items=items))


@asynccontextmanager
async def dead(tmp_path: Path, count: int) -> AsyncIterator[tuple[str, LiveBroker]]:
    """A broker whose group G gave up so many messages of T."""
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
    ):
        await broker.put_topic("T", 1)
        await broker.send("T", 0, *(b"%d" % n for n in range(count)))
        await broker.read_queue("T", 0)
        await broker.commit("G", ("T", 0, 0, 0))
        await kill(broker, *range(count))
        await broker.read_queue(DLQ, 0)
        yield namesrv, broker


async def listed(connection: Connection) -> list[DeadLetterView]:
    return [view async for view, _ in dead_letters.read_dead_letters(connection, "G")]


async def test_what_is_sent_again_comes_to_its_group_once_and_is_marked(tmp_path: Path) -> None:
    got: list[ReceivedMessage] = []

    async def listener(messages: list[ReceivedMessage]) -> Later | None:
        got.extend(messages)
        return None

    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async with dead(tmp_path, 5) as (namesrv, _), Connection(namesrv) as connection:
        found = await listed(connection)
        assert [(one.offset, one.topic, one.tries, one.body) for one in found] == [
            (n, "T", 1, str(n)) for n in range(5)
        ]
        options = PushConsumerOptions(rebalance_delay_ms=1)
        async with PushConsumer(namesrv, "G", listener, options=options) as consumer:
            done = await dead_letters.resend(connection, "G", found[1:4], rate=2.0, sleep=sleep)
            assert (done, waits) == (ResentView("G", 3, 0), [1.0])
            await until(lambda: len(got) >= 3)
            assert sorted(one.body for one in got) == [b"1", b"2", b"3"]
            assert {(one.topic, one.reconsume_times) for one in got} == {("T", 0)}
            assert not any("DLQ_ORIGIN_TOPIC" in one.properties for one in got)
            assert await dead_letters.resend(connection, "G", found) == ResentView("G", 2, 3)
            await until(lambda: len(got) >= 5)
            assert consumer.assigned
        assert all(one.resent for one in await listed(connection))
        assert (await dead_letters.resend(connection, "G", found[:1], again=True)).resent_count == 1


async def test_the_mark_outlives_a_crash_and_goes_with_the_dead_letters(tmp_path: Path) -> None:
    request = pb.ResendDeadLettersRequest(group="G", offsets=[0, 0, 2])
    async with dead(tmp_path, 3) as (_, broker):
        answer = await broker.admin.ResendDeadLetters(request)
        assert not any(one.HasField("error") for one in answer.results)
        broker.crash()
    async with running_broker(tmp_path) as broker:
        assert broker.store.queue_bounds("%RETRY%G", 0)[1] == 2
        answer = await broker.admin.ResendDeadLetters(request)
        assert all(isinstance(from_proto(one.error), AlreadyResent) for one in answer.results)
        assert broker.store.queue_bounds("%RETRY%G", 0)[1] == 2
        await broker.admin.PurgeDeadLetters(pb.PurgeDeadLettersRequest(group="G"))
        assert isinstance(await refusal(broker.admin.ResendDeadLetters(request)), TopicNotFound)
        await kill(broker, 1)  # given up once: it is not stored again
        described = await broker.admin.DescribeDeadLetters(pb.DescribeDeadLettersRequest(group="G"))
        assert not described.resent


async def test_what_is_no_dead_letter_is_refused(tmp_path: Path) -> None:
    async with dead(tmp_path, 1) as (_, broker):
        request = pb.ResendDeadLettersRequest(group="G", offsets=[-1, 1, 1 << 62, 0])
        answer = await broker.admin.ResendDeadLetters(request)
        errors = [from_proto(r.error) if r.HasField("error") else None for r in answer.results]
        assert [type(error) for error in errors[:3]] == [OffsetInvalid] * 3
        assert errors[3] is None
        many = pb.ResendDeadLettersRequest(group="G", offsets=range(257))
        assert isinstance(await refusal(broker.admin.ResendDeadLetters(many)), LimitExceeded)
        none = pb.ResendDeadLettersRequest(group="nobody", offsets=[0])
        assert isinstance(await refusal(broker.admin.ResendDeadLetters(none)), GroupNotFound)


async def test_a_group_without_dead_letters_has_an_empty_list(tmp_path: Path) -> None:
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
        Connection(namesrv) as connection,
    ):
        await broker.put_topic("T", 1)
        with pytest.raises(GroupNotFound):
            await listed(connection)
        await broker.commit("G", ("T", 0, 0, 0))
        assert await listed(connection) == []
        with pytest.raises((TopicNotFound, MessageNotFound)):
            await dead_letters.purge(connection, "G")
