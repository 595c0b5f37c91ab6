"""What must hold for producers and consumer groups.

- Each message of a producer is stored once, each send-back makes one message, each delayed message
  is delivered once and not before its time.
- The messages of a producer that sends one batch after the other are in their order.
- What a group has committed is done by a listener, or was sent back, or an operator let the group
  pass it by.
- In order: a message goes to a listener only after the one before it in its queue is done, and only
  to the member that has the queue's newest lock, while no other believes to have it.
- A commit with an older lock or reset number is never kept.
- Locks, resets and positions of a new writer are those that the changes in its log tell.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from cometmq.errors import CometError
from cometmq.format import delayed, record
from cometmq.format.delayed import SCHEDULE_TOPIC
from cometmq.format.halves import OP_TOPIC
from cometmq.messaging.changes import (
    Change,
    OffsetsCommitted,
    OffsetsReset,
    QueuesLocked,
    QueuesUnlocked,
    decode,
)
from cometmq.messaging.locks import Grant
from cometmq.messaging.retry import Attempt, attempt_of, dlq_topic, retry_topic
from cometmq.messaging.state import CHANGE
from cometmq.model import DLQ_PREFIX, Position, QueueKey, QueueRef
from cometmq.replication.lease import Reason
from cometmq.replication.watermarks import REPLICATED
from services.broker.retry.retries import SendBackItem
from tests.sim.disk import Disk, Record
from tests.sim.member import CLOCK_SKEW_S_MAX, WALL_WRONG_S_MAX, Group
from tests.sim.topics import GROUPS, LEVELS, ORDERLY, RECEIVING
from tests.sim.world import Violation

if TYPE_CHECKING:
    from tests.sim.clients import Client
    from tests.sim.consumers import OrderlyConsumer
    from tests.sim.judge import Judge
    from tests.sim.writer import Writer

KEEPS_ALL = (Reason.FIRST, Reason.RESTART, Reason.HANDOVER)
EARLY_MS_MAX = 2 * round(WALL_WRONG_S_MAX * 1000) + 100


class Reset(NamedTuple):
    """``at``: the end of the log behind it, of that epoch."""

    number: int
    epoch: int
    at: int


class Origin(NamedTuple):
    """What a stored message was made from. ``unique_id``: of its producer, else empty."""

    unique_id: bytes
    source: int
    attempt: Attempt | None
    stored_ms: int  # by a right clock, or one that its writer could not know to be wrong
    epoch: int
    topic: str
    reset: str = ""  # the group that a change of the state resets


class Told(NamedTuple):
    """What the changes of a log tell."""

    positions: dict[tuple[str, QueueKey], Position]
    resets: dict[tuple[str, QueueKey], int]
    locks: dict[tuple[str, QueueKey], Grant]


class GroupJudge:
    """Part of the judge."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._world = judge.world
        self._done: dict[str, set[int]] = defaultdict(set)  # uids that a group needs no more
        self._granted: dict[QueueRef, dict[int, str]] = defaultdict(dict)
        self._resets: dict[tuple[str, QueueKey], list[Reset]] = defaultdict(list)
        self._origins: dict[int, Origin] = {}  # by uid
        self.orderly_streams: set[bytes] = set()  # of producers with one batch at a time
        self.consumers: list[OrderlyConsumer] = []  # that live

    @property
    def _group(self) -> Group:
        return self._judge.group

    # --- listeners --------------------------------------------------------------------------------

    def done(self, consumer_group: str, found: Record) -> None:
        self._done[consumer_group].add(found.uid)
        self._world.counts[f"done: {consumer_group}"] += 1

    def begins(
        self, client: OrderlyConsumer, ref: QueueRef, found: Record, before: int, number: int
    ) -> None:
        """A listener in order gets a message."""
        is_durable = self._is_durable(ref)
        if is_durable or self._has_one_history():
            self._world.counts["messages in order"] += 1
            if before and before not in self._done[ORDERLY]:
                raise Violation(f"{client.name} gets {found.number} of {ref} too early")
        if not is_durable:
            return
        self._check_newest(ref, number, client.name)
        for other in self.consumers:
            if other is not client and other.alive and other.believes(ref):
                raise Violation(f"{client.name} and {other.name} have {ref}")

    def granted(self, client: Client, answers: Mapping[QueueRef, int | CometError]) -> None:
        """A client got locks."""
        for ref, answer in answers.items():
            if isinstance(answer, CometError):
                continue
            numbers = self._granted[ref]
            if answer not in numbers and numbers:
                self._world.counts["locks that went to another number"] += 1
            owner = numbers.setdefault(answer, client.name)
            if owner != client.name:
                raise Violation(f"{client.name} gets lock {answer} of {ref}, which {owner} has")

    def _check_newest(self, ref: QueueRef, number: int, who: str) -> None:
        newest = max(self._granted[ref], default=0)
        if number < newest:
            raise Violation(f"{who} goes on in {ref} with lock {number}, the newest is {newest}")

    def _is_durable(self, ref: QueueRef) -> bool:
        """Whether no grant of this queue can have been lost."""
        index = self._group.indexes[ref.topic, ref.queue_id]
        return bool(self._group.rules.demands[index] & REPLICATED) and not self._judge.lossy_since

    def _has_one_history(self) -> bool:
        """Whether no fail-over can have taken anything back."""
        return all(begun.reason in KEEPS_ALL for begun in self._judge.begun_epochs.values())

    # --- what a writer keeps ----------------------------------------------------------------------

    def reset(
        self, writer: Writer, consumer_group: str, key: QueueKey, offset: int, number: int
    ) -> None:
        """An operator lets a group go on at ``offset``: it need not do what lies before."""
        self._world.counts["resets"] += 1
        units = writer.disk.queues[self._group.indexes[key]]
        self._done[consumer_group].update(one.uid for one in units[:offset])
        self._resets[consumer_group, key].append(Reset(number, writer.epoch, writer.disk.end))

    def kept(
        self, writer: Writer, consumer_group: str, key: QueueKey, lock_number: int, number: int
    ) -> None:
        """A writer keeps a commit with these numbers."""
        for reset in self._resets[consumer_group, key]:
            if reset.epoch == writer.epoch and reset.number > number:
                raise Violation(f"{consumer_group} commits {key} with {number} after {reset}")
        ref = next(ref for ref in self._group.refs if (ref.topic, ref.queue_id) == key)
        if lock_number and self._is_durable(ref):
            self._check_newest(ref, lock_number, "a commit")

    def taken_back(self, writer: Writer, consumer_group: str, item: SendBackItem) -> None:
        """A writer says that it has taken a message back. What is made from it may only be lost
        where what was acknowledged may.
        """
        disk = writer.disk
        source = disk.queues[self._group.indexes[item.topic, item.queue_id]][item.position.offset]
        self._done[consumer_group].add(source.uid)
        made = (self._origin(one).attempt for one in self._made_by_groups(disk))
        if not any(one and one[:2] == (consumer_group, source.start) for one in made):
            raise Violation(f"{writer.disk.replica_id} has nothing of {source.start}, taken back")

    def _made_by_groups(self, disk: Disk) -> Iterator[Record]:
        """Messages that wait for another try, and dead letters."""
        for (topic, _), index in self._group.indexes.items():
            if topic == SCHEDULE_TOPIC or topic.startswith(DLQ_PREFIX):
                yield from disk.queues[index]

    # --- what a log tells -------------------------------------------------------------------------

    def begun(self, writer: Writer) -> None:
        """A writer serves."""
        self._check_state(writer)
        self.check_log(writer)

    def check_log(self, writer: Writer) -> None:
        origins = [self._origin(one) for one in writer.disk.records]
        _check_once("message stored", (one.unique_id for one in origins if one.unique_id))
        _check_once("send-back", _attempts(origins))
        self._check_order(writer)
        self._check_delays(writer, origins)
        self._check_consumed(writer, origins)

    def _check_order(self, writer: Writer) -> None:
        for units in writer.disk.queues:
            last: dict[bytes, bytes] = {}
            for one in units:
                unique_id = self._origin(one).unique_id
                stream = unique_id[:26]
                if stream in self.orderly_streams:
                    if unique_id < last.get(stream, b""):
                        raise Violation(f"{unique_id!r} comes behind {last[stream]!r}")
                    last[stream] = unique_id

    def _check_delays(self, writer: Writer, origins: list[Origin]) -> None:
        delivered = {
            one.source: one
            for one in origins
            if one.source and not one.attempt and one.topic != SCHEDULE_TOPIC
        }
        relayed = [one.source for one in origins if one.source in delivered and not one.attempt]
        _check_once("delayed message delivered", relayed)
        for level in range(1, LEVELS + 1):
            units = writer.disk.queues[self._group.indexes[SCHEDULE_TOPIC, level - 1]]
            reached = writer.delays.levels[level].offset
            for one in units:
                made = delivered.get(one.start)
                if (made is not None) != (one.number <= reached):
                    raise Violation(f"level {level} reached {reached}: {one.number} is {made}")
                if made is None:
                    continue
                due_ms = self._judge.messages.stored_ms(one) + delayed.delay_ms(level)
                # A clock that is wrong by less is not corrected. What the writer before had counted
                # from a clock that was behind, the next one, with a right clock, delivers earlier.
                early_ms_max = EARLY_MS_MAX
                if self._judge.messages.is_clock_wrong:
                    early_ms_max += round(CLOCK_SKEW_S_MAX * 1000)
                if made.epoch != one.epoch:
                    early_ms_max += self._judge.messages.behind_ms(one)
                if made.stored_ms < due_ms - early_ms_max:
                    raise Violation(f"level {level} delivered {due_ms - made.stored_ms} ms early")

    def _check_consumed(self, writer: Writer, origins: list[Origin]) -> None:
        taken = {
            (one.attempt.group, one.attempt.source) for one in origins if one.attempt is not None
        }
        for consumer_group in GROUPS:
            for index, offset in self.consumed(writer, consumer_group):
                for one in writer.disk.queues[index][:offset]:
                    done = one.uid in self._done[consumer_group]
                    if not done and (consumer_group, one.start) not in taken:
                        raise Violation(
                            f"{consumer_group} committed {offset} of queue {index}, and has not "
                            f"done {one.number - 1}"
                        )

    def consumed(self, writer: Writer, consumer_group: str) -> Iterator[tuple[int, int]]:
        """How far a group is in each queue that it reads, by index."""
        state = writer.broker.state
        for key, index in self._group.indexes.items():
            is_users = index < self._group.rules.topics.count
            own = consumer_group != ORDERLY and key[0] == retry_topic(consumer_group)
            if is_users or own:
                position = state.offsets.get(consumer_group, key)
                if position is not None:
                    yield index, state.generations.of(*key).settle(position).offset
                else:
                    yield index, 0

    def is_drained(self, writer: Writer) -> bool:
        """Every group is at the end of every queue, and nothing waits for its time."""
        return all(
            offset == len(writer.disk.queues[index])
            for consumer_group in GROUPS
            for index, offset in self.consumed(writer, consumer_group)
        ) and all(
            level.offset == len(writer.disk.queues[self._group.indexes[SCHEDULE_TOPIC, number - 1]])
            for number, level in writer.delays
            if number <= LEVELS
        )

    def check_end(self, writer: Writer) -> None:
        """After peace: the same once more, and what has become of all."""
        self.check_log(writer)
        for consumer_group in GROUPS:
            index = self._group.indexes[dlq_topic(consumer_group), 0]
            self._world.counts["dead letters in the end"] += len(writer.disk.queues[index])

    def _check_state(self, writer: Writer) -> None:
        """The tables of a new writer against the changes in its log, without its snapshots."""
        told, state = _told(writer.disk), writer.broker.state
        positions = {
            (one.group, (one.topic, one.queue_id)): one.position
            for one in state.offsets
            if one.group != RECEIVING  # its leases say where it is
        }
        resets = {(group, key): number for group, number, keys in state.resets for key in keys}
        locks = {(run.group, key): run.grant for run in state.locks for key in _keys(run.queues)}
        if Told(positions, resets, locks) != told:
            raise Violation(
                f"the state of {writer.disk.replica_id} is {positions} {resets} {locks}, the log "
                f"tells {told}"
            )

    def _origin(self, stored: Record) -> Origin:
        origin = self._origins.get(stored.uid)
        if origin is None:
            found = record.decode(stored.data)
            source = found.prepared_offset
            is_sent = not source and stored.queue >= 0 and found.topic != OP_TOPIC
            unique_id = found.body if is_sent else b""
            attempt = attempt_of(found) if source else None
            reset = _reset_of(found) if stored.queue < 0 else ""
            messages = self._judge.messages
            stored_ms = messages.stored_ms(stored) + messages.ahead_ms(stored)
            origin = Origin(unique_id, source, attempt, stored_ms, stored.epoch, found.topic, reset)
            self._origins[stored.uid] = origin
        return origin


