from __future__ import annotations

import zlib
from typing import Any

import pytest

from cometmq.client.messages import ReceivedMessage, SendReceipt, StoredRun
from cometmq.errors import BodyCompressionInvalid
from cometmq.format.record import decode, encode
from cometmq.model import QueueRef

QUEUE = QueueRef("T", 3, "g1")


def test_a_receipt_counts_from_its_run() -> None:
    run = StoredRun(QUEUE, queue_offset=50, store_time_ms=9)
    run.log_offset, run.starts, run.first = 1000, [0, 100, 250, 400], 1
    run.id_stream, run.first_counter = "AB" * 13, 255
    receipt = SendReceipt(run, 2)
    assert receipt.message_id == "g1/1400"
    assert (receipt.queue, receipt.queue_offset, receipt.store_time_ms) == (QUEUE, 52, 9)
    assert receipt.unique_id == "AB" * 13 + "00000101"
    assert repr(receipt).startswith("SendReceipt('g1/1400'")


def test_a_compressed_body_is_read_as_it_was_sent() -> None:
    host = bytes(8)
    fields: dict[str, Any] = {
        "born_time_ms": 5,
        "born_host": host,
        "store_host": host,
        "sys_flag": 1,
    }
    for stored in (zlib.compress(b"text"), b"not zlib"):
        message = ReceivedMessage(decode(encode(b"T", 0, stored, b"", **fields)), QUEUE)
        assert message.record.body == stored
        if stored == b"not zlib":
            with pytest.raises(BodyCompressionInvalid):
                _ = message.body
        else:
            assert message.body == b"text"


def test_a_received_message_reads_its_record() -> None:
    properties = b"UNIQ_KEY\x01ID\x02KEYS\x01k1 k2\x02TAGS\x01A\x02p\x01v\x02"
    host = bytes(8)
    record = decode(
        encode(
            b"T",
            3,
            b"body",
            properties,
            born_time_ms=5,
            born_host=host,
            store_host=host,
            flag=2,
            queue_offset=7,
            log_offset=800,
            store_time_ms=6,
        )
    )
    message = ReceivedMessage(record, QUEUE)
    assert (message.topic, message.body, message.tag) == ("T", b"body", "A")
    assert (message.keys, message.unique_id, message.properties["p"]) == (("k1", "k2"), "ID", "v")
    assert (message.message_id, message.queue_offset, message.flag) == ("g1/800", 7, 2)
    assert (message.born_time_ms, message.store_time_ms, message.attempt) == (5, 6, 1)
    assert repr(message).startswith("ReceivedMessage('g1/800'")
