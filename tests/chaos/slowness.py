"""A slow disk: the kernel lets a process write no more than so much a second to a device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.chaos.machines import Member

GROUPS = Path("/sys/fs/cgroup/blkio")  # version 1 of control groups
WRITE_BYTES_PER_S = 64 * 1024
WRITES_PER_S = 10


def why_not() -> str:
    """Why no disk can be slowed down here; empty when one can."""
    limit = GROUPS / "blkio.throttle.write_bps_device"
    usable = limit.exists() and os.access(GROUPS, os.W_OK)
    return "" if usable else "the control group blkio (version 1) is missing"


@contextmanager
def slow_disk(member: Member) -> Iterator[None]:
    """The member's process writes slowly to its disk."""
    assert member.disk is not None
    assert member.process is not None
    device = os.stat(member.disk.mount_point).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    group = GROUPS / f"cometmq-chaos-{device}"  # no other run has this device
    group.mkdir()
    try:
        (group / "blkio.throttle.write_bps_device").write_text(f"{number} {WRITE_BYTES_PER_S}")
        (group / "blkio.throttle.write_iops_device").write_text(f"{number} {WRITES_PER_S}")
        (group / "cgroup.procs").write_text(str(member.process.pid))
        yield
    finally:
        for process in (group / "cgroup.procs").read_text().split():
            (GROUPS / "cgroup.procs").write_text(process)
        group.rmdir()
