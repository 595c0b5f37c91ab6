"""How far a log is appended, wanted and flushed: positions that the threads of a store share.

While many callers wait for the disk, their event loop hardly releases the interpreter lock. A flush
thread that needs the lock between two syncs would leave the disk idle. With the C extension
(``cometmq/native/levels.c``) it does not need it: the positions are shared outside of the
interpreter, and the thread syncs again as long as they show a waiting caller. In plain Python a
caller begins every sync.
"""

from __future__ import annotations

from cometmq.native import accelerator
from cometmq.native.interface import SharedOffsets


class PlainSharedOffsets:
    """:class:`~cometmq.native.interface.SharedOffsets` that never sync by themselves."""

    __slots__ = ("_flushed",)

    def __init__(self) -> None:
        self._flushed = (0, 0)

    def append_to(self, position: int, time_ms: int, /) -> None:
        """Does nothing: no thread reads it here."""

    def demand(self, position: int, /) -> None:
        """As :meth:`append_to`."""

    def flush_to(self, position: int, time_ms: int, /) -> None:
        self._flushed = (position, time_ms)

    def flushed(self) -> tuple[int, int]:
        return self._flushed

    def sync(self, fd: int, stop: int, write_fd: int, /) -> int:
        return 0


def new_shared_offsets() -> SharedOffsets:
    """Levels at 0, of the kind that this process can have."""
    return PlainSharedOffsets() if accelerator is None else accelerator.SharedOffsets()
