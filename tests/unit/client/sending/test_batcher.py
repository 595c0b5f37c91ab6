from __future__ import annotations

import asyncio
import gc
import random
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from cometmq.client.messages import StoredRun
from cometmq.client.options import ProducerOptions
from cometmq.client.sending.batch import Batch
from cometmq.client.sending.batcher import Batcher, Buffer, Slot
from cometmq.client.sending.send_many import MessageRange, SendMany
from cometmq.clock import SystemClock
from cometmq.errors import BodyTooLarge, CometError, PropertiesInvalid
from cometmq.format.halves import HalfForm
from cometmq.format.ids import UNIQUE_ID_COUNTER_MAX
from cometmq.format.record import decode_all
from cometmq.model import Message, QueueRef
from cometmq.v1 import broker_pb2

pytestmark = pytest.mark.usefixtures("implementation")

HUGE = 1 << 22


class StillClock(SystemClock):
    """Records that are made one after the other have the same time."""

    def wall_ms(self) -> int:
        return 1234


class Collected:
    """A batcher that is ready, and the batches it closed."""

    def __init__(self, **options: Any) -> None:
        self.closed: list[Batch] = []
        self.turns = 0
        self.buffer = Buffer(HUGE, HUGE)
        self.batcher = Batcher(
            ProducerOptions(**options), self.buffer, StillClock(), self.closed.append, self.turn
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
    moved.is_marked = True
    new.buffer.used = moved.size  # the buffer is the producer's, so it counts them already
    new.put(new.slot(), b"before")
    new.batcher.adopt(moved, new.slot(7))
    before, adopted = new.closed
    assert (bodies(before), bodies(adopted)) == ([b"before"], [b"1", b"2"])
    assert adopted.waiters == futures
    assert adopted.deadline_s == moved.deadline_s
    assert (before.is_marked, adopted.is_marked) == (False, True)
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


# --- one by one, into an open run, many at once ---------------------------------------------------


class OwnMessage(Message):
    """Of a class that an application made."""


class Way(Collected):
    """Messages put in one of three ways, and what comes of it."""

    def __init__(self, way: str, **options: Any) -> None:
        super().__init__(compress_above_bytes=2000, **options)
        self.way = way
        self.errors: list[tuple[int, type[CometError]]] = []
        self.outcomes: list[Any] = []  # futures of single messages
        self.many = SendMany(asyncio.get_running_loop())
        self.slots = {topic: self.slot(1, topic) for topic in "TU"}
        self.run_count = 0  # messages that an open run took

    def put_all(self, messages: list[Message]) -> None:
        at = 0
        while at < len(messages):
            try:
                at += getattr(self, self.way)(messages, at)
            except CometError as error:
                self.errors.append((at, type(error)))
                at += 1

    def by_put(self, messages: list[Message], at: int) -> int:
        self.outcomes.append(self.put_message(messages[at], self.slots[messages[at].topic]))
        return 1

    def by_run(self, messages: list[Message], at: int) -> int:
        """As a producer does it."""
        run = self.buffer.runs.get(messages[at].topic)
        future = None if run is None else run.put(messages[at])
        if future is None:
            self.by_put(messages, at)
            if self.batcher.open is not None:
                self.batcher.begin_run()
        else:
            self.outcomes.append(future)
            self.run_count += 1
        return 1

    def by_extend(self, messages: list[Message], at: int) -> int:
        slot = self.slots[messages[at].topic]
        count = self.batcher.extend(messages, at, slot, self.many, count=1024)
        if count:
            return count
        waiter = self.many.take(1)
        try:
            self.batcher.put(messages[at], slot, waiter)
        except CometError:
            self.many.give_back()
            raise
        return 1

    def facts(self) -> list[tuple[bytes, list[int], object, int, list[int]]]:
        """Everything about the closed batches but the incarnation of their ids."""
        assert self.batcher.encoder is not None
        stream = self.batcher.encoder.stream
        for batch in self.closed:
            assert batch.is_marked is (b"\x02TRACE_ON\x01" in batch.records)
        return [
            (
                batch.records.replace(stream.encode(), b"-" * len(stream)),
                list(batch.starts),
                [(s.queue, s.count, s.first_counter, s.stored) for s in batch.segments],
                sum(w.count if isinstance(w, MessageRange) else 1 for w in batch.waiters),
                [time_ms for segment in batch.segments for time_ms in segment.times],
            )
            for batch in self.closed
        ]

    def records(self) -> bytes:
        """Those of all closed batches."""
        return b"".join(records for records, *_ in self.facts())

    def times(self) -> list[int]:
        """What the messages of all closed batches name."""
        return [time_ms for *_, times in self.facts() for time_ms in times]

    def offsets(self) -> list[int]:
        """The queue offset that each message is told, when all are stored behind each other."""
        for batch in self.closed:
            batch.stored([StoredRun(s.queue, s.first_counter, 1) for s in batch.segments])
        self.many.end()
        if self.way == "by_extend":
            return [receipt.queue_offset for receipt in self.many.decided.result()]
        return [future.result().queue_offset for future in self.outcomes]


def changed(message: Message, name: str, value: object) -> Message:
    """It was right when it was made."""
    setattr(message, name, value)
    return message


UNUSUAL: list[Callable[[str, bytes], Message]] = [
    lambda topic, body: Message(topic, body, keys=("k", "ä")),
    lambda topic, body: Message(topic, body, "tag", properties={"name": "wert ü", "x": "1"}),
    lambda topic, body: Message(topic, body, "tag", ("k",), {"name": "v"}, sharding_key="s"),
    lambda topic, body: Message(topic, body, sharding_key="ß", delay_level=2),
    lambda topic, body: Message(topic, body, properties={"n": "v", "TRACE_ON": "false"}),
    lambda topic, body: Message(topic, body, flag=5),
    lambda topic, body: Message(topic, body, delay_level=1),
    lambda topic, body: Message(topic, body, delay_level=3),
    lambda topic, body: Message(topic, body, wait_store=False),
    lambda topic, body: Message(topic, body, delay_ms=500),
    lambda topic, body: Message(topic, body, deliver_at_ms=2 * 10**12),
    lambda topic, body: Message(topic, bytes(2000)),
    lambda topic, body: Message(topic, bytes(2001)),
    lambda topic, body: Message(topic, bytes(60_000)),
    lambda topic, body: Message(topic, bytes(HUGE + 1)),
    lambda topic, body: OwnMessage(topic, body),
    lambda topic, body: Message(topic, body, "a|b"),
    lambda topic, body: Message(topic, body, "\x01"),
    lambda topic, body: Message(topic, body, "x" * 257),
    lambda topic, body: changed(Message(topic, body), "keys", ("a b",)),
    lambda topic, body: changed(Message(topic, body), "keys", ("",)),
    lambda topic, body: changed(Message(topic, body), "keys", ("a\u2003b",)),
    lambda topic, body: Message(topic, body, keys=("a\x02b",)),
    lambda topic, body: Message(topic, body, keys=("\ud800",)),
    lambda topic, body: Message(topic, body, sharding_key="a\x00"),
    lambda topic, body: Message(topic, body, properties={"TAGS": "x"}),
    lambda topic, body: Message(topic, body, properties={"DELAY": "x"}),
    lambda topic, body: Message(topic, body, properties={"__RMQ.TRANSIENT.x": "x"}),
    lambda topic, body: Message(topic, body, properties={"a": ""}),
    lambda topic, body: Message(topic, body, properties={"": "a"}),
    lambda topic, body: Message(topic, body, properties={"a": "\x01"}),
    lambda topic, body: Message(topic, body, properties={"a": "\udfff"}),
    lambda topic, body: Message(topic, body, properties={"a": "x" * 33_000}),
    lambda topic, body: changed(Message(topic, body), "body", 5),
    lambda topic, body: changed(Message(topic, body), "tag", None),
    lambda topic, body: changed(Message(topic, body), "keys", "k"),
    lambda topic, body: changed(Message(topic, body), "keys", ("k", 5)),
    lambda topic, body: changed(Message(topic, body), "properties", {"k": 5}),
    lambda topic, body: changed(Message(topic, body), "sharding_key", 5),
    lambda topic, body: changed(Message(topic, body), "delay_level", 99),
]


TIMES: list[Callable[[random.Random], dict[str, int]]] = [
    lambda source: {},
    lambda source: {"deliver_at_ms": source.choice([10**12, 10**13 - 1, 2 * 10**12 + 7])},
    lambda source: {"delay_ms": source.choice([1, 700, 40 * 86_400_000])},
]


def any_message(source: random.Random, times: Callable[[random.Random], dict[str, int]]) -> Message:
    """``times``: what most messages name."""
    topic = "T" if source.random() < 0.95 else "U"
    body = source.randbytes(source.choice([0, 1, 10, 300]))
    if source.random() < 0.25:
        return source.choice(UNUSUAL)(topic, body)
    named: dict[str, Any] = times(source)
    return Message(topic, body, source.choice(["", "", "a", "b", "tag ü"]), **named)


async def test_messages_are_the_same_bytes_in_whichever_way_they_are_put(
    implementation: str,
) -> None:
    run_counts = [0, 0, 0]
    for seed in range(200):
        source = random.Random(seed)
        times = TIMES[seed % 3]
        options = {
            "batch_count_max": source.choice([2, 7, 1024]),
            "batch_bytes_max": source.choice([2048, 4096, 262_144]),
        }
        ways = [Way(way, **options) for way in ("by_put", "by_run", "by_extend")]
        for _ in range(source.randint(1, 4)):
            messages = [any_message(source, times) for _ in range(source.randint(1, 40))]
            for way in ways:
                way.put_all(messages)
            if source.random() < 0.5:
                await asyncio.sleep(0)  # a turn ends, and the batch stays open
        for way in ways:
            way.batcher.close()
        one, *others = ways
        for way in others:
            assert way.errors == one.errors, seed
            assert way.buffer.used == one.buffer.used, seed
        assert ways[1].facts() == one.facts(), seed
        # What is put together may fill a batch better.
        assert ways[2].records() == one.records(), seed
        assert ways[2].times() == one.times(), seed
        assert ways[1].offsets() == ways[2].offsets() == one.offsets(), seed
        run_counts[seed % 3] += ways[1].run_count
    assert min(run_counts) > (200 if implementation == "native" else -1)


async def test_a_full_buffer_ends_what_needs_no_look(implementation: str) -> None:
    made = Collected(batch_count_max=8)
    made.buffer.bytes_max = made.buffer.limit = 1
    slot = made.slot()
    made.put(slot, b"1", b"2")
    made.batcher.begin_run()
    assert list(made.buffer.runs) == (["T"] if implementation == "native" else [])
    made.batcher.close()
    assert not made.buffer.runs


async def test_a_run_begins_only_where_messages_come_together() -> None:
    made = Collected()
    slot = made.slot()
    made.put(slot, b"1")
    made.batcher.begin_run()
    assert not made.buffer.runs, "one message a turn"
    made.put(slot, b"2")
    await asyncio.sleep(0)
    made.batcher.begin_run()
    assert not made.buffer.runs, "the clock is looked at in each turn"


@pytest.mark.parametrize("half", [None, HalfForm("P")])
async def test_nothing_is_kept_of_a_topic_whose_batches_are_closed(half: HalfForm | None) -> None:
    made = Collected(compress_above_bytes=HUGE, batch_bytes_max=HUGE)
    size_bytes = 100_000

    def send(topic: str) -> None:
        slot = made.slot(topic=topic)
        if half is not None:
            slot = slot.of_half(half)
            assert made.batcher.ready(slot)
        made.put(slot, bytes(size_bytes), b"")
        made.batcher.begin_run()
        made.batcher.close()
        batch = made.closed.pop()
        made.buffer.release(batch.size, batch.count)

    send("T")
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(20):
            send(f"T{number}")
        gc.collect()
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept_bytes < 5 * size_bytes
