"""What the state log says, as ``docs/format/state.md`` tells it: a part of the independent reader
(:mod:`tests.support.independent.reader`), with the standard library alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.support.independent.changes import (
    COPY_BEGINS,
    HISTORY_PAIRS_MAX,
    STATE_QUEUE,
    TOPIC_KINDS,
    Json,
    changes_of,
)
from tests.support.independent.record import Message, QueueKey, expect


def raise_history(history: list[tuple[int, int]], generation: int, start: int) -> None:
    """A generation without messages gives way to the next one, but the first pair stays; in a
    history that is too long the second and the third pair become one.
    """
    if len(history) > 1 and history[-1][1] == start:
        history.pop()
    history.append((generation, start))
    if len(history) > HISTORY_PAIRS_MAX:
        history[1:3] = [(history[2][0], history[1][1])]


class Commit(NamedTuple):
    generation: int
    offset: int


@dataclass
class Topic:
    """``histories``: for each queue id the pairs (generation, start), oldest first."""

    read_queues: int
    write_queues: int
    permission: int
    flush_mode: int
    reserve_time_ms: int = 0
    histories: list[list[tuple[int, int]]] = field(default_factory=list)


@dataclass
class State:
    """What the state log says: topics, groups, committed offsets by (group, topic, queue id)."""

    topics: dict[str, Topic] = field(default_factory=dict)
    groups: dict[str, Json] = field(default_factory=dict)
    offsets: dict[tuple[str, str, int], Commit] = field(default_factory=dict)
    delays: dict[int, int] = field(default_factory=dict)
    generation: int = 0  # the highest ever given
    topic_changes: int = field(default=0, compare=False)  # applied so far to the topics

    def apply(self, changes: Iterable[Json], place: object) -> None:
        for change in changes:
            fields = dict(change)
            kind = fields.pop("k")
            method = getattr(self, "_" + kind.replace("-", "_"))
            method(fields, place)
            self.topic_changes += kind in TOPIC_KINDS

    def _give(self, generation: int, place: object) -> None:
        expect(generation > self.generation, place, f"generation {generation} was given before")
        self.generation = generation

    def _topic(self, change: Json, place: object) -> None:
        read, write, permission, flush = (change[name] for name in "rwpf")
        known = self.topics.get(change["n"])
        histories = known.histories if known else []
        new = max(read, write) - len(histories)
        if new <= 0:
            self.generation = max(self.generation, change["g"])
        else:
            self._give(change["g"], place)
            histories = [*histories, *([(change["g"], 0)] for _ in range(new))]
        reserve_time_ms = known.reserve_time_ms if known else 0
        settings = (read, write, permission, flush, reserve_time_ms)
        self.topics[change["n"]] = Topic(*settings, histories)

    def _topic_reserve(self, change: Json, place: object) -> None:
        expect(change["n"] in self.topics, place, f"topic {change['n']} is not there")
        self.topics[change["n"]].reserve_time_ms = change["t"]

    def _topic_drop(self, change: Json, place: object) -> None:
        expect(change["n"] in self.topics, place, f"topic {change['n']} is not there to be deleted")
        del self.topics[change["n"]]
        self.offsets = {key: kept for key, kept in self.offsets.items() if key[1] != change["n"]}

    def _topic_copy(self, change: Json, place: object) -> None:
        expect(change["n"] not in self.topics, place, f"topic {change['n']} is there already")
        read, write, permission, flush = (change[name] for name in "rwpf")
        histories = [[(one, start) for one, start in history] for history in change["h"]]
        expect(len(histories) >= max(read, write), place, "a queue without a history")
        self.topics[change["n"]] = Topic(read, write, permission, flush, 0, histories)

    def _queues(self, change: Json, place: object) -> None:
        """Tells of queues, not of the tables."""
        histories = self.topics[change["n"]].histories if change["n"] in self.topics else []
        expect(len(change["o"]) == len(histories), place, f"not each queue of {change['n']}")

    def _raise(self, change: Json, place: object) -> None:
        """Several changes may raise to the same generation, each topic in one of them."""
        generation = change["g"]
        expect(generation >= self.generation, place, f"generation {generation} was given before")
        self.generation = generation
        for name, maxima in change["s"].items():
            histories = self.topics[name].histories if name in self.topics else []
            expect(len(histories) == len(maxima), place, f"not each queue of {name}")
            for history, maximum in zip(histories, maxima, strict=True):
                expect(history[-1][0] < generation, place, f"{name}: {generation} does not rise")
                expect(history[-1][1] <= maximum, place, f"{name}: the start {maximum} falls")
                raise_history(history, generation, maximum)

    def _counter(self, change: Json, place: object) -> None:
        expect(change["g"] >= self.generation, place, "the counter goes back")
        self.generation = change["g"]

    def _group(self, change: Json, _: object) -> None:
        self.groups[change.pop("n")] = change

    def _group_drop(self, change: Json, place: object) -> None:
        expect(change["n"] in self.groups, place, f"group {change['n']} is not there to be deleted")
        del self.groups[change["n"]]
        self.offsets = {key: kept for key, kept in self.offsets.items() if key[0] != change["n"]}

    def _offsets(self, change: Json, _: object) -> None:
        for group, topics in change["o"].items():
            for topic, commits in topics.items():
                for queue_id, generation, offset in commits:
                    self._commit((group, topic, queue_id), Commit(generation, offset))

    def _delays(self, change: Json, _: object) -> None:
        self.delays = {level: offset for level, offset in change["o"]}

    def _commit(self, key: tuple[str, str, int], commit: Commit) -> None:
        _, topic, queue_id = key
        histories = self.topics[topic].histories if topic in self.topics else []
        if queue_id < len(histories) and commit.generation >= histories[queue_id][0][0]:
            self.offsets[key] = max(self.offsets.get(key, commit), commit)

    def resumes_at(self, key: tuple[str, str, int]) -> int:
        """Where the holder of a committed position goes on: there, or at the start of the next
        generation when that is lower.
        """
        commit = self.offsets[key]
        history = self.topics[key[1]].histories[key[2]]
        later = [start for generation, start in history if generation > commit.generation]
        return min([commit.offset, *later])


def rebuild(records: Sequence[Message]) -> State | None:
    """The state after ``records``, read as the document says: back to the newest complete copy,
    then forward. None when there is neither a copy nor the beginning of the state queue.
    """
    first, last = _newest_copy([record.tag for record in records])
    if first is None:
        if records and records[0].queue_offset:
            return None
        first, last = 0, -1
    state = State()
    younger: list[Message] = []
    for number, record in enumerate(records[first:], first):
        if record.tag == "CHANGE" and number <= last:
            younger.append(record)
        elif record.tag == "CHANGE" or number <= last:
            state.apply(changes_of(record), record.log_offset)
        if number == last:
            for change in younger:
                state.apply(changes_of(change), change.log_offset)
    return state


def _newest_copy(tags: Sequence[str]) -> tuple[int | None, int]:
    """Where the newest complete copy begins and ends."""
    last = None
    for number in reversed(range(len(tags))):
        if tags[number] == "COPY_ONLY":
            return number, number
        if tags[number] == "COPY_LAST":
            last = number
        if tags[number] == "COPY_FIRST" and last is not None:
            return number, last
        if tags[number] == "COPY_FIRST":
            last = None
    return None, -1


def expect_copy(replicated: State, running: State, place: object) -> None:
    """A state snapshot equals the writer's state at its instant. Commits take effect before they
    are written to the log, so that a copy may know later ones.
    """
    expect(replicated.topics == running.topics, place, "the copy has other topics than the changes")
    expect(replicated.groups == running.groups, place, "the copy has other groups than the changes")
    same = replicated.generation == running.generation
    expect(same, place, f"counter {replicated.generation}, not {running.generation}")
    for key, commit in running.offsets.items():
        kept = replicated.offsets.get(key, Commit(-1, -1))
        expect(kept >= commit, place, f"{key}: {kept} in the copy, {commit} before it")


class StateScan:
    """Follows the state records in the order of the log and checks each against what came before;
    ``next_offsets`` are the queues' next offsets at this place of the log; ``whole``: all that the
    log ever had is there.
    """

    def __init__(self, next_offsets: Mapping[QueueKey, int], whole: bool) -> None:
        self.records: list[Message] = []
        self.counted: dict[QueueKey, int] = {}  # of queues whose messages are all gone
        self._next_offsets = next_offsets
        self.whole = whole
        self._running: State | None = None
        self._foreign = False  # another program wrote, and no copy has come since
        self._copied: State | None = None
        self._before: State | None = None  # the state at the beginning of the copy
        self._raised: State | None = None  # the same after an unclean start

    def add(self, record: Message, epoch: int) -> list[str]:
        """The names of topics deleted here. ``epoch``: that the record begins; 0 = none."""
        place = f"state record at {record.log_offset}"
        if not record.queue_offset and not self._foreign:
            self._running = State()
        self.records.append(record)
        changes = changes_of(record)
        for change in changes:
            if change["k"] == "queues":
                self._count(change["n"], change["o"], place)
        if record.tag in COPY_BEGINS:
            self._copied, self._before = State(), copy.deepcopy(self._running)
            self._raised = self._raise(epoch) if epoch else None
        if record.tag != "CHANGE":
            self._copy(record.tag, changes, place)
            return []
        for change in changes:
            if change["k"] == "raise":
                self._expect_maxima(change["s"], place)
        if self._running:
            self._running.apply(changes, place)
        return [change["n"] for change in changes if change["k"] == "topic-drop"]

    def _copy(self, tag: str, changes: list[Json], place: str) -> None:
        if self._copied is None:
            return  # the copy's beginning went with older log files
        self._copied.apply(changes, place)
        if tag in ("COPY_LAST", "COPY_ONLY"):
            if self._raised and self._raised.generation == self._copied.generation:
                self._before = self._raised
            if self._before:
                expect_copy(self._copied, self._before, place)
            self._copied = None
            self._running = rebuild(self.records)

    def _raise(self, epoch: int) -> State | None:
        """The state as the writer has it after an unclean start: all queues begin a generation at
        their next offset, and the copy that begins the epoch holds that already.
        """
        raised = copy.deepcopy(self._running)
        if raised:
            raised.generation = max(raised.generation, epoch << 32) + 1
            for name, topic in raised.topics.items():
                for queue_id, history in enumerate(topic.histories):
                    raise_history(history, raised.generation, self._end_of((name, queue_id)))
        return raised

    def _end_of(self, key: QueueKey) -> int:
        return self._next_offsets.get(key, self.counted.get(key, 0))

    def _expect_maxima(self, raised: Mapping[str, Sequence[int]], place: str) -> None:
        for topic, maxima in raised.items():
            here = [self._end_of((topic, number)) for number in range(len(maxima))]
            expect(here == list(maxima), place, f"raises {topic} at {maxima}, which ends at {here}")

    def _count(self, topic: str, offsets: Sequence[int], place: str) -> None:
        """How far queues have counted; of some the log may have no message any more."""
        for queue_id, told in enumerate(offsets):
            key = (topic, queue_id)
            here = self._next_offsets.get(key, self.counted.get(key))
            if here is None and not self.whole:
                here = told
            expect(told == (here or 0), place, f"{key} is at {here or 0}, not {told}")
            if key not in self._next_offsets and told:
                self.counted[key] = told

    def forget(self) -> None:
        """Another program writes: only the next copy tells of topics again."""
        self._running = self._copied = None
        self._foreign = True

    def expect_topic(self, message: Message) -> None:
        """Every topic but this one is made before its first record."""
        known = self._running is None or message.topic in self._running.topics
        place = message.log_offset
        expect(known or message.topic == STATE_QUEUE[0], place, "a record of a topic that is not")

    def expect_agreement(self) -> None:
        """Reading back from the end gives what following from the beginning has given."""
        same = not self.records or rebuild(self.records) == self._running
        expect(same, "state", "two ways of reading differ")
