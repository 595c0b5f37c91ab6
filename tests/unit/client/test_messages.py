from __future__ import annotations

from cometmq.client.messages import SendReceipt, StoredRun
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
