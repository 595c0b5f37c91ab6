"""A real file system on a loop device, whose power can be cut and whose disk can fail.

The power: the shutdown ioctl of ext4 and xfs without flushing the journal. What was synced stays,
what was not is lost as far as the kernel had not written it, open files answer EIO. The next mount
replays the journal, as after a real power cut.

The disk: the loop device is made shorter than the file system on it, so that every write behind its
end fails with EIO, in the kernel's own way: the first sync tells, the next one does not.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.waiting import wait_until

MIB = 1024 * 1024
# xfs is never smaller; the file is sparse
SIZE_BYTES = {"ext4": 32 * MIB, "xfs": 300 * MIB}
KINDS = tuple(SIZE_BYTES)

GOING_DOWN = 0x8004587D  # XFS_IOC_GOINGDOWN, EXT4_IOC_SHUTDOWN
NO_LOG_FLUSH = struct.pack("I", 2)
FREE_S_MAX = 120.0
LOOP_SET_STATUS64, LOOP_GET_STATUS64 = 0x4C04, 0x4C05
LOOP_INFO_BYTES, SIZE_LIMIT_AT = 232, 32  # struct loop_info64, its field lo_sizelimit


class LoopDisk:
    """A mounted file system. Made by :func:`loop_disk`."""

    def __init__(self, directory: Path, kind: str, size_bytes: int = 0) -> None:
        """``size_bytes`` 0: the least that a test needs."""
        self.kind = kind
        self.mount_point = directory / kind
        self._image = directory / f"{kind}.img"
        self.mount_point.mkdir()
        with self._image.open("wb") as image:
            image.truncate(size_bytes or SIZE_BYTES[kind])
        _run(f"mkfs.{kind}", "-q", "-F" if kind == "ext4" else "-f", str(self._image))

    def mount(self) -> None:
        _run("mount", "-o", "loop", str(self._image), str(self.mount_point))

    def unmount(self) -> None:
        """Until the kernel has let the disk go: a process that has just ended may have held it, or
        one with mounts of its own, which began while this was mounted.
        """
        loop = Path("/sys/block") / Path(self._device()).name / "loop"
        _run("umount", str(self.mount_point))
        wait_until("the disk is free", lambda: not loop.exists(), FREE_S_MAX)

    def shut_down(self) -> None:
        """The power goes: nothing reaches the disk from here on. A sync that runs meanwhile may
        still return success: only what a process said before this call counts as promised.
        """
        folder = os.open(self.mount_point, os.O_RDONLY)
        try:
            fcntl.ioctl(folder, GOING_DOWN, NO_LOG_FLUSH)
        finally:
            os.close(folder)

    def restart(self) -> None:
        """The machine is up again. No process may have a file open."""
        self.unmount()
        self.mount()

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Writes to the disk fail with EIO inside the block; what is on it stays."""
        self._limit(MIB)
        try:
            yield
        finally:
            self._limit(0)

    def _limit(self, size_bytes: int) -> None:
        device = os.open(self._device(), os.O_RDWR)
        try:
            info = bytearray(LOOP_INFO_BYTES)
            fcntl.ioctl(device, LOOP_GET_STATUS64, info)
            struct.pack_into("Q", info, SIZE_LIMIT_AT, size_bytes)
            fcntl.ioctl(device, LOOP_SET_STATUS64, bytes(info))
        finally:
            os.close(device)

    def _device(self) -> str:
        for line in Path("/proc/self/mounts").read_text().splitlines():
            device, mount_point, *_ = line.split(" ")
            if mount_point == str(self.mount_point):
                return device
        raise AssertionError(f"{self.mount_point} is not mounted")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


def missing(kind: str) -> str:
    """Why there can be no such disk here; empty when there can."""
    if os.geteuid() != 0:
        return "run as root"
    if not Path("/dev/loop-control").exists():
        return "no loop devices here"
    if shutil.which(f"mkfs.{kind}") is None:
        return f"mkfs.{kind} is missing"
    return ""


@contextmanager
def loop_disk(directory: Path, kind: str) -> Iterator[LoopDisk]:
    """An empty file system of ``kind``, mounted; the test is skipped where there can be none."""
    if reason := missing(kind):
        pytest.skip(f"a power cut needs an {kind} of its own: {reason}")
    disk = LoopDisk(directory, kind)
    try:
        disk.mount()
    except AssertionError as error:
        pytest.skip(f"a power cut needs an {kind} of its own: {error}")
    try:
        yield disk
    finally:
        # Lazily: a test that failed may have left files open, and must not leave a mount.
        subprocess.run(["umount", "--lazy", str(disk.mount_point)], check=False)
