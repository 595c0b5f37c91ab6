"""Delayed messages against a list: random sends, clocks, crashes and orderly stops of one writer.

Each message is delivered once, in the order of its level, never early; no crash repeats one or
loses one, whether progress was written or not.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from cometmq.format import delayed, record
from cometmq.format.delayed import SCHEDULE_TOPIC
from cometmq.format.relay import relay
from cometmq.member.metrics import DELAY_RESULTS, MemberMetrics
from cometmq.member.relay import RelayWriter
from cometmq.messaging.changes import TopicPut
from cometmq.model import TopicConfig
from cometmq.replication.watermarks import DurabilityClass
from services.broker.delay.believed_time import BelievedTime
from services.broker.delay.schedule import ScheduleService
from services.broker.sending.produce import Claim, ProduceHandler, ProducePolicy
from tests.support.cluster.broker import encoded
from tests.support.cluster.members import Member, living_member
from tests.support.stores.small_stores import HOST, START_MS, WallClock

LEVELS = (1, 2, 4)
QUEUES = 2
LARGE_FILES: dict[str, Any] = {
    "mapped_file_size_commit_log": 8 << 20,
    "mapped_file_size_consume_queue": 200_000,
}


class Story:
    """What was sent, by level, and what the topic has to hold."""

    def __init__(self, source: random.Random) -> None:
        self.source = source
        self.clock = WallClock()
        self.sent: dict[int, list[tuple[int, bytes]]] = {level: [] for level in LEVELS}
        self.count = 0

    @asynccontextmanager
    async def life(self, folder: Path, *, clean: bool) -> AsyncIterator[tuple[Member, Parts]]:
        async with living_member(folder, clean=clean, clock=self.clock) as member:
            await member.put("T", QUEUES)
            parts = Parts(member, self.clock)
            yield member, parts
            if clean:
                member.keeper.write_progress(self.clock.monotonic_s())

    async def send(self, parts: Parts) -> None:
        level, queue_id = self.source.choice(LEVELS), self.source.randrange(QUEUES)
        count = self.source.choice([1, 1, 3, 300])
        prefix = delayed.prefix(level, "T", queue_id)
        bodies = [b"%d" % (self.count + n) for n in range(count)]
        self.count += count
        data = b"".join(
            encoded("SCHEDULE_TOPIC_XXXX", delayed.queue_id_of(level), body, properties=prefix)
            for body in bodies
        )
        accepted = await parts.produce.take(data, [Claim("T", queue_id, count, level)], HOST)
        due_ms = accepted.ticket.appended.store_time_ms + delayed.delay_ms(level)
        self.sent[level] += [(due_ms, body) for body in bodies]

    def check(self, member: Member, parts: Parts) -> None:
        """All that is due was delivered, once, in order; nothing else."""
        delivered: dict[int, list[bytes]] = {level: [] for level in LEVELS}
        found = []
        for queue_id in range(QUEUES):
            low, high = member.store.queue_bounds("T", queue_id)
            for offset in range(low, high):
                units = member.store.read_units("T", queue_id, offset, 1)
                found.append(record.decode(member.store.read_records([_span(units)])))
        for one in sorted(found, key=lambda one: one.log_offset):
            delivered[int(one.properties["DELAY"])].append(one.body)
        for level, sent in self.sent.items():
            due = [body for due_ms, body in sent if due_ms <= self.clock.now_ms]
            assert delivered[level] == due, (level, len(delivered[level]), len(due))
            assert parts.schedule.progress.levels[level].offset == len(due)


class Parts:
    """What sends and delivers in one life of the writer."""

    def __init__(self, member: Member, clock: WallClock) -> None:
        metrics = self.metrics = MemberMetrics(CollectorRegistry(), "c", "g")
        policy = ProducePolicy(1 << 30, False, TopicConfig(""), 30.0, 30.0)
        self.produce = ProduceHandler(member.storage, member.keeper, policy, HOST, metrics, clock)
        relays = RelayWriter(member.storage, member.state.topics, HOST, metrics)
        self.schedule = ScheduleService(
            *(member.storage, member.keeper, relays, metrics, clock),
            BelievedTime(clock, metrics, 0),
        )

    async def deliver(self) -> None:
        """All that is due."""
        while await self.schedule.deliver_due() == 0.0:
            pass

    def counts(self) -> dict[str, int]:
        """What became of the messages in this life."""
        return {how: int(self.metrics.delay_out.labels(how)._value.get()) for how in DELAY_RESULTS}


def _span(units: bytes) -> tuple[int, int]:
    return int.from_bytes(units[:8], "big"), int.from_bytes(units[8:12], "big")


@pytest.mark.parametrize("seed", range(12))
async def test_every_message_comes_once_in_time_whatever_ends_the_writer(
    tmp_path: Path, seed: int
) -> None:
    story = Story(random.Random(seed))
    source = story.source
    for _ in range(5):
        async with story.life(tmp_path / "store", clean=source.random() < 0.4) as (member, parts):
            for _ in range(source.randrange(1, 12)):
                match source.randrange(3):
                    case 0:
                        await story.send(parts)
                    case 1:
                        story.clock.now_ms += source.choice([10, 900, 1_000, 5_000, 40_000])
                    case _:
                        await member.on_disk()
                        await parts.deliver()
                        await member.on_disk()
                        story.check(member, parts)
                        if source.random() < 0.3:
                            member.keeper.write_progress(story.clock.monotonic_s())
            await member.on_disk()
    story.clock.now_ms += 3_600_000
    async with story.life(tmp_path / "store", clean=True) as (member, parts):
        await parts.deliver()
        story.check(member, parts)
    assert story.clock.now_ms > START_MS


@pytest.mark.parametrize(
    ("read", "write", "delivered_to"), [(4, 4, 3), (4, 2, 1), (1, 1, 0), (3, 0, 0), (0, 0, None)]
)
async def test_messages_whose_queue_was_taken_away_go_to_one_that_is_written(
    tmp_path: Path, read: int, write: int, delivered_to: int | None
) -> None:
    """Also to one that RocketMQ's tables left, where topics may have no queue for writers."""
    clock = WallClock()
    async with living_member(tmp_path / "store", clean=True, clock=clock) as member:
        await member.put("T", 4)
        parts = Parts(member, clock)
        data = encoded("SCHEDULE_TOPIC_XXXX", 0, b"late", properties=delayed.prefix(1, "T", 3))
        await parts.produce.take(data, [Claim("T", 3, 1, 1)], HOST)
        await member.on_disk()
        change = TopicPut(TopicConfig("T", read, write), member.state.generations.allocate())
        member.state.apply(change)
        clock.now_ms += 2_000
        await parts.schedule.deliver_due()
        ends = [member.store.queue_bounds("T", n)[1] for n in range(4)]
        assert ends == [int(n == delivered_to) for n in range(4)]


