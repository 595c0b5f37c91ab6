"""Groups that receive (POP), over real gRPC: leases, acknowledgements, order, faults."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from cometmq.errors import (
    CometError,
    FilterInvalid,
    GroupModeMismatch,
    GroupNameInvalid,
    GroupNotFound,
    HandleInvalid,
    InvalidRequest,
    InvisibleTimeInvalid,
    LimitExceeded,
    NoPermission,
    NotWriter,
    QueueNotFound,
    StoreDamaged,
    TopicNotFound,
)
from cometmq.format import record
from cometmq.format.properties import SHARDING_KEY
from cometmq.format.record import Record
from cometmq.member.state.keeper import StateKeeper
from cometmq.messaging.changes import GroupDropped
from cometmq.messaging.state import STATE_TOPIC
from cometmq.model import QueueKey, ReplicationMode
from cometmq.rpc.interceptors import from_proto
from cometmq.v1 import broker_pb2 as pb
from cometmq.v1 import common_pb2 as common
from services.broker.pop import acks, receive
from services.broker.retry.retries import RetryService
from tests.support.cluster.broker import BrokerClient, LiveBroker, refusal, running_broker
from tests.support.cluster.live_group import live_group
from tests.support.cluster.pop_cluster import Ahead
from tests.support.independent.index import Shape
from tests.support.independent.reader import Store
from tests.support.waiting import until_async

DLQ, RETRY = "%DLQ%G", "%RETRY%G"
INDEX_OPTIONS = {"max_hash_slot_num": 100, "max_index_num": 400}


def subscription(topic: str, *tags: str, sql: str = "") -> pb.Subscription:
    return pb.Subscription(topic=topic, filter=common.Filter(tags=tags, sql=sql))


async def receive_from(
    broker: BrokerClient, *topics: str | pb.Subscription, group: str = "G", **fields: Any
) -> pb.ReceiveResponse:
    subscriptions = [
        subscription(topic) if isinstance(topic, str) else topic for topic in topics or ("T",)
    ]
    fields = {"invisible_ms": 30_000, **fields}
    request = pb.ReceiveRequest(group=group, subscriptions=subscriptions, **fields)
    return await broker.stub.Receive(request)


def records(answer: pb.ReceiveResponse) -> list[Record]:
    return [one for run in answer.runs for one in record.decode_all(run.records)]


def bodies(answer: pb.ReceiveResponse) -> list[bytes]:
    return [one.body for one in records(answer)]


async def receive_all(broker: BrokerClient, *topics: Any, **fields: Any) -> list[pb.ReceivedRun]:
    runs: list[pb.ReceivedRun] = []
    while True:
        answer = await receive_from(broker, *topics, **fields)
        runs += answer.runs
        if not answer.runs and not answer.has_more:
            return runs


async def ack(
    broker: BrokerClient, *items: pb.AckItem | str, group: str = "G"
) -> list[CometError | None]:
    asked = [pb.AckItem(handle=item) if isinstance(item, str) else item for item in items]
    answer = await broker.stub.AckMessages(pb.AckMessagesRequest(group=group, items=asked))
    return [from_proto(one.error) if one.HasField("error") else None for one in answer.results]


async def change(
    broker: BrokerClient, *items: pb.ChangeInvisibleTimeItem, group: str = "G"
) -> list[pb.ChangeInvisibleTimeResult | CometError]:
    request = pb.ChangeInvisibleTimeRequest(group=group, items=items)
    answer = await broker.stub.ChangeInvisibleTime(request)
    return [from_proto(one.error) if one.HasField("error") else one for one in answer.results]


def later(
    handle: str, ms: int = 30_000, *, first: int = 0, count: int = 0, failed: bool = False
) -> pb.ChangeInvisibleTimeItem:
    messages = pb.AckItem(handle=handle, first_offset=first, count=count)
    return pb.ChangeInvisibleTimeItem(messages=messages, invisible_ms=ms, failed=failed)


async def sent(broker: BrokerClient, queues: int, *texts: bytes) -> None:
    await broker.put_topic("T", queues)
    for number, text in enumerate(texts):
        await broker.send("T", number % queues, text)
    for queue_id in range(queues):
        await broker.read_queue("T", queue_id)


def numbers(first: int, end: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, end)]


async def test_members_share_queues_and_what_is_not_acknowledged_comes_again(
    tmp_path: Path,
) -> None:
    clock = Ahead()
    async with running_broker(tmp_path, clock=clock) as broker:
        await sent(broker, 4, *numbers(0, 20))
        first, second = await asyncio.gather(
            *(receive_from(broker, max_count=10) for _ in range(2))
        )
        assert sorted(bodies(first) + bodies(second)) == sorted(numbers(0, 20))
        assert {run.attempt for run in [*first.runs, *second.runs]} == {1}
        assert not (await receive_from(broker)).runs
        assert await ack(broker, *(run.handle for run in first.runs)) == [None] * len(first.runs)
        clock.later_s = 31
        again = await receive_from(broker, max_count=1_000)
        assert sorted(bodies(again)) == sorted(bodies(second))
        assert {run.attempt for run in again.runs} == {2}
        late = await ack(broker, *(run.handle for run in second.runs))
        assert all(isinstance(one, HandleInvalid) for one in late)
        assert await ack(broker, *(run.handle for run in again.runs)) == [None] * len(again.runs)
        clock.later_s = 62
        assert not (await receive_from(broker)).runs
        for queue_id in range(4):
            committed = await broker.committed("G", "T", queue_id)
            assert committed is not None
            assert committed.offset == 5


async def test_parts_of_a_handle_and_acknowledgements_that_come_twice(tmp_path: Path) -> None:
    """More of them than deliveries do no harm (RocketMQ #5408)."""
    clock = Ahead()
    async with running_broker(tmp_path, clock=clock) as broker:
        await sent(broker, 1, *numbers(0, 10))
        [run] = (await receive_from(broker)).runs
        some = pb.AckItem(handle=run.handle, first_offset=3, count=4)
        assert await ack(broker, some, some, some) == [None] * 3
        assert await ack(broker, pb.AckItem(handle=run.handle, first_offset=5, count=1)) == [None]
        outside = pb.AckItem(handle=run.handle, first_offset=9, count=2)
        negative = pb.AckItem(handle=run.handle, first_offset=3, count=-1)
        assert [type(one) for one in await ack(broker, outside, negative, some)] == [
            HandleInvalid,
            HandleInvalid,
            type(None),
        ]
        clock.later_s = 31
        assert bodies(await receive_from(broker)) == [b"0", b"1", b"2", b"7", b"8", b"9"]
        # Of what came again the old handle is good for nothing, of what is done it says so.
        assert await ack(broker, some) == [None]
        [error] = await ack(broker, pb.AckItem(handle=run.handle, first_offset=2, count=2))
        assert isinstance(error, HandleInvalid)


async def test_a_changed_invisible_time_has_a_new_handle(tmp_path: Path) -> None:
    """Slow work is not delivered again while it is renewed (RocketMQ #3787)."""
    clock = Ahead()
    async with running_broker(tmp_path, clock=clock) as broker:
        await sent(broker, 1, *numbers(0, 4))
        [run] = (await receive_from(broker)).runs
        handle = run.handle
        for _ in range(5):
            clock.later_s += 25
            [changed] = await change(broker, later(handle, 30_000, first=1, count=3))
            assert isinstance(changed, pb.ChangeInvisibleTimeResult)
            assert changed.visible_ms > clock.wall_ms() + 29_000
            assert isinstance((await ack(broker, handle))[0], HandleInvalid) or clock.later_s == 25
            handle = changed.handle
            assert b"2" not in bodies(await receive_from(broker))
        one, gone = await change(broker, later(handle, 10_000, first=2, count=1), later(handle))
        assert isinstance(one, pb.ChangeInvisibleTimeResult)
        assert isinstance(gone, pb.ChangeInvisibleTimeResult), "the rest of the handle"
        clock.later_s += 11
        [again] = (await receive_from(broker)).runs
        assert [one.body for one in record.decode_all(again.records)] == [b"2"]
        assert again.attempt == 2
        assert await ack(broker, gone.handle, again.handle) == [None, None]
        [done] = await change(broker, later(gone.handle))
        assert isinstance(done, HandleInvalid)


async def test_a_change_whose_answer_was_lost_is_answered_again(tmp_path: Path) -> None:
    clock = Ahead()
    async with running_broker(tmp_path, clock=clock) as broker:
        await sent(broker, 1, *numbers(0, 3))
        settings = pb.GroupSettings(group="G", mode=pb.CONSUME_MODE_POP, retry_times_max=0)
        await broker.admin.PutGroup(pb.PutGroupRequest(settings=settings))
        [run] = (await receive_from(broker)).runs
        asked = later(run.handle, 60_000, first=0, count=2)
        [lost] = await change(broker, asked)
        clock.later_s = 5
        [changed] = await change(broker, asked)
        assert isinstance(lost, pb.ChangeInvisibleTimeResult)
        assert isinstance(changed, pb.ChangeInvisibleTimeResult)
        assert changed.visible_ms - lost.visible_ms >= 5_000, "the time that it asked for"
        [other] = await change(broker, later(run.handle, 50_000, first=0, count=2))
        assert isinstance(other, HandleInvalid), "that was not asked for"
        assert await ack(broker, changed.handle) == [None]
        [late] = await change(broker, asked)
        assert isinstance(late, HandleInvalid), "they are acknowledged"
        dead = later(run.handle, first=2, count=1, failed=True)
        [sent_away] = await change(broker, dead)
        assert await change(broker, dead) == [sent_away]
        assert len(await broker.read_queue(DLQ, 0)) == 1


async def test_what_fails_waits_for_the_groups_policy_and_dies(tmp_path: Path) -> None:
    clock = Ahead()
    async with running_broker(tmp_path, clock=clock) as broker:
        await sent(broker, 1, b"0")
        retry_policy = pb.RetryPolicy(
            kind=pb.RETRY_POLICY_KIND_CUSTOMIZED, steps_ms=[40_000, 80_000]
        )
        settings = pb.GroupSettings(
            group="G", retry_times_max=2, mode=pb.CONSUME_MODE_POP, retry_policy=retry_policy
        )
        await broker.admin.PutGroup(pb.PutGroupRequest(settings=settings))
        for attempt, wait_s in ((1, 40), (2, 80)):
            [run] = (await receive_from(broker)).runs
            assert run.attempt == attempt
            [changed] = await change(broker, later(run.handle, 0, failed=True))
            assert isinstance(changed, pb.ChangeInvisibleTimeResult)
            clock.later_s += wait_s - 2
            assert not (await receive_from(broker)).runs
            clock.later_s += 3
        [run] = (await receive_from(broker)).runs
        [changed] = await change(broker, later(run.handle, 0, failed=True))
        assert changed == pb.ChangeInvisibleTimeResult()
        [dead] = await broker.read_queue(DLQ, 0)
        assert (dead.body, dead.reconsume_times) == (b"0", 3)
        assert dead.properties["DLQ_ORIGIN_TOPIC"] == "T"
        clock.later_s += 1_000_000
        assert not (await receive_from(broker)).runs


async def test_a_message_that_nobody_acknowledges_is_a_dead_letter_after_its_tries(
    tmp_path: Path,
) -> None:
    clock = Ahead()
    async with running_broker(tmp_path, clock=clock) as broker:
        await sent(broker, 1, b"0", b"1")
        settings = pb.GroupSettings(group="G", retry_times_max=1, mode=pb.CONSUME_MODE_POP)
        await broker.admin.PutGroup(pb.PutGroupRequest(settings=settings))
        for attempt in (1, 2):
            [run] = (await receive_from(broker)).runs
            assert (run.attempt, run.count) == (attempt, 2)
            clock.later_s += 31
        assert not (await receive_from(broker)).runs
        dead = await broker.read_queue(DLQ, 0)
        assert [(one.body, one.reconsume_times) for one in dead] == [(b"0", 2), (b"1", 2)]
        assert (await broker.committed("G", "T", 0)).offset == 2  # type: ignore[union-attr]


async def test_what_becomes_a_dead_letter_cannot_be_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither while it is stored nor later: who gets an OK finds no dead letter."""
    clock, gate, stores = Ahead(), asyncio.Event(), asyncio.Event()
    send_back = RetryService.send_back

    async def held_up(retries: RetryService, *args: Any) -> Any:
        stores.set()
        await gate.wait()
        return await send_back(retries, *args)

    monkeypatch.setattr(RetryService, "send_back", held_up)
    async with running_broker(tmp_path, clock=clock) as broker:
        await sent(broker, 1, b"0", b"1", b"2")
        settings = pb.GroupSettings(group="G", retry_times_max=0, mode=pb.CONSUME_MODE_POP)
        await broker.admin.PutGroup(pb.PutGroupRequest(settings=settings))
        [run] = (await receive_from(broker)).runs

        def part(offset: int) -> pb.AckItem:
            return pb.AckItem(handle=run.handle, first_offset=offset, count=1)

        assert await ack(broker, part(1)) == [None]
        clock.later_s = 31
        received = asyncio.create_task(receive_from(broker))
        await stores.wait()
        [while_stored] = await ack(broker, run.handle)
        gate.set()
        assert not (await received).runs
        [later_on] = await ack(broker, part(0))
        assert isinstance(while_stored, HandleInvalid)
        assert isinstance(later_on, HandleInvalid)
        assert await ack(broker, part(1)) == [None], "again"
        assert await broker.bodies(DLQ, 0) == [b"0", b"2"]


async def test_a_dead_letter_that_cannot_be_stored_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_room(keeper: StateKeeper, *_: object, **__: object) -> None:
        raise LimitExceeded("there are as many topics as there may be")

    clock = Ahead()
    async with running_broker(tmp_path, clock=clock) as broker:
        await sent(broker, 1, b"0", b"1")
        settings = pb.GroupSettings(group="G", retry_times_max=0, mode=pb.CONSUME_MODE_POP)
        await broker.admin.PutGroup(pb.PutGroupRequest(settings=settings))
        assert bodies(await receive_from(broker)) == [b"0", b"1"]
        clock.later_s = 31
        with monkeypatch.context() as patch:
            patch.setattr(StateKeeper, "create_system_topic", no_room)
            await broker.send("T", 0, b"2")
            await broker.read_queue("T", 0)
            [run] = (await receive_from(broker)).runs
            assert [one.body for one in record.decode_all(run.records)] == [b"2"]
            assert await ack(broker, run.handle) == [None]
            assert 0 < (await receive_from(broker)).again_ms <= 10_000
        clock.later_s = 42
        assert not (await receive_from(broker)).runs
        assert await broker.bodies(DLQ, 0) == [b"0", b"1"]
        assert (await broker.committed("G", "T", 0)).offset == 3  # type: ignore[union-attr]


async def test_a_restart_keeps_leases_and_acknowledgements(tmp_path: Path) -> None:
    """RocketMQ #3503, #7724, #7914, #10985."""
    clock = Ahead()
    async with running_broker(tmp_path, clock=clock) as broker:
        await sent(broker, 2, *numbers(0, 40))
        runs = (await receive_from(broker, max_count=30)).runs
        assert await ack(broker, *(run.handle for run in runs[1:])) == [None] * (len(runs) - 1)
        some = pb.AckItem(handle=runs[0].handle, first_offset=2, count=5)
        assert await ack(broker, some) == [None]
        await broker.read_queue("T", 0)
        broker.crash()
    for crash in (True, False, False):
        async with running_broker(tmp_path, clock=clock) as broker:
            fresh = await receive_from(broker, max_count=1_000)
            known = {body for run in runs for body in _bodies(run)}
            assert not known & set(bodies(fresh))
            if fresh.runs:
                await ack(broker, *(run.handle for run in fresh.runs))
            if crash:
                broker.crash()
    clock.later_s = 31
    async with running_broker(tmp_path, clock=clock) as broker:
        again = (await receive_from(broker)).runs
        wanted = _bodies(runs[0])
        assert [body for run in again for body in _bodies(run)] == wanted[:2] + wanted[7:]
        assert await ack(broker, *(run.handle for run in again)) == [None] * len(again)
        assert not await receive_all(broker)
        committed = [await broker.committed("G", "T", queue_id) for queue_id in (0, 1)]
        assert [one.offset for one in committed if one is not None] == [20, 20]


def _bodies(run: pb.ReceivedRun) -> list[bytes]:
    return [one.body for one in record.decode_all(run.records)]


async def test_the_documents_alone_tell_what_members_have(tmp_path: Path) -> None:
    """An independent reader of the folder knows the leases and floors that the broker knows."""
    clock = Ahead()
    async with running_broker(tmp_path, clock=clock, **INDEX_OPTIONS) as broker:
        await sent(broker, 2, *numbers(0, 40))
        runs = (await receive_from(broker, max_count=30)).runs
        await ack(broker, pb.AckItem(handle=runs[0].handle, first_offset=3, count=4))
        await change(broker, later(runs[0].handle, first=10, count=2))
        clock.later_s = 31
        again = await receive_from(broker, subscription("T", sql="n IS NULL"), max_count=7)
        await ack(broker, *(run.handle for run in again.runs[1:]))
    async with running_broker(tmp_path, clock=clock, **INDEX_OPTIONS) as broker:
        await ack(broker, again.runs[0].handle)
        wanted = {
            key: (
                queue.next_offset,
                queue.floor,
                {one.number: (one.visible_ms, one.attempt, one.count) for one in queue},
            )
            for key, queue in broker.state.pops.of_group("G").items()
        }
    with Store(tmp_path / "store", Shape(*INDEX_OPTIONS.values())) as store:
        assert store.state is not None
        found = {
            (topic, queue_id): (
                pop.next_offset,
                pop.floor,
                {number: (*one[:2], len(one[2])) for number, one in pop.leases.items()},
            )
            for (_, topic, queue_id), pop in store.state.pops.items()
        }
        committed = {key[1:]: one.offset for key, one in store.state.offsets.items()}
    assert found == wanted
    assert committed == {key: floor for key, (_, floor, _) in wanted.items()}


async def test_an_attempt_that_comes_again_gets_the_same_for_its_own_time(tmp_path: Path) -> None:
    clock = Ahead()
    async with running_broker(tmp_path, clock=clock) as broker:
        await sent(broker, 2, *numbers(0, 20))
        first = await receive_from(broker, max_count=7, attempt_id="a", invisible_ms=10_000)
        clock.later_s = 6
        second = await receive_from(broker, max_count=7, attempt_id="a", invisible_ms=60_000)
        assert bodies(second) == bodies(first)
        assert {run.attempt for run in second.runs} == {1}
        gained_ms = second.runs[0].visible_ms - first.runs[0].visible_ms
        assert 56_000 <= gained_ms <= 56_000 + 5_000, "counted from the second call"
        assert isinstance((await ack(broker, first.runs[0].handle))[0], HandleInvalid)
        await ack(broker, second.runs[0].handle)
        third = await receive_from(broker, max_count=7, attempt_id="a")
        assert bodies(third) == bodies(second)[second.runs[0].count :] or len(second.runs) == 1
        other = await receive_from(broker, max_count=7, attempt_id="b")
        assert not set(bodies(other)) & set(bodies(first))
        other_group = await receive_from(broker, max_count=20, attempt_id="a", group="H")
        assert len(bodies(other_group)) == 20
        clock.later_s = 99
        again = await receive_from(broker, max_count=7, attempt_id="b")
        assert {run.attempt for run in again.runs} == {2}


async def test_an_attempt_that_asks_for_less_gets_no_more_than_that(tmp_path: Path) -> None:
    """What it does not want any more is anybody's at once, as if it had not been delivered."""
    async with running_broker(tmp_path) as broker:
        await sent(broker, 1, *numbers(0, 9))
        await receive_from(broker, max_count=9, attempt_id="a")
        less = await receive_from(broker, max_count=4, attempt_id="a")
        assert bodies(less) == numbers(0, 4)
        rest = await receive_from(broker, max_count=9)
        assert bodies(rest) == numbers(4, 9)
        assert {run.attempt for run in rest.runs} == {1}
        await receive_from(broker, max_count=9, attempt_id="c")
        runs = [*less.runs, *rest.runs]
        assert await ack(broker, *(run.handle for run in runs)) == [None] * len(runs)


async def test_what_a_call_got_before_it_was_cancelled_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its messages were nobody's until their time was over."""
    waiting, ended = asyncio.Event(), asyncio.Event()
    from_queue = receive.ReceiveService._from_queue

    async def waits_at_the_second(service: Any, call: Any, *where: Any) -> None:
        if call.taken:
            waiting.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
        await from_queue(service, call, *where)

    async with running_broker(tmp_path) as broker:
        await sent(broker, 2, *numbers(0, 20))
        with monkeypatch.context() as patch:
            patch.setattr(receive.ReceiveService, "_from_queue", waits_at_the_second)
            call = asyncio.create_task(receive_from(broker, max_count=20, attempt_id="a"))
            await waiting.wait()
            call.cancel()
            await ended.wait()
        first = await receive_from(broker, max_count=20, attempt_id="a")
        second = await receive_from(broker, max_count=20)
        assert len(bodies(first)) == 10
        assert sorted(bodies(first) + bodies(second)) == sorted(numbers(0, 20))


class SlowQueue:
    """Holds back the first call that looks at a queue, in its turn."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.reached, self.go_on = asyncio.Event(), asyncio.Event()
        from_queue = receive.ReceiveService._from_queue

        async def waits(service: Any, *args: Any) -> None:
            if not self.reached.is_set():
                self.reached.set()
                await self.go_on.wait()
            await from_queue(service, *args)

        patch.setattr(receive.ReceiveService, "_from_queue", waits)


async def test_a_group_that_is_about_to_pull_receives_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a member got behind the hand-over would come a second time."""
    async with running_broker(tmp_path) as broker:
        await sent(broker, 2)
        await put_mode(broker, pb.CONSUME_MODE_POP)
        assert not (await receive_from(broker)).runs  # the next call begins with queue 1
        for queue_id in (0, 1):
            await broker.send("T", queue_id, b"%d" % queue_id)
            await broker.read_queue("T", queue_id)
        slow = SlowQueue(monkeypatch)
        call = asyncio.create_task(receive_from(broker))
        await slow.reached.wait()
        change_of_mode = asyncio.create_task(put_mode(broker, pb.CONSUME_MODE_PULL))

        async def is_leaving() -> bool:
            try:
                await ack(broker)
            except grpc.aio.AioRpcError:
                return True
            return False

        await until_async(is_leaving)
        slow.go_on.set()
        assert isinstance(await refusal(call), GroupModeMismatch)
        await change_of_mode


async def test_what_was_received_before_a_reset_is_not_sent_back_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_broker(tmp_path) as broker:
        await sent(broker, 1, b"0")
        settings = pb.GroupSettings(group="G", retry_times_max=0, mode=pb.CONSUME_MODE_POP)
        await broker.admin.PutGroup(pb.PutGroupRequest(settings=settings))
        [run] = (await receive_from(broker)).runs
        slow, sends_away = SlowQueue(monkeypatch), asyncio.Event()
        send_away = acks.AckService._send_away

        async def told(service: Any, *args: Any) -> Any:
            sends_away.set()
            return await send_away(service, *args)

        monkeypatch.setattr(acks.AckService, "_send_away", told)
        other = asyncio.create_task(receive_from(broker))
        await slow.reached.wait()
        failed = asyncio.create_task(change(broker, later(run.handle, 0, failed=True)))
        await sends_away.wait()
        reset = pb.ResetOffsetsRequest(group="G", topic="T", offset=1)
        await broker.admin.ResetOffsets(reset)
        slow.go_on.set()
        await other
        [refused] = await failed
        assert isinstance(refused, HandleInvalid)
        assert isinstance(await refusal(broker.status(DLQ, 0)), TopicNotFound)


async def send_keys(broker: BrokerClient, keys: Sequence[str]) -> None:
    await broker.put_topic("T", 1)
    for number, key in enumerate(keys):
        properties = {SHARDING_KEY: key} if key else {}
        message = pb.OutgoingMessage(
            topic="T", queue_id=0, body=b"%d" % number, properties=properties
        )
        await broker.stub.Send(pb.SendRequest(messages=[message]))
    await broker.read_queue("T", 0)


async def test_messages_of_a_message_group_come_one_after_the_other(tmp_path: Path) -> None:
    clock = Ahead()
    async with running_broker(tmp_path, clock=clock) as broker:
        await send_keys(broker, ["a", "a", "b", "a", "c", "b", "", "", "d"])
        settings = pb.GroupSettings(
            group="G", consume_orderly=True, mode=pb.CONSUME_MODE_POP, retry_times_max=3
        )
        await broker.admin.PutGroup(pb.PutGroupRequest(settings=settings))
        first = await receive_from(broker)
        assert bodies(first) == [b"0", b"2", b"4", b"6", b"7", b"8"], "no key, no order"
        blocked = await receive_from(broker)
        assert not blocked.runs
        assert blocked.is_blocked
        assert 29_000 < blocked.again_ms <= 30_000, "an acknowledgement is told sooner"
        [run] = first.runs
        await ack(broker, pb.AckItem(handle=run.handle, first_offset=2, count=1))
        [second] = (await receive_from(broker)).runs
        assert (_bodies(second), second.attempt) == ([b"5"], 1)
        broker.crash()
    async with running_broker(tmp_path, clock=clock) as broker:
        assert not (await receive_from(broker)).runs
        await ack(broker, pb.AckItem(handle=run.handle, first_offset=0, count=1))
        assert bodies(await receive_from(broker, max_count=1)) == [b"1"]
        clock.later_s = 31
        again = await receive_from(broker)
        assert sorted(bodies(again)) == [b"1", b"4", b"5", b"6", b"7", b"8"]
        assert await ack(broker, *(one.handle for one in again.runs)) == [None] * len(again.runs)
        last = await receive_from(broker)
        assert bodies(last) == [b"3"]
        await ack(broker, *(one.handle for one in last.runs))
        assert (await broker.committed("G", "T", 0)).offset == 9  # type: ignore[union-attr]


async def test_filters_pass_over_messages_and_find_rare_ones(tmp_path: Path) -> None:
    """RocketMQ #8472: a filter that few messages pass does not starve."""
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        messages = [
            pb.OutgoingMessage(
                topic="T",
                queue_id=0,
                body=b"%d" % n,
                tag="x" if n % 1_000 == 999 else "y",
                properties={"n": str(n)},
            )
            for n in range(3_000)
        ]
        for first in range(0, 3_000, 1_000):
            await broker.stub.Send(pb.SendRequest(messages=messages[first : first + 1_000]))
        await broker.read_queue("T", 0)
        rare = [b"999", b"1999", b"2999"]
        answer = await receive_from(broker, subscription("T", "x"), group="A", max_count=2)
        committed = await broker.committed("A", "T", 0)
        assert (list(answer.runs), answer.has_more) == ([], True)
        assert committed is not None
        assert committed.offset == 8 * 20, "eight pulls, each of one file of the queue"
        for group, wanted in (
            ("A", subscription("T", "x")),
            (
                "B",
                subscription("T", sql="n IN ('999','1999','2999')"),
            ),
        ):
            runs = await receive_all(broker, wanted, group=group, max_count=2)
            assert [body for run in runs for body in _bodies(run)] == rare
            assert await ack(broker, *(run.handle for run in runs), group=group) == [None] * len(
                runs
            )
            committed = await broker.committed(group, "T", 0)
            assert committed is not None
            assert committed.offset == 3_000


async def test_a_group_begins_where_its_first_member_says(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await sent(broker, 2, *numbers(0, 4))
        assert not (await receive_from(broker, group="L", start=pb.RECEIVE_START_LAST)).runs
        at_ms = (await broker.read_queue("T", 1))[1].store_time_ms
        timed = await receive_from(
            broker, group="Z", start=pb.RECEIVE_START_TIME, start_time_ms=at_ms
        )
        assert b"3" in bodies(timed)
        await broker.send("T", 1, b"new")
        await broker.read_queue("T", 1)
        await broker.put_topic("T", 3)
        await broker.send("T", 2, b"of a later queue")
        await broker.read_queue("T", 2)
        runs = await receive_all(broker, group="L", start=pb.RECEIVE_START_LAST)
        found = sorted(body for run in runs for body in _bodies(run))
        assert found == [b"new", b"of a later queue"]


async def test_a_topic_that_is_made_again_revives_nothing(tmp_path: Path) -> None:
    """RocketMQ #8479."""
    clock = Ahead()
    async with running_broker(tmp_path, clock=clock) as broker:
        await sent(broker, 1, *numbers(0, 4))
        [old] = (await receive_from(broker)).runs
        await broker.drop_topic("T")
        assert isinstance((await ack(broker, old.handle))[0], TopicNotFound)
        await sent(broker, 1, b"new")
        assert isinstance((await ack(broker, old.handle))[0], HandleInvalid)
        clock.later_s = 31
        [run] = await receive_all(broker)
        assert (_bodies(run), run.attempt) == ([b"new"], 1)
        assert isinstance((await ack(broker, old.handle))[0], HandleInvalid)
        broker.crash()
    async with running_broker(tmp_path, clock=clock) as broker:
        clock.later_s = 62
        [run] = await receive_all(broker)
        assert _bodies(run) == [b"new"]


async def test_a_reset_is_final_for_what_was_received_before(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await sent(broker, 1, *numbers(0, 6))
        [run] = (await receive_from(broker)).runs
        reset = pb.ResetOffsetsRequest(group="G", topic="T", offset=2)
        await broker.admin.ResetOffsets(reset)
        assert isinstance((await ack(broker, run.handle))[0], HandleInvalid)
        assert bodies(await receive_from(broker)) == numbers(2, 6)
        assert isinstance((await ack(broker, run.handle))[0], HandleInvalid)
        assert (await broker.committed("G", "T", 0)).offset == 2  # type: ignore[union-attr]


async def test_a_group_changes_its_mode_and_loses_and_repeats_nothing(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await sent(broker, 1, *numbers(0, 10))
        await broker.commit("G", ("T", 0, 0, 3))
        assert isinstance(await refusal(receive_from(broker)), GroupModeMismatch)
        await put_mode(broker, pb.CONSUME_MODE_POP)
        answer = await receive_from(broker, max_count=5)
        assert bodies(answer) == numbers(3, 8)
        [run] = answer.runs
        assert await ack(broker, pb.AckItem(handle=run.handle, first_offset=4, count=3)) == [None]
        [result] = await broker.commit("G", ("T", 0, 0, 9))
        assert isinstance(from_proto(result.error), GroupModeMismatch)
        assert isinstance(await refusal(broker.pull("T", 0, 3, group="G")), GroupModeMismatch)
        progress = await broker.admin.DescribeGroup(pb.DescribeGroupRequest(group="G"))
        [queue] = progress.progress
        assert (queue.committed.offset, queue.max_offset) == (3, 10)
        await put_mode(broker, pb.CONSUME_MODE_PULL)
        assert (await broker.committed("G", "T", 0)).offset == 8  # type: ignore[union-attr]
        assert isinstance(await refusal(ack(broker, run.handle)), GroupModeMismatch)

        async def came_again() -> bool:
            return (await broker.status(RETRY, 0)).max_offset == 2

        await until_async(came_again)
        again = await broker.read_queue(RETRY, 0)
        assert [(one.body, one.reconsume_times) for one in again] == [(b"3", 1), (b"7", 1)]
        await put_mode(broker, pb.CONSUME_MODE_POP)
        runs = await receive_all(broker)
        found = sorted(body for run in runs for body in _bodies(run))
        assert found == [b"3", b"7", b"8", b"9"]
        assert isinstance((await ack(broker, run.handle))[0], type(None) | HandleInvalid)


async def pulled(broker: BrokerClient, offset: int, **fields: Any) -> list[bytes]:
    """What group G gets that pulls from there to the end, and commits all of it."""
    found: list[bytes] = []
    while True:
        answer = await broker.pull("T", 0, offset, group="G", **fields)
        found += [one.body for one in record.decode_all(answer.records)]
        if answer.next_position.offset == offset:
            return found
        offset = answer.next_position.offset
        await broker.commit("G", ("T", 0, 0, offset))


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("fields", [{}, {"max_count": 1}, {"filter": common.Filter(sql="TRUE")}])
async def test_an_ordered_group_that_pulls_again_repeats_nothing_and_keeps_its_order(
    tmp_path: Path, restarts: bool, fields: dict[str, Any]
) -> None:
    """What its members had acknowledged behind others came a second time."""
    clock = Ahead()
    async with running_broker(tmp_path, clock=clock) as broker:
        await send_keys(broker, ["a", "b", "c", "a", "d", "e", "c"])
        await put_mode(broker, pb.CONSUME_MODE_POP, consume_orderly=True)
        [run] = (await receive_from(broker, max_count=9)).runs
        assert _bodies(run) == [b"0", b"1", b"2", b"4", b"5"]
        done = [pb.AckItem(handle=run.handle, first_offset=one, count=1) for one in (1, 4, 5)]
        assert await ack(broker, *done) == [None] * 3
        await put_mode(broker, pb.CONSUME_MODE_PULL, consume_orderly=True)
        if restarts:
            broker.crash()
        else:
            assert await pulled(broker, 0, **fields) == [b"0", b"2", b"3", b"6"]
            assert not broker.state.pops.groups(), "nothing is left over"
            assert await pulled(broker, 0) == numbers(0, 7), "a reader that goes back"
    if restarts:
        async with running_broker(tmp_path, clock=clock) as broker:
            assert (await broker.committed("G", "T", 0)).offset == 0  # type: ignore[union-attr]
            assert await pulled(broker, 0, **fields) == [b"0", b"2", b"3", b"6"]


@pytest.mark.parametrize("restarts", [False, True])
async def test_an_ordered_group_that_pulled_for_a_while_receives_the_rest_once(
    tmp_path: Path, restarts: bool
) -> None:
    async with running_broker(tmp_path) as broker:
        await send_keys(broker, ["a", "b", "c", "a", "d", "e", "c"])
        await put_mode(broker, pb.CONSUME_MODE_POP, consume_orderly=True)
        [run] = (await receive_from(broker, max_count=9)).runs
        done = [pb.AckItem(handle=run.handle, first_offset=one, count=1) for one in (1, 4, 5)]
        assert await ack(broker, *done) == [None] * 3
        await put_mode(broker, pb.CONSUME_MODE_PULL, consume_orderly=True)
        answer = await broker.pull("T", 0, 0, group="G", max_count=1)
        assert answer.next_position.offset == 1
        await broker.commit("G", ("T", 0, 0, 1))
        await put_mode(broker, pb.CONSUME_MODE_POP, consume_orderly=True)
        if restarts:
            broker.crash()
        runs = [] if restarts else await receive_all(broker)
    if restarts:
        async with running_broker(tmp_path) as broker:
            runs = await receive_all(broker)
    assert sorted(body for one in runs for body in _bodies(one)) == [b"2", b"3"]


async def put_mode(broker: BrokerClient, mode: pb.ConsumeMode.ValueType, **policy: Any) -> None:
    settings = pb.GroupSettings(group="G", mode=mode, **policy)
    await broker.admin.PutGroup(pb.PutGroupRequest(settings=settings))


async def test_a_failed_message_far_behind_goes_to_the_retry_topic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the group's committed offset, and its lag, go on without it."""
    monkeypatch.setattr(acks, "WINDOW_HALF", 3)
    async with running_broker(tmp_path) as broker:
        await sent(broker, 1, *numbers(0, 8))
        [run] = (await receive_from(broker)).runs
        assert await ack(broker, pb.AckItem(handle=run.handle, first_offset=1, count=6)) == [None]
        far, near = await change(
            broker,
            later(run.handle, 0, first=0, count=1, failed=True),
            later(run.handle, 0, first=7, count=1, failed=True),
        )
        assert isinstance(far, pb.ChangeInvisibleTimeResult)
        assert (far.handle, far.visible_ms > 0) == ("", True)
        assert isinstance(near, pb.ChangeInvisibleTimeResult)
        assert near.handle
        assert (await broker.committed("G", "T", 0)).offset == 7  # type: ignore[union-attr]
        assert (await broker.status("SCHEDULE_TOPIC_XXXX", 2)).appended_offset == 1


async def _has_messages(broker: BrokerClient, topic: str) -> bool:
    try:
        return (await broker.status(topic, 0)).max_offset > 0
    except TopicNotFound:
        return False


async def test_a_retry_topic_is_received_from_by_the_group_whose_it_is(tmp_path: Path) -> None:
    """RocketMQ's retry topic of group G and topic T has the name of the one of a group G_T."""
    retries = "%RETRY%G_T"
    async with running_broker(tmp_path) as broker:
        await sent(broker, 1, b"0")
        settings = pb.GroupSettings(group="G", mode=pb.CONSUME_MODE_POP, retry_times_max=0)
        await broker.admin.PutGroup(pb.PutGroupRequest(settings=settings))
        await broker.commit("G_T", ("T", 0, 0, 0))
        queue = common.QueueRef(topic="T", queue_id=0)
        item = pb.SendBackItem(queue=queue, position=common.Position(offset=0), delay_ms=1)
        await broker.stub.SendBack(pb.SendBackRequest(group="G_T", items=[item]))
        await until_async(lambda: _has_messages(broker, retries))
        assert [run.queue.topic for run in await receive_all(broker)] == ["T"]
        broker.state.apply(GroupDropped("G_T"))  # as RocketMQ leaves the topic
        [run] = await receive_all(broker, start=pb.RECEIVE_START_LAST)
        assert (run.queue.topic, _bodies(run)) == (retries, [b"0"])
        [dead] = await change(broker, later(run.handle, 0, failed=True))
        assert not isinstance(dead, CometError), dead
        assert await broker.bodies(DLQ, 0) == [b"0"]


async def test_a_call_looks_at_some_queues_and_the_next_one_at_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receive, "QUEUES_PER_CALL_MAX", 2)
    monkeypatch.setattr(receive, "QUEUES_PER_TURN", 2)
    async with running_broker(tmp_path) as broker:
        await sent(broker, 5, *numbers(0, 5))
        found: list[bytes] = []
        for _ in range(3):
            answer = await receive_from(broker)
            assert 0 < answer.again_ms <= receive.AGAIN_MS
            found += bodies(answer)
        assert sorted(found) == numbers(0, 5)


async def test_an_ack_waits_for_what_its_topic_asks(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1, common.FLUSH_MODE_SYNC)
        await broker.send("T", 0, b"0")
        [run] = (await receive_from(broker)).runs
        assert await ack(broker, run.handle) == [None]
        units = broker.store.queue_bounds(STATE_TOPIC, 0)
        log_offset = _last_state_record(broker, units[1])
        assert broker.store.flushed_offset > log_offset


def _last_state_record(broker: LiveBroker, end: int) -> int:
    data = broker.store.read_units(STATE_TOPIC, 0, end - 1, 1)
    return int.from_bytes(data[:8], "big")


async def test_a_fail_over_keeps_leases_and_acknowledgements(tmp_path: Path) -> None:
    """An answered acknowledgement is final, also at a member that only copied it; a lease holds."""
    quick = {"lease_duration_s": 1.0, "lease_renew_s": 0.1, "lease_poll_s": 0.05}
    options = {**quick, "in_sync_lag_s_max": 0.5, "replication_mode": ReplicationMode.APPENDED}
    async with live_group(tmp_path, 2, **options) as group:
        await group.all_in_sync(0, 1)
        first = group[0].client
        await sent(first, 1, *numbers(0, 30))
        runs = (await receive_from(first, max_count=20)).runs
        [run] = runs
        some = pb.AckItem(handle=run.handle, first_offset=3, count=10)
        assert await ack(first, some) == [None]
        [changed] = await change(first, later(run.handle, first=19, count=1))
        assert isinstance(changed, pb.ChangeInvisibleTimeResult)
        asking = pb.QueryOffsetsRequest(group="G", queues=[common.QueueRef(topic="T", queue_id=0)])
        assert (await first.stub.QueryOffsets(asking)).results[0].position.offset == 0
        follower = group[1].client
        assert isinstance(await refusal(receive_from(follower)), NotWriter)
        assert isinstance(await refusal(ack(follower, run.handle)), NotWriter)
        await group[0].crash()
        await group[1].until_role("writer")
        second = group[1].client
        assert bodies(await receive_from(second, max_count=100)) == numbers(20, 30)
        assert await ack(second, some, changed.handle) == [None, None]
        [rest] = await ack(second, pb.AckItem(handle=run.handle, first_offset=0, count=3))
        assert rest is None
        assert (await second.committed("G", "T", 0)).offset == 13  # type: ignore[union-attr]
        await group[0].start("follower")
        await group.all_in_sync(0, 1)
        assert await ack(second, run.handle) == [None]
        assert (await second.committed("G", "T", 0)).offset == 20  # type: ignore[union-attr]
        await group.in_step()


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"invisible_ms": 0}, InvisibleTimeInvalid),
        ({"invisible_ms": 9_999}, InvisibleTimeInvalid),
        ({"invisible_ms": 13 * 3_600_000}, InvisibleTimeInvalid),
        ({"invisible_ms": -1}, InvisibleTimeInvalid),
        ({"max_count": 1_025}, LimitExceeded),
        ({"max_count": -1}, InvalidRequest),
        ({"max_bytes": -1}, InvalidRequest),
        ({"queue_id": 7}, QueueNotFound),
        ({"queue_id": -1}, QueueNotFound),
        ({"attempt_id": "x" * 65}, InvalidRequest),
        ({"attempt_id": "\n"}, InvalidRequest),
        ({"start": 9}, InvalidRequest),
        ({"start": pb.RECEIVE_START_TIME, "start_time_ms": -1}, InvalidRequest),
        ({"form": 9}, InvalidRequest),
        ({"client_id": "\n"}, InvalidRequest),
        ({"group": ""}, CometError),
        ({"group": "g" * 121}, GroupNameInvalid),  # its retry topic would have a name too long
    ],
)
async def test_a_wrong_receive_is_refused(
    tmp_path: Path, fields: dict[str, Any], error: type[CometError]
) -> None:
    async with running_broker(tmp_path) as broker:
        await sent(broker, 1, b"0")
        await receive_from(broker, group="other")
        assert isinstance(await refusal(receive_from(broker, **fields)), error)
        assert "G" not in broker.state.groups
        assert bodies(await receive_from(broker)) == [b"0"]


