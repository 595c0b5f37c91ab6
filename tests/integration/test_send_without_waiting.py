"""Messages with ``wait_store=False``: acknowledged when appended, shown no sooner than others."""

from __future__ import annotations

from pathlib import Path

import pytest

from cometmq.client import Message, Producer, ProducerOptions, SendStatus
from cometmq.errors import CometError, PropertiesInvalid, PropertyReserved
from cometmq.format.delayed import NO_WAIT_PREFIX
from cometmq.v1 import broker_pb2 as pb
from tests.support.cluster.broker import SYNC, encoded, running_broker, running_namesrv
from tests.support.stores.gates import HeldFlush
from tests.support.waiting import until_async


async def test_it_is_acknowledged_while_the_disk_is_late_and_shown_when_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldFlush(monkeypatch)
    options = ProducerOptions(delivery_timeout_ms=600_000)
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,), sync_flush_timeout=60_000) as broker,
    ):
        await broker.put_topic("T", 1, SYNC)
        async with Producer(namesrv, options=options) as producer:
            await producer.send_and_wait(Message("T", b"8", delay_level=1))  # makes its topic
            await producer.send_and_wait(Message("T", b"0"))
            held.hold()
            quick = Message("T", b"1", "A", wait_store=False, properties={"p": "v"})
            receipt = await producer.send_and_wait(quick)
            assert (receipt.status, receipt.queue_offset) == (SendStatus.SEND_OK, 1)
            late = Message("T", b"9", wait_store=False, delay_level=1)
            assert (await producer.send_and_wait(late)).queue_offset == -1
            message = pb.OutgoingMessage(topic="T", body=b"2", no_wait_store=True)
            answer = await broker.stub.Send(pb.SendRequest(messages=[message]))
            assert answer.status == pb.SEND_STATUS_SEND_OK
            waiting = await producer.send(Message("T", b"3"))
            pulled = await broker.pull("T", 0, 1)
            assert pulled.status == pb.PULL_STATUS_NOT_FOUND, "shown although no disk has it"
            assert not waiting.done()
            held.release()
            assert (await waiting).queue_offset == 3

        async def all_there() -> bool:
            return (await broker.status("T", 0)).max_offset == 6

        await until_async(all_there)
        found = await broker.read_queue("T", 0)
    assert [r.body for r in found[:4]] == [b"0", b"1", b"2", b"3"]
    assert {r.body for r in found[4:]} == {b"8", b"9"}
    without = [r.body for r in found if r.properties.get("WAIT") == "false"]
    assert sorted(without) == [b"1", b"2", b"9"]
    assert (found[1].tag, found[1].properties["p"]) == ("A", "v")
    assert found[1].unique_id == receipt.unique_id


@pytest.mark.parametrize(
    ("properties", "flagged", "error"),
    [
        (b"", True, PropertiesInvalid),
        (b"WAIT\x01true\x02", True, PropertiesInvalid),
        (b"a\x01b\x02" + NO_WAIT_PREFIX, True, PropertiesInvalid),
        (NO_WAIT_PREFIX + NO_WAIT_PREFIX, True, PropertyReserved),
        (NO_WAIT_PREFIX + b"DELAY\x013\x02", True, PropertyReserved),
        (NO_WAIT_PREFIX, False, PropertyReserved),
    ],
)
async def test_the_stored_form_is_what_the_segment_says(
    tmp_path: Path, properties: bytes, flagged: bool, error: type[CometError]
) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        lane = await broker.lane()
        segment = pb.Segment(topic="T", queue_id=0, count=1, no_wait_store=flagged)
        refusal = await lane.refused(encoded("T", 0, b"x", properties=properties), [segment])
        assert isinstance(refusal, error)
        assert await broker.bodies("T", 0) == []