@pytest.mark.usefixtures("implementation")
async def test_messages_that_need_a_closer_look_take_no_others_along(tmp_path: Path) -> None:
    """A damaged one, one in RocketMQ's form, and one whose topic is gone, in two levels."""
    clock = WallClock()
    async with living_member(tmp_path / "store", clean=True, clock=clock) as member:
        parts = Parts(member, clock)
        await member.put("T", QUEUES)
        await member.put("Gone", 1)
        bodies = [b"body %03d" % n for n in range(300)]
        for n, body in enumerate(bodies):
            level, target = 1 + n % 2, ("Gone", 0) if n == 20 else ("T", n % 3 % 2)
            prefix = delayed.prefix(level, *target)
            if n == 10:  # the level comes last
                first, rest = prefix.split(b"\x02", 1)
                prefix = rest + first + b"\x02"
            queue = (SCHEDULE_TOPIC, delayed.queue_id_of(level))
            found = record.decode(encoded(*queue, body, properties=prefix))
            kept = relay(found, *queue, HOST, delay_ms=delayed.delay_ms(level))
            demands = {SCHEDULE_TOPIC: DurabilityClass.ASYNC}
            member.storage.append_relayed([kept], demands, HOST)
        await member.on_disk()
        await member.keeper.drop_topic("Gone")
        damage(tmp_path, bodies[5])
        clock.now_ms += 5_000
        await parts.deliver()
        await member.on_disk()
        for queue_id in range(QUEUES):
            there = [n for n in range(300) if n not in (5, 20) and n % 3 % 2 == queue_id]
            found_bodies = bodies_of(member, queue_id)
            for level in (0, 1):  # each in its order
                of_level = [body for body in found_bodies if int(body[5:]) % 2 == level]
                assert of_level == [bodies[n] for n in there if n % 2 == level]
        assert [parts.schedule.progress.levels[level].offset for level in (1, 2)] == [150, 150]
        assert parts.counts() == {"delivered": 298, "dropped": 1, "lost": 1}


