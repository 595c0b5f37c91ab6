"""The member that a consumer reads from next: the rule of
:mod:`cometmq.messaging.replica_selection`, with the memory of this machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from cometmq.messaging.groups import GroupSettings
from cometmq.messaging.replica_selection import ReadReplica, suggest

# Memory limits of a container, in version 2 and 1 of control groups: page cache counts against
# them, so no more of the log than that can be in memory.
_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


class ReplicaSelector:
    """``copies()``: the followers that may be suggested now, if ``enabled``. Far behind is more of
    the log than ``memory_percent`` of the memory.
    """

    def __init__(
        self, enabled: bool, memory_percent: float, copies: Callable[[], Sequence[ReadReplica]]
    ) -> None:
        self._enabled = enabled
        self._memory_bytes = int(machine_memory_bytes() * memory_percent / 100)
        assert self._memory_bytes >= 0
        self._copies = copies

    def member(
        self, groups: Mapping[str, GroupSettings], group: str, backlog_bytes: int
    ) -> int | None:
        """The member that the group is to pull from next; None = the writer."""
        if not self._enabled:
            return None
        settings = groups.get(group) or GroupSettings(group)
        return suggest(backlog_bytes, self._memory_bytes, settings, self._copies())


def machine_memory_bytes(limits: Sequence[Path] = _LIMITS) -> int:
    """Memory of the machine, or the least that one of the files ``limits`` allows."""
    all_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min((_limit(path, all_bytes) for path in limits), default=all_bytes)


def _limit(path: Path, all_bytes: int) -> int:
    try:
        return min(all_bytes, int(path.read_text()))
    except (OSError, ValueError):  # there is no such file, or it says "max"
        return all_bytes
