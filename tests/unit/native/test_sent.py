"""The futures of messages that the extension encodes one by one do what those of asyncio do."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import gc
import pickle
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from cometmq.client.messages import SendReceipt, StoredRun
from cometmq.client.sending.batch import Batch, Segment
from cometmq.client.sending.send_many import MessageRange
from cometmq.errors import CometError, FlowControl, SendTimeout
from cometmq.model import QueueRef
from cometmq.native import accelerator
from cometmq.native.interface import SendEach

pytestmark = pytest.mark.skipif(accelerator is None, reason="the C extension is missing")


def new_each() -> SendEach:
    assert accelerator is not None
    return accelerator.SendEach(asyncio.get_running_loop())


def run_of(queue_offset: int = 0, count: int = 99) -> StoredRun:
    run = StoredRun(QueueRef("T", 0, "g"), queue_offset, 1)
    run.starts = range(0, 100 * count, 100)
    return run


class Twin:
    """A message that is decided twice: with a future of asyncio, and with one of a SendEach."""

    def __init__(self) -> None:
        self.each = new_each()
        self.each.take()  # a neighbour, which is never decided
        self.futures: list[Any] = [asyncio.get_running_loop().create_future(), self.each.take()]
        self.called: tuple[list[Any], list[Any]] = [], []
        self.callbacks = [self._note(number) for number in (0, 1)]
        self.tasks: tuple[list[Any], list[Any]] = [], []

    def _note(self, number: int) -> Callable[[Any], None]:
        return lambda future: self.called[number].append(future is self.futures[number])

    def both(self, act: Callable[[int], Any]) -> None:
        """Does the same to both, and compares what comes of it."""
        found: list[Any] = []
        for number in (0, 1):
            try:
                outcome = act(number)
            except BaseException as error:
                outcome = type(error), str(error)
            found.append(facts(outcome))
        assert found[0] == found[1]

    def decide(self, error: CometError | None) -> None:
        run = run_of(7)
        future = self.futures[0]
        if not future.done():
            if error is None:
                future.set_result(SendReceipt(run, 3))
            else:
                future.set_exception(error)
        if error is None:
            self.each.stored(1, 1, run, 3)
        else:
            self.each.failed(1, 1, error)

    def wait(self, how: Callable[[Any], Any]) -> None:
        for number in (0, 1):
            self.tasks[number].append(asyncio.ensure_future(how(self.futures[number])))


def facts(outcome: object) -> object:
    if isinstance(outcome, SendReceipt):
        return outcome.message_id, outcome.queue_offset, outcome.unique_id
    if isinstance(outcome, list):
        return [facts(one) for one in outcome]
    return outcome


async def _await(future: Any) -> Any:
    return await future


async def _wait(future: Any) -> Any:
    done, pending = await asyncio.wait([future], timeout=30)
    return [one is future for one in done], len(pending)


async def _as_completed(future: Any) -> Any:
    return [await one for one in asyncio.as_completed([future])]


async def _gather(future: Any) -> Any:
    return await asyncio.gather(future, return_exceptions=True)


async def _give_up(future: Any) -> Any:
    try:
        return await asyncio.wait_for(future, 0)
    except TimeoutError:
        return "late"


WAYS = [
    _await,
    _wait,
    _as_completed,
    _gather,
    _give_up,
    lambda future: asyncio.wait_for(_await(future), 30),
    asyncio.shield,
]


def step(twin: Twin, source: random.Random) -> None:
    """Somebody does something with the future."""
    match source.randrange(9):
        case 0:
            twin.both(lambda n: twin.futures[n].done())
        case 1:
            twin.both(lambda n: twin.futures[n].cancelled())
        case 2:
            twin.both(lambda n: twin.futures[n].result())
        case 3:
            twin.both(lambda n: twin.futures[n].exception())
        case 4:
            twin.both(lambda n: twin.futures[n].add_done_callback(twin.callbacks[n]))
        case 5:
            twin.both(lambda n: twin.futures[n].remove_done_callback(twin.callbacks[n]))
        case 6 if source.random() < 0.3:
            twin.both(lambda n: twin.futures[n].cancel())
        case 7:
            twin.wait(source.choice(WAYS))
        case _:
            twin.both(lambda n: twin.futures[n].get_loop() is asyncio.get_running_loop())


async def test_they_behave_as_those_of_asyncio() -> None:
    for seed in range(400):
        source = random.Random(seed)
        twin = Twin()
        decided_at = source.randrange(8)
        for turn in range(8):
            if turn == decided_at:
                twin.decide(source.choice([None, None, SendTimeout("late")]))
            step(twin, source)
            if source.random() < 0.5:
                await asyncio.sleep(0)
        outcomes = [
            [facts(one) for one in await asyncio.gather(*tasks, return_exceptions=True)]
            for tasks in twin.tasks
        ]
        assert str(outcomes[0]) == str(outcomes[1]), seed
        assert twin.called[0] == twin.called[1], seed
        assert all(twin.called[1]), seed
        twin.both(lambda n, twin=twin: twin.futures[n].done())  # type: ignore[misc]
        for future in twin.futures:
            if not future.cancelled():
                future.exception()


async def test_it_is_a_future_to_asyncio() -> None:
    future = new_each().take()
    assert asyncio.isfuture(future)
    assert asyncio.ensure_future(future) is future
    assert not asyncio.iscoroutine(future)
    assert weakref.ref(future)() is future


async def test_the_context_of_a_callback_is_the_one_that_was_asked_for() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    context = contextvars.copy_context()
    context.run(variable.set, "mine")
    seen: list[str] = []
    each = new_each()
    future = each.take()
    future.add_done_callback(lambda _: seen.append(variable.get("none")), context=context)
    future.add_done_callback(lambda _: seen.append(variable.get("none")))
    each.stored(0, 1, run_of(), 0)
    await asyncio.sleep(0)
    assert seen == ["mine", "none"]


async def test_a_result_is_the_same_object_each_time() -> None:
    each = new_each()
    first, second = each.take(), each.take()
    waiting = asyncio.ensure_future(_await(second))
    await asyncio.sleep(0)
    each.stored(0, 2, run_of(10), 0)
    assert first.result() is first.result() is await first
    assert second.result() is await second is await waiting
    assert [first.result().queue_offset, second.result().queue_offset] == [10, 11]


async def test_an_error_that_many_share_does_not_grow() -> None:
    each = new_each()
    futures = [each.take() for _ in range(9)]
    try:
        raise FlowControl("full")
    except FlowControl as caught:
        error = caught
    before = error.__traceback__
    each.failed(0, 9, error)
    for future in futures:
        with pytest.raises(FlowControl):
            future.result()
    assert error.__traceback__ is not None
    assert error.__traceback__.tb_next is before


async def test_all_are_decided_when_each_is() -> None:
    each = new_each()
    decided = each.decided
    for _ in range(3):
        each.take()
    each.stored(0, 3, run_of(), 0)
    assert not decided.done(), "more could come"
    each.end()
    assert decided.done()
    later = new_each()
    later.take()
    later.end()
    assert not later.decided.done()
    later.failed(0, 1, SendTimeout("late"))
    assert later.decided.done()
    with pytest.raises(ValueError, match="no more messages"):
        later.take()


@pytest.mark.parametrize(("first", "count"), [(-1, 1), (0, 0), (1, 2), (0, 3), (2, 1), (0, 1)])
async def test_what_is_not_there_cannot_be_decided(first: int, count: int) -> None:
    each = new_each()
    kept = [each.take(), each.take()]
    each.stored(0, 1, run_of(), 0)
    with pytest.raises(ValueError, match="not there, or decided"):
        each.stored(first, count, run_of(), 0)
    assert [future.done() for future in kept] == [True, False]


class Told:
    """What the loop's exception handler is told."""

    def __init__(self) -> None:
        self.errors: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(self._note)

    def _note(self, loop: object, context: dict[str, Any]) -> None:
        self.errors.append((context["message"], context["exception"]))


