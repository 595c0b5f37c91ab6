"""Delayed messages over real gRPC: from the SDK and from bare stubs, through a crash, and what is
refused.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from cometmq.client import Message, Producer, SendReceipt
from cometmq.errors import (
    BatchMalformed,
    CometError,
    DelayLevelInvalid,
    InvalidRequest,
    NoPermission,
    PropertiesInvalid,
    PropertyReserved,
)
from cometmq.format import delayed
from cometmq.v1 import broker_pb2 as pb
from tests.support.cluster.broker import (
    BrokerClient,
    encoded,
    refusal,
    running_broker,
    running_namesrv,
)
from tests.support.waiting import until_async

SCHEDULE = delayed.SCHEDULE_TOPIC
DELAYED = pb.SEGMENT_KIND_DELAY_LEVEL


async def end_of(broker: BrokerClient, topic: str) -> int:
    return (await broker.status(topic, 0)).max_offset


def outgoing(body: bytes, level: int, **fields: Any) -> pb.OutgoingMessage:
    return pb.OutgoingMessage(topic="T", queue_id=0, body=body, delay_level=level, **fields)


async def test_delayed_messages_of_sdk_and_stub_come_after_their_time(tmp_path: Path) -> None:
    async with running_namesrv(tmp_path) as namesrv:
        async with running_broker(tmp_path, namesrv=(namesrv,)) as broker:
            await broker.put_topic("T", 1)
            began_s = time.monotonic()
            async with Producer(namesrv) as producer:
                futures = [
                    await producer.send(
                        Message("T", b"%d" % n, "A", ("k",), {"p": "v"}, delay_level=n % 2)
                    )
                    for n in range(20)
                ]
                receipts = await asyncio.gather(*futures)
            answer = await broker.stub.Send(pb.SendRequest(messages=[outgoing(b"stub", 1)]))
            assert not answer.sent[0].HasField("position")
            assert [receipt.queue_offset == -1 for receipt in receipts] == [False, True] * 10
            at_once = [b"%d" % n for n in range(0, 20, 2)]
            assert await broker.bodies("T", 0) == at_once

            async def all_there() -> bool:
                return await end_of(broker, "T") == 21

            await until_async(all_there)
            assert time.monotonic() - began_s >= 1.0
            found = await broker.read_queue("T", 0)
        late = [b"%d" % n for n in range(1, 20, 2)]
        assert [one.body for one in found] == [*at_once, *late, b"stub"]
        one = found[10]
        assert (one.tag, one.keys, one.properties["p"]) == ("A", ("k",), "v")
        assert one.unique_id == receipts[1].unique_id
        assert one.properties["REAL_TOPIC"] == "T"  # as RocketMQ leaves it
        assert one.store_time_ms - receipts[1].store_time_ms >= 1_000


async def test_a_level_that_is_none_is_the_error_of_its_message_only(tmp_path: Path) -> None:
    """Messages of the same batch, of other callers maybe, were refused with it."""
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
        Producer(namesrv) as producer,
    ):
        await broker.put_topic("T", 1)
        await producer.send_and_wait(Message("T", b"first"))
        levels = [0, 0, 0, 19, 0, 1, 0]  # in one turn of the loop: one batch
        futures = [await producer.send(Message("T", b".", delay_level=n)) for n in levels]
        answers = await asyncio.gather(*futures, return_exceptions=True)
        kinds = [DelayLevelInvalid if level == 19 else SendReceipt for level in levels]
        assert [type(one) for one in answers] == kinds


async def test_a_crash_neither_loses_nor_repeats_a_delayed_message(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        for n in range(3):
            await broker.stub.Send(pb.SendRequest(messages=[outgoing(b"%d" % n, 1)] * 100))
            await asyncio.sleep(0.45)
        broker.crash()  # the first are delivered, the last are not due
    async with running_broker(tmp_path) as broker:

        async def all_there() -> bool:
            return await end_of(broker, "T") >= 300

        await until_async(all_there)
        assert await broker.bodies("T", 0) == [b"0"] * 100 + [b"1"] * 100 + [b"2"] * 100
        await broker.drop_topic("T")
        await broker.put_topic("T", 1)
        await broker.stub.Send(pb.SendRequest(messages=[outgoing(b"new", 1)]))
        await until_async(lambda: _is_delivered(broker))
        assert await broker.bodies("T", 0) == [b"new"]


async def _is_delivered(broker: BrokerClient) -> bool:
    return await end_of(broker, "T") == 1


def sent(topic: str, queue_id: int, raw: bytes) -> bytes:
    return encoded(topic, queue_id, b"x", properties=raw)


GOOD = delayed.prefix(3, "T", 0)


@pytest.mark.parametrize(
    ("data", "segment", "error"),
    [
        (sent(SCHEDULE, 2, GOOD), {"kind": 99}, InvalidRequest),
        (sent(SCHEDULE, 2, GOOD), {"kind": DELAYED, "delay_level": 19}, DelayLevelInvalid),
        (sent(SCHEDULE, 2, GOOD), {"kind": DELAYED}, DelayLevelInvalid),
        (sent("T", 0, b""), {"delay_level": 3}, InvalidRequest),
        (sent("T", 0, GOOD), {}, PropertyReserved),
        (sent("T", 0, GOOD), {"kind": DELAYED, "delay_level": 3}, BatchMalformed),
        (sent(SCHEDULE, 3, GOOD), {"kind": DELAYED, "delay_level": 3}, BatchMalformed),
        (
            sent(SCHEDULE, 2, delayed.prefix(3, "U", 0)),
            {"kind": DELAYED, "delay_level": 3},
            PropertiesInvalid,
        ),
        (sent(SCHEDULE, 2, b"a\x01b\x02"), {"kind": DELAYED, "delay_level": 3}, PropertiesInvalid),
        (sent(SCHEDULE, 2, GOOD), {"topic": SCHEDULE, "queue_id": 2}, NoPermission),
        (
            sent(SCHEDULE, 2, delayed.prefix(3, SCHEDULE, 0)),
            {"topic": SCHEDULE, "kind": DELAYED, "delay_level": 3},
            NoPermission,
        ),
        (
            sent(SCHEDULE, 2, delayed.prefix(3, "%RETRY%G", 0)),
            {"topic": "%RETRY%G", "kind": DELAYED, "delay_level": 3},
            NoPermission,
        ),
    ],
)
async def test_a_forged_kind_stores_nothing(
    tmp_path: Path, data: bytes, segment: dict[str, Any], error: type[CometError]
) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        lane = await broker.lane()
        good = pb.Segment(topic="T", queue_id=0, count=1, kind=DELAYED, delay_level=3)
        result = await lane.exchange(sent(SCHEDULE, 2, GOOD), [good])
        assert not result.HasField("error")
        wrong = pb.Segment(**{"topic": "T", "queue_id": 0, "count": 1, **segment})
        assert isinstance(await lane.refused(data, [wrong]), error)
        assert await end_of(broker, SCHEDULE) == 0
        assert (await broker.status(SCHEDULE, 2)).appended_offset == 1


async def test_a_stub_is_told_of_a_level_that_is_none(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        for level in (-1, 19):
            request = pb.SendRequest(messages=[outgoing(b"x", level)])
            assert isinstance(await refusal(broker.stub.Send(request)), DelayLevelInvalid)
