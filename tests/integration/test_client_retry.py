"""A push consumer sends back what its listener cannot do: against a real broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from cometmq.client import (
    ConsumeFrom,
    Later,
    Message,
    Producer,
    PullConsumer,
    PushConsumer,
    PushConsumerOptions,
    QueueRef,
    ReceivedMessage,
    pull,
)
from cometmq.errors import (
    DelayLevelInvalid,
    DiskFull,
    InvalidRequest,
    PeerUnavailable,
    QueueNotFound,
)
from cometmq.format.delayed import SCHEDULE_TOPIC
from cometmq.v1 import broker_pb2 as pb
from services.broker.retry.retries import RetryService
from tests.support.cluster.broker import LiveBroker, running_broker, running_namesrv
from tests.support.cluster.pullhold import sample
from tests.support.waiting import until

RETRY, DLQ = "%RETRY%G", "%DLQ%G"


@asynccontextmanager
async def cluster(tmp_path: Path, count: int) -> AsyncIterator[tuple[str, LiveBroker]]:
    """One broker whose topic T has ``count`` messages in one queue."""
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
    ):
        await broker.put_topic("T", 1)
        async with Producer(namesrv) as producer:
            for n in range(count):
                await producer.send(Message("T", b"%d" % n, "A", (f"k{n}",)))
        yield namesrv, broker


def consumer(namesrv: str, listener: Any, **changes: Any) -> PushConsumer:
    options = {"rebalance_delay_ms": 1, "concurrency": 1, "batch_count": 4, **changes}
    return PushConsumer(namesrv, "G", listener, options=PushConsumerOptions(**options))


async def committed(broker: LiveBroker, topic: str, offset: int) -> bool:
    position = await broker.committed("G", topic, 0)
    return position is not None and position.offset == offset


async def test_what_a_list_had_not_done_comes_again_and_the_rest_does_not(tmp_path: Path) -> None:
    got: list[ReceivedMessage] = []

    async def listener(messages: list[ReceivedMessage]) -> Later | None:
        got.extend(messages)
        return None if messages[0].reconsume_times else Later(done=2, delay_level=1)

    async with cluster(tmp_path, 4) as (namesrv, broker):
        async with consumer(namesrv, listener) as consuming:
            await consuming.subscribe("T", "A")
            await until(lambda: len(got) >= 6)
        assert sorted(one.body for one in got[4:]) == [b"2", b"3"]
        again = got[4]
        first = next(one for one in got[:4] if one.body == again.body)
        assert (again.topic, again.tag, again.keys) == ("T", "A", first.keys)
        assert (again.unique_id, again.reconsume_times) == (first.unique_id, 1)
        assert await committed(broker, "T", 4)
        assert await committed(broker, RETRY, 2)


async def test_after_its_tries_a_message_is_a_dead_letter(tmp_path: Path) -> None:
    tries: list[int] = []

    async def listener(messages: list[ReceivedMessage]) -> None:
        tries.append(messages[0].reconsume_times)
        raise ValueError("a listener's mistake")

    async with cluster(tmp_path, 1) as (namesrv, broker):
        async with consumer(namesrv, listener) as consuming:
            await consuming.subscribe("T")
            await until(lambda: stored(broker, SCHEDULE_TOPIC, 2) == 1)  # for 10 s
        async with consumer(namesrv, listener, retry_times_max=0) as consuming:
            await consuming.subscribe("T")
            async with Producer(namesrv) as producer:
                await producer.send_and_wait(Message("T", b"dies"))
            await until(lambda: stored(broker, DLQ) == 1)
        assert tries == [0, 0]
        [dead] = await broker.read_queue(DLQ, 0)
        assert (dead.body, dead.reconsume_times) == (b"dies", 1)
        assert dead.properties["DLQ_ORIGIN_TOPIC"] == "T"


def stored(broker: LiveBroker, topic: str, queue_id: int = 0) -> int:
    return broker.store.queue_bounds(topic, queue_id)[1]


async def test_a_call_that_takes_too_long_is_forgotten_and_its_messages_come_again(
    tmp_path: Path,
) -> None:
    """The late call says that they are done; by then they have been sent back (#1600)."""
    late, ended = asyncio.Event(), list[bytes]()

    async def listener(messages: list[ReceivedMessage]) -> None:
        if messages[0].body == b"0":
            await late.wait()
        ended.append(messages[0].body)

    async with cluster(tmp_path, 3) as (namesrv, broker):
        options = {"batch_count": 1, "concurrency": 2, "consume_timeout_ms": 100}
        async with consumer(namesrv, listener, **options) as consuming:
            await consuming.subscribe("T")
            await until(lambda: stored(broker, SCHEDULE_TOPIC, 2) == 1 and len(ended) == 2)
            late.set()
            await until(lambda: len(ended) == 3)
        assert ended == [b"1", b"2", b"0"]
        assert await committed(broker, "T", 3)
        assert stored(broker, SCHEDULE_TOPIC, 2) == 1


async def test_a_pull_consumer_sends_back_and_reads_what_comes_again(tmp_path: Path) -> None:
    async with cluster(tmp_path, 2) as (namesrv, broker), PullConsumer(namesrv, "G") as pulling:
        await pulling.assign(await pulling.queues("T"))
        got: list[ReceivedMessage] = []
        while len(got) < 2:
            got += await pulling.poll()
        await pulling.send_back(got[:1], delay_level=1)
        wrong = ReceivedMessage(got[1].raw, QueueRef("T", 7, "g1"))
        with pytest.raises(QueueNotFound), mock.patch.object(pull, "ITEMS_PER_CALL_MAX", 1):
            await pulling.send_back([wrong, got[1]], delay_level=-1)
        await pulling.commit()
        assert [dead.body for dead in await broker.read_queue(DLQ, 0)] == [got[1].body]
        await pulling.assign(await pulling.queues(RETRY))
        [again] = await pulling.poll()
        assert (again.topic, again.body, again.reconsume_times) == ("T", got[0].body, 1)
        with pytest.raises(DelayLevelInvalid):
            await pulling.send_back([again], delay_level=19)
        again.queue = QueueRef(RETRY, 7, "g1")
        with pytest.raises(QueueNotFound):
            await pulling.send_back([again])


async def test_a_new_group_begins_at_a_time_and_an_old_one_where_it_was(tmp_path: Path) -> None:
    got: list[bytes] = []

    async def listener(messages: list[ReceivedMessage]) -> None:
        got.extend(message.body for message in messages)

    async with cluster(tmp_path, 2) as (namesrv, broker):
        stored_ms = [record.store_time_ms for record in await broker.read_queue("T", 0)]
        await asyncio.sleep(0.002)
        async with Producer(namesrv) as producer:
            await producer.send_and_wait(Message("T", b"later"))
        at = {"consume_from": ConsumeFrom.TIMESTAMP, "consume_from_time_ms": stored_ms[-1] + 1}
        async with consumer(namesrv, listener, **at) as consuming:
            await consuming.subscribe("T")
            await until(lambda: got)
        assert got == [b"later"]
        assert await committed(broker, "T", 3)
        at["consume_from_time_ms"] = stored_ms[0]
        async with Producer(namesrv) as producer:
            await producer.send_and_wait(Message("T", b"more"))
        async with consumer(namesrv, listener, **at) as consuming:
            await consuming.subscribe("T")
            await until(lambda: len(got) > 1)
        assert got == [b"later", b"more"]


async def test_a_pull_consumer_begins_at_a_time(tmp_path: Path) -> None:
    async with cluster(tmp_path, 3) as (namesrv, broker), PullConsumer(namesrv, "G") as pulling:
        [queue] = await pulling.queues("T")
        stored_ms = [record.store_time_ms for record in await broker.read_queue("T", 0)]
        at = await pulling.positions_at([queue], stored_ms[-1] + 1)
        assert at[queue].offset == 3
        await pulling.assign([queue])
        await pulling.seek_to_time(stored_ms[0])
        assert (await pulling.poll())[0].body == b"0"
        with pytest.raises(InvalidRequest):
            await pulling.positions_at([queue], -1)


async def test_no_commit_passes_a_message_that_no_broker_took_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    got: list[bytes] = []

    async def listener(messages: list[ReceivedMessage]) -> Later | None:
        got.append(messages[0].body)
        return Later(delay_level=-1) if messages[0].body == b"1" else None

    async def refuse(*_: object) -> None:
        raise DiskFull("no room")

    async with cluster(tmp_path, 3) as (namesrv, broker):
        changes = {"batch_count": 1, "redeliver_backoff_ms": 20, "redeliver_backoff_max_ms": 20}
        with monkeypatch.context() as patch:
            patch.setattr(RetryService, "send_back", refuse)
            async with consumer(namesrv, listener, **changes) as consuming:
                await consuming.subscribe("T")
                await until(lambda: got.count(b"1") >= 3)  # it comes again here
            assert await committed(broker, "T", 1)
        async with consumer(namesrv, listener, **changes) as consuming:
            await consuming.subscribe("T")
            await until(lambda: stored(broker, DLQ) == 1)
        assert await committed(broker, "T", 3)
        assert [one.body for one in await broker.read_queue(DLQ, 0)] == [b"1"]


async def test_a_send_back_above_a_quota_waits_and_no_listener_sees_it_twice(
    tmp_path: Path,
) -> None:
    got: list[bytes] = []

    async with cluster(tmp_path, 3) as (namesrv, broker):

        async def listener(messages: list[ReceivedMessage]) -> Later | None:
            await until(lambda: stored(broker, DLQ) == len(got))  # a call for each message
            got.append(messages[0].body)
            return Later(delay_level=-1)

        quota = pb.Quota(bytes_per_s=200)  # one message a call uses it up
        await broker.admin.PutQuota(pb.PutQuotaRequest(scope=pb.QUOTA_SCOPE_ADDRESS, send=quota))
        changes = {"batch_count": 1, "concurrency": 1}
        async with consumer(namesrv, listener, **changes) as consuming:
            await consuming.subscribe("T")
            await until(lambda: stored(broker, DLQ) == 3)
        throttled = "cometmq_calls_throttled_total"
        assert await sample(broker.metrics_address, throttled, 'scope="address"') >= 1
        assert sorted(got) == [b"0", b"1", b"2"]


async def test_a_send_back_without_an_answer_is_sent_again_and_no_listener_sees_it_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message came again here, though the broker had taken it: both copies were delivered."""
    got: list[bytes] = []
    lost: list[str] = []
    send_back = RetryService.send_back

    async def listener(messages: list[ReceivedMessage]) -> Later | None:
        got.append(messages[0].body)
        return Later(delay_level=-1) if messages[0].body == b"1" else None

    async def unheard(service: RetryService, group: str, items: Any) -> Any:
        answers = await send_back(service, group, items)
        if not lost:
            lost.append(group)
            raise PeerUnavailable("the answer is lost")
        return answers

    async with cluster(tmp_path, 3) as (namesrv, broker):
        monkeypatch.setattr(RetryService, "send_back", unheard)
        async with consumer(namesrv, listener, batch_count=1, redeliver_backoff_ms=1) as consuming:
            await consuming.subscribe("T")
            await until(lambda: stored(broker, DLQ) == 1 and len(got) == 3)
        assert lost
        assert sorted(got) == [b"0", b"1", b"2"]
        assert await committed(broker, "T", 3)
        assert [one.body for one in await broker.read_queue(DLQ, 0)] == [b"1"]
