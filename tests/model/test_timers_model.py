"""Messages with a time of their own against a list: random sends, recalls, clocks that jump both
ways, deletions of their topic, damage of the index, removal of all full log files, crashes and
orderly stops of one writer.

Each message is delivered once, never early, and none is forgotten; no crash repeats one or loses
one, whether progress was written or not. One that was recalled, or whose topic was deleted, never
comes.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cometmq.errors import LimitExceeded
from cometmq.format import queueunit, record, timers
from cometmq.format.recall import Handle, RecallRun
from cometmq.format.relay import relay
from cometmq.format.timers import TIMER_QUEUE, TIMER_TOPIC, TimerForm
from cometmq.messaging.timers import RECALLED_MAX, Timer, TimerTable
from cometmq.replication.watermarks import DurabilityClass
from cometmq.store.timers import index
from services.broker.delay import timers as service
from services.broker.sending.produce import Claim
from tests.support.cluster.broker import encoded
from tests.support.cluster.members import Member, living_member
from tests.support.cluster.timer_parts import TimerParts
from tests.support.stores.small_stores import HOST, START_MS, WallClock

TOPICS = ("T", "U")
HOUR_MS = 3_600_000
FILE_BYTES = 64 * 1024
LARGE_FILES: dict[str, Any] = {
    "mapped_file_size_commit_log": 8 << 20,
    "mapped_file_size_consume_queue": 200_000,
}


class Sent(NamedTuple):
    due_ms: int
    body: bytes
    topic: str
    handle: str


class Story:
    """What was sent and is to come, and what has to be there."""

    def __init__(self, source: random.Random, folder: Path) -> None:
        self.source = source
        self.folder = folder
        self.clock = WallClock()
        self.pending: list[Sent] = []
        self.there: dict[str, list[Sent]] = {topic: [] for topic in TOPICS}
        self.recalled: list[Sent] = []
        self.count = 0

    @asynccontextmanager
    async def life(self, *, clean: bool) -> AsyncIterator[tuple[Member, TimerParts]]:
        async with living_member(
            self.folder, clean=clean, clock=self.clock, mapped_file_size_commit_log=FILE_BYTES
        ) as member:
            for topic in TOPICS:
                await member.put(topic)
            parts = TimerParts(member, self.clock)
            try:
                yield member, parts
                if clean:
                    member.keeper.write_progress(self.clock.monotonic_s())
            finally:
                parts.close()

    async def step(self, member: Member, parts: TimerParts) -> None:
        match self.source.randrange(11):
            case 0 | 1 | 2:
                await self.send(parts)
            case 3:
                self.clock.now_ms += self.source.choice([10, 1_000, 9_000, 4 * HOUR_MS])
            case 4 | 5:
                await self.deliver(member, parts)
                if self.source.random() < 0.3:
                    member.keeper.write_progress(self.clock.monotonic_s())
            case 6 | 7:
                await self.recall(parts)
            case 8 if self.source.random() < 0.4:
                await self.make_way(member, parts)
            case 9:
                self.clock.ahead_ms = self.source.choice([0, 0, 2 * HOUR_MS, 9_000, -HOUR_MS])
            case _ if self.source.random() < 0.4:
                await self.drop_topic(member)
            case _:
                self.clock.now_ms += 50 * HOUR_MS  # what waits is stored again

    async def send(self, parts: TimerParts) -> None:
        source, topic = self.source, self.source.choice(TOPICS)
        form = source.choice([TimerForm.AT, TimerForm.AFTER])
        count = source.choice([1, 1, 3, 60])
        prefix, sent, data = timers.prefix(topic, 0), [], b""
        for _ in range(count):
            delay_ms = source.choice([0, 5, 1_000, source.randrange(1, 70 * HOUR_MS)])
            past_ms = source.choice([0, 10_000]) if form is TimerForm.AT else 0
            time_ms = delay_ms if form is TimerForm.AFTER else self.now_ms + delay_ms - past_ms
            body = b"%d" % self.count
            self.count += 1
            properties = timers.with_time(prefix, time_ms) + b"UNIQ_KEY\x01m%b\x02" % body
            data += encoded(*TIMER_QUEUE, body, properties=properties)
            sent.append((time_ms, body))
        claim = Claim(topic, 0, count, timer=form)
        accepted = await parts.produce.take(data, [claim], HOST)
        base_ms = accepted.ticket.appended.clock_ms if form is TimerForm.AFTER else 0
        [(_, first, message_count)] = accepted.timers
        assert message_count == count
        mac = parts.recalls.mac(topic, first, count)
        run = RecallRun("g", topic, parts.recalls.generation, first, count)
        for place, (time_ms, body) in enumerate(sent):
            handle = Handle(run, place, base_ms + time_ms, f"m{body.decode()}", mac).encode()
            self.pending.append(Sent(base_ms + time_ms, body, topic, handle))

    async def recall(self, parts: TimerParts) -> None:
        """Of what waits it is always in time, of what is there never. A recall that comes again is
        answered as before, also by a later writer, behind its time, and after a roll.
        """
        waiting = self.source.sample(self.pending, min(3, len(self.pending)))
        # What came by a clock that was ahead may be said to be recalled, once its log has gone.
        believed_ms = parts.time.now_ms()
        there = [one for some in self.there.values() for one in some if one.due_ms <= believed_ms]
        there = there[-2:]
        handles = [one.handle for one in (*waiting, *waiting[:1], *there)]
        answers = await parts.recalls.recall(handles)
        count = len(waiting) + len(waiting[:1])
        assert answers == [True] * count + [False] * len(there)
        self.pending = [one for one in self.pending if one not in waiting]
        self.recalled += waiting
        again = self.source.sample(self.recalled, min(3, len(self.recalled)))
        answers = await parts.recalls.recall([one.handle for one in again])
        assert answers == [True] * len(again)

    @property
    def now_ms(self) -> int:
        return self.clock.now_ms

    async def deliver(self, member: Member, parts: TimerParts) -> None:
        while True:
            await member.on_disk()
            await parts.deliver()
            await member.on_disk()
            if member.state.timers.read == member.store.queue_bounds(*TIMER_QUEUE)[1]:
                break
        believed_ms = parts.time.now_ms()
        due = [one for one in self.pending if one.due_ms <= believed_ms]
        self.pending = [one for one in self.pending if one.due_ms > believed_ms]
        for one in due:
            self.there[one.topic].append(one)
        await member.on_disk()
        self.check(member)
        assert not parts.metrics.timers_out.labels("lost")._value.get()

    def check(self, member: Member) -> None:
        """All that is due was delivered, once; nothing else. Retention may have removed some."""
        for topic in TOPICS:
            low, high = member.store.queue_bounds(topic, 0)
            found = []
            for offset in range(low, high):
                unit = member.store.read_units(topic, 0, offset, 1)
                span = int.from_bytes(unit[:8], "big"), int.from_bytes(unit[8:12], "big")
                found.append(record.decode(member.store.read_records([span])))
            expected = {one.body: one.due_ms for one in self.there[topic]}
            assert high == len(expected), topic
            assert len({one.body for one in found}) == high - low, topic
            for one in found:
                assert one.store_time_ms >= expected[one.body], "it came early"

    async def make_way(self, member: Member, parts: TimerParts) -> None:
        """Retention removes all log files that are full."""
        for _ in range(3):  # it copies the state further up first
            await parts.retention.clean()
            await member.on_disk()
        assert all(one > member.state.timers.rolled for one in member.state.timers.dropped.values())

    async def drop_topic(self, member: Member) -> None:
        topic = self.source.choice(TOPICS)
        await member.keeper.drop_topic(topic)
        assert topic not in member.state.timers.dropped
        self.pending = [one for one in self.pending if one.topic != topic]
        self.recalled = [one for one in self.recalled if one.topic != topic]
        self.there[topic] = []
        await member.put(topic)

    def damage_index(self) -> None:
        """As a fault of the disk does it."""
        files = sorted((self.folder / "cometmq.timers").glob("*"))
        if files:
            victim = self.source.choice(files)
            data = bytearray(victim.read_bytes())
            how = self.source.randrange(3)
            if how == 0 or not data:
                victim.unlink()
            elif how == 1:
                victim.write_bytes(data[: len(data) // 2])
            else:
                data[self.source.randrange(len(data))] ^= 1 << self.source.randrange(8)
                victim.write_bytes(data)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MEMORY_ENTRIES_MAX", 50)
    monkeypatch.setattr(index, "FILES_MAX", 3)
    monkeypatch.setattr(index, "MERGED_AT_ONCE", 2)
    monkeypatch.setattr(service, "ARRIVALS_MAX", 40)
    monkeypatch.setattr(service, "REST_S", 0.0)


def test_what_is_done_out_of_order_is_forgotten_and_has_a_limit() -> None:
    table, restored, most = TimerTable(), TimerTable(), RECALLED_MAX
    table.arrived([], 3 * most)
    for round_ in range(3):  # each time as many as may be, whose time then comes
        timers = [Timer(1 + n, n) for n in range(round_ * most, (round_ + 1) * most)]
        table.check_room(len(timers))
        for timer in timers:
            table.skip(timer)
        with pytest.raises(LimitExceeded):
            table.check_room(1)
        assert not any(map(table.is_pending, timers[:10]))
        mark, skips = table.unwritten()
        table.written(mark, skips)
        restored.restore(mark, skips)
        table.rolled_to((round_ + 1) * most)
        table.written(table.mark, ())
        restored.restore(table.mark, ())
        assert len(restored.skips) <= most
    assert list(table.as_written()) == [(table.mark, [])]
    late = [Timer(0, 3 * most + n) for n in range(0, 2_000, 2)]
    table.done([Timer(1, 0)])
    table.arrived(late, 3 * most + 2_000)
    assert [table.is_pending(Timer(0, 3 * most + n)) for n in (0, 1, 2, 1_998)] == [
        True,
        False,
        True,
        True,
    ]
    assert not table.is_pending(Timer(-1, late[0].offset))


@pytest.mark.parametrize("seed", range(16))
async def test_every_message_comes_once_and_never_early_whatever_happens(
    tmp_path: Path, seed: int
) -> None:
    source = random.Random(seed)
    story = Story(source, tmp_path / "store")
    for _ in range(6):
        async with story.life(clean=source.random() < 0.4) as (member, parts):
            for _ in range(source.randrange(1, 14)):
                await story.step(member, parts)
            await member.on_disk()
        if source.random() < 0.3:
            story.damage_index()
    story.clock.now_ms += 80 * HOUR_MS
    story.clock.ahead_ms = 0
    async with story.life(clean=True) as (member, parts):
        await story.deliver(member, parts)
        assert not story.pending
        assert member.state.timers.mark.arrivals == member.store.queue_bounds(*TIMER_QUEUE)[1]
    assert story.now_ms > START_MS
    assert TIMER_TOPIC


@pytest.mark.usefixtures("implementation")
async def test_messages_that_need_a_closer_look_take_no_others_along(tmp_path: Path) -> None:
    """A damaged one, one in RocketMQ's form, one whose topic is gone, and a recalled one."""
    story = Story(random.Random(0), tmp_path / "store")
    async with story.life(clean=True) as (member, parts):
        due_ms = story.now_ms + 1_000
        bodies = [b"body %02d" % n for n in range(40)]
        topics = ["Gone" if n == 20 else TOPICS[n // 3 % 2] for n in range(40)]
        await member.put("Gone")
        for topic, body in zip(topics, bodies, strict=True):
            mark = b"TIMER_DELIVER_MS\x01%d\x02" % due_ms if body == bodies[10] else b""
            properties = timers.with_time(timers.prefix(topic, 0), due_ms) + mark
            found = record.decode(encoded(*TIMER_QUEUE, body, properties=properties))
            kept = relay(found, *TIMER_QUEUE, HOST, due_ms=due_ms)
            member.storage.append_relayed([kept], {TIMER_TOPIC: DurabilityClass.ASYNC}, HOST)
        await member.on_disk()
        await member.keeper.drop_topic("Gone")
        member.state.timers.skip(Timer(due_ms, 30))
        damage(tmp_path, bodies[5])
        story.clock.now_ms = due_ms
        await parts.deliver()
        await member.on_disk()
        for topic in TOPICS:
            count = member.store.queue_bounds(topic, 0)[1]
            units = member.store.read_units(topic, 0, 0, count)
            spans = [(place, size) for place, size, _ in queueunit.iterate(units)]
            found_bodies = [one.body for one in record.decode_all(member.store.read_records(spans))]
            there = [n for n in range(40) if topics[n] == topic and n not in (5, 30)]
            assert found_bodies == [bodies[n] for n in there]
        counts = {how: int(parts.metrics.timers_out.labels(how)._value.get()) for how in HOW}
        assert counts == {"delivered": 37, "lost": 1, "dropped": 1, "recalled": 1}


async def test_turns_are_short_until_what_is_due_is_half_a_second_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "ARRIVALS_MAX", 8_192)
    clock = WallClock()
    async with living_member(tmp_path / "store", clock=clock, **LARGE_FILES) as member:
        await member.put("T")
        parts = TimerParts(member, clock)
        due_ms = START_MS + 1_000
        properties = timers.with_time(timers.prefix("T", 0), due_ms)
        one = encoded(*TIMER_QUEUE, b"late", properties=properties)
        for _ in range(8):
            claim = Claim("T", 0, 1_000, timer=TimerForm.AT)
            await parts.produce.take(one * 1_000, [claim], HOST)
        await member.on_disk()
        largest: dict[int, int] = {}
        for late_ms in (0, 499, 500):
            clock.now_ms = due_ms + late_ms
            ends = [member.store.queue_bounds("T", 0)[1]]
            for _ in range(4):  # the first ones as long as before
                await parts.timers.turn()
                ends.append(member.store.queue_bounds("T", 0)[1])
            largest[late_ms] = ends[-1] - ends[-2]
        parts.close()
        assert largest == {0: 384, 499: 384, 500: 1_024}


HOW = ("delivered", "lost", "dropped", "recalled")


def damage(folder: Path, body: bytes) -> None:
    """Other bytes where the log has this body."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    [file] = [path for path in files if body in path.read_bytes()]
    with file.open("r+b") as opened:
        opened.seek(file.read_bytes().index(body))
        opened.write(body.swapcase())
