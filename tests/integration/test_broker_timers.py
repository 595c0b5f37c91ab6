"""Messages with a time of their own over real gRPC: from the SDK and from bare stubs, through a
crash, and what is refused.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from cometmq.client import Message, Producer
from cometmq.errors import (
    BatchMalformed,
    CometError,
    DelayInvalid,
    FlowControl,
    InvalidRequest,
    MessageTypeMismatch,
    NoPermission,
    PropertiesInvalid,
    PropertyReserved,
)
from cometmq.format import timers
from cometmq.format.queueunit import UNIT_BYTES
from cometmq.format.timers import TIMER_TOPIC
from cometmq.rpc.interceptors import from_proto
from cometmq.v1 import broker_pb2 as pb
from cometmq.v1 import common_pb2 as common
from tests.support.cluster.broker import (
    BrokerClient,
    WrongClock,
    encoded,
    refusal,
    running_broker,
    running_namesrv,
)
from tests.support.cluster.pullhold import sample
from tests.support.waiting import until_async

TIMER = pb.SEGMENT_KIND_TIMER
DAY_MS = 86_400_000
FUTURE_MS = 4_102_444_800_000  # in 2100


def now_ms() -> int:
    return time.time_ns() // 1_000_000


async def end_of(broker: BrokerClient, topic: str) -> int:
    return (await broker.status(topic, 0)).max_offset


async def has(broker: BrokerClient, count: int) -> None:
    async def are_there() -> bool:
        return await end_of(broker, "T") >= count

    await until_async(are_there)


def outgoing(body: bytes, **fields: Any) -> pb.OutgoingMessage:
    return pb.OutgoingMessage(topic="T", queue_id=0, body=body, **fields)


async def test_messages_of_sdk_and_stub_come_at_their_time_in_its_order(tmp_path: Path) -> None:
    async with running_namesrv(tmp_path) as namesrv:
        async with running_broker(tmp_path, namesrv=(namesrv,)) as broker:
            await broker.put_topic("T", 1)
            begun_ms = now_ms()
            async with Producer(namesrv) as producer:
                ways: list[dict[str, Any]] = [
                    {},
                    {"delay_ms": 700},
                    {"deliver_at_ms": begun_ms + 1_200},
                    {"delay_ms": 300},
                    {"deliver_at_ms": begun_ms - DAY_MS},  # it has come: at once
                ]
                futures = [
                    await producer.send(Message("T", b"%d" % n, "A", ("k",), {"p": "v"}, **way))
                    for n, way in enumerate(ways)
                ]
                receipts = await asyncio.gather(*futures)
                many = await producer.send_many(
                    [Message("T", b"many", delay_ms=1_500 + n) for n in range(50)]
                )
                await many
            assert [receipt.queue_offset == -1 for receipt in receipts] == [bool(w) for w in ways]
            answer = await broker.stub.Send(
                pb.SendRequest(
                    messages=[
                        outgoing(b"stub at", deliver_at_ms=begun_ms + 2_200),
                        outgoing(b"stub after", delay_ms=2_100),
                    ]
                )
            )
            assert not any(one.HasField("position") for one in answer.sent)
            await has(broker, 57)
            found = {one.body: one for one in await broker.read_queue("T", 0)}
        bodies = list(found)
        assert bodies[:1] == [b"0"]
        assert bodies[1:6] == [b"4", b"3", b"1", b"2", b"many"]
        assert set(bodies[6:]) == {b"stub at", b"stub after"}
        for body, delay_ms in ((b"1", 700), (b"3", 300), (b"stub after", 2_100)):
            sent_ms = found[body].born_time_ms
            assert found[body].store_time_ms >= sent_ms + delay_ms, "it came early"
        assert found[b"2"].store_time_ms >= begun_ms + 1_200
        one = found[b"1"]
        assert (one.tag, one.keys, one.properties["p"]) == ("A", ("k",), "v")
        assert one.unique_id == receipts[1].unique_id
        assert one.properties["REAL_TOPIC"] == "T"


async def test_a_jump_of_the_clock_makes_nothing_early_or_late(tmp_path: Path) -> None:
    """Also after it: delays do not count from the time that was stored meanwhile."""
    clock = WrongClock()
    async with running_broker(tmp_path, clock=clock) as broker:
        await broker.put_topic("T", 1)
        far = [outgoing(b"far", delay_ms=60_000), outgoing(b"far", deliver_at_ms=now_ms() + 60_000)]
        await broker.stub.Send(pb.SendRequest(messages=far))
        clock.wrong_ms = 600_000
        near = [outgoing(b"now"), outgoing(b"after", delay_ms=300)]
        await broker.stub.Send(pb.SendRequest(messages=near))
        await has(broker, 2)
        clock.wrong_ms = 0
        await broker.stub.Send(pb.SendRequest(messages=[outgoing(b"behind", delay_ms=200)]))
        await has(broker, 3)
        assert await broker.bodies("T", 0) == [b"now", b"after", b"behind"]


async def test_a_clock_that_was_behind_and_is_right_again_shortens_no_delay(
    tmp_path: Path,
) -> None:
    """The jump has lasted a minute, and is believed when the delays of before are over."""
    clock = WrongClock(-600_000)
    async with running_broker(tmp_path, clock=clock) as broker:
        await broker.put_topic("T", 1)
        delays = [outgoing(b"long", delay_ms=120_000), outgoing(b"short", delay_ms=30_000)]
        await broker.stub.Send(pb.SendRequest(messages=delays))
        clock.wrong_ms = 0

        async def is_seen() -> bool:
            metric = "cometmq_clock_jumps_total"
            return await sample(broker.metrics_address, metric, 'direction="forward"') == 1

        await until_async(is_seen)
        clock.later_ms += 70_000
        await has(broker, 1)
        assert await broker.bodies("T", 0) == [b"short"]
        clock.later_ms += 60_000
        await has(broker, 2)


async def test_a_crash_neither_loses_nor_repeats_a_message(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        for n in range(3):
            messages = [outgoing(b"%d" % n, delay_ms=400)] * 100
            await broker.stub.Send(pb.SendRequest(messages=messages))
            await has(broker, 100 * n)
        broker.crash()  # the last are not due
    async with running_broker(tmp_path) as broker:
        await has(broker, 300)
        assert await broker.bodies("T", 0) == [b"0"] * 100 + [b"1"] * 100 + [b"2"] * 100
        later = outgoing(b"of before", delay_ms=900)
        await broker.stub.Send(pb.SendRequest(messages=[later]))
        await broker.drop_topic("T")
        await broker.put_topic("T", 1)
        await broker.stub.Send(pb.SendRequest(messages=[outgoing(b"new", delay_ms=1_000)]))
        await has(broker, 1)
        assert await broker.bodies("T", 0) == [b"new"]


def sent(topic: str, queue_id: int, raw: bytes) -> bytes:
    return encoded(topic, queue_id, b"x", properties=raw)


def at(time_ms: int, topic: str = "T") -> bytes:
    return timers.with_time(timers.prefix(topic, 0), time_ms)


GOOD = at(FUTURE_MS)
NO_DIGITS = GOOD.replace(b"4102444800000", b"41024448000x0")
LONGEST_MS = 3 * DAY_MS


WRONG_SEGMENTS: list[tuple[bytes, dict[str, Any], type[CometError]]] = [
    (sent(TIMER_TOPIC, 0, GOOD), {"kind": TIMER}, DelayInvalid),  # too far away
    (sent(TIMER_TOPIC, 0, NO_DIGITS), {"kind": TIMER}, DelayInvalid),
    (sent(TIMER_TOPIC, 0, at(10**12 - 1)), {"kind": TIMER}, DelayInvalid),
    (
        sent(TIMER_TOPIC, 0, at(LONGEST_MS + 1)),
        {"kind": TIMER, "timer_from_now": True},
        DelayInvalid,
    ),
    (sent(TIMER_TOPIC, 0, GOOD), {"kind": TIMER, "delay_level": 3}, InvalidRequest),
    (sent("T", 0, b""), {"timer_from_now": True}, InvalidRequest),
    (sent("T", 0, GOOD), {}, PropertyReserved),
    (sent("T", 0, GOOD), {"kind": TIMER}, BatchMalformed),
    (sent(TIMER_TOPIC, 1, GOOD), {"kind": TIMER}, BatchMalformed),
    (sent(TIMER_TOPIC, 0, at(FUTURE_MS, "U")), {"kind": TIMER}, PropertiesInvalid),
    (sent(TIMER_TOPIC, 0, GOOD[:20]), {"kind": TIMER}, PropertiesInvalid),
    (sent(TIMER_TOPIC, 0, b"a\x01b\x02"), {"kind": TIMER}, PropertiesInvalid),
    (sent(TIMER_TOPIC, 0, GOOD), {"topic": TIMER_TOPIC}, NoPermission),
    (
        sent(TIMER_TOPIC, 0, at(FUTURE_MS, "%RETRY%G")),
        {"topic": "%RETRY%G", "kind": TIMER},
        NoPermission,
    ),
]


async def test_a_wrong_time_or_a_forged_kind_stores_nothing(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        lane = await broker.lane()
        good = pb.Segment(topic="T", queue_id=0, count=1, kind=TIMER, timer_from_now=True)
        result = await lane.exchange(sent(TIMER_TOPIC, 0, at(LONGEST_MS)), [good])
        assert not result.HasField("error")
        for data, segment, error in WRONG_SEGMENTS:
            wrong = pb.Segment(**{"topic": "T", "queue_id": 0, "count": 1, **segment})
            assert isinstance(await lane.refused(data, [wrong]), error), (data, segment)
        assert (await broker.status(TIMER_TOPIC, 0)).appended_offset == 1


WRONG_TIMES: list[tuple[dict[str, int], type[CometError]]] = [
    ({"delay_ms": -1}, DelayInvalid),
    ({"delay_ms": 3 * DAY_MS + 1}, DelayInvalid),
    ({"delay_ms": 41 * DAY_MS}, DelayInvalid),
    ({"deliver_at_ms": -1}, DelayInvalid),
    ({"deliver_at_ms": 1_700_000_000}, DelayInvalid),  # seconds
    ({"deliver_at_ms": FUTURE_MS}, DelayInvalid),
    ({"deliver_at_ms": 253_402_300_800_000}, DelayInvalid),  # in the year 10000
    ({"delay_ms": 5, "delay_level": 1}, InvalidRequest),
    ({"delay_ms": 5, "deliver_at_ms": FUTURE_MS}, InvalidRequest),
]


async def test_a_stub_is_told_of_a_time_that_is_none(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        for fields, error in WRONG_TIMES:
            request = pb.SendRequest(messages=[outgoing(b"good"), outgoing(b"x", **fields)])
            refused = await refusal(broker.stub.Send(request))
            assert isinstance(refused, error), fields
            assert refused.segment == 1, fields
        assert (await broker.status("T", 0)).appended_offset == 0


@pytest.mark.parametrize(
    ("folder", "delay", "metric"),
    [
        ("rmq_sys_wheel_timer/0", {"delay_ms": 6_000}, "rocketmq_timer_dequeue_total"),
        ("SCHEDULE_TOPIC_XXXX/1", {"delay_level": 2}, "cometmq_delay_dequeue_total"),
    ],
)
async def test_damaged_units_of_what_waits_are_found_again_in_the_log(
    tmp_path: Path, folder: str, delay: dict[str, int], metric: str
) -> None:
    """While the member runs; only a message is lost whose record is damaged, too."""
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        bodies = [b"message %03d" % n for n in range(100)]
        await broker.stub.Send(
            pb.SendRequest(messages=[outgoing(body, **delay) for body in bodies])
        )
    store = tmp_path / "store"
    files = sorted((store / "consumequeue" / folder).iterdir())  # of 20 units
    before = [file.read_bytes() for file in files]
    cut_at, cut_bytes = 5 * UNIT_BYTES + 7, 8 * UNIT_BYTES  # 45 to 53, the first and last in part
    wiped = bytearray(before[2])
    wiped[cut_at : cut_at + cut_bytes] = bytes(cut_bytes)
    files[2].write_bytes(wiped)
    flipped = bytearray(before[3])
    for unit, place, mask in ((2, 7, 1), (4, 0, 128), (6, 8, 128), (10, 10, 1)):
        flipped[unit * UNIT_BYTES + place] ^= mask
    flipped[8 * UNIT_BYTES + 8 : 8 * UNIT_BYTES + 12] = bytes(4)  # its size
    files[3].write_bytes(flipped)
    log = next(f for f in (store / "commitlog").iterdir() if bodies[47] in f.read_bytes())
    log.write_bytes(log.read_bytes().replace(bodies[47], b"message 0x7"))
    async with running_broker(tmp_path) as broker:
        await has(broker, 99)
        assert sorted(await broker.bodies("T", 0)) == [*bodies[:47], *bodies[48:]]
        assert await sample(broker.metrics_address, metric, 'result="lost"') == 1
    after = [file.read_bytes() for file in files]
    lost = slice(7 * UNIT_BYTES, 8 * UNIT_BYTES)
    assert after[2][lost] != before[2][lost]
    after[2] = after[2][: lost.start] + before[2][lost] + after[2][lost.stop :]
    assert after == before


async def test_types_of_topics_and_longer_limits(tmp_path: Path) -> None:
    async with running_broker(tmp_path, timer_max_delay_sec=40 * 86_400) as broker:
        for name, kind in (("T", common.MESSAGE_TYPE_DELAY), ("N", common.MESSAGE_TYPE_NORMAL)):
            config = common.TopicConfig(
                name=name, read_queue_count=1, write_queue_count=1, message_type=kind
            )
            await broker.admin.PutTopic(pb.PutTopicRequest(topic=config))
        longest = outgoing(b"x", delay_ms=40 * DAY_MS)
        await broker.stub.Send(pb.SendRequest(messages=[longest]))
        wrong = pb.OutgoingMessage(topic="N", body=b"x", delay_ms=5)
        refused = await refusal(broker.stub.Send(pb.SendRequest(messages=[wrong])))
        assert isinstance(refused, MessageTypeMismatch)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"delay_ms": -1}, DelayInvalid),
        ({"delay_ms": 40 * DAY_MS + 1}, DelayInvalid),
        ({"delay_ms": 1.5}, DelayInvalid),
        ({"delay_ms": True}, DelayInvalid),
        ({"deliver_at_ms": 1_700_000_000}, DelayInvalid),
        ({"deliver_at_ms": 10**13}, DelayInvalid),
        ({"deliver_at_ms": "tomorrow"}, DelayInvalid),
        ({"delay_ms": 1, "delay_level": 1}, InvalidRequest),
        ({"delay_ms": 1, "deliver_at_ms": FUTURE_MS}, InvalidRequest),
    ],
)
def test_a_message_is_told_of_a_time_that_is_none(
    fields: dict[str, Any], error: type[CometError]
) -> None:
    with pytest.raises(error):
        Message("T", b"x", **fields)
    changed = Message("T", b"x")
    for name, value in fields.items():
        setattr(changed, name, value)
    with pytest.raises(error):
        changed.check()


async def test_what_is_sent_back_comes_after_its_own_delay(tmp_path: Path) -> None:
    """By a delay of the consumer's, and by an exponential policy whose steps are no level."""
    kind = pb.RETRY_POLICY_KIND_EXPONENTIAL
    exponential = pb.RetryPolicy(kind=kind, initial_ms=300, multiplier=3, max_ms=900)
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        settings = pb.GroupSettings(group="G", retry_policy=exponential)
        await broker.admin.PutGroup(pb.PutGroupRequest(settings=settings))
        await broker.send("T", 0, b"asked", b"policy", b"wrong")
        await has(broker, 3)

        def item(offset: int, **fields: int) -> pb.SendBackItem:
            queue = common.QueueRef(topic="T", queue_id=0)
            return pb.SendBackItem(queue=queue, position=common.Position(offset=offset), **fields)

        wrong = [item(2, delay_ms=-1), item(2, delay_ms=5, delay_level=1)]
        items = [item(0, delay_ms=250), item(1), *wrong]
        answer = await broker.stub.SendBack(pb.SendBackRequest(group="G", items=items))
        waits = [(one.delay_level, one.delay_ms) for one in answer.results]
        assert waits == [(0, 250), (0, 300), (0, 0), (0, 0)]
        errors = [type(from_proto(one.error)) for one in answer.results[2:]]
        assert errors == [DelayInvalid, InvalidRequest]
        again = await broker.stub.SendBack(pb.SendBackRequest(group="G", items=items[:1]))
        assert again.results[0].delay_ms == 250  # it is stored once

        async def are_there() -> bool:
            return await end_of(broker, "%RETRY%G") >= 2

        await until_async(are_there)
        found = await broker.read_queue("%RETRY%G", 0)
        assert [one.body for one in found] == [b"asked", b"policy"]
        for one in found:
            assert one.store_time_ms >= int(one.properties["TIMER_OUT_MS"])
            assert one.properties["RETRY_TOPIC"] == "T"
            assert one.reconsume_times == 1
        queue = common.QueueRef(topic="%RETRY%G", queue_id=0)
        once_more = pb.SendBackItem(queue=queue, position=common.Position(offset=1), delay_level=1)
        answer = await broker.stub.SendBack(pb.SendBackRequest(group="G", items=[once_more]))
        assert answer.results[0].delay_ms == 1_000
        broker.crash()
    async with running_broker(tmp_path) as broker:
        assert await end_of(broker, "%RETRY%G") == 2


