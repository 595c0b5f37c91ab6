from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from array import array
from collections.abc import AsyncIterator

import pytest

from cometmq.clock import Clock, SystemClock
from cometmq.errors import DiskFull, StoreFailed
from cometmq.member.storage.flusher import PIPE_READ_BYTES, Flusher, FlushPolicy
from tests.support.stores.small_stores import WallClock
from tests.support.waiting import until


class FakeLog:
    """A log whose syncs are let through one by one."""

    def __init__(self) -> None:
        self.appended_offset = 0
        self.flushed_offset = 0
        self.gate = threading.Semaphore(0)
        self.error: Exception | None = None
        self.begun = self.syncs = 0
        self.alone = False  # it syncs by itself

    def demand(self, position: int) -> None:
        assert position <= self.appended_offset

    def flush_log_while_wanted(self, write_fd: int) -> bool:
        assert write_fd >= 0
        if self.alone:
            for position in range(self.flushed_offset + 1, self.appended_offset + 1):
                self.flushed_offset = position
                os.write(write_fd, (position * 10**9).to_bytes(8, sys.byteorder))
        return self.alone

    def flush_log(self) -> int:
        target = self.appended_offset
        self.begun += 1
        assert self.gate.acquire(timeout=10)
        if self.error is not None:
            raise self.error
        self.syncs += 1
        self.flushed_offset = target
        return target


@contextlib.asynccontextmanager
async def flushing(
    log: FakeLog, policy: FlushPolicy, clock: Clock | None = None
) -> AsyncIterator[tuple[Flusher, list[int]]]:
    seen: list[int] = []
    flusher = Flusher(
        log, policy, clock or SystemClock(), lambda position, _seconds: seen.append(position)
    )
    task = asyncio.create_task(flusher.run())
    try:
        yield flusher, seen
    finally:
        log.gate.release(1000)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, StoreFailed):
            await task
        flusher.close()


NEVER = FlushPolicy(interval_s=3600.0, thorough_s=3600.0)


@pytest.mark.parametrize(
    ("idle_s", "waiting", "urgent", "delay_s"),
    [
        (0.0, 0, True, None),  # nothing to sync
        (0.0, 1, True, 0.0),
        (0.0, 4 * 4096, False, 0.5),
        (0.2, 4 * 4096, False, 0.3),
        (0.2, 4 * 4096 - 1, False, 9.8),  # too few bytes for the short interval
        (99.0, 1, False, 0.0),
    ],
)
def test_policy(idle_s: float, waiting: int, urgent: bool, delay_s: float | None) -> None:
    assert FlushPolicy().delay_s(idle_s, waiting, urgent) == (
        None if delay_s is None else pytest.approx(delay_s)
    )


async def test_those_who_come_during_a_sync_share_the_next_one() -> None:
    log = FakeLog()
    async with flushing(log, NEVER) as (flusher, seen):
        log.appended_offset = 10
        flusher.demand(10)
        await until(lambda: log.begun == 1)
        for end in (20, 30, 40):
            log.appended_offset = end
            flusher.demand(end)
        log.gate.release()
        await until(lambda: seen)
        assert seen == [10]
        log.gate.release()
        await until(lambda: seen == [10, 40])


async def test_a_waiting_reader_makes_an_append_visible_at_once() -> None:
    log = FakeLog()
    log.gate.release(100)
    async with flushing(log, NEVER) as (flusher, seen):
        flusher.flush_promptly()
        log.appended_offset = 5
        flusher.appended()
        await until(lambda: seen == [5])


async def test_a_reader_that_comes_late_makes_visible_what_is_there() -> None:
    log = FakeLog()
    log.gate.release(100)
    async with flushing(log, NEVER) as (flusher, seen):
        log.appended_offset = 5
        await asyncio.sleep(0)  # the flusher runs, and is in no hurry
        flusher.appended()
        assert not flusher._syncing
        flusher.flush_promptly()
        await until(lambda: seen == [5])


async def test_without_demand_an_append_waits_for_the_interval() -> None:
    log = FakeLog()
    log.gate.release(100)
    async with flushing(log, NEVER) as (flusher, seen):
        log.appended_offset = 1 << 20
        flusher.appended()
        for _ in range(50):
            await asyncio.sleep(0)
        assert seen == []
        flusher.demand(1)
        await until(lambda: seen == [1 << 20])


async def test_the_interval_runs_without_further_appends() -> None:
    log = FakeLog()
    log.gate.release(100)
    async with flushing(log, FlushPolicy(interval_s=0.01, thorough_s=0.02)) as (flusher, seen):
        log.appended_offset = 1
        flusher.appended()
        await until(lambda: seen == [1])


async def test_the_interval_begins_anew_with_each_sync() -> None:
    log, clock = FakeLog(), WallClock()
    log.gate.release(100)
    async with flushing(log, NEVER, clock) as (flusher, seen):
        clock.now_ms += 3_600_000
        log.appended_offset = 1
        flusher.appended()
        await until(lambda: seen == [1])
        log.appended_offset = 2
        flusher.appended()
        assert not flusher._syncing
        clock.now_ms += 3_600_000
        flusher.appended()
        await until(lambda: seen == [1, 2])


