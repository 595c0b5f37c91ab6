"""How soon a new slave has everything: a writer with a full log gets a slave with an empty disk,
first with nobody sending, then beside a producer at full speed.

Beside each copy that nobody disturbs stands what limits it: the bare disk, which gets as many bytes
in files of the same size, just before; and a slave whose disk is memory, which shows what is left
without one.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.figures import Figure
from bench.group import Groups, create_topic, groups, wait_for
from bench.holds import Scrape
from bench.watching import Watch, producing
from cometmq.member.config import MemberConfig
from cometmq.model import ReplicationMode
from cometmq.replication.follower import CHUNK_BYTES_MAX

TOPIC = "async"
BODY_BYTES = 1024
LOG_BYTES = 1_200_000_000
LOG_FILE_BYTES = MemberConfig().mapped_file_size_commit_log
MEMORY = Path("/dev/shm")
SETTLE_S = 1.0  # after something has changed, before it is measured
LOOK_S = 0.05  # a look at a slave takes a little of what is measured
MB = 1_000_000


def catch_up(folder: Path, runs: int, seconds: float) -> Iterator[list[Figure]]:
    with groups(folder / "group", 1) as group:
        create_topic(group.namesrv, TOPIC, ReplicationMode.ASYNC)
        lose_disk(group)
        fill(group, LOG_BYTES)
        for _ in range(runs):
            yield [*with_nobody_sending(group), *beside_producers(group, seconds)]
            lose_disk(group)


def with_nobody_sending(group: Groups) -> Iterator[Figure]:
    """Before, there is no slave; after, it has everything."""
    size = group.log_end(0)
    if shutil.disk_usage(MEMORY).free > 2 * size:
        with store_in_memory(group):
            in_memory = copy_from_start(group, size)
        yield Figure("catch-up, nobody sends, slave in memory", in_memory / MB, "MB/s")
    disk = bare_disk(group.store_of(1).parent, size)
    replicated = copy_from_start(group, size)
    yield Figure("bare disk, as many bytes", disk / MB, "MB/s")
    yield Figure("catch-up, nobody sends", replicated / MB, "MB/s", 300)
    yield Figure("catch-up, nobody sends / bare disk", replicated / disk, "")


def beside_producers(group: Groups, seconds: float) -> Iterator[Figure]:
    """A producer at full speed: with its slave in step, then beside a new one that catches up."""
    with producing(group.namesrv, TOPIC, body_bytes=BODY_BYTES) as watch:
        in_step = rate_for(watch, seconds)
        lose_disk(group)
        gone = rate_for(watch, seconds)
        group.start()
        wait_for(lambda: group.log_end(1) > 0, "the copy")
        replicated, started_s = group.log_end(1), time.time()
        time.sleep(seconds)
        ended_s = time.time()
        replicated = group.log_end(1) - replicated
        beside = watch.rate(started_s, ended_s)
    yield Figure("produce, no slave", gone, "messages/s")
    yield Figure("produce, slave in step", in_step, "messages/s")
    yield Figure("produce, new slave catches up", beside, "messages/s")
    yield Figure("catching up / in step", beside / in_step, "", 0.80)
    yield Figure("catch-up, beside the producer", replicated / (ended_s - started_s) / MB, "MB/s")


def lose_disk(group: Groups) -> None:
    """The slave dies, and its store with it."""
    group.kill(1)
    group.wipe(1)


@contextmanager
def store_in_memory(group: Groups) -> Iterator[None]:
    """For a slave that has no store; afterwards it has none again."""
    store = group.store_of(1)
    with TemporaryDirectory(dir=MEMORY) as memory:
        store.symlink_to(memory)
        try:
            yield
            group.kill(1)
        finally:
            store.unlink()


def copy_from_start(group: Groups, size: int) -> float:
    """Start the slave, and wait until its disk has all ``size`` bytes; so many a second, from the
    first ones on.
    """
    starting = threading.Thread(target=group.start)
    starting.start()
    wait_for(lambda: group.log_end(1) > 0, "the copy")
    first, started_s = group.log_end(1), time.monotonic()
    wait_for(lambda: group.log_end(1) >= size, "a whole copy", poll_s=LOOK_S)
    wait_for(lambda: on_disk(group) >= size, "a whole copy on disk", poll_s=LOOK_S)
    spent_s = time.monotonic() - started_s
    starting.join()
    return (size - first) / spent_s


def on_disk(group: Groups) -> float:
    """How much of its log the slave has synced."""
    return Scrape(group.member(1).metrics_address).value("cometmq_log_flushed_offset")


def bare_disk(folder: Path, size: int) -> float:
    """Bytes a second, when ``size`` of them are written to new files in ``folder``, each synced."""
    chunk = os.urandom(CHUNK_BYTES_MAX)
    with TemporaryDirectory(dir=folder) as new:
        started_s = time.monotonic()
        for start in range(0, size, LOG_FILE_BYTES):
            with (Path(new) / str(start)).open("wb", buffering=0) as file:
                for _ in range(start, min(start + LOG_FILE_BYTES, size), len(chunk)):
                    file.write(chunk)
                os.fdatasync(file.fileno())
        return size / (time.monotonic() - started_s)


def fill(group: Groups, size: int) -> None:
    with producing(group.namesrv, TOPIC, body_bytes=BODY_BYTES):
        wait_for(lambda: group.log_end(0) >= size, "a full log")


def rate_for(watch: Watch, seconds: float) -> float:
    """Messages a second from a moment after now on."""
    time.sleep(SETTLE_S)
    started_s = time.time()
    time.sleep(seconds)
    return watch.rate(started_s, started_s + seconds)
