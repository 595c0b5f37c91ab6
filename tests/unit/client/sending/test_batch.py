from __future__ import annotations

import asyncio
from asyncio import Future

from hypothesis import given
from hypothesis import strategies as st

from cometmq.client.messages import SendReceipt
from cometmq.client.sending.batch import Batch, Segment
from cometmq.model import QueueRef


def batch_of(runs: list[list[bytes]]) -> Batch:
    """A closed batch: one segment for each run of records."""
    loop = asyncio.new_event_loop()
    batch = Batch(sequence=3, deadline_s=9.0)
    for queue_id, records in enumerate(runs):
        segment = Segment(QueueRef("T", queue_id, "g"), False, "ID", len(batch.starts))
        segment.count = len(records)
        batch.segments.append(segment)
        for record in records:
            future: Future[SendReceipt] = loop.create_future()
            batch.waiters.append(future)
            batch.starts.append(batch.size)
            batch.buffer += record
    batch.close()
    loop.close()
    return batch


def contents(batch: Batch) -> list[tuple[int, bytes, int]]:
    """(queue, record, its unique id's counter) of each message."""
    ends = [*batch.starts[1:], batch.size]
    records = [batch.records[a:b] for a, b in zip(batch.starts, ends, strict=True)]
    places = [
        (s.queue.queue_id, s.first_counter + n) for s in batch.segments for n in range(s.count)
    ]
    return [(q, record, c) for (q, c), record in zip(places, records, strict=True)]


def test_a_closed_batch_is_its_records_end_to_end() -> None:
    batch = batch_of([[b"aa", b"b"], [b"ccc"]])
    assert (batch.records, list(batch.starts), batch.size) == (b"aabccc", [0, 2, 3], 6)


@given(
    st.lists(st.lists(st.binary(min_size=1, max_size=5), min_size=1, max_size=4), min_size=1),
    st.sets(st.integers(0, 5)),
)
def test_splitting_loses_nothing_and_keeps_the_order(
    runs: list[list[bytes]], chosen: set[int]
) -> None:
    batch = batch_of(runs)
    batch.is_marked = True
    before = contents(batch)
    taken, rest = batch.split(chosen)
    wanted = [item for item in before if item[0] in chosen]
    assert [item for part in taken for item in contents(part)] == wanted
    wanted = [item for item in before if item[0] not in chosen]
    assert [item for part in rest for item in contents(part)] == wanted
    parts = sorted([*taken, *rest], key=lambda part: part.first)
    assert [w for part in parts for w in part.waiters] == batch.waiters
    assert all(part.sequence == 3 for part in parts)
    for part in parts:
        assert part.is_marked, "a traced message is in one of them"
        counters = [counter for _, _, counter in contents(part)]
        assert counters == list(range(counters[0], counters[0] + len(counters))), "ids have a gap"


def test_replacing_gives_the_same_messages_other_bytes() -> None:
    batch = batch_of([[b"aa", b"b"]])
    batch.replace([b"xxx", b"yyyy"])
    assert (batch.records, list(batch.starts), batch.size) == (b"xxxyyyy", [0, 3], 7)
