"""How often the threads of gRPC's event engine wake up tells who waits for the network."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from cometmq.rpc.polling import poll_in_one_thread

CALLS = 100
PROGRAM = f"""
import asyncio, pathlib
import pytest

from cometmq.rpc.polling import poll_in_one_thread
poll_in_one_thread() if %r else None
import grpc

def wake_ups():
    found = 0
    for task in pathlib.Path("/proc/self/task").iterdir():
        if "event_engine" in (task / "comm").read_text():
            lines = (task / "status").read_text().splitlines()
            found += sum(int(line.split()[1]) for line in lines if line.startswith("voluntary"))
    return found

async def calls():
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{{port}}") as channel:
        await channel.channel_ready()
        before = wake_ups()
        for _ in range({CALLS}):
            try:
                await channel.unary_unary("/no/method")(b"")
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.UNIMPLEMENTED, error
        print(wake_ups() - before)
    await server.stop(None)

asyncio.run(calls())
"""


def wake_ups(*, in_one: bool) -> tuple[int, str]:
    """Their number in all calls together, and what gRPC has said."""
    command = [sys.executable, "-c", PROGRAM % in_one]
    environ = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"}
    run = subprocess.run(command, check=True, capture_output=True, text=True, env=environ)
    return int(run.stdout), run.stderr


def test_the_event_engine_sleeps() -> None:
    usual, _ = wake_ups(in_one=False)
    left, said = wake_ups(in_one=True)
    assert usual > CALLS, "gRPC does without them anyway: nothing is to be switched off any more"
    assert left < CALLS / 2
    assert "Unknown experiment" not in said


def test_who_starts_the_process_decides() -> None:
    environ = {"GRPC_EXPERIMENTS": ""}
    assert not poll_in_one_thread(environ)
    assert environ == {"GRPC_EXPERIMENTS": ""}


@pytest.mark.parametrize(("before", "decides"), [("", True), ("import grpc", False)])
def test_an_application_decides_before_grpc_is_there(before: str, decides: bool) -> None:
    program = (
        f"{before}\nfrom cometmq.client import poll_in_one_thread\nprint(poll_in_one_thread())"
    )
    environ = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"}
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, check=True, capture_output=True, text=True, env=environ)
    assert run.stdout == f"{decides}\n"


@pytest.mark.parametrize("service", ["namesrv", "broker", "haslave", "pullhold"])
def test_a_service_decides_before_grpc_is_there(service: str) -> None:
    program = f"import sys, services.{service}.__main__; sys.exit('grpc' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
