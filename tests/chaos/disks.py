"""Faults of disks, of the power, and of whole machines."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

from tests.chaos import damage
from tests.chaos.cluster import Cluster
from tests.chaos.listing import everybody, fault, follower, writer, writer_and_follower
from tests.chaos.machines import Member
from tests.support.stores.small_disk import fill

CGROUPS = Path("/sys/fs/cgroup/blkio")  # version 1 of control groups
COMPILER = shutil.which("cc")
BAD_PAGES = Path(damage.__file__).parents[1] / "support/faults/bad_pages.c"
SLOW_BYTES_PER_S, SLOW_WRITES_PER_S = 64 * 1024, 10


def why_not_slow() -> str:
    """Why no disk can be slowed down here; empty when one can."""
    limit = CGROUPS / "blkio.throttle.write_bps_device"
    usable = limit.exists() and os.access(CGROUPS, os.W_OK)
    return "" if usable else "the control group blkio (version 1) is missing"


@contextmanager
def slow(cluster: Cluster, *members: Member) -> Iterator[None]:
    with ExitStack() as stack:
        for member in members:
            stack.enter_context(slow_disk(member))
        yield


@contextmanager
def slow_disk(member: Member) -> Iterator[None]:
    """The kernel lets the member's process write no more than so much a second."""
    assert member.disk is not None
    assert member.process is not None
    device = os.stat(member.disk.mount_point).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    group = CGROUPS / f"cometmq-chaos-{device}"  # no other run has this device
    group.mkdir()
    try:
        (group / "blkio.throttle.write_bps_device").write_text(f"{number} {SLOW_BYTES_PER_S}")
        (group / "blkio.throttle.write_iops_device").write_text(f"{number} {SLOW_WRITES_PER_S}")
        (group / "cgroup.procs").write_text(str(member.process.pid))
        yield
    finally:
        for process in (group / "cgroup.procs").read_text().split():
            (CGROUPS / "cgroup.procs").write_text(process)
        group.rmdir()


@asynccontextmanager
async def full(cluster: Cluster, member: Member, bites: Callable[[], bool]) -> AsyncIterator[None]:
    """Until it bites, and then as long as the block lasts. Nobody helps afterwards."""
    assert member.disk is not None

    async def does_bite() -> bool:
        return bites()

    filler = fill(member.disk.mount_point)
    try:
        await cluster.until("the full disk is felt", does_bite)
        yield
    finally:
        filler.unlink()


@asynccontextmanager
async def writer_full(cluster: Cluster, member: Member) -> AsyncIterator[None]:
    before = cluster.refusals("DISK_FULL")
    async with full(cluster, member, lambda: cluster.refusals("DISK_FULL") > before):
        yield


@asynccontextmanager
async def follower_full(cluster: Cluster, member: Member) -> AsyncIterator[None]:
    async with full(cluster, member, lambda: member.member_id not in cluster.in_sync()):
        yield


@contextmanager
def failing(cluster: Cluster, member: Member) -> Iterator[None]:
    """Writes fail; then somebody starts the machine again."""
    assert member.disk is not None
    with member.disk.failing():
        yield
    member.darken()
    member.reboot()
    member.revive()


@contextmanager
def bit_flipped(cluster: Cluster, member: Member, rng: random.Random) -> Iterator[None]:
    member.kill()
    flip = damage.flip_a_bit(member.store, rng)
    member.revive()
    try:
        yield
    finally:
        member.kill()
        sizes = member.options["max_hash_slot_num"], member.options["max_index_num"]
        cluster.damage_found += damage.find_and_replace(member.store, flip, *sizes)
        member.revive()


def why_no_bad_pages() -> str:
    """Why all pages can be read here; empty when one can be made bad."""
    return "" if COMPILER is not None else "there is no C compiler"


@contextmanager
def page_unreadable(cluster: Cluster, member: Member, rng: random.Random) -> Iterator[None]:
    """Until an operator has replaced the disk."""
    assert COMPILER is not None
    library, bad_pages = member.directory / "bad_pages.so", member.directory / "bad_pages"
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", library, BAD_PAGES], check=True)
    member.kill()
    spoilt = damage.spoil_a_page(member.store, bad_pages, rng)
    environment = {"LD_PRELOAD": str(library), "BAD_PAGES": str(bad_pages)}
    member.environment |= environment
    member.revive()
    try:
        yield
    finally:
        member.kill()
        sizes = member.options["max_hash_slot_num"], member.options["max_index_num"]
        found = damage.find_and_replace(member.store, spoilt, *sizes, **environment)
        cluster.damage_found += found
        for name in environment:
            del member.environment[name]
        member.revive()


@contextmanager
def rebooted(cluster: Cluster, *members: Member) -> Iterator[None]:
    """Without a warning, and on another boot: whether anything is lost they cannot know."""
    for member in members:
        member.reboot()
    try:
        yield
    finally:
        for member in members:
            member.revive()


@asynccontextmanager
async def dark(cluster: Cluster, *members: Member) -> AsyncIterator[None]:
    await cluster.note_darkness(members)
    for member in members:
        member.darken()
    with rebooted(cluster, *members):
        yield


fault("slow disk of the writer", slow, writer, disk=True, missing=why_not_slow)
fault("slow disk of a follower", slow, follower, disk=True, missing=why_not_slow)
fault("slow disks of all members", slow, everybody, disk=True, missing=why_not_slow)
fault("full disk of the writer", writer_full, writer, disk=True, fills=True)
fault("full disk of a follower", follower_full, follower, disk=True, fills=True)
fault("EIO from the writer's disk", failing, writer, disk=True, powerless=1)
fault("EIO from a follower's disk", failing, follower, disk=True, powerless=1)
fault("a bit flipped at a follower", bit_flipped, lambda c, rng: [*follower(c, rng), rng])
fault(
    "a page that a follower cannot read",
    page_unreadable,
    lambda c, rng: [*follower(c, rng), rng],
    missing=why_no_bad_pages,
)
fault("power cut of the writer", dark, writer, disk=True, powerless=1)
fault("power cut of a follower", dark, follower, disk=True, powerless=1)
fault("power cut of the writer and a follower", dark, writer_and_follower, disk=True, powerless=2)
fault("power cut of all members", dark, everybody, disk=True, powerless=3)
fault("unclean restart of the writer's machine", rebooted, writer, disk=True)
fault("unclean restart of a follower's machine", rebooted, follower, disk=True)
fault("unclean restart of all members' machines", rebooted, everybody, disk=True)
