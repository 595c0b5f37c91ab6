from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cometmq.client.batch import Batch
from cometmq.client.batcher import Batcher, Buffer, Slot
from cometmq.client.options import ProducerOptions
from cometmq.clock import SystemClock
from cometmq.errors import BodyTooLarge, PropertiesInvalid
from cometmq.format.ids import UNIQUE_ID_COUNTER_MAX
from cometmq.format.record import decode_all
from cometmq.model import Message, QueueRef
from cometmq.v1 import broker_pb2

pytestmark = pytest.mark.usefixtures("implementation")

HUGE = 1 << 22


class Collected:
    """A batcher that is ready, and the batches it closed."""

    def __init__(self, **options: Any) -> None:
        self.closed: list[Batch] = []
        self.turns = 0
        self.buffer = Buffer(HUGE, HUGE)
        self.batcher = Batcher(
            ProducerOptions(**options), self.buffer, SystemClock(), self.closed.append, self.turn
        )
        self.open_stream()

    def turn(self) -> None:
        self.turns += 1

    def open_stream(self, host_bytes: int = 4, count_max: int = 1024) -> bool:
        return self.batcher.take_opened(
            broker_pb2.SendStreamOpened(
                born_host=bytes(host_bytes),
                store_host=bytes(host_bytes),
                body_max_bytes=HUGE,
                batch_max_bytes=HUGE,
                batch_max_count=count_max,
            )
        )

    def slot(self, queue_id: int = 0, topic: str = "T", pinned: bool = False) -> Slot:
        slot = Slot(QueueRef(topic, queue_id, "g"), pinned=pinned)
        assert self.batcher.ready(slot)
        return slot

    def put(self, slot: Slot, *bodies: bytes) -> list[asyncio.Future[Any]]:
        return [self.put_message(Message(slot.queue.topic, body), slot) for body in bodies]

    def put_message(self, message: Message, slot: Slot) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.batcher.put(message, slot, future)
        return future


def bodies(batch: Batch) -> list[bytes]:
    return [record.body for record in decode_all(batch.records)]


async def test_a_batch_is_closed_by_count() -> None:
    made = Collected(batch_count_max=2)
    made.put(made.slot(), b"1", b"2", b"3")
    assert [bodies(batch) for batch in made.closed] == [[b"1", b"2"]]
    made.batcher.close()
    assert bodies(made.closed[1]) == [b"3"]
    assert [batch.sequence for batch in made.closed] == [1, 2]


async def test_a_batch_is_closed_before_it_grows_too_large() -> None:
    made = Collected(batch_bytes_max=2048, compress_above_bytes=HUGE)
    made.put(made.slot(), b"small", bytes(1900), bytes(900), bytes(900), bytes(5000), b"last")
    made.batcher.close()
    assert [len(bodies(batch)) for batch in made.closed] == [1] * 6
    made.put(made.slot(), bytes(100), bytes(100))
    made.batcher.close()
    assert len(bodies(made.closed[-1])) == 2


async def test_the_broker_may_want_smaller_batches() -> None:
    made = Collected()
    made.open_stream(count_max=1)
    made.put(made.slot(), b"1", b"2")
    assert len(made.closed) == 2


async def test_segments_are_runs_of_one_queue() -> None:
    made = Collected()
    a, b, chosen = made.slot(0), made.slot(1), made.slot(1, pinned=True)
    for slot in (a, a, b, chosen, a):
        made.put(slot, b"x")
    made.batcher.close()
    (batch,) = made.closed
    assert [(s.queue.queue_id, s.count, s.pinned) for s in batch.segments] == [
        (0, 2, False),
        (1, 1, False),
        (1, 1, True),
        (0, 1, False),
    ]
    assert [s.first_counter for s in batch.segments] == [0, 2, 3, 4]
    assert [r.queue_id for r in decode_all(batch.records)] == [0, 0, 1, 1, 0]


async def test_each_turn_of_the_loop_ends_once() -> None:
    made = Collected()
    for expected in (1, 2):
        made.put(made.slot(), b"1", b"2")
        await asyncio.sleep(0)
        assert made.turns == expected


async def test_bad_messages_change_nothing() -> None:
    made = Collected()
    slot = made.slot()
    for message, error in (
        (Message("T", bytes(HUGE + 1)), BodyTooLarge),
        (Message("T", b"", "a|b"), PropertiesInvalid),
    ):
        with pytest.raises(error):
            made.put_message(message, slot)
    assert (made.batcher.open, made.buffer.used) == (None, 0)
    made.put(slot, b"good")
    made.batcher.close()
    assert decode_all(made.closed[0].records)[0].unique_id.endswith("00000000")


async def test_the_buffer_counts_every_byte() -> None:
    made = Collected()
    made.put(made.slot(), b"12345", b"")
    made.batcher.close()
    assert made.buffer.used == len(made.closed[0].records)


async def test_a_new_incarnation_begins_with_a_batch() -> None:
    made = Collected()
    slot = made.slot()
    encoder = made.batcher.encoder
    assert encoder is not None
    encoder.counter = UNIQUE_ID_COUNTER_MAX - 1023
    made.put(slot, b"1")
    made.batcher.close()
    encoder.counter = UNIQUE_ID_COUNTER_MAX - 1022
    made.put(slot, b"2")
    made.batcher.close()
    ids = [decode_all(batch.records)[0].unique_id for batch in made.closed]
    assert ids[0][:26] != ids[1][:26]
    assert [batch.segments[0].id_stream for batch in made.closed] == [i[:26] for i in ids]
    assert ids[1].endswith("00000000")


async def test_an_adopted_batch_keeps_its_identity_and_its_futures() -> None:
    old, new = Collected(), Collected()
    futures = old.put(old.slot(3), b"1", b"2")
    old.batcher.close()
    (moved,) = old.closed
    new.buffer.used = moved.size  # the buffer is the producer's, so it counts them already
    new.put(new.slot(), b"before")
    new.batcher.adopt(moved, new.slot(7))
    before, adopted = new.closed
    assert (bodies(before), bodies(adopted)) == ([b"before"], [b"1", b"2"])
    assert adopted.waiters == futures
    assert adopted.deadline_s == moved.deadline_s
    ids = [r.unique_id for r in decode_all(adopted.records)]
    assert ids == [r.unique_id for r in decode_all(moved.records)]
    segment = adopted.segments[0]
    assert ids[0] == f"{segment.id_stream}{segment.first_counter:08X}"
    assert new.buffer.used == before.size + adopted.size
    assert {r.queue_id for r in decode_all(adopted.records)} == {7}


async def test_other_host_lengths_mean_encoding_again() -> None:
    made = Collected()
    made.put(made.slot(), b"1", b"2")
    assert not made.open_stream(4)
    assert made.open_stream(16)
    (batch,) = made.closed
    old = decode_all(batch.records)
    made.batcher.encode_again(batch)
    new = decode_all(batch.records)
    assert [r.unique_id for r in new] == [r.unique_id for r in old]
    assert ({r.sys_flag for r in old}, {r.sys_flag for r in new}) == ({0}, {48})
    assert made.buffer.used == batch.size == len(batch.records)
