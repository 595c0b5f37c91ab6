"""One store through several lives, each of which ends badly; everything follows from one seed.

The process, the disk and the chance are simulated; the store is the real one. After each life the
store is opened as its successor would, and the ledger tells whether it kept its promises.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from cometmq.errors import DiskFull, StoreFailed
from cometmq.format.indexfile import Sizes
from cometmq.store.writer import MessageStore, StoreOptions
from tests.support.faults import tally
from tests.support.stores.disk_model import DiskModel
from tests.support.stores.ledger import Ledger
from tests.support.stores.simulated_files import Fault, Kind, SimulatedFiles
from tests.support.stores.small_stores import Deletions, Run, WallClock, append

QUEUES = [("A", 0), ("A", 1), ("B", 3)]
# The smallest that a store may have, so that every life rolls over a few times; files of queues and
# of the index with some entries, and of several pages.
OPTIONS = [
    StoreOptions(4096, 20 * 7, index_sizes=Sizes(hash_slots=4, entries=8)),
    StoreOptions(8192, 20 * 300, index_sizes=Sizes(hash_slots=300, entries=400)),
    StoreOptions(16384, 20 * 40, index_sizes=Sizes(hash_slots=2, entries=60)),
]


class Trial:
    """``root`` is a real folder, for the lock alone."""

    def __init__(self, root: Path, seed: int, options: StoreOptions) -> None:
        self.rng = random.Random(seed)
        self.disk = DiskModel(self.rng)
        self.ledger = Ledger()
        self.clock = WallClock()
        self.fault = Fault()
        self.files = SimulatedFiles(root, self.disk)
        self._root = root
        self._options = options
        self._store: MessageStore | None = None
        self._boots = 1
        self._epoch = 0
        self._bodies = 0
        # In every second trial all messages are alike in length: then what was cut may end where
        # something new ends.
        self._padding = self.rng.choice([0, 200])

    # --- lives ------------------------------------------------------------------------------------

    @property
    def store(self) -> MessageStore:
        assert self._store is not None, "nobody has opened it"
        return self._store

    @property
    def is_open(self) -> bool:
        return self._store is not None

    def start(self) -> MessageStore:
        """A new process opens the store."""
        boot = f"boot-{self._boots}"
        self.files = SimulatedFiles(self._root, self.disk, boot=boot, fault=self.fault)
        self._store = MessageStore.open(
            self._root, self._options, clock=self.clock, files=self.files, observer=Deletions()
        )
        assert self._store.epoch > self._epoch, "no two lives have the same epoch"
        self._epoch = self._store.epoch
        return self._store

    def die(self) -> None:
        """The process is gone; what it wrote is not."""
        if self._store is not None:
            self._store.abandon()
            self._store = None

    def cut_power(self) -> None:
        """The machine restarts."""
        self.die()
        self.disk.cut()
        self._boots += 1

    def stop(self, kind: Kind) -> None:
        tally.count(f"simulated stops: {kind.value}")
        self.cut_power() if kind is Kind.POWER_CUT else self.die()

    def recover(self, *, power_cut: bool) -> MessageStore:
        """Open after a bad end, and see that nothing is missing, not even when the power goes
        right after.
        """
        self.fault = Fault()
        store = self.start()
        self.ledger.recovered(store, power_cut=power_cut)
        self.cut_power()
        store = self.start()
        self.ledger.recovered(store, power_cut=True)
        self.ledger.check_index(store)
        return store

    # --- what a life is made of -------------------------------------------------------------------

    def live(self, steps: int) -> None:
        """Do this and that; raises what the store raises, or Gone."""
        acts: list[Callable[[], None]] = [
            *[self.append] * 6,
            *[self.flush] * 3,
            *[self.index] * 3,
            self.flush_queues,
            self.prepare,
            lambda: self.drop(self.rng.choice("AB")),
            self.pause,
            self.close_and_open,
        ]
        for act in self.rng.choices(acts, k=steps):
            act()

    def append(self) -> None:
        wanted = self.rng.sample(QUEUES, self.rng.randint(1, 3))
        runs = [(topic, queue_id, self._fresh()) for topic, queue_id in wanted]
        self.send(*runs, keys=f"all k{self._bodies % 4}")

    def send(self, *runs: Run, keys: str = "") -> None:
        """Append one batch, and note what became of it."""
        self.ledger.asks(runs, keys)
        try:
            appended = append(self.store, *runs, keys=keys)
        except DiskFull:
            self.ledger.refused()
            raise
        self.ledger.stored(appended.end_offset)

    def _fresh(self) -> list[bytes]:
        sizes = [self.rng.choice([0, 10, 150, 300]) for _ in range(self.rng.randint(1, 3))]
        self._bodies += 1
        bodies = [b"%d/%d/" % (self._bodies, at) + bytes(size) for at, size in enumerate(sizes)]
        return (
            [b[: self._padding].ljust(self._padding) for b in bodies] if self._padding else bodies
        )

    def flush(self) -> None:
        self.ledger.flushed(self.store.flush_log())

    def flush_queues(self) -> None:
        self.store.flush_queues()

    def index(self) -> None:
        self.store.index_some()

    def prepare(self) -> None:
        self.store.prepare_next_file()

    def drop(self, topic: str) -> None:
        """A topic is deleted once the record that says so is on the disk."""
        self.send(("S", 0, [topic.encode()]))
        self.flush()
        self.store.drop_topic(topic)

    def pause(self) -> None:
        self.clock.now_ms += self.rng.choice([0, 1, 500, 5000])
        self.disk.write_back()

    def open(self) -> None:
        """Begin, or go on after a close, in order or not."""
        self.ledger.recovered(self.start(), power_cut=False)

    def close(self) -> None:
        end = self.store.appended_offset
        try:
            self.store.close()
        finally:
            self._store = None
        self.ledger.flushed(end)

    def close_and_open(self) -> None:
        self.close()
        self.open()
        assert self.store.clean_start


def must_stay_failed(trial: Trial) -> None:
    """After EIO nothing is written any more, and no sync is tried again."""
    store, before = trial.store, trial.files.changes
    acts: list[Callable[[], object]] = [
        lambda: append(store, ("A", 0, [b"in vain"])),
        store.flush_log,
        store.flush_queues,
        store.prepare_next_file,
        store.index_some,
        lambda: store.drop_topic("A"),
        store.close,
    ]
    for number, act in enumerate(acts):
        with pytest.raises(StoreFailed):
            act()
        assert trial.files.changes == before, (number, trial.files.trail[-5:])
