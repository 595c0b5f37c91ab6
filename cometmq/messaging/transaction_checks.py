"""The checks of transactions: half messages that are due go to any one member of their producer
group, and to the next one if it does not answer. Pure: the time is a parameter.

A check counts when it is handed out. While no producer of the group is there, checks wait and do
not count. After the last one has had its time, the half is given up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from cometmq.messaging.transactions import CheckRules, HalfTable

ASKED_MAX = 1_024  # halves that a member has not answered
ASK_MAX = 128  # of one batch
MEMBERS_MAX = 1_000  # of one producer group


class Ask(NamedTuple):
    """These halves are asked of this member."""

    member: int
    offsets: list[int]


class _Group:
    """A producer group with members or with halves that wait."""

    def __init__(self) -> None:
        self.members: dict[int, set[int]] = {}  # → halves asked of it; the next one comes first
        self.waiting: dict[int, None] = {}  # halves that are due, in order


class CheckBoard:
    """Belongs to a writer. Members are numbers that the caller gives out once."""

    def __init__(self, table: HalfTable, rules: CheckRules) -> None:
        self.given_up: list[int] = []  # asked about often enough; for the caller to take
        self._table = table
        self._rules = rules
        self._groups: dict[str, _Group] = {}
        self._asked: dict[int, tuple[int, float]] = {}  # half → member, when its answer is overdue
        # Halves that the table names once too often, because their member left: → when it is their
        # time.
        self._moved: dict[int, float] = {}

    def member_count(self, group: str) -> int:
        """Members of a producer group that are there."""
        known = self._groups.get(group)
        return 0 if known is None else len(known.members)

    def join(self, group: str, member: int) -> None:
        """A producer answers for its group from now on."""
        self._groups.setdefault(group, _Group()).members[member] = set()

    def leave(self, group: str, member: int) -> None:
        """It does not any more: what it has not answered goes to the next one."""
        known = self._groups[group]
        for offset in sorted(known.members.pop(member)):
            _, overdue_s = self._asked.pop(offset)
            self._moved[offset] = overdue_s
            # After the last check there is time for an answer by other ways.
            if self._table.checks_of(offset) < self._rules.checks_max:
                self._wait([offset])
        self._forget_empty(group)

    def look(self, now_s: float) -> bool:
        """Take what is due. Whether there may be more."""
        due = self._table.take_due(now_s, ASKED_MAX)
        asked_of, moved = self._asked.get, self._moved
        if not self._asked and not moved:
            self._wait(list(dict.fromkeys(due)))
            return len(due) == ASKED_MAX
        waiting: list[int] = []
        for offset in dict.fromkeys(due):
            if moved:
                if moved.get(offset, now_s) > now_s:
                    continue
                moved.pop(offset, None)
            asked = asked_of(offset)
            if asked is not None:
                if asked[1] > now_s:  # asked again meanwhile, with a later look
                    continue
                self._forget_ask(offset)
            waiting.append(offset)
        self._wait(waiting)
        return len(due) == ASKED_MAX

    def _wait(self, offsets: Sequence[int]) -> None:
        """It is the time of these halves."""
        checks_max = self._rules.checks_max
        name: str | None = None
        waiting: dict[int, None] = {}  # of the producer group `name`
        groups, counts = self._table.groups_of(offsets), self._table.counts_of(offsets)
        for offset, group, count in zip(offsets, groups, counts, strict=True):
            if group is None:
                continue
            if count >= checks_max:
                self.given_up.append(offset)
                continue
            if group != name:
                name = group
                waiting = self._groups.setdefault(name, _Group()).waiting
            waiting[offset] = None

    def asks(self, now_s: float) -> Iterator[Ask]:
        """Hands out what waits, in batches, each to the next member that has room; counts each
        check.
        """
        for known in list(self._groups.values()):
            while known.waiting:
                member = next((m for m, its in known.members.items() if len(its) < ASKED_MAX), None)
                if member is None:
                    break
                its = known.members.pop(member)
                known.members[member] = its  # its turn comes last now
                room = min(ASK_MAX, ASKED_MAX - len(its))
                offsets = list(islice(known.waiting, room))
                overdue_s = now_s + self._rules.interval_s
                for offset in offsets:
                    del known.waiting[offset]
                self._asked.update(dict.fromkeys(offsets, (member, overdue_s)))
                self._table.asked(offsets, overdue_s)
                if self._moved:
                    self._moved.update((o, overdue_s) for o in offsets if o in self._moved)
                its.update(offsets)
                yield Ask(member, offsets)

    def is_asked(self, offset: int, member: int) -> bool:
        """Whether the member owes an answer for the half: nobody else's counts."""
        asked = self._asked.get(offset)
        return asked is not None and asked[0] == member

    def unknown(self, offset: int) -> None:
        """The member that was asked does not know yet: it is asked again when the time comes."""
        self._forget_ask(offset)

    def closed(self, offsets: Collection[int], group: str) -> None:
        """Halves of the group have ended."""
        if self._moved:
            for offset in offsets:
                self._moved.pop(offset, None)
        known = self._groups.get(group)
        if known is None:  # nothing was asked of it, and nothing waits
            return
        asked, waiting = self._asked, known.waiting
        for offset in offsets if asked or waiting else ():
            if offset in asked:
                self._forget_ask(offset, group)
            elif waiting:
                waiting.pop(offset, None)
        self._forget_empty(group)

    def _forget_ask(self, offset: int, group: str | None = None) -> None:
        member, _ = self._asked.pop(offset)
        if group is None:
            group = self._table.group_of(offset)
            assert group is not None
        self._groups[group].members[member].discard(offset)

    def _forget_empty(self, group: str) -> None:
        known = self._groups[group]
        if not known.members and not known.waiting:
            del self._groups[group]

    def validate(self) -> None:
        """Asserts what must hold; for tests."""
        asked = {o: m for g in self._groups.values() for m, its in g.members.items() for o in its}
        assert asked == {offset: member for offset, (member, _) in self._asked.items()}
        assert all(self._table.find(offset) is not None for offset in self._moved)
        assert len(set(self.given_up)) == len(self.given_up)
        for name, group in self._groups.items():
            assert group.members or group.waiting, name
            for offset in group.waiting:
                assert offset not in self._asked
                half = self._table.find(offset)
                assert half is not None, offset
                assert half[2] == name
