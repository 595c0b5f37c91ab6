"""What a process does before it is forked. Each test is a process of its own: gRPC is there once.

Children: tests/integration/test_client_workers.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import cast

import grpc
import pytest

from cometmq.rpc import forks

_PROGRAM = """
import asyncio, gc, logging, threading
{first}
from cometmq import client
from cometmq.rpc import forks
from cometmq.rpc.channels import open_channel

gc.disable()

async def use(keep):
    channel = open_channel("127.0.0.1:1")
    call = channel.unary_unary("/a/b")
    try:
        await call(b"")
    except Exception:
        pass
    if keep:
        return channel
    await channel.close()
    cycle = [channel, call]
    cycle.append(cycle)

logging.basicConfig()
kept = asyncio.run(use({keep}))
print(len(list(forks._threads())) > 0)
forks.FORKS.before()
print(len(list(forks._threads())) > 0)
if kept is not None:
    asyncio.run(kept.close())
"""


def play(*, keep: bool = False, first: str = "") -> tuple[list[str], str]:
    environment = {k: v for k, v in os.environ.items() if k != "GRPC_ENABLE_FORK_SUPPORT"}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM.format(keep=keep, first=first)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.split(), done.stderr


def test_what_closed_channels_have_left_is_collected_before_a_fork() -> None:
    assert play()[0] == ["True", "False"]


def test_open_channels_stay_and_nothing_is_told() -> None:
    found, told = play(keep=True)
    assert found == ["True", "True"]
    assert "forked" not in told


class Freed:
    """In the place of a channel that nothing holds any more."""


def test_threads_that_are_about_to_end_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    left = iter([["grpc_"], ["grpc_"], []])
    monkeypatch.setattr(forks, "_threads", lambda: next(left))
    monkeypatch.setenv("GRPC_ENABLE_FORK_SUPPORT", "0")
    process = forks.Forks()
    process.opened(cast(grpc.aio.Channel, Freed()))
    process.before()
    process.in_child()
    process.check()


@pytest.mark.parametrize(
    "first", ["import os; os.environ['GRPC_ENABLE_FORK_SUPPORT'] = '1'", "import grpc"]
)
def test_a_fork_with_open_channels_and_grpcs_own_support_is_told(first: str) -> None:
    told = play(keep=True, first=first)[1]
    assert told.count("the child may crash") == 1
