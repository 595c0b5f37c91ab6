"""Timers that Apache RocketMQ left: which of them still wait."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

import pytest

from cometmq.format import properties, record
from cometmq.format.timers import TIMER_TOPIC
from cometmq.member.state.timer_adoption import Checkpoint, adopt_timers, read_check
from cometmq.messaging.timers import Timer, TimerTable
from cometmq.replication.watermarks import DurabilityClass
from tests.support.cluster.members import living_member
from tests.support.stores.small_stores import HOST, START_MS

NOW_MS = START_MS
S = 1_000


class Left(NamedTuple):
    """A record of the timer queue as RocketMQ has it."""

    properties: bytes
    topic: str = TIMER_TOPIC
    queue_id: int = 0

    @property
    def size_bytes(self) -> int:
        return len(self.encode(0, 0, 0, HOST))

    def tags_code(self, store_time_ms: int) -> int:
        return 0

    def encode(
        self, queue_offset: int, log_offset: int, store_time_ms: int, store_host: bytes
    ) -> bytes:
        return record.encode(
            self.topic.encode(),
            self.queue_id,
            b"x",
            self.properties,
            born_time_ms=5,
            born_host=store_host,
            store_host=store_host,
            queue_offset=queue_offset,
            log_offset=log_offset,
            store_time_ms=store_time_ms,
        )


def left(name: str, due_s: float, **more: str) -> Left:
    due_ms = NOW_MS + int(due_s * S)
    out_ms = (due_ms - 1) // S * S
    pairs = {"REAL_TOPIC": "T", "REAL_QID": "0", "TIMER_DELIVER_MS": str(due_ms), **more}
    return Left(properties.encode({**pairs, "TIMER_OUT_MS": str(out_ms), "UNIQ_KEY": name}))


QUEUE = [
    left("delivered", -60),
    left("rounded", 0.5),  # RocketMQ has delivered it: its time is rounded down
    left("waits", 60),
    left("stored again", 100_000),
    left("recalled", 90),
    left("stored again", 100_000, TIMER_ROLL_TIMES="1"),
    left("recalled", 90, TIMER_DEL_UNIQKEY="T+recalled"),
    Left(properties.encode({"UNIQ_KEY": "no timer"})),
    left("not looked at, due", -5),
    left("not looked at", 70),
]


@pytest.mark.parametrize(
    ("check", "waiting"),
    [
        (Checkpoint(NOW_MS, 8), [2, 5, 8, 9]),
        (Checkpoint(NOW_MS, 0), [0, 1, 2, 5, 8, 9]),  # it has looked at nothing
        (Checkpoint(NOW_MS + 65 * S, 10), [5, 9]),
        (None, [2, 5, 9]),
    ],
)
async def test_what_still_waits(
    tmp_path: Path, check: Checkpoint | None, waiting: list[int]
) -> None:
    async with living_member(tmp_path / "store") as member:
        member.storage.append_relayed(QUEUE, {TIMER_TOPIC: DurabilityClass.ASYNC}, HOST)
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


def test_the_checkpoint_is_read_strictly() -> None:
    good = struct.pack(">qqqq", NOW_MS, 7, 12, 0) + bytes(24)
    assert read_check(good) == Checkpoint(NOW_MS, 12)
    for wrong in (None, b"", good[:20], bytes(56), struct.pack(">qqq", NOW_MS, 0, -1)):
        assert read_check(wrong) is None
