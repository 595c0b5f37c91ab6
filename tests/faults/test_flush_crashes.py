"""The flush thread beside callers that wait for the disk, over the worst disk that keeps its
promises (``tests/support/faults/worst_disk.c``): with the C extension, whose thread syncs by
itself, and in plain Python.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cometmq import native
from cometmq.store.writer import StoreOptions
from tests.support.stores.small_stores import FaultyFiles, append, bodies, open_store

ROOT = Path(__file__).parents[2]
OPTIONS = StoreOptions(commit_log_file_bytes=64 * 1024, consume_queue_file_bytes=20 * 300)
COMPILER = shutil.which("cc")

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")

CHILD = """
import asyncio
import os
import sys
from pathlib import Path
from cometmq.clock import SystemClock
from cometmq.errors import StoreFailed
from cometmq.member.storage.authority import SoleWriter
from cometmq.member.storage.flusher import FlushPolicy
from cometmq.member.storage.member_storage import MemberStorage, Segment
from cometmq.replication.watermarks import DurabilityClass
from cometmq.store.writer import MessageStore
from tests.faults.test_flush_crashes import OPTIONS
from tests.support.stores.small_stores import HOST, encoded

store = MessageStore.open(Path(sys.argv[1]), OPTIONS, clock=SystemClock())
storage = MemberStorage(store, FlushPolicy(), SystemClock(), SoleWriter())
flush = store.flush_log_while_wanted

def say(line):  # of two threads
    os.write(1, line.encode() + b"\\n")

def flush_and_say(write_fd):
    done = flush(write_fd)
    if done:
        say("by itself")
    return done

store.flush_log_while_wanted = flush_and_say

async def call(number):
    segment = Segment("A", 0, 1, DurabilityClass.FLUSHED)
    while True:
        body = b"%d of %d " % (number, store.appended_offset)
        record = encoded("A", 0, body + bytes(600))
        try:
            ticket = storage.append(record, [segment], born_host=HOST, store_host=HOST)
        except StoreFailed:  # which storage.run tells, in its turn
            return
        await ticket.acked
        say(f"acked {ticket.appended.queue_offsets[0]} {body.decode()}")

async def main():
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(storage.run(0.02))
        for number in range(24):
            tasks.create_task(call(number))

try:
    asyncio.run(main())
except* StoreFailed as failures:
    say(f"failed {failures.exceptions[0]}")
storage.close()
"""


@pytest.fixture(scope="module")
def worst_disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that makes a disk the worst one."""
    built = tmp_path_factory.mktemp("worst-disk") / "worst_disk.so"
    source = ROOT / "tests/support/faults/worst_disk.c"
    assert COMPILER is not None
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", built, source], check=True)
    return built


@pytest.fixture(params=["plain", "native"])
def environment(request: pytest.FixtureRequest, worst_disk: Path, disk: Path) -> dict[str, str]:
    """Of a child in this implementation."""
    if request.param == "native" and native.accelerator is None:
        pytest.skip("the C extension was not built, or COMETMQ_NATIVE=0")
    chosen = {"COMETMQ_NATIVE": "0"} if request.param == "plain" else {}
    return {**os.environ, **chosen, "LD_PRELOAD": str(worst_disk), "WORST_DISK": str(disk)}


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """Where the log files are as the disk has them."""
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


@contextmanager
def child(store: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", CHILD, str(store)]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process


def lose_power(store: Path, disk: Path) -> None:
    """Leave of the log files what the disk has of them; nothing else was written but zeros."""
    for path in (store / "commitlog").iterdir():
        kept = disk / path.name
        zeros = bytes(OPTIONS.commit_log_file_bytes)
        path.write_bytes(kept.read_bytes() if kept.exists() else zeros)


def check(store: Path, disk: Path, lines: list[str]) -> None:
    """Every message that was acknowledged is there once the power is back."""
    acked = [line.split(maxsplit=2) for line in lines if line.startswith("acked")]
    lose_power(store, disk)
    again = open_store(store, OPTIONS, files=FaultyFiles(boot="another"))
    found = bodies(again, "A", 0)
    for _, offset, body in acked:
        assert found[int(offset)].rstrip(b"\0").decode().strip() == body
    append(again, ("A", 0, [b"next"]))
    again.close()


def test_what_was_acknowledged_is_on_the_disk(
    tmp_path: Path, disk: Path, environment: dict[str, str], seed: int
) -> None:
    lines: list[str] = []
    with child(tmp_path / "store", environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.endswith("\n"):  # the kill may fall into the middle of one
                lines.append(line.strip())
            if len(lines) == 400 + seed % 200:
                process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert ("by itself" in lines) == ("COMETMQ_NATIVE" not in environment)
    assert len([path for path in disk.iterdir() if path.name != "new"]) > 2, "it went on in files"
    check(tmp_path / "store", disk, lines)


# What a sync wrongly claims for what came during it, the next one makes good: only the last one
# that succeeds can show it.
@pytest.mark.parametrize("first", [2, 12, 22])
def test_after_a_sync_that_failed_nothing_is_acknowledged_nor_synced(
    tmp_path: Path, disk: Path, environment: dict[str, str], seed: int, first: int
) -> None:
    environment["WORST_DISK_FAILS_AT"] = str(first + seed % 10)
    with child(tmp_path / "store", environment) as process:
        assert process.stdout is not None
        lines = [line.strip() for line in process.stdout]
    assert process.returncode == 0
    assert "Input/output error" in lines[-1]
    assert lines[-1].startswith("failed cannot sync")
    assert not (disk / "again").exists(), "a sync that failed is never tried again"
    check(tmp_path / "store", disk, lines)
