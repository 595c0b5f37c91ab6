"""Resets of consumer groups: where an operator lets a group go on, against commits of what it did
before.

A reset is numbered. A commit names the newest reset that its consumer knows: one that was on its
way when the reset came is refused, and cannot undo it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from cometmq.errors import OffsetReset
from cometmq.messaging.locks import EPOCH_SHIFT
from cometmq.messaging.offsets import CommittedOffset
from cometmq.model import Position, QueueKey


class ResetTable:
    """The number of the newest reset, by group and queue. 0: there was none."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[QueueKey, int]] = {}
        self._last_number = 0

    @property
    def count(self) -> int:
        return sum(map(len, self._groups.values()))

    def number(self, group: str, key: QueueKey) -> int:
        return self._groups.get(group, {}).get(key, 0)

    def newest(self, group: str) -> int:
        """The number of the group's newest reset."""
        return max(self._groups.get(group, {}).values(), default=0)

    def next_number(self, epoch: int) -> int:
        """The number of a reset that the writer of this epoch makes: above all that any group ever
        had, also for topics and groups that are deleted. A client may still know those.
        """
        return max(self._last_number, epoch << EPOCH_SHIFT) + 1

    def put(self, group: str, number: int, keys: Iterable[QueueKey]) -> None:
        self._last_number = max(self._last_number, number)
        self._groups.setdefault(group, {}).update(dict.fromkeys(keys, number))

    def check(self, group: str, key: QueueKey, number: int, position: Position | None) -> None:
        """Raises OffsetReset, with the group's position, for a commit that does not know the newest
        reset.
        """
        newest = self.number(group, key)
        if number < newest:
            assert position is not None, "a reset leaves a position"
            raise OffsetReset(
                f"group {group} was reset in queue {key[1]} of {key[0]}: the commit knows reset "
                f"{number}, the newest is {newest}",
                fence=(position.generation, position.offset),
            )

    def forget_group(self, group: str) -> None:
        self._groups.pop(group, None)

    def forget_topic(self, topic: str) -> None:
        for group in list(self._groups):
            self.forget(group, topic)

    def forget(self, group: str, topic: str) -> None:
        """The group has left the topic."""
        queues = self._groups.get(group, {})
        for key in [key for key in queues if key[0] == topic]:
            del queues[key]
        if not queues:
            self._groups.pop(group, None)

    def __iter__(self) -> Iterator[tuple[str, int, list[QueueKey]]]:
        """All resets, in order of group and number."""
        for group in sorted(self._groups):
            pairs = sorted((number, key) for key, number in self._groups[group].items())
            for number, some in groupby(pairs, key=lambda pair: pair[0]):
                yield group, number, [key for _, key in some]


def positions_of(
    group: str, keys: Iterable[QueueKey], committed: dict[QueueKey, Position]
) -> tuple[CommittedOffset, ...]:
    """Where the group is in these queues now."""
    return tuple(CommittedOffset(group, *key, committed[key]) for key in keys if key in committed)