async def test_a_second_that_is_full_takes_no_more(tmp_path: Path) -> None:
    """Also when it was filled before a restart; other seconds do. A recall makes room for one."""
    hour_s = now_ms() // 1_000 + 3_600
    options = {"timer_messages_per_second_max": 10}

    def sent(count: int, second: int) -> pb.SendRequest:
        each = [outgoing(b"x", deliver_at_ms=1_000 * second + 37 * n) for n in range(count)]
        return pb.SendRequest(messages=each)

    async with running_broker(tmp_path, **options) as broker:
        await broker.put_topic("T", 1)
        await broker.stub.Send(sent(7, hour_s))
        assert isinstance(await refusal(broker.stub.Send(sent(4, hour_s))), FlowControl)
        answer = await broker.stub.Send(sent(3, hour_s))
        assert isinstance(await refusal(broker.stub.Send(sent(1, hour_s))), FlowControl)
        handles = [one.recall_handle for one in answer.sent]
        for _ in range(2):  # the second time nothing is recalled any more
            await broker.stub.Recall(pb.RecallRequest(handles=handles[:2]))
        await broker.stub.Send(sent(1, hour_s))
        assert isinstance(await refusal(broker.stub.Send(sent(2, hour_s))), FlowControl)
        await broker.stub.Send(sent(10, hour_s + 1))
        await broker.stub.Send(pb.SendRequest(messages=[outgoing(b"plain")] * 20))

    async with running_broker(tmp_path, **options) as broker:

        async def is_loaded() -> bool:
            request = pb.ListDelayedRequest(until_ms=[FUTURE_MS])
            return list((await broker.admin.ListDelayed(request)).counts) == [23]

        await until_async(is_loaded)
        assert isinstance(await refusal(broker.stub.Send(sent(2, hour_s))), FlowControl)
        await broker.stub.Send(sent(1, hour_s))
        assert isinstance(await refusal(broker.stub.Send(sent(1, hour_s))), FlowControl)
        after = pb.SendRequest(messages=[outgoing(b"x", delay_ms=5)] * 10)
        await broker.stub.Send(after)