async def test_a_failed_sync_is_never_tried_again() -> None:
    log = FakeLog()
    log.error = StoreFailed("fdatasync: input/output error")
    log.gate.release(100)
    flusher = Flusher(log, NEVER, SystemClock(), lambda *_: None)
    log.appended_offset = 1
    flusher.demand(1)
    with pytest.raises(StoreFailed):
        await asyncio.wait_for(flusher.run(), 5)
    assert log.syncs == 0
    flusher.close()


async def test_more_bytes_bring_the_sync_forward() -> None:
    log = FakeLog()
    log.gate.release(100)
    policy = FlushPolicy(interval_s=0.01, least_bytes=100, thorough_s=3600.0)
    async with flushing(log, policy) as (flusher, seen):
        log.appended_offset = 99
        flusher.appended()
        for _ in range(50):
            await asyncio.sleep(0)
        assert seen == []
        log.appended_offset = 100
        flusher.appended()
        await until(lambda: seen == [100])


async def test_what_ends_after_the_flusher_has_ended_is_not_told() -> None:
    log = FakeLog()
    seen: list[int] = []
    flusher = Flusher(log, NEVER, SystemClock(), lambda position, _seconds: seen.append(position))
    running = asyncio.create_task(flusher.run())
    await asyncio.sleep(0)
    log.appended_offset = 1
    flusher.demand(1)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    log.gate.release()
    flusher.close()
    for _ in range(3):
        await asyncio.sleep(0)
    assert (log.syncs, seen) == (1, [])
    flusher.appended()
    assert log.syncs == 1


async def test_the_next_sync_does_not_wait_for_a_busy_loop() -> None:
    log = FakeLog()
    async with flushing(log, NEVER) as (flusher, seen):
        log.appended_offset = 10
        flusher.demand(10)
        await until(lambda: log.begun == 1)
        log.appended_offset = 20
        flusher.demand(20)
        log.gate.release(2)
        deadline_s = SystemClock().monotonic_s() + 10
        while log.flushed_offset < 20:  # the loop does not turn meanwhile
            assert SystemClock().monotonic_s() < deadline_s
        assert seen == []
        await until(lambda: seen[-1:] == [20])


async def test_a_disk_that_is_full_for_the_pool_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cometmq.member.storage.flusher.SHORTAGE_RETRY_S", 0.001)
    log = FakeLog()
    log.error = DiskFull("no room")
    log.gate.release(1000)
    async with flushing(log, NEVER) as (flusher, seen):
        log.appended_offset = 10
        flusher.demand(10)
        await until(lambda: log.gate._value < 998)
        log.error = None
        await until(lambda: seen == [10])


async def test_the_loop_hears_of_every_sync_that_the_thread_began_by_itself() -> None:
    log = FakeLog()
    log.alone = True
    seen: list[tuple[int, float]] = []
    flusher = Flusher(log, NEVER, SystemClock(), lambda *flushed: seen.append(flushed))
    running = asyncio.create_task(flusher.run())
    for first, end in ((0, 3), (3, 5)):
        log.appended_offset = end
        flusher.demand(end)

        def all_seen(end: int = end) -> bool:
            return len(seen) == end and not flusher._syncing

        await until(all_seen)
        assert [seconds for _, seconds in seen[first:]] == list(range(first + 1, end + 1))
        assert seen[-1][0] == end
    assert log.syncs == 0
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    flusher.close()


async def test_a_sync_is_told_late_of_which_a_later_one_was_heard() -> None:
    """The thread goes on by itself at once; the loop hears of the second sync first."""
    log = FakeLog()
    async with flushing(log, NEVER) as (flusher, seen):
        await asyncio.sleep(0)
        log.appended_offset = log.flushed_offset = 20  # by the second
        os.write(flusher._write_fd, bytes(8))
        await until(lambda: seen == [20])
        flusher._syncing = True
        flusher._ended(1.0, is_next_begun=False)
        assert seen == [20, 20]


async def test_what_the_thread_reports_between_two_runs_is_heard_by_the_second() -> None:
    log = FakeLog()
    seen: list[float] = []
    flusher = Flusher(log, NEVER, SystemClock(), lambda _position, seconds: seen.append(seconds))
    durations = array("q", range(PIPE_READ_BYTES // 4))  # in more than one reading
    for heard in (0, len(durations)):
        running = asyncio.create_task(flusher.run())

        def all_heard(count: int = heard) -> bool:
            return len(seen) == count and flusher._failed is not None

        await until(all_heard)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        if not heard:
            os.write(flusher._write_fd, durations)
            for _ in range(3):
                await asyncio.sleep(0)
            assert not seen
    assert seen == [duration / 1e9 for duration in durations]
    write_fd = flusher._write_fd
    for _ in range(2):
        flusher.close()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(write_fd, bytes(8))


def test_a_sync_that_ends_after_its_loop_reaches_nobody() -> None:
    log = FakeLog()
    seen: list[int] = []
    flusher = Flusher(log, NEVER, SystemClock(), lambda position, _seconds: seen.append(position))
    flusher.close()  # nothing has run yet

    async def begin() -> None:
        running = asyncio.create_task(flusher.run())
        await asyncio.sleep(0)
        log.appended_offset = 1
        flusher.demand(1)
        running.cancel()

    asyncio.run(begin())
    log.gate.release()
    flusher.close()
    assert (log.syncs, seen) == (1, [])