async def test_errors_that_nobody_looks_at_are_told_once() -> None:
    told = Told()
    late = SendTimeout("late")
    each = new_each()
    futures = [each.take() for _ in range(5)]
    del futures[0]  # not decided yet
    each.failed(0, 5, late)
    assert futures[0].exception() is late
    with pytest.raises(SendTimeout):
        await futures[1]
    del futures, each
    assert told.errors == [("SendFuture exception was never retrieved, of 3 messages", late)]


async def test_errors_that_somebody_looked_at_are_not_told() -> None:
    told = Told()
    each = new_each()
    one, other, third = each.take(), each.take(), each.take()
    other.add_done_callback(lambda future: future.exception())
    third.cancel()
    each.failed(0, 3, SendTimeout("late"))
    await asyncio.sleep(0)
    one.exception()
    one.exception()
    del one, other, third, each
    gc.collect()
    assert told.errors == []


async def test_the_collector_looks_only_at_futures_that_somebody_waits_for() -> None:
    each = new_each()
    plain, watched = each.take(), each.take()
    watched.add_done_callback(print)
    watched.remove_done_callback(print)
    assert (gc.is_tracked(plain), gc.is_tracked(watched)) == (False, True)
    assert not gc.is_tracked(SendReceipt(run_of(), 0))


