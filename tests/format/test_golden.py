"""Bytes that must never change. Each file was made by another program than the one under test:
RocketMQ's own record by RocketMQ 4.9.8, the others by the naive writer of tests/unit/format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cometmq.format import batch, properties, record
from cometmq.format.taghash import tags_code

pytestmark = pytest.mark.usefixtures("implementation")

GOLDEN = Path(__file__).parent / "golden"
ROCKETMQ = bytes.fromhex((GOLDEN / "rocketmq-4.9.8-record.hex").read_text())
RECORDS: list[dict[str, Any]] = json.loads((GOLDEN / "records-v1.json").read_text())
BATCH: dict[str, Any] = json.loads((GOLDEN / "batch-v1.json").read_text())
BY_NAME = pytest.mark.parametrize("golden", RECORDS, ids=[one["name"] for one in RECORDS])


def test_a_record_of_rocketmq_is_read() -> None:
    found = record.decode(ROCKETMQ)
    assert (found.topic, found.queue_id, found.body) == ("TopicTest", 0, b"Hello RocketMQ 0")
    assert found.born_time_ms == 1_700_000_000_000
    assert found.store_time_ms == 0x1A1FDFFAD95
    assert record.host_text(found.born_host) == "10.0.0.1:12345"
    assert record.host_text(found.store_host) == "10.0.0.2:10911"
    assert found.properties == {
        "KEYS": "key0",
        "UNIQ_KEY": "0A00000100002A139A55000000000000",
        "TAGS": "TagA",
    }
    assert tags_code(found.tag.encode()) == 2598919
    assert record.check(ROCKETMQ, 0, log_offset=0, bytes_left=1024).record == found


def test_a_record_of_rocketmq_is_written_byte_for_byte() -> None:
    found = record.decode(ROCKETMQ)
    again = record.encode(
        b"TopicTest",
        0,
        b"Hello RocketMQ 0",
        properties.encode(found.properties).removesuffix(b"\x02"),  # 4.9 drops the last one
        born_time_ms=1_700_000_000_000,
        born_host=record.host_bytes("10.0.0.1", 12345),
        store_host=record.host_bytes("10.0.0.2", 10911),
        store_time_ms=0x1A1FDFFAD95,
    )
    assert again == ROCKETMQ


@BY_NAME
def test_golden_records_are_read(golden: dict[str, Any]) -> None:
    found = record.decode(bytes.fromhex(golden["hex"]))
    seen = found._asdict() | {"properties": found.properties}
    del seen["raw_properties"]
    for name in ("born_host", "store_host", "body"):
        seen[name] = seen[name].hex()
    assert seen == golden["fields"]


@BY_NAME
def test_golden_records_are_written(golden: dict[str, Any]) -> None:
    fields = dict(golden["fields"])
    for computed in ("size", "magic", "body_crc", "body_bytes"):
        del fields[computed]
    data = record.encode(
        fields.pop("topic").encode(),
        fields.pop("queue_id"),
        bytes.fromhex(fields.pop("body")),
        properties.encode(fields.pop("properties")),
        born_host=bytes.fromhex(fields.pop("born_host")),
        store_host=bytes.fromhex(fields.pop("store_host")),
        **fields,
    )
    assert data.hex() == golden["hex"]


def test_the_golden_batch_is_stamped() -> None:
    stamped = batch.stamp(
        bytes.fromhex(BATCH["records"]),
        [
            batch.SegmentClaim(**segment | {"topic": segment["topic"].encode()})
            for segment in BATCH["segments"]
        ],
        log_offset=BATCH["log_offset"],
        store_time_ms=BATCH["store_time_ms"],
        born_host=bytes.fromhex(BATCH["born_host"]),
        store_host=bytes.fromhex(BATCH["store_host"]),
        limits=batch.BatchLimits(),
    )
    assert stamped.buffer.hex() == BATCH["stamped"]
    assert [units.hex() for units in stamped.units] == BATCH["units"]
