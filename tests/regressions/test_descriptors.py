"""Clients that open connections and never close them take the descriptors, not the store."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from cometmq.errors import DescriptorsExhausted, Retry, StoreFailed
from cometmq.rpc.descriptors import CONNECTIONS_MIN, OTHERS
from cometmq.store.disk.files import OsFiles
from cometmq.store.layout import offset_name
from tests.support.cluster.broker import BrokerProcess
from tests.support.stores.small_stores import FaultyFiles, append, bodies, open_store

FEW = 256  # what the process may have open
TOO_MANY = 2 * FEW


@contextmanager
def all_descriptors_taken() -> Iterator[list[int]]:
    """This process can open nothing more; those that were taken for that."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    try:
        # Other tests of this process may have left files open: the limit stands above those.
        highest = max(map(int, os.listdir("/proc/self/fd")))
        room = min(limits[0], max(1024, highest + 256))
        resource.setrlimit(resource.RLIMIT_NOFILE, (room, limits[1]))
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        yield taken
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@contextmanager
def nothing_idle(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """… and every file of the store is in use, so that none can make room."""
    with all_descriptors_taken(), monkeypatch.context() as patch:
        patch.setattr(OsFiles, "_close_one", lambda _files: False)
        yield


def test_idle_files_make_room(tmp_path: Path) -> None:
    store = open_store(tmp_path, files=OsFiles())
    append(store, ("T", 0, [b"a"]))
    with all_descriptors_taken():
        append(store, ("T", 1, [b"b"]))  # a new file, in new folders
        store.flush_log()
        store.flush_queues()
        read = bodies(store, "T", 1)
    assert read == [b"b"]
    assert store.flushed_offset == store.dispatched_offset == store.appended_offset
    store.close()


def test_what_cannot_be_opened_now_is_refused_for_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path, files=OsFiles())
    append(store, ("T", 0, [b"a"]))
    with nothing_idle(monkeypatch):
        append(store, ("T", 1, [b"b"]))  # its unit waits in memory
        with pytest.raises(DescriptorsExhausted, match="cannot create") as refused:
            append(store, ("T", 0, [b"refused"]))
    assert refused.value.retry is Retry.LATER
    append(store, ("T", 0, [b"c"]))
    store.flush_log()
    store.abandon()
    store = open_store(tmp_path)
    assert (bodies(store, "T", 0), bodies(store, "T", 1)) == ([b"a", b"c"], [b"b"])
    store.close()


def test_what_was_not_synced_stays_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = FaultyFiles()
    store = open_store(tmp_path, files=files)
    for queue_id in range(20):
        append(store, ("T", queue_id, [b"%d" % queue_id]))
    close_idle_files(files)
    with nothing_idle(monkeypatch):
        with pytest.raises(DescriptorsExhausted):
            store.flush_log()
        with pytest.raises(DescriptorsExhausted):
            store.flush_queues()
    assert store.flushed_offset < store.appended_offset
    files.synced.clear()
    store.flush_log()
    store.flush_queues()
    folders = {str(tmp_path / "consumequeue" / "T" / str(queue_id)) for queue_id in range(20)}
    assert folders <= set(files.synced)
    assert {f"{folder}/{offset_name(0)}" for folder in folders} <= set(files.synced)
    store.close()


def close_idle_files(files: OsFiles) -> None:
    with files.lock:
        while files._close_one():
            pass


def test_a_folder_is_waited_for_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a sync of a folder follows has been done: that cannot be refused any more."""
    files = OsFiles()
    attempts = iter(range(10))
    with all_descriptors_taken() as taken:

        def somebody_closes(_files: OsFiles) -> bool:
            if next(attempts) == 2:
                os.close(taken.pop())
            return False

        monkeypatch.setattr(OsFiles, "_close_one", somebody_closes)
        files.sync_directory(tmp_path)
        taken.append(os.open(os.devnull, os.O_RDONLY))
        monkeypatch.setattr("cometmq.store.disk.files.PATIENCE_S", 0.1)
        with pytest.raises(StoreFailed, match="Too many open files"):
            files.sync_directory(tmp_path)
    assert next(attempts) > 3


def test_a_service_raises_its_limit_and_leaves_half_to_its_store() -> None:
    program = f"""
import resource
from cometmq.rpc.descriptors import raise_limit, share_of_connections
resource.setrlimit(resource.RLIMIT_NOFILE, ({FEW}, 1000))
print(share_of_connections())
raise_limit()
print(resource.getrlimit(resource.RLIMIT_NOFILE), share_of_connections())
"""
    told = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert told.splitlines() == [f"{CONNECTIONS_MIN}", f"(1000, 1000) {(500 - OTHERS) // 2}"]


async def test_idle_connections_stop_nobody(tmp_path: Path) -> None:
    limited = ("sh", "-c", f'ulimit -n {FEW} && exec "$0" "$@"')
    async with BrokerProcess(tmp_path, wrapper=limited) as process:
        await process.client.put_topic("T", 4)
        await process.client.send("T", 0, b"before")  # who is connected stays so
        host, port = process.client.address.rsplit(":", 1)
        with ExitStack() as idle:
            for _ in range(TOO_MANY):
                idle.enter_context(socket.create_connection((host, int(port))))
            for queue_id in range(4):
                await process.client.send("T", queue_id, b"%d" % queue_id)
        await process.client.send("T", 0, b"later")
        await process.kill()
        client = await process.start()
        assert await client.bodies("T", 0) == [b"before", b"0", b"later"]
        assert [await client.bodies("T", n) for n in (1, 2, 3)] == [[b"1"], [b"2"], [b"3"]]
