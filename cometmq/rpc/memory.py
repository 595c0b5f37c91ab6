"""Memory that is freed is kept for the next message.

A chunk of the log or a batch passes through several buffers of its size: protobuf's, gRPC's, ours.
The C library gives buffers of 128 KiB and more back to the kernel as soon as they are free, and the
next ones are zeroed again, page by page. That costs two to three times as much as sending
the bytes. So a service keeps what it has needed once, up to KEPT_BYTES in each of its heaps.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

KEPT_BYTES = 64 * 1024 * 1024
MAPPED_BYTES_MIN = 32 * 1024 * 1024  # buffers from here on are the kernel's; glibc takes no more
# mallopt(3) and the variables by which the parent process may have decided it.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def resident_bytes() -> int:
    """Memory that this process has now; 0 where the system has no /proc/self/statm."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def give_back_freed() -> bool:
    """Give the kernel what is free now: after a crowd, which needed more than is usual here. False:
    the C library is not glibc.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and trim(0) == 1


def keep_freed(environ: Mapping[str, str] = os.environ) -> bool:
    """Do so in this process; False: the C library is not glibc, or a variable sets it."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in environ for name in _VARIABLES):
        return False
    settings = ((_TRIM_THRESHOLD, KEPT_BYTES), (_MMAP_THRESHOLD, MAPPED_BYTES_MIN))
    return all([mallopt(name, value) == 1 for name, value in settings])
