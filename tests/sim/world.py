"""Simulated time: what happens is a heap of (time, number, action), played in order.

One seed decides everything, so that a run can be played again. Machines stop and go on, processes
die; coroutines of a process run by :class:`Process`, which needs no event loop.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Action = Callable[[], None]
STEPS_MAX = 2_000_000  # of one run: more is a loop without end


class Violation(AssertionError):
    """An invariant does not hold."""


class World:
    """``told`` gets a line for everything worth reading; None: nobody reads."""

    def __init__(self, seed: int, told: Callable[[str], None] | None = None) -> None:
        self.now = 0.0  # true time, which nobody in the cluster knows
        self.rng = random.Random(seed)
        self.counts: Counter[str] = Counter()  # what has happened, for the coverage
        self._told = told
        self._heap: list[tuple[float, int, Action]] = []
        self._number = 0

    def at(self, delay_s: float, action: Action) -> None:
        self._number += 1
        assert self._number < STEPS_MAX, "the simulation does not come to an end"
        heapq.heappush(self._heap, (self.now + delay_s, self._number, action))

    def run(self, until_s: float) -> None:
        """Play what happens up to then."""
        while self._heap and self._heap[0][0] <= until_s:
            self.now, _, action = heapq.heappop(self._heap)
            action()
        self.now = until_s

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self.rng.random()

    def tell(self, who: object, what: str, *details: object) -> None:
        """A line of the trace."""
        if self._told is not None:
            self._told(f"{self.now:9.3f}  {who!s:<4} {what} {' '.join(map(str, details))}".rstrip())

    @property
    def is_told(self) -> bool:
        """Whether anybody reads the trace."""
        return self._told is not None


class Wait(Generic[T]):
    """What a coroutine waits for: ``start`` is called with what to call then, once."""

    def __init__(
        self, start: Callable[[Callable[[T], None], Callable[[Exception], None]], None]
    ) -> None:
        self.start = start

    def __await__(self) -> Generator[Wait[T], T, T]:
        return (yield self)


class Future:
    """What waits to be done, as asyncio's: awaited, or asked to call back."""

    def __init__(self) -> None:
        self._is_done = False
        self._waiting: list[Callable[[Future], None]] = []

    def done(self) -> bool:
        return self._is_done

    def cancelled(self) -> bool:
        return False

    def exception(self) -> None:
        return None

    def set(self) -> None:
        """It is done."""
        self._is_done = True
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call(self)

    def add_done_callback(self, call: Callable[[Future], None]) -> None:
        if self._is_done:
            call(self)
        else:
            self._waiting.append(call)

    def __await__(self) -> Generator[Wait[None], None, None]:
        if not self._is_done:
            waits: Wait[None] = Wait(
                lambda done, _: self.add_done_callback(lambda _future: done(None))
            )
            yield from waits.__await__()


class Machine:
    """What processes run on. While it is stopped (SIGSTOP, a suspended machine) nothing happens on
    it, but time goes on: afterwards everything that came meanwhile is done at once, in order.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.stopped = False
        self._backlog: list[Action] = []

    def stop(self) -> None:
        """Until :meth:`go_on`."""
        self.stopped = True

    def do(self, action: Action) -> None:
        if self.stopped:
            self._backlog.append(action)
        else:
            action()

    def restart(self) -> None:
        """Nothing of before is done."""
        self.stopped = False
        self._backlog = []

    def go_on(self) -> None:
        self.stopped = False
        while self._backlog and not self.stopped:
            self._backlog.pop(0)()


class Process:
    """Everything that a dead process would do is not done."""

    def __init__(self, machine: Machine) -> None:
        self.alive = True
        self.world = machine.world
        self._machine = machine

    def call(self, action: Action) -> None:
        """Something happens to this process now."""

        def unless_dead() -> None:
            if self.alive:
                action()

        if self.alive:
            self._machine.do(unless_dead)

    def after(self, delay_s: float, action: Action) -> None:
        self.world.at(delay_s, lambda: self.call(action))

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._step(coroutine, lambda: coroutine.send(None))

    def sleep(self, delay_s: float) -> Wait[None]:
        return Wait(lambda done, _: self.after(delay_s, lambda: done(None)))

    def _step(
        self, coroutine: Coroutine[Any, Any, None], go_on: Callable[[], Wait[Any] | None]
    ) -> None:
        if not self.alive:
            return
        try:
            wait = go_on()
        except StopIteration:
            return

        def resume(next_step: Callable[[], Wait[Any] | None]) -> None:
            self.call(lambda: self._step(coroutine, next_step))

        if wait is None:  # asyncio.sleep(0): others have a turn
            self.world.at(0.0, lambda: resume(lambda: coroutine.send(None)))
            return
        wait.start(
            lambda value: resume(lambda: coroutine.send(value)),
            lambda error: resume(lambda: coroutine.throw(error)),
        )


class Notifier:
    """Wakes who waits for it; rung while nobody waits, it wakes the next at once."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._rung = False
        self._waiting: list[Callable[[], None]] = []

    def notify(self) -> None:
        self._rung = True
        waiting, self._waiting = self._waiting, []
        for wake in waiting:
            wake()

    def heard(self, timeout_s: float | None) -> Wait[None]:
        """Until it rings, or the time is over."""

        def start(done: Callable[[None], None], _: object) -> None:
            over = False

            def wake() -> None:
                nonlocal over
                if not over:
                    over, self._rung = True, False
                    done(None)

            if self._rung:
                wake()
                return
            self._waiting.append(wake)
            if timeout_s is not None:
                self._process.after(timeout_s, wake)

        return Wait(start)
