"""Messages that wait for a time of their own, while the process ends, the power goes or the disk
fails at any call of what their broker does for them: entries of the index go to files, files become
one, messages are delivered, and stored once more before retention removes their log files.

Each message comes once, never early, and none is lost; a full disk makes them late.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path, PurePath
from typing import NamedTuple, TypeAlias

import pytest

from cometmq.errors import Shortage, StoreFailed
from cometmq.store.layout import TIMERS
from cometmq.store.timers import index, runs
from services.broker.delay import timers as service
from tests.support.faults import tally
from tests.support.faults.timer_trials import HOUR_MS, Life, World, prepared
from tests.support.stores.simulated_files import Fault, Gone, Kind

Harm: TypeAlias = Callable[[World], None]

COUNT = 60  # of a batch: each batch becomes a file
IN_MS = 60 * HOUR_MS
CALLS_MAX = 5_000
SHARE = 40  # each so many-th call in ``make test``
WHAT = {
    Kind.EIO: "the disk answers EIO",
    Kind.ENOSPC: "there is no room",
    Kind.DEATH: "the process dies",
    Kind.POWER_CUT: "the power goes",
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Few entries become a file, of several blocks. The product speaks of each fault."""
    for module, name, value in (
        (index, "MEMORY_ENTRIES_MAX", 50),
        (index, "FILES_MAX", 3),
        (index, "MERGED_AT_ONCE", 2),
        (index, "BLOCK_ENTRIES", 8),
        (runs, "BLOCK_ENTRIES", 8),
        (runs, "BLOCK_BYTES", 8 * 16),
        (service, "ARRIVALS_MAX", 40),
        (service, "REST_S", 0.0),
        (service, "RETRY_S", 0.0),
    ):
        monkeypatch.setattr(module, name, value)
    caplog.set_level(logging.CRITICAL)


# --- what the broker does -------------------------------------------------------------------------


async def more(life: Life) -> None:
    await life.send(COUNT, IN_MS)
    await life.deliver()


async def their_time_comes(life: Life) -> None:
    life.world.clock.now_ms += IN_MS + 100_000
    await life.deliver()


async def they_get_old(life: Life) -> None:
    life.world.clock.now_ms += 50 * HOUR_MS
    await life.deliver()


async def their_files_go(life: Life) -> None:
    life.world.clock.now_ms += 2 * HOUR_MS
    await life.deliver()
    await life.clean()


class Work(NamedTuple):
    """``batches``: of messages that wait before. ``calls_min``: of the disk."""

    batches: int
    act: Callable[[Life], Awaitable[None]]
    calls_min: int


WORKS = {
    "spill": Work(0, more, 15),
    "merge": Work(3, more, 40),
    "delivery": Work(4, their_time_comes, 40),
    "roll by age": Work(4, they_get_old, 40),
    "roll before retention": Work(4, their_files_go, 60),
}


# --- a fault at any call --------------------------------------------------------------------------


async def strike(world: World, work: Work, fault: Fault, at: int) -> bool:
    """Do the work; at its call ``at`` something goes wrong. False: it has no such call."""
    life = Life(world, fault)
    begun = fault.calls
    fault.at = begun + at
    ends = False
    try:
        await work.act(life)
    except Shortage:
        pass
    except (StoreFailed, Gone):
        ends = True
    fault.at, calls = 0, fault.calls - begun
    if not ends:  # there is room again, or it was not felt: all goes on
        await life.deliver()
    cut = fault.kind is Kind.POWER_CUT or world.disk.is_shut
    world.end(life, power_cut=cut)
    await world.check_all_come()
    return calls >= at


async def sweep(root: Path, rng: random.Random, name: str, kind: Kind, share: int) -> None:
    work = WORKS[name]
    before = await prepared(root, rng, work.batches, COUNT, IN_MS)
    hits, at = 0, rng.randint(1, share)
    while at < CALLS_MAX:
        seed = rng.getrandbits(32)
        fault = Fault(kind, lasting=kind is Kind.ENOSPC)
        try:
            has_call = await strike(before.copy(random.Random(seed)), work, fault, at)
        except BaseException as error:
            error.add_note(f"{name}, {kind.value} at call {at}, seed {seed}")
            raise
        if not has_call:
            break
        hits += fault.hits > 0
        at += share
    assert hits or share > 1
    assert at > work.calls_min
    tally.count(f"calls of the timers' work, each in turn the one where {WHAT[kind]}", hits)


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("name", WORKS)
async def test_a_fault_at_some_calls(
    tmp_path: Path, rng: random.Random, name: str, kind: Kind
) -> None:
    await sweep(tmp_path, rng, name, kind, SHARE)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("name", WORKS)