async def test_a_topic_that_is_created_again_gets_nothing_of_the_old_one(tmp_path: Path) -> None:
    """Nor after the writer has ended. What is dropped is counted, and in the end forgotten."""
    story = Story(random.Random(0))

    async def send(parts: Parts, body: bytes, *levels: int) -> None:
        for level in levels:
            queue = (SCHEDULE_TOPIC, delayed.queue_id_of(level))
            one = encoded(*queue, body, properties=delayed.prefix(level, "T", 0))
            await parts.produce.take(one, [Claim("T", 0, 1, level)], HOST)

    async with story.life(tmp_path / "store", clean=False) as (member, parts):
        await send(parts, b"in time", 1)
        await member.on_disk()
        story.clock.now_ms += 1_000
        await parts.deliver()
        await send(parts, b"old", 1, 4)
        await member.on_disk()
        for _ in range(3):  # a note has no more than its topic
            await member.keeper.drop_topic("T")
            assert not member.state.delay_drops.dropped
            await member.put("T", QUEUES)
        await send(parts, b"new 1", 1)
        await send(parts, b"new 2", 2)
        await send(parts, b"new 4", 4)
        assert member.state.delay_drops.dropped == {"T": {1: 2, 4: 1}}
        await member.on_disk()
    async with story.life(tmp_path / "store", clean=True) as (member, parts):
        for waited_ms, left, dropped in ((5_000, {"T": {4: 1}}, 1), (30_000, {}, 2)):
            story.clock.now_ms += waited_ms
            await parts.deliver()
            await member.on_disk()
            member.keeper.write_progress(story.clock.monotonic_s())
            assert member.state.delay_drops.dropped == left
            assert parts.counts() == {"delivered": 1 + dropped, "dropped": dropped, "lost": 0}
        assert sorted(bodies_of(member, 0)) == [b"new 1", b"new 2", b"new 4"]


async def test_a_level_that_is_always_full_does_not_keep_the_others_waiting(
    tmp_path: Path,
) -> None:
    clock = WallClock()
    async with living_member(tmp_path / "store", clean=True, clock=clock) as member:
        await member.put("T", 1)
        parts = Parts(member, clock)
        for level, count in ((1, 500), (2, 1), (3, 1)):
            queue = (SCHEDULE_TOPIC, delayed.queue_id_of(level))
            one = encoded(*queue, b"%d" % level, properties=delayed.prefix(level, "T", 0))
            await parts.produce.take(one * count, [Claim("T", 0, count, level)], HOST)
        await member.on_disk()
        clock.now_ms += 3_600_000
        levels = parts.schedule.progress.levels
        for _ in range(len(levels)):
            parts.schedule._delivery.turn_count = 10  # of the 20 that a file of a queue has
            await parts.schedule.deliver_due()
        assert levels[1].offset < 500
        assert [levels[level].offset for level in (2, 3)] == [1, 1]


async def test_turns_are_short_until_what_is_due_is_half_a_second_late(tmp_path: Path) -> None:
    """Sends wait for at most one of them at a time."""
    clock = WallClock()
    async with living_member(tmp_path / "store", clock=clock, **LARGE_FILES) as member:
        await member.put("T", 1)
        parts = Parts(member, clock)
        one = encoded(SCHEDULE_TOPIC, 0, b"late", properties=delayed.prefix(1, "T", 0))
        for _ in range(8):
            await parts.produce.take(one * 1_000, [Claim("T", 0, 1_000, 1)], HOST)
        await member.on_disk()
        largest: dict[int, int] = {}
        for late_ms in (0, 499, 500):
            clock.now_ms = START_MS + 1_000 + late_ms
            ends = [member.store.queue_bounds("T", 0)[1]]
            for _ in range(4):  # the first ones as long as before
                await parts.schedule.deliver_due()
                ends.append(member.store.queue_bounds("T", 0)[1])
            largest[late_ms] = ends[-1] - ends[-2]
        assert largest == {0: 384, 499: 384, 500: 1_024}


def bodies_of(member: Member, queue_id: int) -> list[bytes]:
    """In the order of the queue."""
    low, high = member.store.queue_bounds("T", queue_id)
    spans = [_span(member.store.read_units("T", queue_id, n, 1)) for n in range(low, high)]
    return [one.body for one in record.decode_all(member.store.read_records(spans))]


def damage(folder: Path, body: bytes) -> None:
    """Other bytes where the log has this body."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    [file] = [path for path in files if body in path.read_bytes()]
    with file.open("r+b") as opened:
        opened.seek(file.read_bytes().index(body))
        opened.write(body.swapcase())
