"""Delayed messages against a list: random sends, clocks, crashes and orderly stops of one writer.

Each message is delivered once, in the order of its level, never early; no crash repeats one or
loses one, whether progress was written or not.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from cometmq.format import delayed, record
from cometmq.member.metrics import MemberMetrics
from cometmq.member.relay import RelayWriter
from cometmq.messaging.changes import TopicPut
from cometmq.model import TopicConfig
from services.broker.delay.schedule import ScheduleService
from services.broker.sending.produce import Claim, ProduceHandler, ProducePolicy
from tests.support.cluster.broker import encoded
from tests.support.cluster.members import Member, living_member
from tests.support.stores.small_stores import HOST, START_MS, WallClock

LEVELS = (1, 2, 4)
QUEUES = 2


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
        metrics = MemberMetrics(CollectorRegistry(), "c", "g")
        policy = ProducePolicy(1 << 30, False, TopicConfig(""), 30.0, 30.0)
        self.produce = ProduceHandler(member.storage, member.keeper, policy, HOST, metrics, clock)
        relays = RelayWriter(member.storage, member.state.topics, HOST, metrics)
        self.schedule = ScheduleService(member.storage, member.keeper, relays, metrics, clock)


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
                        while await parts.schedule.deliver_due() == 0.0:
                            pass
                        await member.on_disk()
                        story.check(member, parts)
                        if source.random() < 0.3:
                            member.keeper.write_progress(story.clock.monotonic_s())
            await member.on_disk()
    story.clock.now_ms += 3_600_000
    async with story.life(tmp_path / "store", clean=True) as (member, parts):
        while await parts.schedule.deliver_due() == 0.0:
            pass
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