async def test_a_fault_at_every_call(
    tmp_path: Path, rng: random.Random, name: str, kind: Kind
) -> None:
    await sweep(tmp_path, rng, name, kind, 1)


# --- files of the index that are not what they were -----------------------------------------------


def harms(world: World, rng: random.Random, share: int) -> Iterator[tuple[str, Harm]]:
    """What may befall the index's files, and each with its name: of all bytes every so many."""
    for name, node in world.index_files().items():
        size = len(node.seen)
        yield f"{name} is missing", partial(_remove, name)
        # Far behind what is read when the file is taken up.
        yield f"{name} has another bit in its last block", partial(_flip, name, size - 10, 0)
        for at in range(rng.randrange(share), size, share):
            yield f"{name} ends at {at}", partial(_cut, name, at)
            yield f"{name} has another bit at {at}", partial(_flip, name, at, rng.randrange(8))


def _remove(name: str, world: World) -> None:
    world.disk.remove(PurePath(TIMERS, name))


def _cut(name: str, at: int, world: World) -> None:
    del world.index_files()[name].seen[at:]


def _flip(name: str, at: int, bit: int, world: World) -> None:
    world.index_files()[name].seen[at] ^= 1 << bit


async def damage(root: Path, rng: random.Random, share: int) -> None:
    """Each harm once while no process runs, and once under a running one, which then makes one file
    of many, and delivers.
    """
    before = await prepared(root, rng, 3, COUNT, IN_MS)
    found = list(harms(before, rng, share))
    assert len(found) > 10
    for name, harm in found:
        for is_running in (False, True):
            world = before.copy(random.Random(rng.getrandbits(32)))
            try:
                await _live_on(world, harm, is_running=is_running)
            except BaseException as error:
                error.add_note(f"{name}, {is_running=}")
                raise
        tally.count("files of the timer index missing, cut or flipped")


async def _live_on(world: World, harm: Harm, *, is_running: bool) -> None:
    if not is_running:
        harm(world)
    life = Life(world)
    await life.deliver()
    if is_running:
        harm(world)
    await more(life)  # which merges files
    await life.timers.between(0, world.clock.now_ms + IN_MS, 1_000)
    await their_time_comes(life)
    life.check()
    world.end(life, power_cut=False)
    await world.check_all_come()


async def test_some_damage_of_the_index_is_no_loss(tmp_path: Path, rng: random.Random) -> None:
    await damage(tmp_path, rng, 400)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_any_damage_of_the_index_is_no_loss(tmp_path: Path, rng: random.Random) -> None:
    await damage(tmp_path, rng, 6)


async def test_the_index_of_another_history_is_not_taken(
    tmp_path: Path, rng: random.Random
) -> None:
    """Two members went on from the same log: one gets what the other made of its own."""
    before = await prepared(tmp_path, rng, 2, COUNT, IN_MS)
    one, other = before.copy(random.Random(1)), before.copy(random.Random(2))
    for world, epoch_floor in ((one, 0), (other, 10)):
        life = Life(world, epoch_floor=epoch_floor)
        await more(life)
        await life.send(COUNT, IN_MS // 2 if world is one else IN_MS)
        await life.deliver()
        life.close()
    ours = other.disk.folder(PurePath(TIMERS))
    for name in list(ours.seen):
        _remove(name, other)
    for name, node in one.index_files().items():
        ours.seen[name] = ours.kept[name] = deepcopy(node)
    life = Life(other)
    await life.deliver()
    assert life.timers.index.count_until(2**62) == 4 * COUNT
    found = await life.timers.between(0, 2**62, 5 * COUNT)
    assert sorted(timer.due_ms for timer in found) == sorted(other.sent.values())
    world.end(life, power_cut=False)
    await other.check_all_come()
    tally.count("timer indexes of another epoch history")
