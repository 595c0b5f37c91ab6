"""Small stores for tests: a clock to set, batches from bodies, files that fail when told."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from cometmq.errors import DiskFull, StoreFailed
from cometmq.format import queueunit, record
from cometmq.format.indexfile import TIME_MS_MAX, Sizes
from cometmq.format.properties import encode as encode_properties
from cometmq.native.interface import SharedOffsets
from cometmq.store.base import BaseStore
from cometmq.store.disk.files import Buffer, File, OsFiles, StrPath, Usage
from cometmq.store.metadata.checkpoint import CheckpointFile
from cometmq.store.queries import Found, KeySearch
from cometmq.store.recovery.replay import QueueEdits
from cometmq.store.writer import Appended, MessageStore, Observer, StoreOptions

HOST = record.host_bytes("127.0.0.1", 10911)
LOG_FILE_BYTES = 16 * 1024
QUEUE_FILE_BYTES = 20 * 16
INDEX_SIZES = Sizes(hash_slots=4, entries=8)  # seven keys a file
SMALL = StoreOptions(
    commit_log_file_bytes=LOG_FILE_BYTES,
    consume_queue_file_bytes=QUEUE_FILE_BYTES,
    index_sizes=INDEX_SIZES,
)
START_MS = 1_700_000_000_000

Run = tuple[str, int, Sequence[bytes]]  # topic, queue, bodies


class WallClock:
    """A clock whose time is set by the test, and how far the wall's is ahead of it."""

    def __init__(self, now_ms: int = START_MS) -> None:
        self.now_ms = now_ms
        self.ahead_ms = 0

    def wall_ms(self) -> int:
        return self.now_ms + self.ahead_ms

    def monotonic_s(self) -> float:
        return self.now_ms / 1000

    def boottime_s(self) -> float:
        return self.now_ms / 1000


class FaultyFiles(OsFiles):
    """Real files on a disk with ``room`` bytes left to write (None: enough), also to where room was
    taken, as on a disk that copies what is written to. Syncs may fail. The machine restarts when
    ``boot`` changes. ``full_for`` is a part of the paths that no room is left for,
    ``sync_fails_for`` of those that cannot be synced.
    """

    def __init__(self, room: int | None = None, boot: str = "boot-1") -> None:
        super().__init__(64)
        self.room = room
        self.boot = boot
        self.sync_fails = False
        self.sync_fails_for: str | None = None
        self.full_for: str | None = None
        self.synced: list[str] = []

    def open(self, path: StrPath) -> File:
        return FaultyFile(super().open(path), self)

    def create(self, path: StrPath, size: int, *, takes_room: bool = False) -> File:
        if self.room is not None and self.room < (size if takes_room else 1):
            raise DiskFull(f"no room to create {path}")
        return super().create(path, size, takes_room=takes_room)

    def usage(self, path: StrPath) -> Usage:
        found = super().usage(path)
        return found if self.room is None else found._replace(free_bytes=self.room)

    def unlink(self, path: StrPath) -> None:
        if self.room is not None and os.path.exists(path):
            self.room += os.stat(path).st_size
        super().unlink(path)

    def sync_directory(self, path: StrPath) -> None:
        self.synced.append(str(path))
        super().sync_directory(path)

    def boot_id(self) -> str:
        return self.boot


