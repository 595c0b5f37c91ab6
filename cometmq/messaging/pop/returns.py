"""When messages came back last to the groups that receive from a queue. Pure.

Each return has a number that rises, so that a member who waits knows whether it came after its last
look at the queue.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from cometmq.model import QueueKey

ALL_MEMBERS = 1 << 32  # as a count: every member that waits is to look again


class Return(NamedTuple):
    """So many messages may be received again."""

    number: int
    message_count: int


class Returns:
    """The newest return of each group in each queue."""

    def __init__(self) -> None:
        self._queues: dict[QueueKey, dict[str, Return]] = {}

    def note(self, key: QueueKey, group: str, number: int, count: int) -> None:
        """Messages came back; ``number`` is above all before."""
        groups = self._queues.setdefault(key, {})
        assert group not in groups or groups[group].number < number
        groups[group] = Return(number, count)

    def of_queue(self, key: QueueKey) -> Mapping[str, Return]:
        """By group."""
        return self._queues.get(key, {})

    def number(self, key: QueueKey, group: str) -> int:
        """Of the newest return; 0: there was none."""
        found = self._queues.get(key, {}).get(group)
        return 0 if found is None else found.number

    def forget_group(self, group: str) -> None:
        """The group is gone, or pulls."""
        for key in [key for key, groups in self._queues.items() if group in groups]:
            del self._queues[key][group]
            if not self._queues[key]:
                del self._queues[key]

    def forget_topic(self, topic: str) -> None:
        """The topic is gone."""
        for key in [key for key in self._queues if key[0] == topic]:
            del self._queues[key]
