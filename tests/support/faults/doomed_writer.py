"""A process that writes into a store as a broker does, with a thread for each kind of sync, and
tells what it was promised, until somebody takes the disk away.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal, TypeAlias

from cometmq.errors import StoreFailed
from cometmq.store.writer import MessageStore, StoreOptions
from tests.support.stores.ledger import Ledger
from tests.support.stores.small_stores import FaultyFiles, Run, WallClock, append

OPTIONS = StoreOptions(commit_log_file_bytes=64 * 1024, consume_queue_file_bytes=20 * 300)
QUEUES = [("A", 0), ("A", 1), ("B", 0)]

Told: TypeAlias = (
    tuple[Literal["asks"], list[Run]]
    | tuple[Literal["stored"], int]
    | tuple[Literal["flushed"], int, int]
)


def write(directory: Path, life: int, seed: int, told: Connection) -> None:
    """Append until the disk fails. ``life`` numbers the machine's starts; hours lie between them,
    and half a second between two batches.
    """
    clock = WallClock(WallClock().now_ms + life * 3_600_000)
    files = FaultyFiles(boot=f"boot-{life}")
    store = MessageStore.open(directory, OPTIONS, clock=clock, files=files)
    telling = threading.Lock()

    def tell(what: Told) -> None:
        with telling:
            told.send(what)

    for act in (
        lambda: tell(("flushed", store.flush_log(), time.monotonic_ns())),
        store.flush_queues,
        store.prepare_next_file,
    ):
        threading.Thread(target=_until_it_fails, args=(act,), daemon=True).start()
    rng = random.Random(seed)
    with suppress(StoreFailed):
        for number in range(100_000):
            runs = _batch(rng, f"{life}/{number}")
            tell(("asks", runs))
            clock.now_ms += 500
            tell(("stored", append(store, *runs).end_offset))


def _until_it_fails(act: Callable[[], object]) -> None:
    with suppress(StoreFailed, BrokenPipeError):
        while True:
            act()


def _batch(rng: random.Random, name: str) -> list[Run]:
    queues = rng.sample(QUEUES, rng.randint(1, 3))
    return [
        (topic, queue, [name.encode() + bytes(rng.choice([0, 100, 1000, 5000]))])
        for topic, queue in queues
    ]


class DoomedWriter:
    """The process, and what it has told so far."""

    def __init__(self, directory: Path, life: int, seed: int) -> None:
        # Not a fork of the test's own process, which has threads; the server of forks has none.
        context = get_context("forkserver")
        context.set_forkserver_preload(["tests.support.faults.doomed_writer"])
        self._ear, mouth = context.Pipe(duplex=False)
        self._process = context.Process(target=write, args=(directory, life, seed, mouth))
        self._process.start()
        mouth.close()
        self._flushed: list[tuple[int, int]] = []  # positions, and when they were on the disk

    def listen(self, ledger: Ledger, count: int) -> None:
        """Note the next ``count`` things that it tells, or all when it ends before that."""
        with suppress(EOFError, OSError):
            for _ in range(count):
                self._note(ledger, self._ear.recv())

    def _note(self, ledger: Ledger, told: Told) -> None:
        match told:
            case ("asks", runs):
                ledger.asks(runs)
            case ("stored", end):
                ledger.stored(end)
            case ("flushed", position, at_ns):
                self._flushed.append((position, at_ns))

    def end(self, ledger: Ledger, cut_ns: int, *, kill: bool) -> None:
        """It dies of the disk that fails, or is killed; then ``ledger`` has all that it told.
        ``cut_ns``: when the power began to go, by the monotonic clock; later syncs promise nothing.
        """
        if kill:
            self._process.kill()
        self.listen(ledger, 1_000_000)
        self._process.join()
        self._ear.close()
        # At last: a sync may be told before the batch that it had a part in.
        ledger.flushed(
            max((position for position, at_ns in self._flushed if at_ns < cut_ns), default=0)
        )