async def test_wrong_topics_are_refused_and_make_no_group(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await sent(broker, 1, b"0")
        for topics, error in (
            (("nowhere",), TopicNotFound),
            (("T", "nowhere"), TopicNotFound),
            (("T", "T"), InvalidRequest),
            (tuple(f"t{n}" for n in range(65)), LimitExceeded),
            ((subscription("T", sql="a >"),), FilterInvalid),
            ((STATE_TOPIC,), NoPermission),
        ):
            assert isinstance(await refusal(receive_from(broker, *topics)), error), topics
        assert "G" not in broker.state.groups
        assert isinstance(await refusal(ack(broker, "A" * 80)), GroupNotFound)


async def test_a_topic_that_is_gone_keeps_nobody_from_the_others(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("U", 1)
        await sent(broker, 1, b"0")
        await receive_from(broker, "U")
        await broker.drop_topic("U")
        assert bodies(await receive_from(broker, "U", "T")) == [b"0"]
        nothing = await receive_from(broker, "U", "T")
        assert [one.queue.topic for one in nothing.positions] == ["T"]
        assert isinstance(await refusal(receive_from(broker, "U")), TopicNotFound)


async def test_a_queue_that_fails_keeps_nobody_from_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_broker(tmp_path) as broker:
        await sent(broker, 2, b"0")
        real = receive.ReceiveService._from_queue

        async def first_fails(service: Any, call: Any, wanted: Any, key: QueueKey, **_: Any) -> Any:
            if key[1] in failing:
                raise StoreDamaged("its file cannot be read")
            return await real(service, call, wanted, key)

        monkeypatch.setattr(receive.ReceiveService, "_from_queue", first_fails)
        failing = {1}
        assert bodies(await receive_from(broker)) == [b"0"]
        nothing = await receive_from(broker)
        assert 0 < nothing.again_ms <= receive.AGAIN_MS
        assert [one.queue.queue_id for one in nothing.positions] == [0]
        failing = {0, 1}
        assert isinstance(await refusal(receive_from(broker)), StoreDamaged)


async def test_wrong_handles_are_refused_alone(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "a") as broker, running_broker(tmp_path / "b") as other:
        for one in (broker, other):
            await sent(one, 1, *numbers(0, 3))
        [run] = (await receive_from(broker)).runs
        [foreign] = (await receive_from(other)).runs
        [of_h] = (await receive_from(broker, group="H")).runs
        forged = run.handle[:-1] + ("A" if run.handle[-1] != "A" else "B")
        wrong = [foreign.handle, of_h.handle, forged, "", "?" * 80, "x" * 5_000]
        for handle in wrong:
            refused, fine = await ack(
                broker, handle, pb.AckItem(handle=run.handle, first_offset=0, count=1)
            )
            assert isinstance(refused, HandleInvalid)
            assert fine is None
            [refused_change] = await change(broker, later(handle))
            assert isinstance(refused_change, HandleInvalid)
        for ms in (0, 9_999, 43_200_001, -1):
            [refused_time] = await change(broker, later(run.handle, ms))
            assert isinstance(refused_time, InvisibleTimeInvalid)
        [refused_time] = await change(broker, later(run.handle, 43_200_001, failed=True))
        assert isinstance(refused_time, InvisibleTimeInvalid)
        many = [pb.AckItem(handle=run.handle)] * 1_025
        assert isinstance(await refusal(ack(broker, *many)), LimitExceeded)
        assert isinstance(
            await refusal(change(broker, *[later(run.handle)] * 1_025)), LimitExceeded
        )


async def test_assignments_are_all_queues_or_a_share(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await sent(broker, 5, b"0")
        await receive_from(broker)

        async def assigned(group: str, client_id: str) -> list[int | None]:
            request = pb.QueryAssignmentRequest(group=group, topic="T", client_id=client_id)
            found = (await broker.stub.QueryAssignment(request)).assignments
            return [one.queue_id if one.HasField("queue_id") else None for one in found]

        assert await assigned("G", "c") == [None]
        assert await assigned("P", "b") == []
        streams = []
        for client_id in ("a", "b"):
            stream = broker.stub.JoinGroup()
            await stream.write(
                pb.JoinGroupRequest(
                    group="P", client_id=client_id, subscriptions=[subscription("T")]
                )
            )
            await stream.read()
            streams.append(stream)
        assert await assigned("P", "a") == [0, 1, 2]
        assert await assigned("P", "b") == [3, 4]
        assert await assigned("P", "c") == []
        for stream in streams:
            stream.cancel()