class Held:
    pass


async def test_what_is_never_decided_goes_with_its_callbacks() -> None:
    each = new_each()
    future, held = each.take(), Held()
    gone = weakref.ref(held)

    def callback(_: object, held: object = held, future: object = future) -> None:
        raise AssertionError(held, future)

    future.add_done_callback(callback)
    del each, future, held, callback
    gc.collect()
    assert gone() is None


async def test_a_receipt_can_be_copied_and_pickled() -> None:
    receipt = SendReceipt(run_of(5), 2)
    for again in (copy.copy(receipt), pickle.loads(pickle.dumps(receipt))):
        assert facts(again) == facts(receipt)


# --- with batches ---------------------------------------------------------------------------------


def batch_of(source: random.Random) -> tuple[Batch, list[Any]]:
    """A batch of messages with futures of both kinds, as runs that follow each other make it."""
    batch = Batch(1, 9.0)
    futures: list[Any] = []
    for queue_id in range(source.randint(1, 3)):
        segment = Segment(QueueRef("T", queue_id, "g"), False, "ID", batch.count)
        batch.segments.append(segment)
        for _ in range(source.randint(1, 3)):
            taken, waiters = futures_of(source.randint(1, 5), source)
            futures += taken
            batch.waiters += waiters
            for _ in taken:
                batch.starts.append(len(batch.buffer))
                batch.buffer += b"x"
            segment.count += len(taken)
    batch.close()
    return batch, futures


def futures_of(count: int, source: random.Random) -> tuple[list[Any], list[Any]]:
    """So many of one kind, and what a batch knows them by."""
    if source.random() < 0.3:
        futures = [asyncio.get_running_loop().create_future() for _ in range(count)]
        return futures, futures
    each = new_each()
    futures = [each.take() for _ in range(count)]
    each.end()
    for future in futures:
        if source.random() < 0.2:
            future.add_done_callback(lambda _: None)
    return futures, [MessageRange(each, 0, count)]


def decide(batch: Batch, source: random.Random) -> None:
    """All of its messages, in parts."""
    if batch.count > 1 and source.random() < 0.5:
        for part in batch.split_at(source.randrange(1, batch.count)):
            decide(part, source)
    elif source.random() < 0.1:
        batch.failed(SendTimeout("late"))
    else:
        runs = [StoredRun(s.queue, s.first_counter, 1) for s in batch.segments]
        for run, segment in zip(runs, batch.segments, strict=True):
            run.id_stream, run.first_counter = "ID", segment.first_counter
        batch.stored(runs)


async def test_each_message_gets_its_own_receipt_however_its_batch_is_cut() -> None:
    refused_count = 0
    for seed in range(300):
        source = random.Random(seed)
        batch, futures = batch_of(source)
        counters = [(s.queue, s.first_counter + n) for s in batch.segments for n in range(s.count)]
        decide(batch, source)
        for future, (queue, counter) in zip(futures, counters, strict=True):
            assert future.done()
            if future.exception() is None:
                receipt = future.result()
                assert (receipt.queue, receipt.queue_offset) == (queue, counter), seed
                assert receipt.unique_id == f"ID{counter:08X}", seed
            else:
                refused_count += 1
    assert refused_count > 100


async def test_errors_do_not_keep_the_frames_that_they_came_through() -> None:
    """The error refers to the frame, that to the futures, and these to the error."""

    class Payload:
        """What an application has in a local variable."""

    left: list[weakref.ref[Payload]] = []

    async def send_and_fail() -> None:
        payload = Payload()
        left.append(weakref.ref(payload))
        each = new_each()
        futures: Any = [each.take() for _ in range(3)]
        each.failed(0, 2, SendTimeout("late"))
        futures.append(each.take())
        each.end()
        each.failed(2, 2, SendTimeout("late"))
        for future in futures[1:3]:
            with pytest.raises(SendTimeout):
                await future
        assert futures[0].exception() is not None
        assert futures[3].exception() is not None

    async def leave_unseen() -> None:
        """An error of the same cycle that nobody looked at is told before it is taken apart."""
        each = new_each()
        futures: Any = [each.take(), each.take()]
        each.end()
        each.failed(0, 2, SendTimeout("unseen"))
        with pytest.raises(SendTimeout):
            await futures[0]

    told: list[str] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: told.append(str(context["exception"]))
    )
    await send_and_fail()
    await leave_unseen()
    gc.collect()
    assert left[0]() is None
    assert [text.startswith("unseen") for text in told] == [True]