def _check_once(what: str, found: Iterator[object] | list[int]) -> None:
    times = Counter(found)
    twice = [one for one, count in times.items() if count > 1]
    if twice:
        raise Violation(f"{what} {times[twice[0]]} times: {twice[0]}")


def _reset_of(state_record: record.Record) -> str:
    for change in decode(state_record.body) if state_record.tag == CHANGE else ():
        if isinstance(change, OffsetsReset):
            return change.commits[0].group
    return ""


def _attempts(origins: list[Origin]) -> Iterator[tuple[Attempt, int]]:
    """Each send-back, and how often its group had been reset before: then it begins again."""
    resets: Counter[str] = Counter()
    for one in origins:
        resets[one.reset] += 1
        if one.attempt is not None:
            yield one.attempt, resets[one.attempt.group]


def _told(disk: Disk) -> Told:
    told = Told({}, {}, {})
    for stored in disk.states:
        found = record.decode(stored.data)
        if found.tag == CHANGE:
            for change in decode(found.body):
                _tell(told, change)
    return told


def _tell(told: Told, change: Change) -> None:
    match change:
        case OffsetsCommitted(commits):
            for one in commits:
                key = one.group, (one.topic, one.queue_id)
                told.positions[key] = max(told.positions.get(key, one.position), one.position)
        case OffsetsReset(number, commits):
            for one in commits:
                key = one.group, (one.topic, one.queue_id)
                told.positions[key] = one.position
                told.resets[key] = number
        case QueuesLocked(run):
            told.locks.update({(run.group, key): run.grant for key in _keys(run.queues)})
        case QueuesUnlocked(group, queues):
            for queue in _keys(queues):
                told.locks.pop((group, queue), None)


def _keys(queues: Mapping[str, tuple[int, ...]]) -> Iterator[QueueKey]:
    for topic, queue_ids in queues.items():
        for queue_id in queue_ids:
            yield topic, queue_id