class FaultyFile:
    def __init__(self, file: File, disk: FaultyFiles) -> None:
        self.path = file.path
        self._file = file
        self._disk = disk

    def pread(self, size: int, offset: int, *, nowait: bool = False) -> bytes:
        return self._file.pread(size, offset, nowait=nowait)

    def is_unreadable(self, start: int, end: int) -> bool:
        return self._file.is_unreadable(start, end)

    def pwrite(self, data: Buffer, offset: int) -> None:
        disk = self._disk
        if disk.full_for is not None and disk.full_for in self.path:
            raise DiskFull(f"no room in {self.path}")
        fits = len(data) if disk.room is None else min(disk.room, len(data))
        self._file.pwrite(bytes(data)[:fits], offset)  # a full disk takes what still fits
        if disk.room is not None:
            disk.room -= fits
        if fits < len(data):
            raise DiskFull(f"no room in {self.path}")

    def sync(self) -> None:
        failing = self._disk.sync_fails_for
        if self._disk.sync_fails or (failing is not None and failing in self.path):
            raise StoreFailed(f"cannot sync {self.path}")
        self._disk.synced.append(self.path)
        self._file.sync()

    def sync_while_wanted(self, levels: SharedOffsets, stop: int, write_fd: int) -> bool:
        return False  # so :meth:`sync` is called, every time

    def data_extents(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        return self._file.data_extents(start, end)

    def close(self) -> None:
        self._file.close()


def let_go(root: Path, file_bytes: int = LOG_FILE_BYTES) -> None:
    """Remove the oldest log file of a store at ``root`` as retention does."""
    oldest = min((root / "commitlog").iterdir())
    writer = CheckpointFile(OsFiles(), root / "checkpoint")
    writer.write(replace(writer.current, log_start=int(oldest.name) + file_bytes))
    writer.close()
    oldest.unlink()


class Deletions:
    """Deletes the topic that the body of a record of topic S names."""

    topics = frozenset({"S"})

    def __init__(self) -> None:
        self.seen: list[bytes] = []

    def observe_record(self, topic: str, log_offset: int, data: bytes, queues: QueueEdits) -> None:
        found = record.decode(data)
        assert (topic, found.topic, found.log_offset) == ("S", "S", log_offset)
        self.seen.append(found.body)
        queues.drop_topic(found.body.decode())


def encoded(topic: str, queue_id: int, body: bytes, tag: str = "", keys: str = "") -> bytes:
    """A record as a producer sends it."""
    given = {name: text for name, text in (("TAGS", tag), ("KEYS", keys)) if text}
    return record.encode(
        topic.encode(),
        queue_id,
        body,
        encode_properties(given),
        born_time_ms=START_MS,
        born_host=HOST,
        store_host=HOST,
    )


def append(store: MessageStore, *runs: Run, tag: str = "", keys: str = "") -> Appended:
    """Append one batch of runs."""
    records = b"".join(
        encoded(topic, queue, b, tag, keys) for topic, queue, bodies in runs for b in bodies
    )
    segments = [(topic, queue, len(bodies)) for topic, queue, bodies in runs]
    return store.append(records, segments, born_host=HOST, store_host=HOST)


def append_keyed(store: MessageStore, topic: str, queue_id: int, *keys: str) -> Appended:
    """Append one message for each of ``keys``, which is its body and what stands in KEYS."""
    records = b"".join(encoded(topic, queue_id, key.encode(), keys=key) for key in keys)
    return store.append(records, [(topic, queue_id, len(keys))], born_host=HOST, store_host=HOST)


def read_queue(store: BaseStore, topic: str, queue_id: int, start: int = 0) -> list[record.Record]:
    """The messages of a queue from ``start`` on, through its units."""
    first, end = store.queue_bounds(topic, queue_id)
    offset = max(first, start)
    found: list[record.Record] = []
    while offset < end:
        units = store.read_units(topic, queue_id, offset, 32, nowait=False)
        assert units, (topic, queue_id, offset)
        spans = [(at, size) for at, size, _ in queueunit.iterate(units)]
        records = record.decode_all(store.read_records(spans, nowait=False))
        assert [r.queue_offset for r in records] == list(range(offset, offset + len(spans)))
        assert all(r.topic == topic and r.queue_id == queue_id for r in records)
        found += records
        offset += len(spans)
    return found


def bodies(store: BaseStore, topic: str, queue_id: int, start: int = 0) -> list[bytes]:
    return [found.body for found in read_queue(store, topic, queue_id, start)]


def find_by_key(
    store: BaseStore, topic: str, key: str, first_ms: int = 0, last_ms: int = TIME_MS_MAX
) -> Iterator[Found]:
    """All that a search finds."""
    search = KeySearch(store, topic, key, first_ms, last_ms)
    while not search.is_over:
        yield from search.piece()


def open_store(
    directory: Path,
    options: StoreOptions = SMALL,
    *,
    clock: WallClock | None = None,
    files: OsFiles | None = None,
    observer: Observer | None = None,
    epoch_floor: int = 0,
) -> MessageStore:
    return MessageStore.open(
        directory,
        options,
        clock=clock or WallClock(),
        files=files,
        observer=observer,
        epoch_floor=epoch_floor,
    )
