"""A loop that stands still is logged with its stack, by a thread; one that only rests is not."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry

from cometmq.rpc import loop_watch
from cometmq.rpc.gate import Gate
from cometmq.rpc.loop_lag import LoopLagMonitor
from cometmq.rpc.loop_watch import LoopWatch
from tests.support.waiting import until
from tests.unit.rpc.test_loop_lag import Late

STANDS, TURNS = "the event loop stands still", "the event loop turns again"


class Told(logging.Handler):
    """Events of the watch."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, str]] = []  # and the stack
        self._came = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        event = vars(record)
        with self._came:
            self.events.append((event["event"], str(event["fields"].get("stack", ""))))
            self._came.notify_all()

    def wait_for(self, place: str) -> bool:
        """Blocks until a loop is told that stands in this function."""
        with self._came:
            return self._came.wait_for(lambda: self.told(place), 20)

    def told(self, place: str) -> bool:
        return any(event == STANDS and f"in {place}\n" in stack for event, stack in self.events)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    monkeypatch.setattr(loop_watch, "LOOK_S", 0.001)
    handler, log = Told(), logging.getLogger(loop_watch.__name__)
    log.addHandler(handler)
    yield handler
    log.removeHandler(handler)


def stands_here(told: Told) -> None:
    assert told.wait_for("stands_here"), "the loop stands still, and no line says it"


async def test_a_loop_that_stands_still_is_told_with_its_stack_until_it_turns(told: Told) -> None:
    counted: list[int] = []
    end = LoopWatch().watch(0.005, lambda: counted.append(1))
    stands_here(told)
    await until(lambda: told.events[-1][0] == TURNS)
    end()
    assert counted


async def test_a_loop_that_turns_is_not_told(told: Told) -> None:
    end = LoopWatch().watch(10_000.0)
    looks: list[object] = []
    for _ in range(3):  # each is answered by a turn of the loop
        asyncio.get_running_loop().call_soon(looks.append, None)
        await asyncio.sleep(0)
    end()
    assert told.events == []


def test_a_loop_between_two_runs_does_not_stand(told: Told) -> None:
    watch, loop = LoopWatch(), asyncio.new_event_loop()
    counted: list[int] = []

    async def begin() -> None:
        watch.watch(0.001, lambda: counted.append(1))

    loop.run_until_complete(begin())
    other = asyncio.new_event_loop()

    async def stand() -> None:
        end = watch.watch(0.02)
        stands_here(told)
        end()

    other.run_until_complete(stand())  # twenty looks at the first
    assert not counted
    assert watch._loops.keys() == {loop}
    other.close()
    loop.close()


async def test_the_thread_ends_with_the_last_watch_and_with_a_closed_loop(told: Told) -> None:
    watch = LoopWatch()

    def threads() -> int:
        return sum(one.name == "loop watch" for one in threading.enumerate())

    await until(lambda: not threads())
    first, second = watch.watch(1.0), watch.watch(1.0)
    assert threads() == 1, "one for all"
    first()
    assert threads() == 1
    second()
    await until(lambda: not threads())

    async def forget_to_end() -> None:
        watch.watch(1.0)

    await asyncio.to_thread(asyncio.run, forget_to_end())
    await until(lambda: not threads())
    assert not watch._loops


async def test_a_service_counts_that_its_loop_stood(told: Told) -> None:
    registry = CollectorRegistry()
    monitor = LoopLagMonitor(registry, Gate(), Late(), stall_ms=5)
    running = asyncio.create_task(monitor.run())
    await asyncio.sleep(0)
    stands_here(told)
    stalls = "cometmq_event_loop_stalls_total"
    await until(lambda: (registry.get_sample_value(stalls) or 0) >= 1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
