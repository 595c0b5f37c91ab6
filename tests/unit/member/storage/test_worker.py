from __future__ import annotations

import asyncio
import threading

from cometmq.member.storage.worker import Worker


async def test_each_start_is_one_call_in_the_thread_told_on_the_loop() -> None:
    threads: list[threading.Thread] = []
    told: asyncio.Queue[tuple[int | Exception, threading.Thread]] = asyncio.Queue()

    def work() -> int:
        threads.append(threading.current_thread())
        return len(threads)

    worker: Worker[int] = Worker(
        "w", work, lambda result, _more: told.put_nowait((result, threading.current_thread()))
    )
    for number in (1, 2):
        worker.start()
        assert await asyncio.wait_for(told.get(), 5) == (number, threading.main_thread())
    assert threads[0] is threads[1] is not threading.main_thread()
    worker.close()
    assert not threads[0].is_alive()


async def test_an_error_is_told_like_a_result() -> None:
    told: asyncio.Queue[int | Exception] = asyncio.Queue()

    def work() -> int:
        raise OSError("disk")

    worker: Worker[int] = Worker("w", work, lambda result, _more: told.put_nowait(result))
    for _ in range(2):
        worker.start()
        assert str(await asyncio.wait_for(told.get(), 5)) == "disk"
    worker.close()


async def test_it_goes_on_by_itself_as_long_as_it_is_told_to() -> None:
    told: asyncio.Queue[tuple[int | Exception, bool]] = asyncio.Queue()
    left = [3, 2, 1]

    worker: Worker[int] = Worker(
        "w",
        left.pop,
        lambda result, more: told.put_nowait((result, more)),
        goes_on=lambda: bool(left),
    )
    worker.start()
    found = [await asyncio.wait_for(told.get(), 5) for _ in range(3)]
    assert found == [(1, True), (2, True), (3, False)]
    worker.start()  # an error ends it, whatever is left to do
    result, more = await asyncio.wait_for(told.get(), 5)
    assert isinstance(result, IndexError)
    assert not more
    worker.close()


def test_a_loop_that_has_ended_is_told_nothing() -> None:
    gate = threading.Event()
    told: list[int | Exception] = []

    def work() -> int:
        gate.wait(5)
        return 1

    worker: Worker[int] = Worker("w", work, lambda result, _more: told.append(result))

    async def begin() -> None:
        worker.start()

    asyncio.run(begin())
    gate.set()
    worker.close()
    assert told == []


def test_a_worker_that_never_worked_closes() -> None:
    worker: Worker[int] = Worker("w", lambda: 1, lambda _result, _more: None)
    worker.close()
    worker.close()
