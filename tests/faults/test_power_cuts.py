"""Real file systems whose power is cut while a process writes: what was synced is there."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path

import pytest

from tests.support.faults import tally
from tests.support.faults.doomed_writer import OPTIONS, DoomedWriter
from tests.support.stores.ledger import Ledger
from tests.support.stores.loop_disk import KINDS, LoopDisk, loop_disk
from tests.support.stores.small_stores import FaultyFiles, open_store

LIVES_OF_A_STORE = 10  # then an empty one: what a store has, is read in every life


def cut_power_again_and_again(disk: LoopDisk, rng: random.Random, cuts: int) -> None:
    """``ledger`` is started anew with each store."""
    ledger = Ledger()
    store = disk.mount_point / "store"
    for life in range(1, cuts + 1):
        writer = DoomedWriter(store, 2 * life, rng.getrandbits(32))
        writer.listen(ledger, rng.randint(1, 300))
        cut_ns = time.monotonic_ns()
        disk.shut_down()
        writer.end(ledger, cut_ns, kill=rng.random() < 0.5)
        disk.restart()
        tally.count(f"power cuts of a real {disk.kind} under a bare store")
        look_at(store, 2 * life + 1, ledger, close=rng.random() < 0.5)
        if life % LIVES_OF_A_STORE == 0:
            shutil.rmtree(store)
            ledger = Ledger()


def look_at(directory: Path, boot: int, ledger: Ledger, *, close: bool) -> None:
    """Recover, compare, and leave the store in order or not."""
    if not directory.exists():
        assert not ledger.promised
        ledger.messages.clear()
        return
    store = open_store(directory, OPTIONS, files=FaultyFiles(boot=f"boot-{boot}"))
    try:
        ledger.recovered(store, power_cut=True)
        if close:
            store.close()
    finally:
        store.abandon()


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_power_cuts(tmp_path: Path, rng: random.Random, kind: str) -> None:
    with loop_disk(tmp_path, kind) as disk:
        cut_power_again_and_again(disk, rng, 10)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
def test_many_power_cuts(tmp_path: Path, rng: random.Random, kind: str) -> None:
    with loop_disk(tmp_path, kind) as disk:
        cut_power_again_and_again(disk, rng, 150)
