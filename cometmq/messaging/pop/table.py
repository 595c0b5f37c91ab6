"""The leases of all groups, and what of them the state log does not know yet.

What members receive and acknowledge takes effect at once. What happened in one turn of the writer's
loop is one change of the state log (:meth:`PopTable.unwritten`), appended before it is answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from cometmq.errors import FlowControl
from cometmq.messaging.pop.leases import Done, Given, Lease, QueueLeases
from cometmq.messaging.pop.masks import shifted, trimmed
from cometmq.model import QueueKey

# The writer's epoch is the upper part of the numbers: no number that a fail-over took back is given
# a second time.
EPOCH_SHIFT = 32
LEASES_MAX = 500_000  # of all groups; below 250 bytes each
CHANGE_BYTES = 128 * 1024  # of the leases in one change, rather too many than too few
_QUEUE_BYTES = 64  # names left out
_ENTRY_BYTES = 48  # numbers of a lease, but for its mask


# The generation of a queue; 0: it is not there.
GenerationOf = Callable[[QueueKey], int]


@dataclass(frozen=True, slots=True)
class QueueMoved:
    """Changes of a group in a queue: first its new leases, in order, then what is done."""

    group: str
    key: QueueKey
    generation: int
    next_offset: int
    given: tuple[Given, ...] = ()
    done: tuple[Done, ...] = ()

    @property
    def is_last(self) -> bool:
        """Whether no other part of these changes follows: only the last one says how far the group
        has looked, and a group that has not looked yet has nothing else to say.
        """
        return bool(self.next_offset) or not (self.given or self.done)

    @property
    def size_bytes(self) -> int:
        """In the state log, rather too many than too few."""
        entries = sum(_entry_bytes(one.mask) for some in (self.given, self.done) for one in some)
        return _QUEUE_BYTES + len(self.group) + len(self.key[0]) + entries


@dataclass(slots=True)
class _Unwritten:
    given: list[Given] = field(default_factory=list)
    done: dict[int, Done] = field(default_factory=dict)


class PopTable:
    """Of each group that receives: its leases by queue."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[QueueKey, QueueLeases]] = {}
        self._unwritten: dict[tuple[str, QueueKey], _Unwritten] = {}
        self._last_number = 0
        self.lease_count = 0  # of all queues

    def find(self, group: str, key: QueueKey) -> QueueLeases | None:
        """None: the group has not received anything from the queue."""
        return self._groups.get(group, {}).get(key)

    def open(self, group: str, key: QueueKey, next_offset: int) -> QueueLeases:
        """The group in the queue; if it is new there it begins at ``next_offset``."""
        found = self.find(group, key)
        if found is None:
            found = self._groups.setdefault(group, {})[key] = QueueLeases(next_offset)
            self._note(group, key)
        return found

    def of_group(self, group: str) -> dict[QueueKey, QueueLeases]:
        """The group in each queue that it has received from."""
        return dict(self._groups.get(group, {}))

    def groups(self) -> list[str]:
        """Groups that have received something, in order."""
        return sorted(self._groups)

    @property
    def queue_count(self) -> int:
        return sum(map(len, self._groups.values()))

    @property
    def open_count(self) -> int:
        """Messages that members have, and did not acknowledge."""
        # Read by the metrics' thread too: a group may just have come.
        queues = [queue for some in list(self._groups.values()) for queue in list(some.values())]
        return sum(queue.open_count for queue in queues)

    # --- what members do ---

    def check_room(self) -> None:
        """Raises FlowControl while there are as many leases as there may be."""
        if self.lease_count >= LEASES_MAX:
            raise FlowControl(f"members of all groups have {LEASES_MAX} leases here (LEASES_MAX)")

    @contextmanager
    def _counting(self, queue: QueueLeases) -> Iterator[None]:
        """Around what changes the leases of a queue."""
        before = len(queue)
        yield
        self.lease_count += len(queue) - before

    def next_number(self, epoch: int) -> int:
        """The number of the next lease that the writer of this epoch gives."""
        self._last_number = max(self._last_number, epoch << EPOCH_SHIFT) + 1
        return self._last_number

    def give(self, group: str, key: QueueKey, given: Given) -> Lease:
        """Put messages into a lease."""
        queue = self._groups[group][key]
        with self._counting(queue):
            lease = queue.give(given)
        self._note(group, key).given.append(given)
        return lease

    def finish(self, group: str, key: QueueKey, done: Done) -> int:
        """Messages of a lease are done; how many were not before."""
        queue = self._groups[group][key]
        with self._counting(queue):
            count = queue.finish(done)
        if count:
            ends = self._note(group, key).done
            if queue.find(done.number) is None:
                ends[done.number] = Done(done.number)
            else:
                before = ends.get(done.number)
                ends[done.number] = done if before is None else _joined(before, done)
        return count

    def skip(self, group: str, key: QueueKey, next_offset: int) -> None:
        """The group wants no message before ``next_offset`` that is in no lease."""
        queue = self._groups[group][key]
        if next_offset > queue.next_offset:
            queue.skip_to(next_offset)
            self._note(group, key)

    def _note(self, group: str, key: QueueKey) -> _Unwritten:
        return self._unwritten.setdefault((group, key), _Unwritten())

    # --- the state log ---

    @property
    def has_unwritten(self) -> bool:
        """Whether the state log does not know all of it."""
        return bool(self._unwritten)

    def unwritten(self, generation_of: GenerationOf) -> list[QueueMoved]:
        """What the state log does not know. Call :meth:`written` with each part that is in the log,
        in their order.
        """
        moved: list[QueueMoved] = []
        for (group, key), some in list(self._unwritten.items()):
            queue, generation = self.find(group, key), generation_of(key)
            if queue is None or not generation:
                del self._unwritten[group, key]
                continue
            done = tuple(some.done.values())
            moved += _parts(group, key, generation, queue.next_offset, some.given, done)
        return moved

    def written(self, moved: QueueMoved) -> None:
        """The state log has this part."""
        some = self._unwritten[moved.group, moved.key]
        del some.given[: len(moved.given)]
        for done in moved.done:
            del some.done[done.number]
        if moved.is_last:
            assert some == _Unwritten(), moved
            del self._unwritten[moved.group, moved.key]

    def restore(self, moved: QueueMoved) -> None:
        """Takes what the state log has. Leases that are known already change nothing."""
        queue = self._groups.setdefault(moved.group, {}).get(moved.key)
        if queue is None:
            queue = self._groups[moved.group][moved.key] = QueueLeases(0)
        with self._counting(queue):
            for given in moved.given:
                if given.number > queue.last_number:
                    queue.give(given)
                    self._last_number = max(self._last_number, given.number)
            for done in moved.done:
                queue.finish(done)
        queue.skip_to(moved.next_offset)

    def as_moved(self, generation_of: GenerationOf) -> Iterator[QueueMoved]:
        """All leases, as if they had just been given; in order of group and queue."""
        for group in sorted(self._groups):
            for key, queue in sorted(self._groups[group].items(), key=lambda pair: pair[0]):
                if generation := generation_of(key):
                    given = [
                        Given(one.number, 0, one.first, one.mask, one.visible_ms, one.attempt)
                        for one in queue
                    ]
                    yield from _parts(group, key, generation, queue.next_offset, given, ())

    # --- groups that receive no more, and again ---

    def leave(self, group: str) -> None:
        """The group pulls from now on. What is done behind messages that are not stays known: see
        :meth:`left_over`.
        """
        for key, queue in self.of_group(group).items():
            if not queue.open_count:
                self.forget(group, key)

    def left_over(self, group: str, key: QueueKey, offset: int) -> tuple[int, int]:
        """As :meth:`QueueLeases.next_open`, for a group that pulls."""
        queue = self.find(group, key)
        return (offset, 0) if queue is None else queue.next_open(offset)

    def pulled(self, group: str, key: QueueKey, offset: int) -> None:
        """A group that pulls has done everything before ``offset``."""
        queue = self.find(group, key)
        if queue is not None and offset >= queue.next_offset:
            self.forget(group, key)

    def as_waiting(
        self, group: str, key: QueueKey, generation: int, offset: int, epoch: int
    ) -> QueueMoved:
        """What is left over from ``offset`` on, for a group that receives again: messages that
        wait, in leases of this epoch.
        """
        queue = self._groups[group][key]
        given: list[Given] = []
        for lease in sorted(queue, key=lambda one: one.first):
            first, mask = lease.first, shifted(lease.mask, lease.first, max(lease.first, offset))
            if mask:
                first, mask = trimmed(max(first, offset), mask)
                given.append(Given(self.next_number(epoch), 0, first, mask, 0, 0))
        return QueueMoved(group, key, generation, max(offset, queue.next_offset), tuple(given))

    # --- what ends leases otherwise ---

    def cut(self, starts: Mapping[str, Sequence[int]]) -> None:
        """A new generation begins in these topics at these offsets, by queue id."""
        for queues in self._groups.values():
            for (topic, queue_id), queue in queues.items():
                if topic in starts:
                    with self._counting(queue):
                        queue.cut(starts[topic][queue_id])

    def forget(self, group: str, key: QueueKey) -> None:
        """The group goes on elsewhere in the queue."""
        queues = self._groups.get(group, {})
        if (queue := queues.pop(key, None)) is not None:
            self.lease_count -= len(queue)
        self._unwritten.pop((group, key), None)
        if not queues:
            self._groups.pop(group, None)

    def validate(self) -> None:
        """Asserts the invariants; for tests."""
        queues = [queue for some in self._groups.values() for queue in some.values()]
        assert self.lease_count == sum(map(len, queues))
        for queue in queues:
            queue.validate()

    def forget_group(self, group: str) -> None:
        for key in self.of_group(group):
            self.forget(group, key)

    def forget_topic(self, topic: str) -> None:
        for group in self.groups():
            for key in self.of_group(group):
                if key[0] == topic:
                    self.forget(group, key)


