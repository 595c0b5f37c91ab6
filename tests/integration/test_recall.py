"""Recall over real gRPC: from the SDK and from bare stubs, in time and too late, through crashes,
and what is refused.
"""

from __future__ import annotations

import asyncio
import base64
import threading
import tracemalloc
from pathlib import Path

import pytest

from cometmq.client import Message, Producer, sync
from cometmq.errors import (
    FlowControl,
    LimitExceeded,
    MessageNotFound,
    PropertiesTooLarge,
    RecallHandleInvalid,
)
from cometmq.format import recall
from cometmq.format.queueunit import UNIT_BYTES
from cometmq.format.timers import TIMER_TOPIC
from cometmq.member.read.records import read_units
from cometmq.model import QueueKey, ReplicationMode
from cometmq.rpc.interceptors import from_proto
from cometmq.store.base import BaseStore
from cometmq.v1 import broker_pb2 as pb
from services.broker.delay import tombstones
from tests.integration.test_broker_timers import end_of, has, now_ms, outgoing
from tests.support.cluster.broker import BrokerClient, refusal, running_broker, running_namesrv
from tests.support.cluster.live_group import live_group
from tests.support.waiting import until_async

HOUR_MS = 3_600_000


async def recalled(broker: BrokerClient, *handles: str) -> list[bool | type[Exception]]:
    answer = await broker.stub.Recall(pb.RecallRequest(handles=handles))
    return [
        type(from_proto(one.error)) if one.HasField("error") else one.recalled
        for one in answer.results
    ]


async def test_a_recalled_message_is_never_seen(tmp_path: Path) -> None:
    async with running_namesrv(tmp_path) as namesrv:
        async with running_broker(tmp_path, namesrv=(namesrv,)) as broker:
            await broker.put_topic("T", 1)
            async with Producer(namesrv) as producer, Producer(namesrv) as other:
                futures = [
                    await producer.send(Message("T", b"%d" % n, delay_ms=1_200)) for n in range(10)
                ]
                receipts = await asyncio.gather(*futures)
                at = await producer.send_and_wait(
                    Message("T", b"at", deliver_at_ms=now_ms() + 1_300)
                )
                handles = [receipt.recall_handle for receipt in receipts]
                assert len(set(handles)) == 10
                assert await producer.recall(handles[3])
                assert await other.recall(handles[7])  # which has sent nothing
                assert await other.recall(at.recall_handle)
                assert await producer.recall(handles[3])  # once more changes nothing
                plain = await producer.send_and_wait(Message("T", b"plain"))
                level = await producer.send_and_wait(Message("T", b"level", delay_level=1))
                assert plain.recall_handle == level.recall_handle == ""
                await has(broker, 10)
                assert not await producer.recall(handles[0])  # too late
                assert await producer.recall(handles[3])
            bodies = await broker.bodies("T", 0)
        expected = {b"%d" % n for n in range(10) if n not in (3, 7)} | {b"plain", b"level"}
        assert set(bodies) == expected
        assert len(bodies) == len(expected)


