"""One fixed life of a store, played again and again: at each of its calls to the disk, one by one,
something goes wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from cometmq.errors import DiskFull, StoreFailed
from cometmq.format.indexfile import Sizes
from cometmq.store.writer import StoreOptions
from tests.support.faults import tally
from tests.support.faults.trials import Trial, must_stay_failed
from tests.support.stores.simulated_files import Fault, Gone, Kind

OPTIONS = StoreOptions(
    commit_log_file_bytes=4096, consume_queue_file_bytes=20 * 5, index_sizes=Sizes(4, 20)
)
CALLS_MAX = 5_000
WHAT = {
    Kind.EIO: "the disk answers EIO",
    Kind.ENOSPC: "there is no room",
    Kind.DEATH: "the process dies",
    Kind.POWER_CUT: "the power goes",
}


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Recovery speaks of each of thousands of crashes."""
    caplog.set_level(logging.CRITICAL)


def story(trial: Trial) -> list[Callable[[], None]]:
    """Open, append, roll over, flush, drop a topic, close, and once more."""
    bodies = [b"x" * size for size in (10, 700, 10, 300, 900)]

    def part(life: int) -> list[Callable[[], None]]:
        return [
            trial.open,
            *[partial(trial.send, ("A", 0, [b]), ("B", life, [b, b""]), keys="k") for b in bodies],
            trial.flush,
            trial.prepare,
            trial.index,
            trial.flush_queues,
            *[partial(trial.send, ("A", 0, [b, b]), keys="k l") for b in bodies],
            partial(trial.drop, "B"),
            trial.flush,
            trial.index,
            partial(trial.send, ("B", 0, [b"again"])),
            trial.close,
        ]

    return [*part(0), *part(1)]


def play(root: Path, fault: Fault, again: bool) -> Trial:
    """The story up to where it fails for good. ``again``: a full disk does not end it, what failed
    is done once more when there is room.
    """
    trial = Trial(root, fault.at, OPTIONS)
    trial.fault = fault
    try:
        for act in story(trial):
            try:
                act()
            except DiskFull:
                fault.lasting = False
                if not again:
                    break
                if trial.is_open or act == trial.open:
                    act()
    except (StoreFailed, Gone):
        pass
    return trial


def sweep(root: Path, kind: Kind, check: Callable[[Trial], None], *, again: bool = False) -> int:
    """Play the story with ``kind`` at each call; the number of calls that could fail."""
    hits = 0
    for at in range(1, CALLS_MAX):
        fault = Fault(kind, at, lasting=again)
        trial = play(root, fault, again)
        if fault.calls < at:  # the story has no such call
            trial.die()
            return hits
        if fault.hits:
            hits += 1
            tally.count(f"calls of a fixed life, each in turn the one where {WHAT[kind]}")
            try:
                check(trial)
            except BaseException as error:
                error.add_note(f"{kind.value} at call {at}: {trial.files.trail[-1:]}")
                raise
        trial.die()
    raise AssertionError("the story never ends")


@pytest.mark.parametrize("kind", [Kind.DEATH, Kind.POWER_CUT])
def test_it_ends_at_any_call(tmp_path: Path, kind: Kind) -> None:
    def check(trial: Trial) -> None:
        trial.stop(kind)
        trial.recover(power_cut=kind is Kind.POWER_CUT)

    assert sweep(tmp_path, kind, check) > 200


@pytest.mark.parametrize("reboot", [False, True])
def test_any_call_fails_with_eio(tmp_path: Path, reboot: bool) -> None:
    """Writing stops at once, no sync is tried again, nothing that was promised is lost. A read that
    fails is an error for who reads.
    """

    def check(trial: Trial) -> None:
        if trial.is_open and trial.fault.struck not in ("read", "list"):
            must_stay_failed(trial)
        # A file system that has shut itself has to be mounted anew, which is as good as a reboot.
        power_cut = reboot or trial.disk.is_shut
        trial.stop(Kind.POWER_CUT if power_cut else Kind.DEATH)
        trial.recover(power_cut=power_cut)

    assert sweep(tmp_path, Kind.EIO, check) > 200


@pytest.mark.parametrize("again", [False, True])
def test_from_any_call_on_the_disk_is_full(tmp_path: Path, again: bool) -> None:
    """What was refused is not there, and once there is room again all goes on."""

    def check(trial: Trial) -> None:
        trial.die()
        trial.recover(power_cut=False)

    assert sweep(tmp_path, Kind.ENOSPC, check, again=again) > 100
