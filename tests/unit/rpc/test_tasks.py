from __future__ import annotations

import asyncio
import gc
import logging

import pytest

from cometmq.rpc.tasks import Tasks, apart, is_cancelled, map_bounded, race, stop_all, wait_at_most


async def forever() -> None:
    await asyncio.Event().wait()


async def test_stopping_waits_until_all_are_gone() -> None:
    tasks = Tasks("test")
    started = [tasks.start(forever(), f"task {n}") for n in range(3)]
    await tasks.stop()
    assert all(task.cancelled() for task in started)
    await asyncio.sleep(0)
    assert len(tasks) == 0


async def test_a_failure_is_logged_with_the_owner(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise ValueError("on purpose")

    tasks = Tasks("somebody")
    with caplog.at_level(logging.ERROR):
        await asyncio.wait([tasks.start(fail(), "failing")])
        await asyncio.sleep(0)
    assert "on purpose" in caplog.text
    assert len(tasks) == 0


async def test_a_cancelled_stopper_still_waits() -> None:
    release = asyncio.Event()

    async def slow_to_end() -> None:
        try:
            await forever()
        finally:
            await release.wait()

    task = asyncio.create_task(slow_to_end())
    await asyncio.sleep(0)
    stopping = asyncio.create_task(stop_all([task]))
    await asyncio.sleep(0)
    stopping.cancel()
    await asyncio.sleep(0)
    assert not stopping.done()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert task.cancelled()


async def test_waiting_has_an_end() -> None:
    event = asyncio.Event()
    assert not await wait_at_most(event, 0.001)
    event.set()
    assert await wait_at_most(event, 10)


async def test_a_race_ends_with_its_first_part_and_leaves_none_behind() -> None:
    others: list[asyncio.Task[None]] = []

    async def note_and_wait() -> None:
        others.append(asyncio.current_task())  # type: ignore[arg-type]
        await forever()

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        await race(note_and_wait(), fail())
    assert not await race(note_and_wait(), timeout_s=0.001)
    assert await race(note_and_wait(), asyncio.sleep(0))
    assert [task.cancelled() for task in others] == [True] * 3


async def test_a_bounded_map_keeps_the_order_and_the_bound_and_ends_with_the_first_error() -> None:
    running: set[int] = set()
    most = 0

    async def double(number: int) -> int:
        nonlocal most
        running.add(number)
        most = max(most, len(running))
        for _ in range(number % 3):
            await asyncio.sleep(0)
        running.remove(number)
        if number == 40:
            raise ValueError("on purpose")
        return 2 * number

    assert await map_bounded(double, range(30), 4) == [2 * number for number in range(30)]
    assert most == 4
    assert await map_bounded(double, (), 4) == []
    with pytest.raises(ValueError, match="on purpose"):
        await map_bounded(double, range(38, 100), 2)
    assert not running - {41}, "nothing new begins"


async def test_work_that_cancels_its_own_task_does_not_cancel_its_caller() -> None:
    async def cancels_itself() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    with pytest.raises(asyncio.CancelledError) as raised:
        await apart(cancels_itself())
    assert not is_cancelled(raised.value)
    await asyncio.sleep(0)


async def test_a_cancelled_caller_cancels_the_work_apart() -> None:
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await forever()
        finally:
            ended.set()

    caller = asyncio.create_task(apart(work()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await stop_all([caller])
    assert caller.cancelled()
    assert ended.is_set()


async def test_work_that_was_cancelled_before_it_began_leaves_no_warning() -> None:
    """A coroutine that nobody awaits is one; warnings are errors."""

    async def work() -> None:
        raise AssertionError("it never begins")

    task = asyncio.create_task(apart(work()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gc.collect()
