"""Freed memory stays with the process, which the kernel's count of page faults shows."""

from __future__ import annotations

import subprocess
import sys

from cometmq.rpc.memory import keep_freed

ROUNDS = 20
PROGRAM = f"""
import resource
from cometmq.rpc.memory import keep_freed
keep_freed({{}}) if %r else None
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({ROUNDS}):
    [bytearray(b"x") * (1024 * 1024) for _ in range(8)]
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(*, kept: bool) -> int:
    command = [sys.executable, "-c", PROGRAM % kept]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def test_large_buffers_are_not_zeroed_again_and_again() -> None:
    assert page_faults(kept=False) > ROUNDS * 1000
    assert page_faults(kept=True) < 8 * 1000  # those of the first round


def test_who_starts_the_process_decides() -> None:
    assert not keep_freed({"MALLOC_TRIM_THRESHOLD_": "131072"})
    assert not keep_freed({"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"})
