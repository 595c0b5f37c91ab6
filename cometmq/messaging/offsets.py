"""Committed offsets: how far each group has consumed each queue.

A committed position is the next message the group wants; all before it are done. It is kept with
the generation it was committed in and answered as it is: after a crash the pull that follows fences
it, so that the consumer hears of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cometmq.messaging.generations import History
from cometmq.model import Position, QueueKey

_ENTRY_BYTES = (
    64  # of a commit in a state record, names left out: queue id, generation, offset, punctuation
)


@dataclass(frozen=True, slots=True)
class CommittedOffset:
    """One group's position in one queue."""

    group: str
    topic: str
    queue_id: int
    position: Position


def batched(
    commits: Iterable[CommittedOffset], bytes_max: int
) -> Iterator[tuple[CommittedOffset, ...]]:
    """The commits in runs of at least one that fit ``bytes_max`` of a state record each."""
    batch: list[CommittedOffset] = []
    size = 0
    for commit in commits:
        entry = _ENTRY_BYTES + len(commit.group) + len(commit.topic)
        if batch and size + entry > bytes_max:
            yield tuple(batch)
            batch, size = [], 0
        batch.append(commit)
        size += entry
    if batch:
        yield tuple(batch)


class OffsetTable:
    """Positions by group and queue, and which of them the state log does not know yet.

    Invariants: within a generation a kept offset never goes back; no kept offset was above the
    queue's readable maximum when it was committed.
    """

    def __init__(self) -> None:
        self._groups: dict[str, dict[QueueKey, Position]] = {}
        self._topics: dict[str, Counter[str]] = {}  # of each group: its queues by topic
        self._unwritten: dict[
            tuple[str, QueueKey], None
        ] = {}  # a set in order of the first commit since written

    def commit(
        self, group: str, key: QueueKey, position: Position, history: History, readable_max: int
    ) -> Position:
        """Takes a group's commit for a queue and answers the position that is kept.

        Raises ``PositionFenced`` and ``OffsetInvalid`` as :meth:`History.validate`. What lies above
        the readable maximum was never delivered and is cut off there, whatever the generation: a
        client that does not track generations, or lies, cannot make the group skip messages to
        come.
        """
        wanted = history.validate(position)
        offset = min(wanted.offset, readable_max)
        queues = self._groups.setdefault(group, {})
        before = queues.get(key)
        if before is not None:
            # What the group had committed before a crash still counts as far as the crash left it
            # standing.
            offset = max(offset, history.settle(before).offset)
        kept = Position(wanted.generation, offset)
        if kept != before:
            if before is None:
                self._count(group, key[0])
            queues[key] = kept
            self._unwritten[group, key] = None
        assert before is None or kept >= before
        return kept

    def get(self, group: str, key: QueueKey) -> Position | None:
        """The group's committed position, in the generation of its commit; None without one."""
        queues = self._groups.get(group)
        return queues.get(key) if queues else None

    def of_group(self, group: str) -> dict[QueueKey, Position]:
        """All committed positions of a group."""
        return dict(self._groups.get(group, {}))

    def reads(self, group: str, topic: str) -> bool:
        """Whether the group has committed anything in the topic."""
        return topic in self._topics.get(group, ())

    @property
    def count(self) -> int:
        return sum(map(len, self._groups.values()))

    def __iter__(self) -> Iterator[CommittedOffset]:
        """Everything, in order of group, topic and queue."""
        for group in sorted(self._groups):
            # Read by the metrics' thread too: a group may just have gone.
            for (topic, queue_id), position in sorted(self._groups.get(group, {}).items()):
                yield CommittedOffset(group, topic, queue_id, position)

    def unwritten(self) -> Iterator[CommittedOffset]:
        """Commits that no state record holds yet, the longest waiting first."""
        for group, key in self._unwritten:
            yield CommittedOffset(group, *key, self._groups[group][key])

    def written(self, commits: tuple[CommittedOffset, ...]) -> None:
        """A state record with these was appended; what has moved on since stays unwritten."""
        for commit in commits:
            key = (commit.topic, commit.queue_id)
            if self.get(commit.group, key) == commit.position:
                self._unwritten.pop((commit.group, key), None)

    def restore(self, commit: CommittedOffset) -> None:
        """Takes a commit from the state log. One older than what is kept changes nothing."""
        queues = self._groups.setdefault(commit.group, {})
        key = (commit.topic, commit.queue_id)
        before = queues.get(key)
        if before is None:
            self._count(commit.group, commit.topic)
        if before is None or commit.position > before:
            queues[key] = commit.position

    def reset(self, commit: CommittedOffset) -> None:
        """The group goes on here, also if that is back."""
        key = (commit.topic, commit.queue_id)
        queues = self._groups.setdefault(commit.group, {})
        if key not in queues:
            self._count(commit.group, commit.topic)
        queues[key] = commit.position
        self._unwritten.pop((commit.group, key), None)

    def forget_topic(self, topic: str) -> None:
        """Drops all commits for a topic that is deleted."""
        for group, queues in list(self._groups.items()):
            for key in [key for key in queues if key[0] == topic]:
                self._forget(group, key)

    def forget_group(self, group: str) -> None:
        """Drops all commits of a group that is deleted."""
        for key in list(self._groups.get(group, ())):
            self._forget(group, key)

    def forget(self, group: str, topic: str) -> None:
        """Drops all commits of a group for a topic that it has left."""
        for key in [key for key in self._groups.get(group, ()) if key[0] == topic]:
            self._forget(group, key)

    def _forget(self, group: str, key: QueueKey) -> None:
        queues, topics = self._groups[group], self._topics[group]
        del queues[key]
        topics[key[0]] -= 1
        if not topics[key[0]]:
            del topics[key[0]]
        self._unwritten.pop((group, key), None)
        if not queues:
            del self._groups[group], self._topics[group]

    def _count(self, group: str, topic: str) -> None:
        self._topics.setdefault(group, Counter())[topic] += 1
