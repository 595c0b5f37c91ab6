"""A machine whose clock is wrong: libfaketime, preloaded into its process. The time since the boot
stays right, as it does on a machine whose clock was set.
"""

from __future__ import annotations

from pathlib import Path

FOLDERS = ("/usr/lib", "/usr/lib64", "/usr/local/lib")
CACHE_S = 1  # how late the process sees a change


def _library() -> Path | None:
    found = (path for folder in FOLDERS for path in Path(folder).glob("*/*/libfaketimeMT.so.1"))
    near = (path for folder in FOLDERS for path in Path(folder).glob("faketime/libfaketimeMT.so.1"))
    return next(found, None) or next(near, None)


LIBRARY = _library()


def why_not() -> str:
    """Why no clock can be wrong here; empty when one can."""
    return "" if LIBRARY is not None else "libfaketime is missing"


class WrongClock:
    """``folder``: where the file is kept that tells how wrong the clock is."""

    def __init__(self, folder: Path) -> None:
        self._told = folder / "wrong_clock"
        self.set(0)

    def set(self, ahead_s: int) -> None:
        """From now on, and for the next process, it is ahead by so much; below 0: behind."""
        draft = self._told.with_suffix(".new")  # a process must never read half of it
        draft.write_text(f"{ahead_s:+d}\n")
        draft.replace(self._told)

    @property
    def environment(self) -> dict[str, str]:
        """Of a process on this machine."""
        return {
            "LD_PRELOAD": str(LIBRARY),
            "FAKETIME_TIMESTAMP_FILE": str(self._told),
            "FAKETIME_CACHE_DURATION": str(CACHE_S),
            "DONT_FAKE_MONOTONIC": "1",
            "NO_FAKE_STAT": "1",
        }
