"""A listener call that blocks the event loop is logged with its stack, by a thread."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator

import pytest

from cometmq.client.consuming.listener import CALLERS, Workers
from cometmq.client.received import ReceivedMessage
from cometmq.client.remote import loop_watch
from cometmq.rpc.retry import BackoffPolicy
from cometmq.rpc.tasks import Tasks
from tests.unit.client.consuming.test_listener import FakeQueue


class Told(logging.Handler):
    """Events of the watch, and that there was one."""

    def __init__(self) -> None:
        super().__init__()
        self.stacks: list[str] = []
        self.came = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.stacks.append(vars(record)["fields"]["stack"])
        self.came.set()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    monkeypatch.setattr(loop_watch, "LOOK_S_MIN", 0.001)
    handler, log = Told(), logging.getLogger(loop_watch.__name__)
    log.addHandler(handler)
    yield handler
    log.removeHandler(handler)


async def test_a_call_that_blocks_the_loop_is_told_once_with_its_stack(told: Told) -> None:
    async def blocks_the_loop(messages: list[ReceivedMessage]) -> None:
        assert told.came.wait(20), "the loop is blocked, and nobody has told it"

    queue = FakeQueue(1)
    made = Workers(blocks_the_loop, 1, 1, BackoffPolicy(0.001, 0.001), timeout_s=0.02)
    tasks = Tasks("test")
    made.start(tasks)
    made.push(queue.work())
    await asyncio.wait_for(queue.done.wait(), 30)
    made.close()
    await tasks.stop()
    assert len(told.stacks) == 1
    assert "in blocks_the_loop" in told.stacks[0]
    assert ", in _run\n" not in told.stacks[0]


async def test_a_loop_that_something_else_blocks_is_not_told(told: Told) -> None:
    watch = loop_watch.LoopWatch(0.005, *CALLERS)
    watch.start()
    watch.beat()
    looked = threading.Event()

    def tell() -> bool:
        looked.set()
        return type(watch)._tell(watch)

    watch._tell = tell  # type: ignore[method-assign]
    assert looked.wait(20)
    watch.stop()
    assert told.stacks == []
