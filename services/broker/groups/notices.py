"""How fast members are told that their groups have changed.

A lone change is told at once. Above that a broker tells so many members a turn, over all groups:
a crowd that joins leaves the event loop to the others, and changes that come meanwhile are told
together. Groups take turns, so a small one does not wait for a large one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator
from itertools import islice
from typing import Protocol

from services.broker.groups.pacing import Pacer

TOLD_COUNT = 32  # members of a turn
PATIENCE = 4.0  # with a loop that has much to do


class Told(Protocol):
    """A member's stream."""

    def wake(self) -> None:
        """The group may have changed."""


class Notices:
    """``members`` lists the streams of a group that are told of changes. Belongs to the event
    loop.
    """

    def __init__(self, members: Callable[[str], Collection[Told]]) -> None:
        self._members = members
        # By group, who is still to be told; None: its round has not begun, so all are.
        self._rounds: dict[str, Iterator[Told] | None] = {}
        self._changed: set[str] = set()  # during their rounds: another one follows
        self._soon: dict[str, asyncio.TimerHandle] = {}
        self._pacer = Pacer(self._tell, PATIENCE)

    def __len__(self) -> int:
        """Groups that are to be told something."""
        return len(self._rounds.keys() | self._soon.keys())

    def tell(self, group: str) -> None:
        """The group has changed."""
        if notice := self._soon.pop(group, None):
            notice.cancel()
        if self._rounds.get(group) is not None:
            self._changed.add(group)
        else:
            self._rounds.setdefault(group)
        self._pacer.start()

    def tell_in(self, group: str, wait_s: float) -> None:
        """The group has changed, and its members hear of it after so long."""
        if group not in self._soon:
            loop = asyncio.get_running_loop()
            self._soon[group] = loop.call_later(wait_s, self.tell, group)

    def _tell(self) -> bool:
        left = TOLD_COUNT
        while self._rounds and left:
            left -= self._tell_some(left)
        return left < TOLD_COUNT

    def _tell_some(self, count_max: int) -> int:
        """Tells members of the group whose turn it is; how many."""
        group = next(iter(self._rounds))
        waiting = self._rounds.pop(group) or iter(list(self._members(group)))
        told = 0
        for stream in islice(waiting, count_max):
            stream.wake()
            told += 1
        if told == count_max:  # perhaps not all: behind the other groups
            self._rounds[group] = waiting
        elif group in self._changed:
            self._changed.discard(group)
            self._rounds[group] = None
        return told
