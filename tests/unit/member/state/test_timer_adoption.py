"""Timers that Apache RocketMQ left: which of them still wait."""

from __future__ import annotations

from pathlib import Path

import pytest

from cometmq.format import properties
from cometmq.format.timerlog import TimerCheck
from cometmq.format.timers import TIMER_TOPIC
from cometmq.member.state.timer_adoption import adopt_timers
from cometmq.messaging.timers import TIME_MS_MAX, Timer, TimerMark, TimerTable
from cometmq.replication.watermarks import DurabilityClass
from tests.support.cluster.members import living_member
from tests.support.stores.foreign_record import ForeignRecord
from tests.support.stores.small_stores import HOST, START_MS

NOW_MS = START_MS
S = 1_000


def left(name: str, due_s: float, **more: str) -> ForeignRecord:
    due_ms = NOW_MS + int(due_s * S)
    out_ms = (due_ms - 1) // S * S
    pairs = {"REAL_TOPIC": "T", "REAL_QID": "0", "TIMER_DELIVER_MS": str(due_ms), **more}
    pairs |= {"TIMER_OUT_MS": str(out_ms), "UNIQ_KEY": name}
    return ForeignRecord(TIMER_TOPIC, properties=properties.encode(pairs))


QUEUE = [
    left("delivered", -60),
    left("rounded", 0.5),  # RocketMQ delivers it a second after its time, rounded down
    left("waits", 60),
    left("stored again", 100_000),
    left("recalled", 90),
    left("stored again", 100_000, TIMER_ROLL_TIMES="1"),
    left("recalled", 90, TIMER_DEL_UNIQKEY="T+recalled"),
    ForeignRecord(TIMER_TOPIC, properties=properties.encode({"UNIQ_KEY": "no timer"})),
    left("not looked at, due", -5),
    left("not looked at", 70),
]


@pytest.mark.parametrize("recalls", ["T+recalled", "recalled"], ids=["5.3", "5.5"])
@pytest.mark.parametrize(
    ("check", "waiting"),
    [
        (TimerCheck(NOW_MS, 8), [1, 2, 5, 8, 9]),
        (TimerCheck(NOW_MS + S, 8), [2, 5, 8, 9]),
        (TimerCheck(NOW_MS, 0), [0, 1, 2, 5, 8, 9]),  # it has looked at nothing
        (TimerCheck(NOW_MS + 65 * S, 10), [5, 9]),
        (None, [1, 2, 5, 9]),
    ],
)
async def test_what_still_waits(
    tmp_path: Path, check: TimerCheck | None, waiting: list[int], recalls: str
) -> None:
    queue = [*QUEUE[:6], left("recalled", 90, TIMER_DEL_UNIQKEY=recalls), *QUEUE[7:]]
    async with living_member(tmp_path / "store") as member:
        member.storage.append_relayed(queue, {TIMER_TOPIC: DurabilityClass.ASYNC}, HOST)
        table = TimerTable()
        count = adopt_timers(member.store, table, check, NOW_MS)
        dues = [NOW_MS + int(s * S) for s in (-60, 0.5, 60, 1e5, 90, 1e5, 90, 0, -5, 70)]
        pending = [n for n, due_ms in enumerate(dues) if n != 7 and _waits(table, due_ms, n)]
        assert pending == waiting
        assert count == len(waiting)
        await member.on_disk()


def _waits(table: TimerTable, due_ms: int, offset: int) -> bool:
    """Whether the writer that reads on from the table's mark will deliver it."""
    return table.is_pending(Timer(due_ms, offset))


async def test_what_we_had_delivered_stays_delivered(tmp_path: Path) -> None:
    """RocketMQ was started on our store, and stopped before it came to what was late."""
    ours = TimerMark(Timer(NOW_MS + 65 * S, TIME_MS_MAX), 10, 0)
    async with living_member(tmp_path / "store") as member:
        member.storage.append_relayed(QUEUE, {TIMER_TOPIC: DurabilityClass.ASYNC}, HOST)
        table = TimerTable()
        table.restore(ours, [Timer(NOW_MS + 90 * S, 4), Timer(NOW_MS + 90 * S, 6)])
        table.late.add(Timer(NOW_MS + 60 * S, 2))
        assert adopt_timers(member.store, table, TimerCheck(NOW_MS + 10 * S, 10), NOW_MS) == 3
        dues = {2: 60, 5: 1e5, 9: 70}
        assert all(_waits(table, NOW_MS + int(s * S), n) for n, s in dues.items())
        assert not any(_waits(table, NOW_MS + s * S, n) for n, s in {0: -60, 4: 90, 8: -5}.items())
        await member.on_disk()


async def test_our_own_checkpoint_says_nothing_new(tmp_path: Path) -> None:
    ours = TimerMark(Timer(NOW_MS + 65 * S, TIME_MS_MAX), 10, 0)
    async with living_member(tmp_path / "store") as member:
        member.storage.append_relayed(QUEUE, {TIMER_TOPIC: DurabilityClass.ASYNC}, HOST)
        for before, after in ((ours, ours), (TimerMark(), None)):
            table = TimerTable()
            table.restore(before, ())
            adopt_timers(member.store, table, TimerCheck(NOW_MS, 0, is_ours=True), NOW_MS)
            assert (table.mark == after) == (after is not None), "a lost state has only the file"
        await member.on_disk()
