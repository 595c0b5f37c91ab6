"""The task that delivers messages with a time of their own: what it does beside its turns, and what
it bears. The rest is in ``tests/model/test_timers_model.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest import mock

import pytest

from cometmq.errors import StoreDamaged
from cometmq.format import timers
from cometmq.format.timers import TIMER_QUEUE, TimerForm
from cometmq.messaging.timers import Timer
from cometmq.store.timers import index
from cometmq.turns import TURNS_MAX
from services.broker.delay import timers as service
from services.broker.sending.produce import Claim
from tests.support.cluster.broker import encoded
from tests.support.cluster.members import Member, living_member
from tests.support.cluster.timer_parts import TimerParts
from tests.support.stores.small_stores import HOST, WallClock

HOUR_MS = 3_600_000


class Scene:
    """A writer with topic T, and its timers."""

    def __init__(self, member: Member, clock: WallClock) -> None:
        self.member = member
        self.clock = clock
        self.parts = TimerParts(member, clock)
        self.timers = self.parts.timers
        self.table = member.state.timers

    async def send(self, *dues_ms: int) -> None:
        """Messages that are due so long after now."""
        prefix = timers.prefix("T", 0)
        for due_ms in dues_ms:
            properties = timers.with_time(prefix, self.clock.now_ms + due_ms)
            data = encoded(*TIMER_QUEUE, b"%d" % due_ms, properties=properties)
            await self.parts.produce.take(data, [Claim("T", 0, 1, timer=TimerForm.AT)], HOST)
        await self.member.on_disk()

    async def come_by_a_clock_that_was_ahead(self) -> None:
        """One timer of in two hours; now the clock is right again."""
        await self.send(2 * HOUR_MS)
        self.clock.ahead_ms = 2 * HOUR_MS
        await self.timers.turn()
        self.clock.now_ms += 61_000
        await self.timers.turn()
        self.clock.ahead_ms = 0
        await self.member.on_disk()
        assert self.delivered == 1

    @property
    def delivered(self) -> int:
        return self.member.store.queue_bounds("T", 0)[1]


@asynccontextmanager
async def scene(folder: Path, clock: WallClock | None = None) -> AsyncIterator[Scene]:
    clock = clock or WallClock()
    async with living_member(folder, clock=clock) as member:
        await member.put("T")
        found = Scene(member, clock)
        try:
            yield found
            member.keeper.write_progress(0.0)
        finally:
            found.parts.close()


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MEMORY_ENTRIES_MAX", 20)
    monkeypatch.setattr(service, "ARRIVALS_MAX", 15)


# --- index jobs -----------------------------------------------------------------------------------


async def test_a_job_of_the_index_ends_between_two_turns(tmp_path: Path) -> None:
    """A turn takes from the index what it saw there before it read the log."""
    async with scene(tmp_path) as s:
        await s.send(*range(1_000, 1_030))
        await s.timers.take_all_arrivals()
        job = await s.timers._next_job()
        assert job is not None
        s.clock.now_ms += 1_010
        reads, goes_on = asyncio.Event(), asyncio.Event()
        deliver = s.timers._delivery.deliver

        async def slowly(*args: object) -> object:
            reads.set()
            await goes_on.wait()
            return await deliver(*args)  # type: ignore[arg-type]

        with mock.patch.object(s.timers._delivery, "deliver", slowly):
            turn = asyncio.create_task(s.timers.turn())
            await reads.wait()
            with mock.patch.object(s.timers.index, "finish", wraps=s.timers.index.finish) as finish:
                running = asyncio.create_task(s.timers._run_job(job))
                await asyncio.sleep(0)  # the job is in the thread
                await s.timers._in_thread(lambda: None)  # and has run
                for _ in range(10):
                    await asyncio.sleep(0)
                assert finish.call_count == 0
                goes_on.set()
                await turn
                await running
                assert finish.call_count == 1
        await s.timers.turn()
        assert s.delivered == 11


async def test_an_index_that_is_made_again_piece_by_piece_says_what_it_has(tmp_path: Path) -> None:
    """The next start reads from there on. Not all that was read before has been added yet."""
    clock = WallClock()
    async with scene(tmp_path, clock) as s:
        await s.send(*range(1_000, 1_070))
        await s.timers.take_all_arrivals()
    for file in (tmp_path / "cometmq.timers").glob("*"):
        file.unlink()
    for _ in range(2):
        async with scene(tmp_path, clock) as s:
            await s.timers.turn()
            assert len(s.timers.index) == 70


async def test_an_index_whose_end_is_gone_stays_in_memory(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        await s.send(*range(1_000, 1_030))
        await s.timers.take_all_arrivals()
        with mock.patch.object(s.member.store, "read_units", return_value=b""):
            assert await s.timers._next_job() is None
        assert await s.timers._next_job() is not None


async def test_damage_that_is_met_again_is_no_hot_loop(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        pauses_s: list[float] = []

        async def pause(delay_s: float) -> None:
            pauses_s.append(delay_s)
            if len(pauses_s) == 3:
                raise asyncio.CancelledError

        with (
            mock.patch.object(s.timers, "turn", side_effect=StoreDamaged("a unit")),
            mock.patch("services.broker.delay.timers.asyncio.sleep", pause),
            pytest.raises(asyncio.CancelledError),
        ):
            await s.timers.run()
        assert pauses_s == [service.RETRY_S] * 3


async def test_turns_that_change_nothing_are_no_hot_loop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with scene(tmp_path) as s:
        pauses_s: list[float] = []

        async def pause(delay_s: float) -> None:
            pauses_s.append(delay_s)
            if delay_s == service.RETRY_S:
                raise asyncio.CancelledError
            assert len(pauses_s) <= 2 * TURNS_MAX

        with (
            mock.patch.object(s.timers, "turn", return_value=0.0),
            mock.patch("services.broker.delay.timers.asyncio.sleep", pause),
            pytest.raises(asyncio.CancelledError),
        ):
            await s.timers.run()
        assert "a loop does not get on" in caplog.text


async def test_an_index_that_is_damaged_whenever_it_is_made_is_waited_for(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        await s.send(1_000)
        with (
            mock.patch.object(s.timers, "_load") as load,
            pytest.raises(StoreDamaged, match="damaged 3 times"),
        ):
            await s.timers.turn()
        assert load.call_count == service.LOADS_MAX == 3
        s.clock.now_ms += 1_000
        await s.timers.turn()
        await s.member.on_disk()
        assert s.delivered == 1


# --- a clock that was ahead -----------------------------------------------------------------------


async def test_late_timers_are_stored_again_before_their_log_goes(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        await s.come_by_a_clock_that_was_ahead()
        await s.send(HOUR_MS, 1_000, 90 * 60_000)
        await s.timers.turn()
        assert len(s.table.late) == 3
        await s.send(HOUR_MS)  # nobody has looked at it yet
        await s.timers.roll_before(s.member.store.appended_offset)
        assert s.table.rolled == 5
        assert not len(s.table.late)
        await s.member.on_disk()
        s.clock.now_ms += HOUR_MS
        for _ in range(3):
            await s.timers.turn()
            await s.member.on_disk()
        assert s.delivered == 1 + 3
        assert list(s.table.late) == [Timer(s.clock.now_ms + 30 * 60_000, 8 - 1)]


async def test_late_timers_come_by_their_times_and_hold_up_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than the task looks at: it waits until one is due, and then reads on."""
    monkeypatch.setattr(service, "LATE_MAX", 10)
    async with scene(tmp_path) as s:
        await s.come_by_a_clock_that_was_ahead()
        await s.send(*[HOUR_MS] * 14, 30 * 60_000)
        assert await s.timers.turn() == pytest.approx(30 * 60), "the first one of those it read"
        assert await s.timers.turn() > 1.0, "it waits"  # type: ignore[operator]
        await s.send(1_000)
        assert await s.timers.turn() > 1.0  # type: ignore[operator]
        s.clock.now_ms += 30 * 60_000
        await s.timers.turn()
        await s.member.on_disk()
        assert s.delivered == 2
        s.clock.now_ms += 30 * 60_000
        for _ in range(5):
            await s.timers.turn()
        await s.member.on_disk()
        assert s.delivered == 1 + 16


async def test_a_clock_that_jumps_for_a_moment_stores_nothing_again(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        await s.send(*[HOUR_MS] * 3)
        await s.timers.turn()
        s.timers._roll_at_s = 0.0
        s.clock.ahead_ms = 100 * HOUR_MS
        await s.timers.turn()
        assert s.table.rolled == 0