async def test_a_crash_brings_no_recalled_message_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        messages = [outgoing(b"%d" % n, delay_ms=3_000) for n in range(100)]
        sent = (await broker.stub.Send(pb.SendRequest(messages=messages))).sent
        handles = [one.recall_handle for one in sent]
        assert await recalled(broker, *handles[:50]) == [True] * 50
        broker.crash()
    async with running_broker(tmp_path) as broker:
        assert await recalled(broker, handles[0], handles[60]) == [True, True]
        broker.crash()
    async with running_broker(tmp_path) as broker:
        await has(broker, 49)
        expected = [b"%d" % n for n in range(50, 100) if n != 60]
        assert await broker.bodies("T", 0) == expected
        await broker.stub.Send(pb.SendRequest(messages=[outgoing(b"end", delay_ms=100)]))
        await has(broker, 50)
        assert await broker.bodies("T", 0) == [*expected, b"end"]
        assert await recalled(broker, *handles[:2], handles[60], handles[61]) == [
            *[True] * 3,
            False,
        ]
        counts: list[int] = []

        async def counted(store: BaseStore, queue: QueueKey, first: int, count: int) -> bytes:
            units = await read_units(store, queue, first, count)
            counts.append(len(units) // UNIT_BYTES)
            return units

        monkeypatch.setattr(tombstones, "read_units", counted)
        answers = await recalled(broker, *handles)
        assert answers == [n < 50 or n == 60 for n in range(100)]
        assert sum(counts) <= broker.store.queue_bounds(TIMER_TOPIC, 0)[1], "it is read once"
        monkeypatch.setattr(tombstones, "SEARCH_UNITS_MAX", 10)  # it says that it does not know
        monkeypatch.setattr(tombstones, "CALL_UNITS_MAX", 20)
        old = [handles[number] for number in (80, 70, 61)]
        assert await recalled(broker, *old) == [FlowControl, MessageNotFound, MessageNotFound]
        assert await recalled(broker, handles[80]) == [MessageNotFound]


async def test_a_call_with_many_handles_fits_a_small_log_file(tmp_path: Path) -> None:
    """What says that they are recalled was one batch, and was refused: BATCH_TOO_LARGE."""
    async with running_broker(tmp_path, mapped_file_size_commit_log=64 * 1024) as broker:
        await broker.put_topic("T", 1)
        handles: list[str] = []
        for _ in range(20):
            messages = [outgoing(b"x", delay_ms=HOUR_MS)] * 20
            sent = (await broker.stub.Send(pb.SendRequest(messages=messages))).sent
            handles += [one.recall_handle for one in sent]
        assert await recalled(broker, *handles) == [True] * 400
        broker.crash()
    async with running_broker(tmp_path, mapped_file_size_commit_log=64 * 1024) as broker:
        assert await recalled(broker, *handles[::100]) == [True] * 4


async def test_the_same_call_again_gives_the_same_handle(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        message = outgoing(b"x", delay_ms=HOUR_MS, properties={"UNIQ_KEY": "01AB"})
        first = await broker.stub.Send(pb.SendRequest(messages=[message]))
        again = await broker.stub.Send(pb.SendRequest(messages=[message]))
        assert first.sent[0].message_id == again.sent[0].message_id  # it is stored once
        one, other = (recall.decode(answer.sent[0].recall_handle) for answer in (first, again))
        assert one == other
        assert one.due_ms == first.store_time_ms + HOUR_MS
        assert await recalled(broker, again.sent[0].recall_handle) == [True]


@pytest.mark.parametrize("unique_id", ["a b", " 1 2:3:4 5 ", "x" * 12_000, "ü\n%"])
async def test_any_unique_id_can_be_recalled(tmp_path: Path, unique_id: str) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        message = outgoing(b"x", delay_ms=HOUR_MS, properties={"UNIQ_KEY": unique_id})
        [sent] = (await broker.stub.Send(pb.SendRequest(messages=[message]))).sent
        assert recall.decode(sent.recall_handle).unique_id == unique_id
        message.properties["UNIQ_KEY"] = "y" * 20_000  # the tombstone has it twice
        [other] = (await broker.stub.Send(pb.SendRequest(messages=[message]))).sent
        handles = [other.recall_handle, sent.recall_handle]
        assert await recalled(broker, *handles) == [PropertiesTooLarge, True]


async def test_handles_that_are_none(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        messages = [outgoing(b"x", delay_ms=HOUR_MS)] * 2
        sent = (await broker.stub.Send(pb.SendRequest(messages=messages))).sent
        good = recall.decode(sent[0].recall_handle)
        run = good.run
        forged = [
            good._replace(mac=bytes(16)),
            good._replace(mac=b""),
            good._replace(run=run._replace(first=run.first + 1)),
            good._replace(run=run._replace(message_count=2)),
            good._replace(run=run._replace(topic="U")),
            good._replace(run=run._replace(broker_group="other")),
            good._replace(run=run._replace(generation=99)),
            good._replace(due_ms=good.due_ms + 1),
            good._replace(unique_id=sent[1].message_id),
        ]
        handles = [one.encode() for one in forged]
        rocketmq = base64.urlsafe_b64encode(b"v1 T broker 1700000000000 01AB").decode()
        handles += ["", "x", "a" * 2_000, "é", rocketmq, sent[0].recall_handle[:-8]]
        answers = await recalled(broker, *handles)
        assert answers == [RecallHandleInvalid] * len(handles)
        assert await recalled(broker, sent[0].recall_handle) == [True]
        extreme = good._replace(due_ms=10**19).encode()  # of a message that waits no more
        assert await recalled(broker, extreme) == [RecallHandleInvalid]
        too_many = broker.stub.Recall(pb.RecallRequest(handles=["x"] * 1_025))
        assert isinstance(await refusal(too_many), LimitExceeded)
        assert await recalled(broker) == []
    async with running_broker(tmp_path / "other") as other:  # a group of the same name
        await other.put_topic("T", 1)
        assert await recalled(other, sent[1].recall_handle) == [RecallHandleInvalid]


async def test_the_sync_client_recalls(tmp_path: Path) -> None:
    def work(namesrv: str) -> bool:
        with sync.Producer(namesrv) as producer:
            receipt = producer.send_and_wait(Message("T", b"x", delay_ms=HOUR_MS))
            with pytest.raises(RecallHandleInvalid):
                producer.recall("x")
            return producer.recall(receipt.recall_handle)

    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
    ):
        await broker.put_topic("T", 1)
        assert await asyncio.to_thread(work, namesrv)
        assert await end_of(broker, "T") == 0


async def test_what_waits_is_listed_by_topic_and_time(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        await broker.put_topic("U", 1)
        begun_ms = now_ms()
        messages = [
            pb.OutgoingMessage(topic="TU"[n % 2], body=b"x", deliver_at_ms=begun_ms + HOUR_MS + n)
            for n in range(10)
        ]
        sent = (await broker.stub.Send(pb.SendRequest(messages=messages))).sent
        assert await recalled(broker, sent[4].recall_handle) == [True]

        async def listed(**fields: object) -> pb.ListDelayedResponse:
            return await broker.admin.ListDelayed(pb.ListDelayedRequest(**fields))  # type: ignore[arg-type]

        async def are_all_seen() -> bool:
            return list((await listed(until_ms=[begun_ms + 2 * HOUR_MS])).counts) == [11]

        # The recalled one, and the record that says so, count too.
        await until_async(are_all_seen)
        found = await listed(count_max=100, until_ms=[begun_ms])
        kept = [one for n, one in enumerate(sent) if n != 4]
        assert [one.message_id for one in found.messages] == [one.message_id for one in kept]
        assert [one.recall_handle for one in found.messages] != [""] * 9
        assert list(found.counts) == [0]
        only = await listed(count_max=100, topic="U", first_ms=begun_ms + HOUR_MS + 5)
        assert [one.queue.topic for one in only.messages] == ["U"] * 3
        page = await listed(count_max=4)
        rest = await listed(count_max=100, after=page.next)
        assert [*page.messages, *rest.messages] == list(found.messages)
        assert not rest.HasField("next")
        assert await recalled(broker, found.messages[0].recall_handle) == [True]


async def test_a_list_reads_no_disk_on_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand looks into a queue that is not in memory would hold everybody up."""
    read_units = BaseStore.read_units

    def as_if_cold(store: BaseStore, topic: str, *place: int, nowait: bool = False) -> bytes:
        if topic == TIMER_TOPIC and nowait:
            raise BlockingIOError
        assert topic != TIMER_TOPIC or threading.current_thread() is not threading.main_thread()
        return read_units(store, topic, *place, nowait=nowait)

    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        messages = [outgoing(b"x", delay_ms=HOUR_MS + n % 7) for n in range(20)]
        await broker.stub.Send(pb.SendRequest(messages=messages))

        async def are_listed() -> bool:
            found = await broker.admin.ListDelayed(pb.ListDelayedRequest(count_max=1_000))
            return len(found.messages) == 20

        await until_async(are_listed)
        with monkeypatch.context() as patch:
            patch.setattr(BaseStore, "read_units", as_if_cold)
            assert await are_listed()


async def test_what_is_listed_dropped_or_recalled_is_read_piece_by_piece(tmp_path: Path) -> None:
    body, count = bytes(400_000), 40
    async with running_broker(tmp_path, mapped_file_size_commit_log=1 << 25) as broker:
        await broker.put_topic("T", 1)
        timer = pb.OutgoingMessage(topic="T", body=body, delay_ms=HOUR_MS)
        half = pb.OutgoingMessage(topic="T", body=body, producer_group="P")
        handles: list[str] = []
        for _ in range(count):
            [one] = (await broker.stub.Send(pb.SendRequest(messages=[timer]))).sent
            handles.append(one.recall_handle)
            await broker.stub.Send(pb.SendRequest(messages=[half]))

        async def listed() -> bool:
            request = pb.ListDelayedRequest(count_max=1_000)
            return len((await broker.admin.ListDelayed(request)).messages) == count

        async def dropped() -> bool:
            request = pb.DropHalvesRequest(half_offsets=range(count))
            return len((await broker.admin.DropHalves(request)).results) == count

        async def are_recalled() -> bool:
            return await recalled(broker, *handles) == [True] * count

        await until_async(listed)
        for work in (listed, dropped, are_recalled):
            tracemalloc.start()
            try:
                assert await work()
                _, most_bytes = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert most_bytes < 10 * len(body), work


async def test_a_fail_over_brings_no_recalled_message_back_and_loses_none(tmp_path: Path) -> None:
    """A member that only copied the log delivers what waits, once, and nothing recalled."""
    quick = {"lease_duration_s": 1.0, "lease_renew_s": 0.1, "lease_poll_s": 0.05}
    options = {**quick, "in_sync_lag_s_max": 0.5, "replication_mode": ReplicationMode.APPENDED}
    async with live_group(tmp_path, 2, **options) as group:
        await group.all_in_sync(0, 1)
        first = group[0].client
        await first.put_topic("T", 1)
        soon = [outgoing(b"soon %d" % n, delay_ms=10 + n) for n in range(20)]
        later = [outgoing(b"later %d" % n, delay_ms=4_000 + n) for n in range(20)]
        later.append(outgoing(b"in an hour", delay_ms=HOUR_MS))
        await first.stub.Send(pb.SendRequest(messages=soon))
        sent = (await first.stub.Send(pb.SendRequest(messages=later))).sent
        await has(first, 20)
        assert await recalled(first, *[one.recall_handle for one in sent[:5]]) == [True] * 5
        await group[0].crash()
        await group[1].until_role("writer")
        second = group[1].client
        assert await recalled(second, sent[20].recall_handle) == [True]
        await has(second, 35)
        # The first answer may be lost: behind its time the next writer knows who was in time.
        handles = [one.recall_handle for one in sent]
        assert await recalled(second, *handles) == [True] * 5 + [False] * 15 + [True]
        bodies = await second.bodies("T", 0)
        assert bodies[:20] == [b"soon %d" % n for n in range(20)]
        assert bodies[20:] == [b"later %d" % n for n in range(5, 20)]
        await group[0].start("follower")
        await group.all_in_sync(0, 1)
        await group.in_step()
        assert await end_of(second, "T") == 35
