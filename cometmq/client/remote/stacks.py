"""Where the application's code is that runs in a thread or in a coroutine, as text."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
import weakref
from collections.abc import Collection, Iterator
from contextvars import ContextVar
from types import CodeType, FrameType
from typing import Any

FRAMES_MAX = 64
STACK_LENGTH_MAX = 16_384  # characters

_Place = tuple[FrameType, int]  # and its line

# The thread that waits for a call of a client without asyncio.
calling_thread: ContextVar[threading.Thread] = ContextVar("calling_thread")


class Caller:
    """The thread or the task that makes the present call. It is not kept alive."""

    def __init__(self) -> None:
        thread, task = calling_thread.get(None), asyncio.current_task()
        self._thread = None if thread is None else weakref.ref(thread)
        self._task = None if task is None else weakref.ref(task)

    def stack(self) -> str:
        """Where it is now, innermost call last. Empty: it has ended."""
        if self._thread is not None:
            thread = self._thread()
            if thread is None or not thread.is_alive():
                return ""
            assert thread.ident is not None
            return thread_stack(thread.ident)
        task = self._task() if self._task is not None else None
        return "" if task is None or task.done() else task_stack(task)


def task_stack(task: asyncio.Task[Any], *callers: CodeType) -> str:
    """Where a coroutine is that one of ``callers`` (none: the task itself) awaits in the task,
    innermost call last, and which other task it waits for. Empty: none is awaited now.
    """
    frames = _below(list(_coroutine_frames(task.get_coro())), callers)
    text = _text(frames)
    waits_for = getattr(task, "_fut_waiter", None)
    if not frames or not isinstance(waits_for, asyncio.Task):
        return text
    inner = _text(list(_coroutine_frames(waits_for.get_coro())))
    return _short(f"{text}\n  waits for task {waits_for.get_name()}\n{inner}")


def thread_stack(thread_id: int, *callers: CodeType) -> str:
    """Where a function is that one of ``callers`` (none: the thread itself) has called in the
    thread, innermost call last. Empty: none is called now.
    """
    frames: list[_Place] = []
    frame = sys._current_frames().get(thread_id)
    while frame is not None:
        frames.append((frame, frame.f_lineno))
        frame = frame.f_back
    return _text(_below(frames[::-1], callers))


def exception_text(error: BaseException, *callers: CodeType) -> str:
    """An exception with its traceback, without the frames of ``callers`` and above."""
    frames = list(traceback.walk_tb(error.__traceback__))
    told = traceback.StackSummary.extract(iter(_below(frames, callers)), limit=-FRAMES_MAX)
    lines = [*told.format(), *traceback.format_exception_only(type(error), error)]
    return _short("".join(lines).rstrip())


def _coroutine_frames(awaited: Any) -> Iterator[_Place]:
    """Of a coroutine and of what it awaits, outermost first."""
    while awaited is not None:
        for kind, inner in (("cr", "cr_await"), ("gi", "gi_yieldfrom"), ("ag", "ag_await")):
            frame = getattr(awaited, f"{kind}_frame", None)
            if frame is not None:
                yield frame, frame.f_lineno
                awaited = getattr(awaited, inner)
                break
        else:  # a future, or an iterator of an extension
            return


def _below(frames: list[_Place], callers: Collection[CodeType]) -> list[_Place]:
    """The frames below the last one of a caller; without callers, all."""
    if not callers:
        return frames
    places = [n for n, (frame, _) in enumerate(frames) if frame.f_code in callers]
    return frames[places[-1] + 1 :] if places else []


def _text(frames: list[_Place]) -> str:
    told = traceback.StackSummary.extract(iter(frames), limit=-FRAMES_MAX)
    return _short("".join(told.format()).rstrip())


def _short(text: str) -> str:
    """The end of a text that is too long: the innermost calls. What is no Unicode is replaced."""
    text = text.encode("utf-8", "replace").decode()
    if len(text) <= STACK_LENGTH_MAX:
        return text
    return f"…{text[-STACK_LENGTH_MAX + 1 :]}"
