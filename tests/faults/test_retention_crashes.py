"""A process that dies, or a machine that loses its power, at any call while retention removes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from cometmq.store.writer import MessageStore
from tests.support.stores.disk_model import DiskModel
from tests.support.stores.simulated_files import Fault, Gone, Kind, SimulatedFiles
from tests.support.stores.small_stores import SMALL, WallClock, append, read_queue

BODY = b"." * 1_500
QUEUES = [("A", 0), ("A", 1), ("B", 0)]


class Life:
    """A store on a simulated disk that outlives it."""

    def __init__(self, root: Path, rng: random.Random) -> None:
        self.root = root
        self.rng = rng
        self.disk = DiskModel(rng)
        self.clock = WallClock()
        self.boots = 1

    def start(self, fault: Fault | None = None) -> MessageStore:
        boot = f"boot-{self.boots}"
        files = SimulatedFiles(self.root, self.disk, boot=boot, fault=fault)
        return MessageStore.open(self.root, SMALL, clock=self.clock, files=files)

    def end(self, store: MessageStore, *, power_cut: bool) -> None:
        store.abandon()
        if power_cut:
            self.disk.cut()
            self.boots += 1


def fill(store: MessageStore, rng: random.Random, batches: int) -> None:
    for _ in range(batches):
        topic, queue_id = rng.choice(QUEUES)
        append(store, (topic, queue_id, [BODY[: rng.randint(0, len(BODY))]] * rng.randint(1, 9)))


def clean(store: MessageStore, count: int) -> None:
    """Let ``count`` log files go, and what is left of queues."""
    files = store.cleaner.log_files()[:count]
    if files:
        store.cleaner.forget_before(files[-1].end)
    for _ in files:
        store.cleaner.remove_first()
    store.cleaner.remove_spare_files()


def whole(store: MessageStore) -> dict[tuple[str, int], tuple[int, int]]:
    """The bounds of all queues, each of whose messages were read."""
    found = {}
    for key in QUEUES:
        low, high = store.queue_bounds(*key)
        assert len(read_queue(store, *key)) == high - low
        found[key] = (low, high)
    return found


def crash(root: Path, rng: random.Random, at: int) -> bool:
    """Fill, sync, remove, die at call ``at`` of that; False: it was over before."""
    life = Life(root, rng)
    kind = rng.choice([Kind.DEATH, Kind.POWER_CUT])
    fault = Fault(kind)
    store = life.start(fault)
    append(store, ("B", 0, [b"early"]))
    fill(store, rng, 25)
    store.flush_log()
    store.flush_queues()
    before = whole(store)
    died = False
    fault.at = fault.calls + at
    try:
        clean(store, rng.randint(1, 4))
        fill(store, rng, 3)
        clean(store, 1)
    except Gone:
        died = True
    life.end(store, power_cut=kind is Kind.POWER_CUT)
    store = life.start()
    after = whole(store)
    for key in QUEUES:
        assert before[key][0] <= after[key][0] <= after[key][1], (key, before, after)
        assert after[key][1] >= before[key][1], "what was on the disk has been counted"
        [offset] = append(store, (*key, [b"next"])).queue_offsets
        assert offset == after[key][1]
    clean(store, 2)
    whole(store)
    store.close()
    store = life.start()
    whole(store)
    store.abandon()
    return died


@pytest.mark.parametrize("part", range(4))
def test_a_crash_at_any_call_leaves_a_whole_store(
    tmp_path: Path, rng: random.Random, part: int
) -> None:
    for at in range(1, 10_000):
        if not crash(tmp_path, random.Random(rng.getrandbits(32)), at):
            break
    assert at > 30, "something was removed, call by call"
