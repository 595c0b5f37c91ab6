"""What the state log says, as ``docs/format/state.md`` has it."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from tests.support.independent.record import INT32_MAX, Message, QueueKey, expect

Json = dict[str, Any]

NAME = re.compile(r"[%|a-zA-Z0-9_-]{1,255}")
STATE_QUEUE: QueueKey = ("rmq_sys_cometmq_state", 0)
PART_BYTES_MAX = 256 * 1024
HISTORY_PAIRS_MAX = 16


def _number(low: int, high: int) -> Callable[[object], bool]:
    return lambda value: type(value) is int and low <= value <= high


def _is_name(value: object) -> bool:
    return isinstance(value, str) and NAME.fullmatch(value) is not None


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value.isprintable()


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _is_type(value: object) -> bool:
    return value in {"UNSPECIFIED", "NORMAL", "FIFO", "DELAY", "TRANSACTION", "MIXED"}


def _are_attributes(value: object) -> bool:
    """In order of their names, few and short, without what JSON escapes."""
    if not isinstance(value, dict) or len(value) > 32 or list(value) != sorted(value):
        return False
    texts = [text for pair in value.items() for text in pair]
    small = all(isinstance(text, str) for text in texts) and sum(map(len, texts)) <= 4096
    return small and re.fullmatch(r"[ !#-\[\]-~]*", "".join(texts)) is not None


def _is_history(value: object) -> bool:
    """1 to 16 pairs; the first start is 0, generations rise, starts never fall."""
    if not isinstance(value, list) or not 1 <= len(value) <= HISTORY_PAIRS_MAX:
        return False
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        return False
    generations, starts = zip(*value, strict=True)
    if not all(map(_generation, generations)) or not all(map(_offset, starts)):
        return False
    rising = all(low < high for low, high in pairwise(generations))
    return rising and starts[0] == 0 and list(starts) == sorted(starts)


def _is_list_of(check: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _is_map_to(check: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: (
        isinstance(value, dict) and all(map(_is_name, value)) and all(map(check, value.values()))
    )


_generation = _number(1, 2**64 - 1)
_offset = _number(0, 2**63 - 1)
_count = _offset
_COMMIT = (_number(0, INT32_MAX), _number(0, 2**64 - 1), _offset)  # queue id, generation, offset


def _is_commit(value: object) -> bool:
    if not isinstance(value, list) or len(value) != len(_COMMIT):
        return False
    return all(check(field) for check, field in zip(_COMMIT, value, strict=True))


def _is_stream_name(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9A-F]{26}", value) is not None


def _is_stream(value: object) -> bool:
    """[intervals, runs]: intervals rise and never touch; runs lie inside of them."""
    if not isinstance(value, list) or len(value) != 2 or any(len(some) > 64 for some in value):
        return False
    intervals, runs = value
    bounds = [bound for interval in intervals for bound in interval]
    in_order = bounds == sorted(set(bounds)) and all(len(pair) == 2 for pair in intervals)
    inside = all(
        any(low <= first and first + count <= end for low, end in intervals)
        for first, count, _ in runs
    )
    return in_order and inside and all(map(_count, bounds))


def _is_counts(value: object, length: int) -> bool:
    return isinstance(value, list) and len(value) == length and all(map(_count, value))


_SETTINGS = {
    "n": _is_name,
    "r": _number(0, 1024),  # 0, and no permission, only of a topic taken over from RocketMQ
    "w": _number(0, 1024),
    "p": lambda value: type(value) is int and value in (0, 2, 4, 6),
    "f": lambda value: type(value) is int and value in (1, 2),
    "y": lambda value: type(value) is int and value in (2, 3),
}
# Fields that may be left out: an asynchronous topic says no replication mode.
OPTIONAL = {
    "topic": {"y"},
    "topic-copy": {"y"},
    "streams": {"x"},
    "resent": {"n"},
    "timer": {"x"},
    "group-policy": {"rs", "re", "q", "d", "f", "a"},
    "quota": {"w", "r"},
}


# Kind → field → is it of the right type; fields in the order in which they must stand.
def _is_attempts(value: object) -> bool:
    match value:
        case [str(group), int(times), list(sources)]:
            return _is_name(group) and times > 0 and _is_list_of(_offset)(sources)
    return False


def _is_pop(value: object) -> bool:
    """[queue id, generation, next offset, leases, ends]; a set of messages is an odd number of
    lengths.
    """
    match value:
        case [int(queue_id), generation, next_offset, list(given), list(done)]:
            numbers = _is_list_of(_is_list_of(_offset))
            return (
                0 <= queue_id <= INT32_MAX
                and _generation(generation)
                and _offset(next_offset)
                and numbers(given)
                and all(len(one) >= 6 and len(one) % 2 == 0 and min(one[5:]) for one in given)
                and numbers(done)
                and all(len(one) == 1 or len(one) % 2 for one in done)
            )
    return False


def _messages(first: int, lengths: Sequence[int]) -> set[int]:
    found: set[int] = set()
    for number, length in enumerate(lengths):
        found |= set(range(first, first + length)) if number % 2 == 0 else set()
        first += length
    return found


KINDS: Mapping[str, Mapping[str, Callable[[object], bool]]] = {
    "topic": {**_SETTINGS, "g": _generation},
    "topic-reserve": {"n": _is_name, "t": _count},
    "topic-type": {"n": _is_name, "t": _is_type, "o": _is_bool, "a": _are_attributes},
    "topic-quota": {"n": _is_name, "q": lambda value: _is_counts(value, 2)},
    "quota": {
        "s": lambda value: value in ("address", "topic"),
        "n": _is_text,
        "w": lambda value: _is_counts(value, 2),
        "r": lambda value: _is_counts(value, 2),
    },
    "topic-drop": {"n": _is_name},
    "topic-copy": {**_SETTINGS, "h": _is_list_of(_is_history)},
    "queues": {"n": _is_name, "o": _is_list_of(_offset)},
    "raise": {"g": _generation, "s": _is_map_to(_is_list_of(_offset))},
    "counter": {"g": _number(0, 2**64 - 1)},
    "kinds": {"n": _is_list_of(_is_name)},
    "group": {
        "n": _is_name,
        **dict.fromkeys(("c", "m", "b"), _is_bool),
        **dict.fromkeys(("rq", "rt", "i", "s"), _count),
        "y": _is_bool,
    },
    "group-policy": {
        "n": _is_name,
        "o": _is_bool,
        "t": _count,
        "m": lambda value: type(value) is int and value in (1, 2),
        "rs": lambda value: any(_is_counts(value, length) for length in range(1, 65)),
        "re": lambda value: _is_counts(value, 3),
        "q": lambda value: _is_counts(value, 2) and value != [0, 0],
        "d": _number(1, 2**63 - 1),
        "f": _number(1, 2**63 - 1),
        "a": lambda value: (
            isinstance(value, dict)
            and 1 <= len(value) <= 64
            and all(map(_is_text, [*value, *value.values()]))
        ),
    },
    "group-drop": {"n": _is_name},
    "offsets": {"o": _is_map_to(_is_map_to(_is_list_of(_is_commit)))},
    "reset": {"r": _number(1, 2**63 - 1), "o": _is_map_to(_is_map_to(_is_list_of(_is_commit)))},
    "group-leave": {"n": _is_name, "t": _is_name},
    "delays": {"o": _is_list_of(_is_list_of(_offset))},
    "halves": {"h": _offset, "o": _offset, "c": _is_list_of(_is_list_of(_offset))},
    "attempts": {"a": _is_list_of(_is_attempts)},
    "resent": {
        "t": _is_name,
        "q": _count,
        "o": _is_list_of(_is_list_of(_offset)),
        "n": _is_name,
    },
    "locks": {"n": _is_name, "c": _is_text, "l": _offset, "q": _is_map_to(_is_list_of(_count))},
    "unlocks": {"n": _is_name, "q": _is_map_to(_is_list_of(_count))},
    "pop": {"b": _offset, "t": _offset, "p": _is_map_to(_is_map_to(_is_list_of(_is_pop)))},
    "streams": {"s": _is_map_to(_is_stream), "x": _is_list_of(_is_stream_name)},
    "timer": {
        "w": lambda value: _is_counts(value, 2),
        "a": _count,
        "r": _count,
        "x": _is_list_of(lambda value: _is_counts(value, 2)),
    },
    "delay-drop": {"n": _is_name, "o": _is_list_of(lambda value: _is_counts(value, 2))},
    "half-drop": {"n": _is_name, "o": _number(1, 2**63 - 1)},
    "timer-drop": {"n": _is_name, "o": _number(1, 2**63 - 1)},
    "secret": {
        "t": _count,
        "s": lambda value: re.fullmatch("[0-9a-f]{64}", str(value)) is not None,
    },
}
TOPIC_KINDS = frozenset({"topic", "topic-reserve", "topic-type", "topic-drop", "topic-copy"})
COPY_BEGINS = frozenset({"COPY_FIRST", "COPY_ONLY"})
COPY_TAGS = frozenset({"COPY_FIRST", "COPY", "COPY_LAST", "COPY_ONLY"})


def changes_of(record: Message) -> list[Json]:
    """The changes of a state record, each of a known kind with all its fields in their order."""
    place = f"state record at {record.log_offset}"
    expect(record.tag == "CHANGE" or record.tag in COPY_TAGS, place, f"unknown tag {record.tag}")
    body = json.loads(record.body)
    plain = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
    expect(plain == record.body, place, "blanks, line ends or a number in another form")
    expect(list(body) == ["v", "c"] and body["v"] == 1, place, "not version 1")
    changes: list[Json] = body["c"]
    for change in changes:
        kind = str(change.get("k"))
        expect(kind in KINDS, place, f"unknown kind {kind}")
        left_out = OPTIONAL.get(kind, set()) - set(change)
        fields = [name for name in KINDS[kind] if name not in left_out]
        expect(list(change) == ["k", *fields], place, f"fields {list(change)} of {kind}")
        for name in fields:
            expect(KINDS[kind][name](change[name]), place, f"{kind}: {name} is {change[name]!r}")
    small = len(record.body) <= PART_BYTES_MAX or len(changes) == 1
    expect(small, place, f"{len(record.body)} bytes of several changes")
    return changes


def raise_history(history: list[tuple[int, int]], generation: int, start: int) -> None:
    """A generation without messages gives way to the next one, but the first pair stays; in a
    history that is too long the second and the third pair become one.
    """
    if len(history) > 1 and history[-1][1] == start:
        history.pop()
    history.append((generation, start))
    if len(history) > HISTORY_PAIRS_MAX:
        history[1:3] = [(history[2][0], history[1][1])]


@dataclass
class Pop:
    """A group that receives, in a queue: lease number → (visible again, attempt, messages)."""

    next_offset: int = 0
    leases: dict[int, tuple[int, int, set[int]]] = field(default_factory=dict)

    @property
    def floor(self) -> int:
        return min((min(one[2]) for one in self.leases.values()), default=self.next_offset)

    def take(self, number: int, messages: set[int]) -> None:
        if number in self.leases:
            self.leases[number][2].difference_update(messages)
            if not self.leases[number][2]:
                del self.leases[number]


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
    message_type: str = "UNSPECIFIED"
    is_ordered: bool = False
    attributes: Mapping[str, str] = field(default_factory=dict)
    histories: list[list[tuple[int, int]]] = field(default_factory=list)


@dataclass
class State:
    """What the state log says: topics, groups, committed offsets by (group, topic, queue id)."""

    topics: dict[str, Topic] = field(default_factory=dict)
    groups: dict[str, Json] = field(default_factory=dict)
    policies: dict[str, Json] = field(default_factory=dict)
    quotas: dict[str, list[int]] = field(default_factory=dict)
    limits: dict[tuple[str, str], Json] = field(default_factory=dict)  # by scope and name
    offsets: dict[tuple[str, str, int], Commit] = field(default_factory=dict)
    delays: dict[int, int] = field(default_factory=dict)
    # By the topic, then by the level. In a state snapshot further than the changes before it.
    delay_drops: dict[str, dict[int, int]] = field(default_factory=dict, compare=False)
    halves: Json = field(default_factory=dict, compare=False)
    half_drops: dict[str, int] = field(default_factory=dict, compare=False)
    # In a state snapshot further than the changes before it: (watermark, arrivals, rolled).
    timers: tuple[list[int], int, int] = field(default=([0, 0], 0, 0), compare=False)
    timer_skips: dict[int, int] = field(default_factory=dict, compare=False)  # offset → due
    timer_drops: dict[str, int] = field(default_factory=dict, compare=False)
    # In a state snapshot one more than the changes before it, where an epoch begins with a new one.
    secrets: list[str] = field(default_factory=list, compare=False)
    resent: dict[tuple[str, int, str], Json] = field(default_factory=dict)
    # Of groups that consume in order: (group, topic, queue id) → client id, lock number.
    # What groups sent back; in a state snapshot further than the changes before it, too.
    attempts: dict[tuple[str, int, int], None] = field(default_factory=dict, compare=False)
    resets: dict[tuple[str, str, int], int] = field(default_factory=dict)
    locks: dict[tuple[str, str, int], tuple[str, int]] = field(default_factory=dict)
    pops: dict[tuple[str, str, int], Pop] = field(default_factory=dict)
    # Of producers; in a state snapshot further than the changes before it.
    # Stream → its intervals, its runs.
    streams: dict[str, list[list[list[int]]]] = field(default_factory=dict, compare=False)
    generation: int = 0  # the highest ever given
    topic_changes: int = field(default=0, compare=False)  # applied so far to the topics

    def apply(self, changes: Iterable[Json], place: object) -> None:
        for change in changes:
            fields = dict(change)
            kind = fields.pop("k")
            method = getattr(self, "_" + kind.replace("-", "_"))
            method(fields, place)
            self.topic_changes += kind in TOPIC_KINDS

    def _topic(self, change: Json, place: object) -> None:
        read, write, permission, flush = (change[name] for name in "rwpf")
        known = self.topics.get(change["n"])
        histories = known.histories if known else []
        new = max(read, write) - len(histories)
        if new <= 0:
            self.generation = max(self.generation, change["g"])
        else:
            expect(
                change["g"] > self.generation, place, f"generation {change['g']} was given before"
            )
            self.generation = change["g"]
            histories = [*histories, *([(change["g"], 0)] for _ in range(new))]
        made = Topic(read, write, permission, flush, histories=histories)
        if known:
            made.reserve_time_ms, made.message_type = known.reserve_time_ms, known.message_type
            made.is_ordered, made.attributes = known.is_ordered, known.attributes
        self.topics[change["n"]] = made

    def _topic_reserve(self, change: Json, place: object) -> None:
        expect(change["n"] in self.topics, place, f"topic {change['n']} is not there")
        self.topics[change["n"]].reserve_time_ms = change["t"]

    def _topic_type(self, change: Json, place: object) -> None:
        expect(change["n"] in self.topics, place, f"topic {change['n']} is not there")
        topic = self.topics[change["n"]]
        topic.message_type, topic.is_ordered = change["t"], change["o"]
        topic.attributes = change["a"]

    def _topic_quota(self, change: Json, place: object) -> None:
        expect(change["n"] in self.topics, place, f"topic {change['n']} is not there")
        self.quotas[change["n"]] = change["q"]
        if change["q"] == [0, 0]:
            del self.quotas[change["n"]]

    def _quota(self, change: Json, place: object) -> None:
        scope, name = key = change.pop("s"), change.pop("n")
        is_there = scope == "address" or not name or name in self.topics
        expect(is_there, place, f"topic {name} is not there")
        self.limits.pop(key, None)
        if change:
            self.limits[key] = change

    def _topic_drop(self, change: Json, place: object) -> None:
        self.quotas.pop(change["n"], None)
        self.limits.pop(("topic", change["n"]), None)
        expect(change["n"] in self.topics, place, f"topic {change['n']} is not there to be deleted")
        del self.topics[change["n"]]
        self.offsets = {key: kept for key, kept in self.offsets.items() if key[1] != change["n"]}
        self.locks = {key: lock for key, lock in self.locks.items() if key[1] != change["n"]}
        self.resets = {key: one for key, one in self.resets.items() if key[1] != change["n"]}
        self.resent = {key: one for key, one in self.resent.items() if key[0] != change["n"]}
        self.pops = {key: one for key, one in self.pops.items() if key[1] != change["n"]}

    def _topic_copy(self, change: Json, place: object) -> None:
        expect(change["n"] not in self.topics, place, f"topic {change['n']} is there already")
        read, write, permission, flush = (change[name] for name in "rwpf")
        histories = [[(one, start) for one, start in history] for history in change["h"]]
        expect(len(histories) >= max(read, write), place, "a queue without a history")
        self.topics[change["n"]] = Topic(read, write, permission, flush, histories=histories)

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
            for (_, topic, queue_id), pop in self.pops.items():
                if topic == name and pop.next_offset > maxima[queue_id]:
                    pop.next_offset = maxima[queue_id]
                    for number in list(pop.leases):
                        held = pop.leases[number][2]
                        pop.take(number, {one for one in held if one >= pop.next_offset})

    def _kinds(self, change: Json, place: object) -> None:
        kinds = change["n"]
        expect(kinds == sorted(set(kinds) & set(KINDS)), place, f"kinds {kinds}")
        expect("kinds" in kinds, place, "`kinds` is none that every release knows")

    def _counter(self, change: Json, place: object) -> None:
        expect(change["g"] >= self.generation, place, "the counter goes back")
        self.generation = change["g"]

    def _group(self, change: Json, _: object) -> None:
        self.groups[change.pop("n")] = change

    def _group_policy(self, change: Json, place: object) -> None:
        name = change.pop("n")
        expect(name in self.groups, place, f"group {name} is not there to have a policy")
        expect(not {"rs", "re"} <= set(change), place, f"two retry policies of {name}")
        self.policies[name] = change
        if change["m"] == 1:
            self.pops = {key: one for key, one in self.pops.items() if key[0] != name}
        if change == {"o": False, "t": 15, "m": 1}:
            del self.policies[name]

    def _group_drop(self, change: Json, place: object) -> None:
        self.policies.pop(change["n"], None)
        expect(change["n"] in self.groups, place, f"group {change['n']} is not there to be deleted")
        del self.groups[change["n"]]
        self.offsets = {key: kept for key, kept in self.offsets.items() if key[0] != change["n"]}
        self.attempts = {key: None for key in self.attempts if key[0] != change["n"]}
        self.locks = {key: lock for key, lock in self.locks.items() if key[0] != change["n"]}
        self.resets = {key: one for key, one in self.resets.items() if key[0] != change["n"]}
        self.pops = {key: one for key, one in self.pops.items() if key[0] != change["n"]}
        self.resent = {
            key: one
            for key, one in self.resent.items()
            if key[2] != change["n"] or key[0].startswith("%DLQ%")
        }

    def _offsets(self, change: Json, _: object) -> None:
        for group, topics in change["o"].items():
            for topic, commits in topics.items():
                histories = self.topics[topic].histories if topic in self.topics else []
                for queue_id, generation, offset in commits:
                    key, commit = (group, topic, queue_id), Commit(generation, offset)
                    if queue_id < len(histories) and generation >= histories[queue_id][0][0]:
                        self.offsets[key] = max(self.offsets.get(key, commit), commit)

    def _reset(self, change: Json, place: object) -> None:
        for group, topics in change["o"].items():
            self.attempts = {key: None for key in self.attempts if key[0] != group}
            for topic, commits in topics.items():
                for queue_id, _, _ in commits:
                    self.offsets.pop((group, topic, queue_id), None)
                    self.pops.pop((group, topic, queue_id), None)
                    self.resets[group, topic, queue_id] = change["r"]
        self._offsets(change, place)

    def _group_leave(self, change: Json, _: object) -> None:
        group, topic = change["n"], change["t"]
        self.attempts = {key: None for key in self.attempts if key[0] != group}
        for table in (self.offsets, self.pops, self.resets, self.locks):
            for key in [key for key in table if key[:2] == (group, topic)]:
                table.pop(key)
        mine = (topic, group)
        self.resent = {key: one for key, one in self.resent.items() if key[::2] != mine}

    def _delays(self, change: Json, _: object) -> None:
        self.delays = {level: offset for level, offset in change["o"]}
        self.delay_drops = {
            topic: left
            for topic, ends in self.delay_drops.items()
            if (left := {n: end for n, end in ends.items() if end > self.delays.get(n, 0)})
        }

    def _delay_drop(self, change: Json, place: object) -> None:
        expect(bool(change["o"]), place, "delay-drop: no level")
        self.delay_drops[change["n"]] = dict(change["o"])

    def _halves(self, change: Json, _: object) -> None:
        self.halves = change
        self.half_drops = {n: end for n, end in self.half_drops.items() if end > change["h"]}

    def _half_drop(self, change: Json, _: object) -> None:
        self.half_drops[change["n"]] = change["o"]

    def _timer(self, change: Json, place: object) -> None:
        mark, arrivals, rolled = change["w"], change["a"], change["r"]
        expect(rolled <= arrivals, place, "timer: rolled beyond the arrivals")
        self.timers = mark, arrivals, rolled
        skips = self.timer_skips | {offset: due for due, offset in change.get("x", [])}
        self.timer_skips = {
            offset: due
            for offset, due in skips.items()
            if offset >= rolled and (offset >= arrivals or [due, offset] > mark)
        }
        self.timer_drops = {n: end for n, end in self.timer_drops.items() if end > rolled}

    def _timer_drop(self, change: Json, _: object) -> None:
        self.timer_drops[change["n"]] = change["o"]

    def _secret(self, change: Json, _: object) -> None:
        self.secrets = [*self.secrets, change["s"]][-2:]

    def _pop(self, change: Json, _: object) -> None:
        for group, topics in change["p"].items():
            for topic, entries in topics.items():
                histories = self.topics[topic].histories if topic in self.topics else []
                for queue_id, generation, *what in entries:
                    there = queue_id < len(histories) and generation >= histories[queue_id][0][0]
                    if group in self.groups and there:
                        pop = self.pops.setdefault((group, topic, queue_id), Pop())
                        self._move(pop, change["b"], change["t"], *what)
                        key, now = (group, topic, queue_id), histories[queue_id][-1][0]
                        commit = Commit(now, pop.floor)
                        self.offsets[key] = max(self.offsets.get(key, commit), commit)

    def _move(self, pop: Pop, base: int, base_ms: int, end: int, given: Any, done: Any) -> None:
        for number, source, first, visible_ms, attempt, *lengths in given:
            messages = _messages(first, lengths)
            if source:
                pop.take(base + source, messages)
            pop.next_offset = max(pop.next_offset, max(messages) + 1)
            time_ms = base_ms + visible_ms if attempt else 0
            pop.leases[base + number] = (time_ms, attempt, messages)
        for number, *rest in done:
            if base + number in pop.leases:
                held = pop.leases[base + number][2]
                pop.take(base + number, _messages(rest[0], rest[1:]) if rest else set(held))
        pop.next_offset = max(pop.next_offset, end)

    def _resent(self, change: Json, _: object) -> None:
        key = change["t"], change["q"], change.get("n", "")
        self.resent.pop(key, None)
        if change["o"]:
            self.resent[key] = change["o"]

    def _attempts(self, change: Json, _: object) -> None:
        for group, times, sources in change["a"]:
            for source in sources:
                self.attempts[group, source, times] = None
        self.attempts = dict(list(self.attempts.items())[-10_000:])

    def _locks(self, change: Json, _: object) -> None:
        for topic, queue_ids in change["q"].items():
            for queue_id in queue_ids:
                self.locks[change["n"], topic, queue_id] = (change["c"], change["l"])

    def _unlocks(self, change: Json, _: object) -> None:
        for topic, queue_ids in change["q"].items():
            for queue_id in queue_ids:
                self.locks.pop((change["n"], topic, queue_id), None)

    def _streams(self, change: Json, _: object) -> None:
        for name in change.get("x", []):
            self.streams.pop(name, None)
        for name, (intervals, runs) in change["s"].items():
            known = self.streams.get(name, [[], []])[1]
            last = known[-1][2] if known else -1
            runs = [*known, *(run for run in runs if run[2] > last)]
            self.streams[name] = [intervals, runs[-64:]]

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
    expect(replicated.quotas == running.quotas, place, "the copy has other quotas")
    expect(replicated.policies == running.policies, place, "the copy has other group policies")
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
        self._expect_ends(changes, place)
        if record.tag in COPY_BEGINS:
            self._copied, self._before = State(), copy.deepcopy(self._running)
            self._raised = self._raise(epoch) if epoch else None
        if record.tag == "CHANGE":
            if self._running:
                self._running.apply(changes, place)
            return [change["n"] for change in changes if change["k"] == "topic-drop"]
        if self._copied is not None:  # else the copy's beginning went with older log files
            self._copied.apply(changes, place)
            if record.tag in ("COPY_LAST", "COPY_ONLY"):
                self._end_copy(self._copied, place)
        return []

    def _end_copy(self, copied: State, place: str) -> None:
        if self._raised and self._raised.generation == copied.generation:
            self._before = self._raised
        if self._before:
            expect_copy(copied, self._before, place)
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

    def _expect_ends(self, changes: Iterable[Json], place: str) -> None:
        """A generation begins at its queue's end, and a copy knows how far queues have counted; of
        some the log may have no message any more.
        """
        for change in changes:
            for topic, maxima in change["s"].items() if change["k"] == "raise" else ():
                here = [self._end_of((topic, number)) for number in range(len(maxima))]
                expect(here == maxima, place, f"raises {topic} at {maxima}, not {here}")
            for queue_id, end in enumerate(change["o"] if change["k"] == "queues" else ()):
                key = (change["n"], queue_id)
                known = key in self._next_offsets or key in self.counted or self.whole
                expect(not known or end == self._end_of(key), place, f"{key} is not at {end}")
                if key not in self._next_offsets and end:
                    self.counted[key] = end

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
