"""Copies of a writer's store, and a log that is worth copying."""

from __future__ import annotations

import random
from pathlib import Path

from cometmq.format import record
from cometmq.store.base import BaseStore
from cometmq.store.disk.files import OsFiles
from cometmq.store.follower import FollowerStore
from cometmq.store.recovery.replay import QueueEdits
from cometmq.store.writer import MessageStore
from tests.support.stores.small_stores import (
    LOG_FILE_BYTES,
    SMALL,
    WallClock,
    append,
    bodies,
    open_store,
)


class Watcher:
    """Hears of what is copied; ``S`` is observed, and deletes nothing."""

    topics = frozenset({"S"})

    def __init__(self) -> None:
        self.heard: list[tuple[object, ...]] = []

    def approve_record(self, topic: str, log_offset: int, data: bytes) -> None:
        pass

    def observe_record(self, topic: str, log_offset: int, data: bytes, queues: QueueEdits) -> None:
        self.heard.append((topic, log_offset, record.decode(data).body))

    def queue_advanced(self, topic: str, queue_id: int, end: int, next_offset: int) -> None:
        self.heard.append((topic, queue_id, end, next_offset))


def two_epochs(directory: Path, rng: random.Random) -> MessageStore:
    """A writer's log of several files, in two epochs."""
    clock = WallClock()
    store = open_store(directory, clock=clock)
    for number in range(60):
        clock.now_ms += 400
        sizes = [rng.randrange(700) for _ in range(3)]
        append(store, ("A", 0, [bytes(size) for size in sizes]), ("B", number % 3, [b"b"]))
        if number == 30:
            store.close()
            store = open_store(directory, clock=clock)
    store.flush_log()
    return store


def open_copy(tmp_path: Path, files: OsFiles | None = None) -> FollowerStore:
    return FollowerStore.open(tmp_path / "copy", SMALL, files=files)


def copy_all(
    writer: MessageStore,
    copy: FollowerStore,
    chunk_bytes: int = 3000,
    watcher: Watcher | None = None,
) -> None:
    watcher = watcher or Watcher()
    if copy.epochs != writer.epochs:
        copy.adopt_epochs(writer.epochs)
    while chunk := writer.read_chunk(copy.appended_offset, chunk_bytes):
        assert copy.append(copy.appended_offset, chunk.data, watcher) == chunk.next_offset


def whole_log(store: BaseStore) -> bytes:
    found, at = b"", store.min_offset
    while piece := store.read_raw(at, LOG_FILE_BYTES):
        found, at = found + piece, at + len(piece)
    return found


def assert_copied(writer: MessageStore, copy: FollowerStore) -> None:
    assert whole_log(copy) == whole_log(writer)
    assert set(copy.queues()) == set(writer.queues())
    for topic, queue_id in writer.queues():
        assert copy.queue_bounds(topic, queue_id) == writer.queue_bounds(topic, queue_id)
        assert bodies(copy, topic, queue_id) == bodies(writer, topic, queue_id)
    assert copy.last_record() == writer.last_record()
    assert copy.last_store_time_ms == writer.last_store_time_ms


def places(writer: MessageStore) -> list[int]:
    """Every place where a record or a file starts."""
    found = [0]
    while chunk := writer.read_chunk(found[-1], 1):
        found.append(chunk.next_offset)
    return found
