"""Queue locks of consumer groups that consume in order: which client has which queue.

A grant is state: it outlives a restart and a fail-over. Its lock number is above all that were
given before, so a client that was away can be distinguished from the present holder. Renewals are
not state: they die with the writer, and its successor counts every lease from its own beginning.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cometmq.errors import QueueLocked
from cometmq.model import QueueKey

LEASE_S = 15.0
QUEUES_PER_CALL_MAX = 4_096
LOCKS_MAX = 1_000_000
# The writer's epoch is the upper part of the numbers of locks and of resets: what a fail-over took
# back is not given again.
EPOCH_SHIFT = 32


class Grant(NamedTuple):
    """Who may consume a queue in order."""

    client_id: str
    number: int


@dataclass(frozen=True, slots=True)
class GrantRun:
    """Queues, by topic, that a client of a group got in one call."""

    group: str
    grant: Grant
    queues: Mapping[str, tuple[int, ...]]


class LockTable:
    """The grants of all groups. At most one for each queue of a group."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[QueueKey, Grant]] = {}
        self.last_number = 0

    @property
    def count(self) -> int:
        return sum(map(len, self._groups.values()))

    def get(self, group: str, key: QueueKey) -> Grant | None:
        return self._groups.get(group, {}).get(key)

    def number(self, group: str, key: QueueKey) -> int:
        """The lock number of the queue; 0: nobody has it."""
        grant = self.get(group, key)
        return grant.number if grant is not None else 0

    def grant(self, run: GrantRun) -> None:
        """Give the queues to a client; a client that had them has them no more."""
        queues = self._groups.setdefault(run.group, {})
        for key in _keys(run.queues):
            queues[key] = run.grant
        self.last_number = max(self.last_number, run.grant.number)

    def release(self, group: str, queues: Mapping[str, Iterable[int]]) -> None:
        """Nobody has these queues."""
        granted = self._groups.get(group, {})
        for key in _keys(queues):
            granted.pop(key, None)
        if not granted:
            self._groups.pop(group, None)

    def forget_group(self, group: str) -> None:
        self._groups.pop(group, None)

    def forget_topic(self, topic: str) -> None:
        for group in list(self._groups):
            self.forget(group, topic)

    def forget(self, group: str, topic: str) -> None:
        """The group has left the topic."""
        queues = self._groups.get(group, {})
        self.release(group, {topic: [key[1] for key in queues if key[0] == topic]})

    def __iter__(self) -> Iterator[GrantRun]:
        """All grants, in order of group, lock number, topic and queue."""
        for group in sorted(self._groups):
            runs: defaultdict[Grant, list[QueueKey]] = defaultdict(list)
            for key, grant in self._groups[group].items():
                runs[grant].append(key)
            for grant in sorted(runs, key=lambda one: one.number):
                yield GrantRun(group, grant, by_topic(runs[grant]))

    def check_pull(self, group: str, key: QueueKey, number: int) -> None:
        """Raises QueueLocked when another client got the queue since. A follower may not know the
        newest grants yet, so a higher number passes.
        """
        grant = self.get(group, key)
        if grant is not None and grant.number > number:
            raise _locked(group, key, grant)

    def check_commit(self, group: str, key: QueueKey, number: int) -> None:
        """Raises QueueLocked unless the grant with this number holds."""
        grant = self.get(group, key)
        if grant is None:
            raise QueueLocked(
                f"nobody has the lock of queue {key[1]} of {key[0]} for group {group}: lock it "
                "again"
            )
        if grant.number != number:
            raise _locked(group, key, grant)


class LockLeases:
    """When each grant was renewed. ``opened_s``: when this writer began; until then it counts every
    grant of its predecessors as renewed.
    """

    def __init__(self, table: LockTable, epoch: int, opened_s: float) -> None:
        self._table = table
        self._epoch = epoch
        self._opened_s = opened_s
        self._renewed_s: dict[str, dict[QueueKey, float]] = defaultdict(dict)

    def renew(
        self, group: str, client_id: str, keys: Iterable[QueueKey], now_s: float
    ) -> tuple[list[QueueKey], dict[QueueKey, QueueLocked]]:
        """Renew what the client has. Answers the queues that it may get, and why not the others."""
        free: list[QueueKey] = []
        refused: dict[QueueKey, QueueLocked] = {}
        renewed_s = self._renewed_s[group]
        for key in keys:
            grant = self._table.get(group, key)
            if grant is not None and grant.client_id == client_id:
                renewed_s[key] = now_s
                continue
            if grant is not None:
                left_s = renewed_s.get(key, self._opened_s) + LEASE_S - now_s
                if left_s > 0:
                    refused[key] = _locked(group, key, grant, left_s)
                    continue
            free.append(key)
        return free, refused

    def plan_grant(self, group: str, client_id: str, keys: Sequence[QueueKey]) -> GrantRun:
        """The grant of queues that are free, with the next lock number."""
        number = max(self._table.last_number, self._epoch << EPOCH_SHIFT) + 1
        return GrantRun(group, Grant(client_id, number), by_topic(keys))

    def granted(self, run: GrantRun, now_s: float) -> None:
        """Counts the leases of a new grant."""
        self._renewed_s[run.group].update(dict.fromkeys(_keys(run.queues), now_s))

    def forget_group(self, group: str) -> None:
        self._renewed_s.pop(group, None)


def by_topic(keys: Iterable[QueueKey]) -> dict[str, tuple[int, ...]]:
    """Queue ids by topic, both in order."""
    topics: dict[str, list[int]] = {}
    for topic, queue_id in sorted(set(keys)):
        topics.setdefault(topic, []).append(queue_id)
    return {topic: tuple(queue_ids) for topic, queue_ids in topics.items()}


def _keys(queues: Mapping[str, Iterable[int]]) -> Iterator[QueueKey]:
    for topic, queue_ids in queues.items():
        for queue_id in queue_ids:
            yield topic, queue_id


def _locked(group: str, key: QueueKey, grant: Grant, left_s: float | None = None) -> QueueLocked:
    until = "" if left_s is None else f", for {left_s:.1f} s at least"
    return QueueLocked(
        f"client {grant.client_id} of group {group} has queue {key[1]} of {key[0]}{until}"
    )
