"""One bit of one file of a store flips while nobody looks: whatever has a checksum notices, and
nobody is served a body that is not what was sent.
"""

from __future__ import annotations

import copy
import random
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePath

import pytest

from cometmq.errors import MessageNotFound, StoreDamaged, StoreForeignFile
from cometmq.format import queueunit, record
from cometmq.format.indexfile import Sizes
from cometmq.store import layout
from cometmq.store.writer import MessageStore, StoreOptions
from tests.support.faults import tally
from tests.support.stores.disk_model import DiskModel, FileNode, FolderNode
from tests.support.stores.simulated_files import SimulatedFiles
from tests.support.stores.small_stores import WallClock, append, encoded, find_by_key

OPTIONS = StoreOptions(8192, 20 * 20, index_sizes=Sizes(hash_slots=4, entries=20))
QUEUES = [("A", 0), ("A", 1), ("B", 0)]
BODY_CRC_AT, BODY_AT = 8, 88  # of a record with IPv4 hosts

Sent = dict[tuple[str, int], list[bytes]]  # the records of each queue, as the store has them


class Victim:
    """A store of a few log files, closed in order or not, on a disk that can be copied."""

    def __init__(self, root: Path, *, clean: bool) -> None:
        self.root = root
        self.disk = DiskModel(random.Random(1))
        self.clock = WallClock()
        store = self.open(self.disk)
        for number in range(40):
            self.clock.now_ms += 700
            topic, queue_id = QUEUES[number % 3]
            runs = (topic, queue_id, [b"%d " % number * 50, b"%d" % number])
            append(store, runs, tag="red", keys="k")
            if number == 25:
                store.flush_log()
                store.index_some()
                store.flush_queues()
        self.sent: Sent = {key: [r for _, r in served(store, key)] for key in QUEUES}
        every = [r for records in self.sent.values() for r in records]
        self.stands_at = {record.decode(r).log_offset: r for r in every}
        if clean:
            store.close()
        store.abandon()
        self.disk.put(PurePath("config"), FolderNode())
        for name in layout.SNAPSHOTS:
            table = FileNode()
            table.write(b'{"cometmq":{"epoch":1,"position":0},"dataVersion":{"counter":1}}', 0)
            self.disk.put(PurePath("config", name), table)

    def open(self, disk: DiskModel) -> MessageStore:
        files = SimulatedFiles(self.root, disk)
        return MessageStore.open(self.root, OPTIONS, clock=self.clock, files=files)


def served(store: MessageStore, key: tuple[str, int]) -> Iterator[tuple[int, bytes]]:
    """Every message of a queue that can be read, one by one, by its number."""
    first, end = store.queue_bounds(*key)
    for number in range(first, end):
        try:
            [(at, size, _)] = queueunit.iterate(store.read_units(*key, number, 1))
            yield number, store.read_records([(at, size)])
        except (StoreDamaged, MessageNotFound):
            tally.count("messages that could not be read after a bit had flipped, and said so")


def flip(disk: DiskModel, path: PurePath, rng: random.Random) -> None:
    content = disk.file(path).seen
    bit = rng.randrange(len(content) * 8)
    content[bit // 8] ^= 1 << bit % 8


def check(victim: Victim, disk: DiskModel, path: PurePath) -> None:
    """Refused by name, or opened; then only what was sent is served."""
    try:
        store = victim.open(disk)
    except (StoreDamaged, StoreForeignFile):
        tally.count("bit flips for which a store was refused")
        return
    try:
        for key, expected in victim.sent.items():
            for number, found in served(store, key):
                assert as_sent(found, expected[number]), (key, number)
        for one in find_by_key(store, "A", "k"):
            assert as_sent(one.raw, victim.stands_at[one.message.log_offset])
        append(store, ("A", 0, [b"and it goes on"]))
        last = store.queue_bounds("A", 0)[1] - 1
        assert dict(served(store, ("A", 0)))[last].endswith(encoded("A", 0, b"and it goes on")[84:])
    finally:
        store.abandon()
    tally.count("bit flips that a store was opened with")


def as_sent(found: bytes, sent: bytes) -> bool:
    """Whether a body is what was sent. The format has no checksum over the other fields: one bit of
    them may differ.
    """
    differing = [bin(a ^ b).count("1") for a, b in zip(found, sent, strict=True)]
    body_bytes = int.from_bytes(sent[84:88], "big")
    body = found[BODY_AT : BODY_AT + body_bytes]
    crc = int.from_bytes(found[BODY_CRC_AT : BODY_CRC_AT + 4], "big")
    return sum(differing) <= 1 and zlib.crc32(body) & 0x7FFFFFFF == crc


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("name", ["commitlog", "consumequeue", "index", "config", ""])
def test_bits_flip(tmp_path: Path, rng: random.Random, name: str, clean: bool) -> None:
    """``name``: of the folder; nothing is for the files in the root."""
    victim = Victim(tmp_path, clean=clean)
    paths = [p for p in victim.disk.files() if p.parts[:-1][:1] == ((name,) if name else ())]
    assert paths
    for _ in range(150):
        disk = copy.deepcopy(victim.disk)
        path = rng.choice(paths)
        flip(disk, path, rng)
        check(victim, disk, path)
