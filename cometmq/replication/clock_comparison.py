"""Which clock is wrong: what other machines' clocks show, and what most of them agree on. Pure:
clocks are parameters.

All clocks are kept as their offset to the time since the boot of this machine, so a jump of its own
wall clock changes none of the others. One exchange tells an offset with its error: the other clock
was read between a question and its answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

CLOCKS_MAX = 64
# A better reading is kept for so long, unless a newer one contradicts it.
KEPT_MS = 30_000
FORGOTTEN_MS = 86_400_000
DRIFT = 1e-4  # two clocks may part by this much of the time since the reading
DAY_MS = 86_400_000
# From 2001 to 2099: seconds that were taken for milliseconds are below.
TIME_MS_MIN, TIME_MS_MAX = 10**12, 4_070_908_800_000


class Reading(NamedTuple):
    """Another clock, less the time since the boot, in ms; as of ``boot_ms``."""

    offset_ms: int
    error_ms: int
    boot_ms: int

    def error_now_ms(self, boot_ms: int) -> int:
        """By how much the offset may be wrong by now."""
        return self.error_ms + round(DRIFT * max(0, boot_ms - self.boot_ms))


class Verdict(NamedTuple):
    """What most clocks show, less the time since the boot, and how far that may be wrong."""

    offset_ms: int
    error_ms: int


class ClockComparison:
    """The clocks of other members and of name servers, by name. ``known``: from a process before
    this one.
    """

    def __init__(self, known: Mapping[str, Iterable[int]] | None = None) -> None:
        self.readings = {name: Reading(*values) for name, values in (known or {}).items()}

    def note(self, name: str, first_ms: int, last_ms: int, theirs_ms: int) -> None:
        """That clock showed ``theirs_ms`` between two moments, in ms since the boot. A clock
        that shows a time outside of this century does not count.
        """
        if last_ms < first_ms or not TIME_MS_MIN <= theirs_ms <= TIME_MS_MAX:
            return
        error_ms = (last_ms - first_ms + 1) // 2
        found = Reading(theirs_ms - (first_ms + last_ms) // 2, error_ms, last_ms)
        known = self.readings.get(name)
        if known is not None and last_ms - known.boot_ms < KEPT_MS:
            is_the_same = abs(found.offset_ms - known.offset_ms) <= error_ms + known.error_ms
            if is_the_same and known.error_ms < error_ms:
                return
        self.readings.pop(name, None)
        self.readings[name] = found
        if len(self.readings) > CLOCKS_MAX:
            del self.readings[next(iter(self.readings))]

    def verdict(self, own_ms: int, boot_ms: int, stored_ms: int = 0) -> Verdict | None:
        """What most clocks show, this machine's (``own_ms``: less the time since the boot) among
        them; of an even number the lower half decides, so that nothing comes early. None: no other
        clock is known.

        With one other clock nobody can tell which is wrong, and the lower one counts, unless it is
        more than a day behind ``stored_ms``, a time that has been.
        """
        readings = list(self.readings.values())  # in one step: metrics are read in a thread
        others = [r for r in readings if boot_ms - r.boot_ms < FORGOTTEN_MS]
        if not others:
            return None
        votes = [(r.offset_ms, r.error_now_ms(boot_ms)) for r in others]
        votes = sorted([*votes, (own_ms, 0)])
        if len(votes) == 2 and stored_ms and votes[0][0] + boot_ms < stored_ms - DAY_MS:
            return Verdict(*votes[1])
        return Verdict(*votes[(len(votes) - 1) // 2])
