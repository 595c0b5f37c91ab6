from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from cometmq.client.consuming import listener as listening
from cometmq.client.consuming.listener import Listener, Work, Workers
from cometmq.client.messages import ConsumeResult, Later
from cometmq.client.reading.progress import AnyRun, Progress
from cometmq.client.received import ReceivedMessage
from cometmq.client.remote.rates import Tally
from cometmq.format.record import encode
from cometmq.model import Position, QueueRef
from cometmq.rpc.retry import BackoffPolicy
from cometmq.rpc.tasks import Tasks
from tests.support.waiting import until

QUEUE = QueueRef("T", 0, "g")
HOST = bytes(8)


class FakeQueue:
    """A queue with ``count`` messages in one run; ``done`` is set when all are finished."""

    def __init__(self, count: int) -> None:
        self.closed = False
        self.running = 0
        self.tally = Tally()
        self.finished: list[tuple[int, int]] = []
        self.progress = Progress(Position(1, 0))
        self.run = self.progress.add(list(range(count)), Position(1, count), count)
        self.messages = [message(n) for n in range(count)]
        self.done = asyncio.Event()

    def finish(self, run: AnyRun, start: int, stop: int) -> None:
        self.finished.append((start, stop))
        self.progress.finish(run, start, stop)
        if self.progress.count == 0:
            self.done.set()

    def work(self) -> Work:
        return Work(self, self.run, self.messages)


def message(offset: int) -> ReceivedMessage:
    record = encode(
        b"T", 0, b"", b"", born_time_ms=1, born_host=HOST, store_host=HOST, queue_offset=offset
    )
    return ReceivedMessage(record, QUEUE)


@asynccontextmanager
async def workers(
    listener: Listener, concurrency: int = 2, batch_count: int = 1, timeout_s: float = 60.0
) -> AsyncIterator[Workers]:
    made = Workers(listener, concurrency, batch_count, BackoffPolicy(0.001, 0.001), timeout_s)
    tasks = Tasks("test")
    made.start(tasks)
    yield made
    made.close()
    await tasks.stop()