def _joined(before: Done, more: Done) -> Done:
    if not before.mask:
        return before
    first = min(before.first, more.first)
    mask = before.mask << (before.first - first) | more.mask << (more.first - first)
    return Done(before.number, first, mask)


def _parts(
    group: str,
    key: QueueKey,
    generation: int,
    next_offset: int,
    given: Sequence[Given],
    done: Sequence[Done],
) -> Iterator[QueueMoved]:
    """In parts of a bounded size: first the leases, then what is done.

    A crash may come between two records of the log, and a message that is in no lease counts as
    done. So leases that lie between each other stay together, and only the last part says how far
    the group has looked.
    """
    first = size = end = 0
    for place, one in enumerate(given):
        if size > CHANGE_BYTES and (one.source or one.first >= end):
            yield QueueMoved(group, key, generation, 0, tuple(given[first:place]))
            first, size = place, 0
        size += _entry_bytes(one.mask)
        if not one.source:
            end = max(end, one.first + one.mask.bit_length())
    ends_first = 0
    leases = tuple(given[first:])
    for place, ended in enumerate(done):
        if size > CHANGE_BYTES:
            yield QueueMoved(group, key, generation, 0, leases, tuple(done[ends_first:place]))
            leases, ends_first, size = (), place, 0
        size += _entry_bytes(ended.mask)
    yield QueueMoved(group, key, generation, next_offset, leases, tuple(done[ends_first:]))


def _entry_bytes(mask: int) -> int:
    """At most so many bytes has a lease in the state log."""
    return _ENTRY_BYTES + 2 * mask.bit_length()
