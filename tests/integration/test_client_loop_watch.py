"""A listener that blocks its client's event loop is named in the log, with and without asyncio."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from cometmq.client import PushConsumer, PushConsumerOptions, ReceivedMessage, sync
from tests.support.cluster.broker import running_broker, running_namesrv
from tests.unit.rpc.test_loop_watch import Told, told

__all__ = ["told"]

OPTIONS = PushConsumerOptions(loop_stall_ms=10)


@pytest.mark.parametrize("with_asyncio", [True, False])
async def test_a_listener_that_blocks_the_loop_is_told(
    tmp_path: Path, told: Told, with_asyncio: bool
) -> None:
    done = threading.Event()

    async def blocks_the_loop(_messages: list[ReceivedMessage]) -> None:
        assert told.wait_for("blocks_the_loop"), "the loop stands still, and no line says it"
        done.set()

    async with (
        running_namesrv(tmp_path) as names,
        running_broker(tmp_path, namesrv=(names,)) as one,
    ):
        await one.put_topic("T", 1)
        await one.send("T", 0, b"x")

        def consume() -> None:
            with sync.PushConsumer(names, "G", blocks_the_loop, options=OPTIONS) as other:
                other.subscribe("T")
                assert done.wait(20)

        if with_asyncio:
            async with PushConsumer(names, "G", blocks_the_loop, options=OPTIONS) as other:
                await other.subscribe("T")
                assert await asyncio.to_thread(done.wait, 20)
        else:
            await asyncio.to_thread(consume)
