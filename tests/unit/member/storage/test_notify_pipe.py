from __future__ import annotations

import asyncio
import os
from array import array

import pytest

from cometmq.member.storage.notify_pipe import READ_BYTES, NotifyPipe


async def test_numbers_are_heard_in_their_order() -> None:
    heard: list[int] = []
    enough = asyncio.Event()
    numbers = array("q", [*range(READ_BYTES // 4), -1])

    def hear(some: array[int]) -> None:
        heard.extend(some)
        if -1 in some:
            enough.set()

    pipe = NotifyPipe(hear)
    with pipe.listening():
        os.write(pipe.write_fd, numbers)
        await asyncio.wait_for(enough.wait(), 5)
    assert heard == list(numbers)
    pipe.close()


async def test_what_comes_while_nobody_listens_is_heard_later() -> None:
    heard: asyncio.Queue[list[int]] = asyncio.Queue()
    pipe = NotifyPipe(lambda some: heard.put_nowait(some.tolist()))
    with pipe.listening():
        write_fd = pipe.write_fd
    os.write(write_fd, array("q", [7]))
    await asyncio.sleep(0)
    assert heard.empty()
    with pipe.listening():
        assert pipe.write_fd == write_fd
        assert await asyncio.wait_for(heard.get(), 5) == [7]
    pipe.close()


async def test_its_descriptors_are_closed_once() -> None:
    pipe = NotifyPipe(lambda _: None)
    pipe.close()  # it has none
    with pipe.listening():
        write_fd = pipe.write_fd
    pipe.close()
    pipe.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(write_fd, bytes(8))
