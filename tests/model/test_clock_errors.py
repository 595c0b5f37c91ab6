"""Messages that wait, while the wall clock of the writer is wrong for a time: none comes early, and
none is late by more than the error of a clock that was believed.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from prometheus_client import CollectorRegistry

from cometmq.errors import DelayInvalid
from cometmq.format import delayed, queueunit, record, timers
from cometmq.format.delayed import SCHEDULE_TOPIC
from cometmq.format.timers import TIMER_QUEUE, TIMER_TOPIC, TimerForm
from cometmq.member.metrics import MemberMetrics
from cometmq.member.relay import RelayWriter
from cometmq.model import TopicConfig
from services.broker.delay.believed_time import BelievedTime
from services.broker.delay.schedule import ScheduleService
from services.broker.delay.timers import TimerService
from services.broker.sending.produce import Claim, ProduceHandler, ProducePolicy
from tests.support.cluster.broker import encoded
from tests.support.cluster.members import Member, living_member
from tests.support.stores.small_stores import HOST, START_MS, WallClock

HOUR_MS = 3_600_000
TO_2030_MS = 1_893_456_000_000 - START_MS
TO_SECONDS_MS = START_MS // 1000 - START_MS  # seconds were taken for milliseconds
STEP_MS = 10_000
WRONG_FROM_MS = START_MS + 20_000
LEVEL = 5  # of a minute


class WrongClock(WallClock):
    """Its boot time is right, and so is its time of day but for ``wrong_ms``."""

    wrong_ms = 0

    def wall_ms(self) -> int:
        return self.now_ms + self.wrong_ms


class Sent(NamedTuple):
    """When it was sent and is to come, by a right clock."""

    sent_ms: int
    due_ms: int
    is_exact: bool  # by the time that its sender has named


class Writer:
    """What sends and delivers."""

    def __init__(self, member: Member, clock: WrongClock) -> None:
        metrics = MemberMetrics(CollectorRegistry(), "c", "g")
        self._member = member
        self.clock = clock
        self.time = time = BelievedTime(clock, metrics, 0)
        member.store.stamp_by(time)
        policy = ProducePolicy(1 << 30, False, TopicConfig(""), 30.0, 30.0)
        parts = member.storage, member.keeper
        self._produce = ProduceHandler(*parts, policy, HOST, metrics, time)
        relays = RelayWriter(member.storage, member.state.topics, HOST, metrics)
        self._schedule = ScheduleService(*parts, relays, metrics, clock, time)
        self._timers = TimerService(*parts, relays, metrics, clock, time, 72 * HOUR_MS)
        self.sent: dict[bytes, Sent] = {}
        self.seen = 0

    async def send_all(self, delay_ms: int) -> None:
        """One of each kind: after a delay, at a time, after a delay level."""
        now_ms = self.clock.now_ms
        form = timers.prefix("T", 0)
        await self._send(timers.with_time(form, delay_ms), TimerForm.AFTER, delay_ms, "after")
        due_ms = now_ms + delay_ms
        with suppress(DelayInvalid):  # by a clock that is decades behind it is for too late a time
            await self._send(timers.prefix_at("T", 0, due_ms), TimerForm.AT, delay_ms, "at")
        body = b"level %d" % now_ms
        prefix = delayed.prefix(LEVEL, "T", 0)
        data = encoded(SCHEDULE_TOPIC, delayed.queue_id_of(LEVEL), body, properties=prefix)
        await self._produce.take(data, [Claim("T", 0, 1, LEVEL)], HOST)
        self.sent[body] = Sent(now_ms, now_ms + delayed.delay_ms(LEVEL), is_exact=False)

    async def _send(self, prefix: bytes, form: TimerForm, delay_ms: int, what: str) -> None:
        now_ms = self.clock.now_ms
        body = b"%s %d" % (what.encode(), now_ms)
        data = encoded(*TIMER_QUEUE, body, properties=prefix)
        await self._produce.take(data, [Claim("T", 0, 1, timer=form)], HOST)
        self.sent[body] = Sent(now_ms, now_ms + delay_ms, is_exact=form is TimerForm.AT)

    async def deliver(self) -> list[bytes]:
        """All that is due; the bodies of what came."""
        member = self._member
        await member.on_disk()
        while await self._schedule.deliver_due() == 0.0:
            pass
        while await self._timers.turn() == 0.0:
            pass
        bodies = []
        while units := member.store.read_units("T", 0, self.seen, 1):
            place, size, _ = queueunit.unit_at(units, 0)
            bodies.append(record.decode(member.store.read_records([(place, size)])).body)
            self.seen += 1
        return bodies


@pytest.mark.parametrize("delay_ms", [2_000, 100_000])
@pytest.mark.parametrize("wrong_s", [40, 200])
@pytest.mark.parametrize(
    "wrong_ms",
    [20_000, 600_000, HOUR_MS, TO_2030_MS, -20_000, -600_000, -HOUR_MS, TO_SECONDS_MS],
)
async def test_no_message_is_early_and_none_late_by_more_than_the_error(
    tmp_path: Path, wrong_ms: int, wrong_s: int, delay_ms: int
) -> None:
    """A clock that has been ahead for a minute is believed: then times are early by its error."""
    clock = WrongClock()
    is_believed = wrong_ms < 0 or wrong_s > 60
    late_ms_max = min(abs(wrong_ms), 2 * HOUR_MS) if is_believed else 0
    late_level_ms_max = min(abs(wrong_ms), delayed.delay_ms(LEVEL))
    async with living_member(tmp_path / "store", clean=True, clock=clock) as member:
        await member.put("T", 1)
        await member.keeper.create_system_topic(TIMER_TOPIC, 1)
        await member.keeper.create_system_topic(SCHEDULE_TOPIC, 18)
        writer = Writer(member, clock)
        step_ms = STEP_MS
        right_again_ms = WRONG_FROM_MS + wrong_s * 1_000
        sends_until_ms = right_again_ms + 100_000
        lasts_until_ms = sends_until_ms + 3 * HOUR_MS
        while clock.now_ms < lasts_until_ms:
            is_wrong = 0 <= clock.now_ms - WRONG_FROM_MS < wrong_s * 1_000
            clock.wrong_ms = wrong_ms if is_wrong else 0
            for body in await writer.deliver():
                sent = writer.sent.pop(body)
                late_ms = clock.now_ms - sent.due_ms
                early_ms_max = wrong_ms if sent.is_exact and is_believed and wrong_ms > 0 else 0
                assert late_ms >= -early_ms_max, (body, sent, late_ms)
                level = body.startswith(b"level")
                most_ms = late_level_ms_max if level else late_ms_max
                if wrong_ms > 0 and not level and sent.sent_ms >= right_again_ms:
                    most_ms = 0
                assert late_ms <= most_ms + step_ms, (body, late_ms)
            if clock.now_ms < sends_until_ms:
                await writer.send_all(delay_ms)
            elif clock.now_ms > sends_until_ms + 600_000:
                step_ms = STEP_MS * 30
            clock.now_ms += step_ms
    # Late by the error, which is years: delays that were counted from a clock that was believed.
    assert not writer.sent or (is_believed and wrong_ms > 2 * HOUR_MS)
    assert all(0 < sent.sent_ms - WRONG_FROM_MS < wrong_s * 1_000 for sent in writer.sent.values())