@pytest.mark.parametrize("waits", [True, False])
async def test_a_listener_that_cancels_its_own_task_loses_neither_worker_nor_message(
    waits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """``waits``: the cancellation meets the call itself; else the worker, once the call is over."""
    tried: list[int] = []

    async def listener(messages: list[ReceivedMessage]) -> None:
        tried.append(messages[0].queue_offset)
        if tried.count(messages[0].queue_offset) == 1:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            if waits:
                await asyncio.sleep(0)

    queue, later = FakeQueue(20), FakeQueue(3)
    async with workers(listener, concurrency=1) as made:
        made.push(queue.work())
        await queue.done.wait()
        made.push(later.work())
        await later.done.wait()
    assert set(tried) == set(range(20))
    if waits:
        assert all(tried.count(offset) >= 2 for offset in range(20))
        assert "listener failed" in caplog.text


async def test_work_is_done_in_its_order() -> None:
    got: list[int] = []

    async def listener(messages: list[ReceivedMessage]) -> None:
        got.extend(m.queue_offset for m in messages)

    queue = FakeQueue(100)
    async with workers(listener, batch_count=7) as made:
        made.push(queue.work())
        await queue.done.wait()
    assert got == list(range(100))
    assert queue.running == 0


@pytest.mark.parametrize("concurrency", [1, 20])
async def test_calls_that_never_wait_leave_the_loop_to_others(
    concurrency: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All workers together use no more of a turn than their part, but all of that."""
    now_ns = calls = 0
    call_ns = listening._TURN_NS_MAX // 10
    monkeypatch.setattr(listening, "monotonic_ns", lambda: now_ns)

    async def listener(messages: list[ReceivedMessage]) -> None:
        nonlocal now_ns, calls
        now_ns += call_ns
        calls += 1

    queue = FakeQueue(1000)
    turns: list[int] = []
    async with workers(listener, concurrency) as made:
        made.push(queue.work())
        while not queue.done.is_set():
            before = calls
            await asyncio.sleep(0)
            turns.append(calls - before)
            assert made.calls(20, with_stacks=False) == ([], 0)
    some = [turn for turn in turns if turn]
    assert max(some) < 10 + listening._CALLS_PER_LOOK
    assert min(some[:-1]) >= 10


async def test_calls_that_wait_run_together_though_others_use_up_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_ns = running = 0
    monkeypatch.setattr(listening, "monotonic_ns", lambda: now_ns)
    all_run = asyncio.Event()

    async def listener(messages: list[ReceivedMessage]) -> None:
        nonlocal now_ns, running
        now_ns += 2 * listening._TURN_NS_MAX
        running += 1
        if running == 20:
            all_run.set()
        await all_run.wait()

    queue = FakeQueue(100)
    async with workers(listener, concurrency=20) as made, asyncio.timeout(10):
        made.push(queue.work())
        await queue.done.wait()


async def test_only_what_failed_comes_again() -> None:
    seen: list[tuple[int, int]] = []

    async def listener(messages: list[ReceivedMessage]) -> ConsumeResult:
        (one,) = messages
        seen.append((one.queue_offset, one.attempt))
        later = one.queue_offset == 1 and one.attempt < 3
        return ConsumeResult.LATER if later else ConsumeResult.SUCCESS

    queue = FakeQueue(3)
    async with workers(listener) as made:
        made.push(queue.work())
        await queue.done.wait()
    assert sorted(seen) == [(0, 1), (1, 1), (1, 2), (1, 3), (2, 1)]


async def test_a_closed_queue_and_a_cut_run_give_no_work() -> None:
    got: list[int] = []

    async def listener(messages: list[ReceivedMessage]) -> None:
        got.extend(m.queue_offset for m in messages)

    closed, cut, whole = FakeQueue(5), FakeQueue(5), FakeQueue(2)
    closed.closed = True
    cut.progress.rewind(Position(2, 3))
    async with workers(listener, concurrency=1) as made:
        for queue in (closed, cut, whole):
            made.push(queue.work())
        await whole.done.wait()
    assert got == [0, 1, 2, 0, 1]
    assert closed.finished == []


async def test_plain_functions_run_in_threads_and_may_block_while_others_go_on() -> None:
    """All calls have to meet: none ends before all have begun."""
    together = threading.Barrier(4, timeout=10)
    threads: set[int] = set()

    def listener(messages: list[ReceivedMessage]) -> ConsumeResult:
        threads.add(threading.get_ident())
        together.wait()
        return ConsumeResult.SUCCESS

    queue = FakeQueue(4)
    async with workers(listener, concurrency=4) as made:
        made.push(queue.work())
        await queue.done.wait()
    assert len(threads) == 4
    assert threading.get_ident() not in threads


@pytest.mark.parametrize("error", [ValueError, StopIteration, asyncio.CancelledError])
async def test_what_a_plain_function_raises_means_not_done(error: type[BaseException]) -> None:
    def listener(messages: list[ReceivedMessage]) -> None:
        if messages[0].attempt == 1:
            raise error

    queue = FakeQueue(1)
    async with workers(listener) as made:
        made.push(queue.work())
        await asyncio.wait_for(queue.done.wait(), 10)
    assert queue.finished == [(0, 0), (0, 1)]


async def test_what_a_lambda_returns_is_awaited() -> None:
    got: list[int] = []

    async def listener(messages: list[ReceivedMessage]) -> None:
        got.append(messages[0].queue_offset)

    queue = FakeQueue(1)
    async with workers(lambda messages: listener(messages)) as made:
        made.push(queue.work())
        await queue.done.wait()
    assert got == [0]


async def test_the_number_of_calls_at_a_time_changes_while_they_run() -> None:
    running, most, go_on = 0, 0, asyncio.Semaphore(0)

    async def listener(messages: list[ReceivedMessage]) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await go_on.acquire()
        running -= 1

    queue = FakeQueue(30)
    tasks = Tasks("test")
    made = Workers(listener, 2, 1, BackoffPolicy(0.001, 0.001), 60.0)
    made.start(tasks)
    other_tasks = len(tasks) - 2
    made.push(queue.work())
    await until(lambda: running == 2)
    made.resize(5)
    await until(lambda: running == 5)
    made.resize(1)
    for _ in range(10):
        go_on.release()
    await until(lambda: len(tasks) == other_tasks + 1 and running == 1)
    most = 0
    made.resize(3)
    for _ in range(30):
        go_on.release()
    await queue.done.wait()
    assert 1 <= most <= 3
    made.close()
    await tasks.stop()


async def test_no_call_begins_while_calls_are_suspended() -> None:
    got: list[int] = []

    async def listener(messages: list[ReceivedMessage]) -> None:
        got.append(messages[0].queue_offset)

    first, second = FakeQueue(3), FakeQueue(3)
    async with workers(listener) as made:
        made.suspend()
        made.push(first.work())
        await asyncio.sleep(0.05)
        assert got == []
        made.resume()
        await first.done.wait()
        made.push(second.work())
        await second.done.wait()
    assert got == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("plain", [False, True])
async def test_a_worker_outlives_what_is_no_exception(plain: bool) -> None:
    """Of a plain function also SystemExit: it would end the event loop, and not only a thread."""

    def fail(messages: list[ReceivedMessage]) -> None:
        if messages[0].attempt == 1:
            raise SystemExit if plain else BaseException

    async def fail_too(messages: list[ReceivedMessage]) -> None:
        fail(messages)

    queue = FakeQueue(3)
    async with workers(fail if plain else fail_too, concurrency=1) as made:
        made.push(queue.work())
        await asyncio.wait_for(queue.done.wait(), 10)


async def test_a_late_call_tells_its_queue_that_it_has_ended() -> None:
    """Who gives the queue up waits for that, and would wait for drain_timeout_ms."""
    go_on = asyncio.Event()

    async def listener(messages: list[ReceivedMessage]) -> None:
        await go_on.wait()

    queue, sent_back = FakeQueue(1), asyncio.Event()
    async with workers(listener, timeout_s=0.02) as made:
        made.send_back = lambda work, start, stop, level: sent_back.set()
        made.push(queue.work())
        await sent_back.wait()
        assert not queue.finished
        go_on.set()
        await until(lambda: queue.finished == [(0, 0)])
        assert queue.running == 0


async def test_a_late_call_is_told_once_with_its_stack_also_where_nothing_is_sent_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    go_on = asyncio.Event()

    async def waits_for_go_on(messages: list[ReceivedMessage]) -> None:
        await go_on.wait()

    def late() -> list[str]:
        return [
            vars(record)["fields"]["stack"]
            for record in caplog.records
            if "listener call takes too long" in record.getMessage()
        ]

    queue = FakeQueue(2)
    async with workers(waits_for_go_on, concurrency=1, timeout_s=0.01) as made:
        made.push(queue.work())
        await until(late)
        [call], count = made.calls(64, with_stacks=True)
        assert count == 1
        assert (call.queue_offset, call.is_late) == (0, True)
        assert "in waits_for_go_on" in call.stack
        go_on.set()
        await queue.done.wait()
        assert made.calls(64, with_stacks=True) == ([], 0)
    [stack] = late()
    assert "in waits_for_go_on" in stack
    assert queue.finished == [(0, 1), (1, 2)]


async def test_what_was_done_and_what_was_not_is_counted_by_topic() -> None:
    async def listener(messages: list[ReceivedMessage]) -> ConsumeResult | Later:
        last = messages[-1].queue_offset == 7
        return Later(done=1) if last and messages[-1].attempt == 1 else ConsumeResult.SUCCESS

    queue = FakeQueue(8)
    async with workers(listener, batch_count=4) as made:
        made.push(queue.work())
        await queue.done.wait()
    tally = queue.tally
    assert (tally.done, tally.failed) == (8, 3)
    assert tally.calls == 3
    assert tally.busy_ns > 0


async def test_what_fails_behind_a_reset_is_not_sent_back() -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def listener(messages: list[ReceivedMessage]) -> ConsumeResult:
        begun.set()
        await go_on.wait()
        return ConsumeResult.LATER

    queue, sent_back = FakeQueue(4), list[tuple[int, int]]()
    async with workers(listener, batch_count=4) as made:
        made.not_done = lambda work, start, stop, later: sent_back.append((start, stop))
        made.push(queue.work())
        await begun.wait()
        queue.progress.rewind(Position(1, 3))
        go_on.set()
        await until(lambda: queue.finished)
    assert sent_back == [(0, 3)]
