"""A stack names the function that runs, and what its caller has to do with is left out."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from cometmq.client.remote import stacks
from cometmq.client.remote.stacks import (
    Caller,
    calling_thread,
    exception_text,
    task_stack,
    thread_stack,
)
from tests.support.waiting import until

Function = Callable[..., Awaitable[object]]


async def call_with(function: Function, *arguments: Any) -> object:
    """The caller, as the SDK is one."""
    return await function(*arguments)


CALLER = call_with.__code__


async def waits_for_the_gate(gate: asyncio.Event) -> None:
    await gate.wait()


async def calls_deeper(gate: asyncio.Event) -> None:
    await waits_for_the_gate(gate)


async def waits_for_a_task(gate: asyncio.Event) -> None:
    await asyncio.create_task(waits_for_the_gate(gate), name="inner")


async def begun(function: Function, gate: asyncio.Event) -> asyncio.Task[object]:
    task = asyncio.create_task(call_with(function, gate))
    await until(lambda: getattr(gate, "_waiters", ()))
    return task


async def test_a_coroutine_is_told_down_to_where_it_waits() -> None:
    gate = asyncio.Event()
    task = await begun(calls_deeper, gate)
    told = task_stack(task, CALLER)
    places = [
        told.index(f", in {name}\n") for name in ("calls_deeper", "waits_for_the_gate", "wait")
    ]
    assert places == sorted(places)
    assert "await waits_for_the_gate(gate)" in told
    assert "call_with" not in told
    gate.set()
    await task
    assert task_stack(task, CALLER) == ""


async def test_a_task_that_is_waited_for_is_told_too() -> None:
    gate = asyncio.Event()
    task = await begun(waits_for_a_task, gate)
    told = task_stack(task, CALLER)
    assert told.index("in waits_for_a_task") < told.index("waits for task inner")
    assert told.index("waits for task inner") < told.index("in waits_for_the_gate")
    gate.set()
    await task


def test_a_thread_is_told_down_to_where_it_is() -> None:
    inside, go_on = threading.Event(), threading.Event()

    def blocks() -> None:
        inside.set()
        go_on.wait(10)

    def caller() -> None:
        blocks()

    thread = threading.Thread(target=caller)
    thread.start()
    assert inside.wait(10)
    told = thread_stack(thread.ident or 0, caller.__code__)
    assert "in blocks" in told
    assert "go_on.wait(10)" in told
    assert "in caller" not in told
    go_on.set()
    thread.join()
    assert thread_stack(thread.ident or 0, caller.__code__) == ""


async def test_an_exception_is_told_without_its_caller() -> None:
    async def fails() -> None:
        raise ValueError("no such customer")

    with pytest.raises(ValueError, match="no such customer") as failed:
        await call_with(fails)
    told = exception_text(failed.value, CALLER)
    assert told.endswith("ValueError: no such customer")
    assert "in fails" in told
    assert "call_with" not in told


def test_a_long_text_keeps_its_end() -> None:
    error = ValueError("x" * 100_000 + " the end")
    told = exception_text(error, CALLER)
    assert len(told) == stacks.STACK_LENGTH_MAX
    assert told.endswith(" the end")


async def test_a_caller_is_told_where_it_is_until_it_ends() -> None:
    gate, called = asyncio.Event(), asyncio.Event()
    callers: list[Caller] = []

    async def calls_and_goes_on() -> None:
        callers.append(Caller())
        called.set()
        await waits_for_the_gate(gate)

    task = asyncio.create_task(calls_and_goes_on())
    await called.wait()
    assert "in waits_for_the_gate" in callers[0].stack()
    gate.set()
    await task
    assert callers[0].stack() == ""


def test_a_caller_in_a_thread_is_told_where_the_thread_is() -> None:
    gate, called = threading.Event(), threading.Event()
    callers: list[Caller] = []

    async def call() -> None:
        callers.append(Caller())

    def waits_in_a_thread() -> None:
        calling_thread.set(threading.current_thread())
        asyncio.run(call())
        called.set()
        gate.wait()

    thread = threading.Thread(target=waits_in_a_thread)
    thread.start()
    assert called.wait(20)
    assert "in waits_in_a_thread" in callers[0].stack()
    gate.set()
    thread.join()
    assert callers[0].stack() == ""
