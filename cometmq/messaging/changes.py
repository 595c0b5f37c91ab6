"""The changes of a broker's state, and their bytes: the bodies of the records of the state topic.

The form is documented byte by byte in ``docs/format/state.md``. Reading is strict: an unknown
version, kind or field raises ``StateTooNew``, because a program that skips what it does not know
would silently lose state; anything else that does not fit raises ``StoreDamaged``. New state is a
new kind; the fields of a kind never change.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

from cometmq.errors import StateTooNew, StoreDamaged
from cometmq.messaging.dedup import StoredRun, StreamEntry
from cometmq.messaging.generations import History, is_history
from cometmq.messaging.group_policy import (
    ConsumeMode,
    CustomizedRetry,
    ExponentialRetry,
    GroupPolicy,
    RetryPolicy,
)
from cometmq.messaging.groups import GroupSettings
from cometmq.messaging.handle_secrets import Secret
from cometmq.messaging.intervals import Interval
from cometmq.messaging.locks import Grant, GrantRun
from cometmq.messaging.offsets import CommittedOffset
from cometmq.messaging.pop import wire as pop_wire
from cometmq.messaging.pop.table import QueueMoved
from cometmq.messaging.quotas import NO_QUOTA, Limits, Quota, Scope
from cometmq.messaging.resends import ResentKey
from cometmq.messaging.retry import Attempt
from cometmq.messaging.timers import Timer, TimerMark
from cometmq.messaging.topics import check_attributes
from cometmq.messaging.transactions import HalfProgress
from cometmq.model import FlushMode, MessageType, Position, ReplicationMode, TopicConfig

VERSION = 1

Json = Any  # what json.loads gives


@dataclass(frozen=True, slots=True)
class TopicPut:
    """A topic is created or gets other settings; new queues begin with ``generation``. The reserve
    time stays as it is: it has a change of its own.
    """

    config: TopicConfig
    generation: int


@dataclass(frozen=True, slots=True)
class TopicReserved:
    """A topic's messages are shown for another time; 0 = as long as the log has them."""

    topic: str
    reserve_time_ms: int


@dataclass(frozen=True, slots=True)
class TopicTyped:
    """Which messages a topic takes, whether they are in order over all broker groups, and
    RocketMQ's attributes of it that say nothing here. Replaces what was known.
    """

    topic: str
    message_type: MessageType = MessageType.UNSPECIFIED
    is_ordered: bool = False
    attributes: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, config: TopicConfig) -> TopicTyped:
        """What a topic's settings say of it."""
        return cls(config.name, config.message_type, config.is_ordered, config.attributes)


@dataclass(frozen=True, slots=True)
class TopicQuotaPut:
    """How much each client may send to a topic that is there."""

    topic: str
    quota: Quota


@dataclass(frozen=True, slots=True)
class LimitsPut:
    """What an address, or all clients of a topic that is there, may send and read. No name: each of
    them that says nothing. Replaces what was known.
    """

    scope: Scope
    name: str
    limits: Limits


@dataclass(frozen=True, slots=True)
class TopicDropped:
    """A topic is deleted, with its queues' histories and all that groups committed there."""

    topic: str


@dataclass(frozen=True, slots=True)
class TopicSnapshot:
    """A topic as it is now, in a state snapshot: settings but for the reserve time, and all
    histories by queue id.
    """

    config: TopicConfig
    histories: tuple[History, ...]


@dataclass(frozen=True, slots=True)
class QueuesCounted:
    """How far the queues of a topic have counted, in a state snapshot: the offset of each one's
    next message, by queue id.

    Changes nothing in the tables. It is for a rebuild of queues from a log whose beginning has
    gone, where a queue without younger messages has left no other trace.
    """

    topic: str
    next_offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KindsUsed:
    """The log has, or is about to have, changes of these kinds, which only some releases know. A
    snapshot keeps it: a change may leave no other trace there.
    """

    kinds: frozenset[str]


@dataclass(frozen=True, slots=True)
class GenerationsRaised:
    """After an unclean start: the queues of the named topics begin ``generation``.

    ``starts``: each topic's maxima then, by queue id.
    """

    generation: int
    starts: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class GenerationsCounted:
    """All generations up to ``last`` have been given out.

    Stands in a state snapshot, where deleted topics leave no other trace.
    """

    last: int


@dataclass(frozen=True, slots=True)
class GroupPut:
    """A consumer group is created or its settings change. The policy stays as it is: it has a
    change of its own.
    """

    settings: GroupSettings


@dataclass(frozen=True, slots=True)
class GroupPolicyPut:
    """A group that is there gets another policy."""

    group: str
    policy: GroupPolicy


@dataclass(frozen=True, slots=True)
class GroupDropped:
    """A consumer group is deleted, with all that it committed."""

    group: str


@dataclass(frozen=True, slots=True)
class OffsetsCommitted:
    """Groups have come further; many commits in one change."""

    commits: tuple[CommittedOffset, ...]


@dataclass(frozen=True, slots=True)
class OffsetsReset:
    """A group goes on here, whatever it had committed in these queues. ``number``: of the reset,
    above the group's earlier ones. All commits are of one group.
    """

    number: int
    commits: tuple[CommittedOffset, ...]


@dataclass(frozen=True, slots=True)
class GroupLeft:
    """A group has left a topic, with all that it committed and received there. When it comes back
    it begins as a new one.
    """

    group: str
    topic: str


@dataclass(frozen=True, slots=True)
class DelaysReached:
    """How far each level of delayed messages was delivered: queue offsets by level from 1; levels
    that are not named are at 0. Replaces what was known.
    """

    offsets: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class HalvesReached:
    """The floors of the half and op queues, and the checks of open halves; replaces older ones."""

    progress: HalfProgress


@dataclass(frozen=True, slots=True)
class DelaysDropped:
    """A topic is created: of a delay level's messages before ``ends[level]``, an offset in the
    level's queue, those for a topic of its name are for one that was deleted, and are not
    delivered.
    """

    topic: str
    ends: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class HalvesDropped:
    """A topic is created: of the half queue's messages before ``end`` those for a topic of its name
    are for one that was deleted, and are not committed.
    """

    topic: str
    end: int


@dataclass(frozen=True, slots=True)
class StreamsReached:
    """What is stored of these streams of producers: all intervals, and runs in addition to those
    that are known. The streams of ``gone`` are forgotten before.
    """

    streams: tuple[StreamEntry, ...]
    gone: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AttemptsStored:
    """Messages that groups sent back were stored for another try, or among the dead letters; the
    oldest first.
    """

    attempts: tuple[Attempt, ...]


@dataclass(frozen=True, slots=True)
class MessagesResent:
    """Which messages of a queue were sent again, by their offsets; replaces what was known. No
    offsets: none was, or they are gone.
    """

    key: ResentKey
    offsets: tuple[Interval, ...]


@dataclass(frozen=True, slots=True)
class QueuesLocked:
    """A client of a group got the locks of these queues."""

    run: GrantRun


@dataclass(frozen=True, slots=True)
class QueuesUnlocked:
    """Nobody of the group has the locks of these queues, by topic."""

    group: str
    queues: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class TimersReached:
    """The progress of timers, and later ones that are to be skipped, in addition to those that are
    known.
    """

    mark: TimerMark
    skips: tuple[Timer, ...] = ()


@dataclass(frozen=True, slots=True)
class TimersDropped:
    """A topic is created: of the timer queue's messages before ``end`` those for a topic of its
    name are for one that was deleted, and are not delivered. Of the timer topic: some topic is
    deleted, and messages before ``end`` may be for it.
    """

    topic: str
    end: int


@dataclass(frozen=True, slots=True)
class SecretAdded:
    """The secret that signs handles from now on."""

    secret: Secret


@dataclass(frozen=True, slots=True)
class PopsMoved:
    """New leases, acknowledgements and floors of groups that receive, of one turn of the writer's
    loop; in a snapshot: all leases.
    """

    queues: tuple[QueueMoved, ...]


Change = (
    TopicPut
    | TopicReserved
    | TopicTyped
    | TopicQuotaPut
    | LimitsPut
    | TopicDropped
    | TopicSnapshot
    | QueuesCounted
    | KindsUsed
    | GenerationsRaised
    | GenerationsCounted
    | GroupPut
    | GroupPolicyPut
    | GroupDropped
    | OffsetsCommitted
    | OffsetsReset
    | GroupLeft
    | DelaysReached
    | HalvesReached
    | DelaysDropped
    | HalvesDropped
    | StreamsReached
    | AttemptsStored
    | MessagesResent
    | QueuesLocked
    | QueuesUnlocked
    | TimersReached
    | TimersDropped
    | SecretAdded
    | PopsMoved
)


# --- fields ---------------------------------------------------------------------------------------


def _config_fields(config: TopicConfig) -> dict[str, Json]:
    fields = {
        "n": config.name,
        "r": config.read_queue_count,
        "w": config.write_queue_count,
        "p": config.permission,
        "f": config.flush_mode.value,
    }
    if config.replication_mode is not ReplicationMode.ASYNC:
        fields["y"] = config.replication_mode.value
    return fields


def _config(f: dict[str, Json]) -> TopicConfig:
    return TopicConfig(
        _str(f["n"]),
        _int(f["r"]),
        _int(f["w"]),
        _int(f["p"]),
        FlushMode(f["f"]),
        ReplicationMode(_int(f.get("y", ReplicationMode.ASYNC.value))),
    )


def _group_fields(s: GroupSettings) -> dict[str, Json]:
    return {
        "n": s.name,
        "c": s.consume_enable,
        "m": s.consume_from_min_enable,
        "b": s.consume_broadcast_enable,
        "rq": s.retry_queue_count,
        "rt": s.retry_times_max,
        "i": s.broker_id,
        "s": s.broker_id_when_slow,
        "y": s.notify_members_enable,
    }


def _group(f: dict[str, Json]) -> GroupSettings:
    return GroupSettings(
        name=_str(f["n"]),
        consume_enable=_bool(f["c"]),
        consume_from_min_enable=_bool(f["m"]),
        consume_broadcast_enable=_bool(f["b"]),
        retry_queue_count=_int(f["rq"]),
        retry_times_max=_int(f["rt"]),
        broker_id=_int(f["i"]),
        broker_id_when_slow=_int(f["s"]),
        notify_members_enable=_bool(f["y"]),
    )


def _policy_fields(p: GroupPolicy) -> dict[str, Json]:
    fields: dict[str, Json] = {"o": p.is_orderly, "t": p.consume_timeout_min, "m": p.mode.value}
    match p.retry:
        case CustomizedRetry(next_ms):
            fields["rs"] = next_ms
        case ExponentialRetry(initial_ms, multiplier, max_ms):
            fields["re"] = [initial_ms, multiplier, max_ms]
    if p.read_quota:
        fields["q"] = _quota_fields(p.read_quota)
    if p.dlq_reserve_ms:
        fields["d"] = p.dlq_reserve_ms
    if p.system_flag:
        fields["f"] = p.system_flag
    if p.attributes:
        fields["a"] = dict(p.attributes)
    return fields


def _policy(f: dict[str, Json]) -> GroupPolicy:
    retry: RetryPolicy | None = None
    if "rs" in f:
        retry = CustomizedRetry(tuple(map(_int, f["rs"])))
    elif "re" in f:
        initial_ms, multiplier, max_ms = map(_int, f["re"])
        retry = ExponentialRetry(initial_ms, multiplier, max_ms)
    return GroupPolicy(
        is_orderly=_bool(f["o"]),
        retry=retry,
        consume_timeout_min=_int(f["t"]),
        mode=ConsumeMode(_int(f["m"])),
        read_quota=_quota(f["q"]) if "q" in f else NO_QUOTA,
        dlq_reserve_ms=_int(f.get("d", 0)),
        system_flag=_int(f.get("f", 0)),
        attributes=tuple((name, _str(value)) for name, value in f.get("a", {}).items()),
    )


def _quota_fields(quota: Quota) -> list[int]:
    return [quota.messages_per_s, quota.bytes_per_s]


def _quota(value: list[Json]) -> Quota:
    messages_per_s, bytes_per_s = map(_int, value)
    return Quota(messages_per_s, bytes_per_s)


def _limit_fields(limits: Limits) -> dict[str, list[int]]:
    both = {"w": limits.send, "r": limits.read}
    return {name: _quota_fields(quota) for name, quota in both.items() if quota is not None}


def _limits(f: dict[str, Json]) -> Limits:
    send, read = (_quota(f[name]) if name in f else None for name in "wr")
    return Limits(send, read)


def _limited(value: Json) -> Scope:
    scope = Scope(value)
    if scope is Scope.CLIENT:
        raise ValueError("clients have their quotas in topics and groups")
    return scope


def _commit_fields(commits: Iterable[CommittedOffset]) -> dict[str, dict[str, list[list[int]]]]:
    groups: dict[str, dict[str, list[list[int]]]] = {}
    for c in commits:
        entries = groups.setdefault(c.group, {}).setdefault(c.topic, [])
        entries.append([c.queue_id, c.position.generation, c.position.offset])
    return groups


def _commits(groups: dict[str, Json]) -> tuple[CommittedOffset, ...]:
    return tuple(
        CommittedOffset(group, topic, _int(queue_id), Position(_int(generation), _int(offset)))
        for group, topics in groups.items()
        for topic, entries in topics.items()
        for queue_id, generation, offset in entries
    )


def _histories(value: list[Json]) -> tuple[History, ...]:
    return tuple(_history(tuple((_int(g), _int(start)) for g, start in pairs)) for pairs in value)


@lru_cache(maxsize=1024)  # the queues of a topic mostly share one history: keep it once
def _history(pairs: tuple[tuple[int, int], ...]) -> History:
    if not is_history(pairs):
        raise ValueError(f"{pairs} is not a history of generations")
    return History(pairs)


def _numbers(value: dict[str, Json]) -> dict[str, tuple[int, ...]]:
    """By topic: offsets by queue id, or queue ids."""
    return {topic: tuple(map(_int, numbers)) for topic, numbers in value.items()}


def _stream_fields(streams: Iterable[StreamEntry]) -> dict[str, list[list[list[int]]]]:
    return {name: [list(map(list, some)) for some in both] for name, *both in streams}


def _streams(value: dict[str, Json]) -> tuple[StreamEntry, ...]:
    return tuple(
        StreamEntry(
            name,
            _intervals(intervals),
            tuple(StoredRun(*map(_int, run)) for run in runs),
        )
        for name, (intervals, runs) in value.items()
    )


def _attempt_fields(attempts: Iterable[Attempt]) -> list[list[Json]]:
    runs = groupby(attempts, key=lambda one: (one.group, one.reconsume_times))
    return [[*key, [one.source for one in some]] for key, some in runs]


def _attempts(value: list[Json]) -> tuple[Attempt, ...]:
    return tuple(
        Attempt(_str(group), _int(source), _int(times))
        for group, times, sources in value
        for source in sources
    )


def _intervals(value: list[Json]) -> tuple[Interval, ...]:
    return tuple(Interval(_int(first), _int(end)) for first, end in value)


def _check_steps(value: list[Json]) -> tuple[tuple[int, int], ...]:
    steps = tuple((_int(end), _int(count)) for end, count in value)
    ends = [end for end, _ in steps]
    if ends != sorted(set(ends)):
        raise ValueError(f"{ends[:10]} are not the ends of runs in order")
    return steps


def _timer(value: list[Json]) -> Timer:
    due_ms, offset = map(_int, value)
    return Timer(due_ms, offset)


def _attributes(value: dict[str, Json]) -> tuple[tuple[str, str], ...]:
    found = tuple((name, _str(text)) for name, text in value.items())
    check_attributes(found)
    return found


def _int(value: Json) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a number from 0")
    return value


def _bool(value: Json) -> bool:
    if type(value) is not bool:
        raise ValueError(f"{value!r} is neither true nor false")
    return value


def _str(value: Json) -> str:
    if type(value) is not str:
        raise ValueError(f"{value!r} is not a string")
    return value


# --- kinds ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Kind:
    """How one kind of change is written: its name, its fields besides "k", and the way back.
    ``optional`` fields are left out where they say nothing.
    """

    name: str
    fields: frozenset[str]
    to_fields: Callable[[Any], dict[str, Json]]
    from_fields: Callable[[dict[str, Json]], Change]
    optional: frozenset[str] = frozenset()


_CONFIG_FIELDS = frozenset("nrwpf")
_CONFIG_OPTIONAL = frozenset("y")
_GROUP_FIELDS = frozenset({"n", "c", "m", "b", "rq", "rt", "i", "s", "y"})

# What every release reads that replicates with this one: nothing is added here. The release that
# spoke replication protocol 3 did not say which kinds it reads; it reads these.
_KINDS_OF_PROTOCOL_3: dict[type[Change], _Kind] = {
    TopicPut: _Kind(
        "topic",
        _CONFIG_FIELDS | {"g"},
        lambda c: {**_config_fields(c.config), "g": c.generation},
        lambda f: TopicPut(_config(f), _int(f["g"])),
        optional=_CONFIG_OPTIONAL,
    ),
    TopicReserved: _Kind(
        "topic-reserve",
        frozenset("nt"),
        lambda c: {"n": c.topic, "t": c.reserve_time_ms},
        lambda f: TopicReserved(_str(f["n"]), _int(f["t"])),
    ),
    TopicTyped: _Kind(
        "topic-type",
        frozenset("ntoa"),
        lambda c: {
            "n": c.topic,
            "t": c.message_type.name,
            "o": c.is_ordered,
            "a": dict(c.attributes),
        },
        lambda f: TopicTyped(
            _str(f["n"]), MessageType[_str(f["t"])], _bool(f["o"]), _attributes(f["a"])
        ),
    ),
    TopicQuotaPut: _Kind(
        "topic-quota",
        frozenset("nq"),
        lambda c: {"n": c.topic, "q": _quota_fields(c.quota)},
        lambda f: TopicQuotaPut(_str(f["n"]), _quota(f["q"])),
    ),
    TopicDropped: _Kind(
        "topic-drop", frozenset("n"), lambda c: {"n": c.topic}, lambda f: TopicDropped(_str(f["n"]))
    ),
    TopicSnapshot: _Kind(
        "topic-copy",
        _CONFIG_FIELDS | {"h"},
        lambda c: {**_config_fields(c.config), "h": [h.pairs for h in c.histories]},
        lambda f: TopicSnapshot(_config(f), _histories(f["h"])),
        optional=_CONFIG_OPTIONAL,
    ),
    QueuesCounted: _Kind(
        "queues",
        frozenset("no"),
        lambda c: {"n": c.topic, "o": c.next_offsets},
        lambda f: QueuesCounted(_str(f["n"]), tuple(map(_int, f["o"]))),
    ),
    GenerationsRaised: _Kind(
        "raise",
        frozenset("gs"),
        lambda c: {"g": c.generation, "s": c.starts},
        lambda f: GenerationsRaised(_int(f["g"]), _numbers(f["s"])),
    ),
    GenerationsCounted: _Kind(
        "counter",
        frozenset("g"),
        lambda c: {"g": c.last},
        lambda f: GenerationsCounted(_int(f["g"])),
    ),
    GroupPut: _Kind(
        "group", _GROUP_FIELDS, lambda c: _group_fields(c.settings), lambda f: GroupPut(_group(f))
    ),
    GroupPolicyPut: _Kind(
        "group-policy",
        frozenset("notm"),
        lambda c: {"n": c.group, **_policy_fields(c.policy)},
        lambda f: GroupPolicyPut(_str(f["n"]), _policy(f)),
        optional=frozenset({"rs", "re", "q", "d", "f", "a"}),
    ),
    GroupDropped: _Kind(
        "group-drop", frozenset("n"), lambda c: {"n": c.group}, lambda f: GroupDropped(_str(f["n"]))
    ),
    OffsetsCommitted: _Kind(
        "offsets",
        frozenset("o"),
        lambda c: {"o": _commit_fields(c.commits)},
        lambda f: OffsetsCommitted(_commits(f["o"])),
    ),
    OffsetsReset: _Kind(
        "reset",
        frozenset("ro"),
        lambda c: {"r": c.number, "o": _commit_fields(c.commits)},
        lambda f: OffsetsReset(_int(f["r"]), _commits(f["o"])),
    ),
    DelaysReached: _Kind(
        "delays",
        frozenset("o"),
        lambda c: {"o": sorted(c.offsets.items())},
        lambda f: DelaysReached({_int(level): _int(offset) for level, offset in f["o"]}),
    ),
    DelaysDropped: _Kind(
        "delay-drop",
        frozenset("no"),
        lambda c: {"n": c.topic, "o": sorted(c.ends.items())},
        lambda f: DelaysDropped(_str(f["n"]), {_int(level): _int(end) for level, end in f["o"]}),
    ),
    HalvesReached: _Kind(
        "halves",
        frozenset("hoc"),
        lambda c: {
            "h": c.progress.floor,
            "o": c.progress.op_floor,
            "c": list(map(list, c.progress.checks)),
        },
        lambda f: HalvesReached(HalfProgress(_int(f["h"]), _int(f["o"]), _check_steps(f["c"]))),
    ),
    HalvesDropped: _Kind(
        "half-drop",
        frozenset("no"),
        lambda c: {"n": c.topic, "o": c.end},
        lambda f: HalvesDropped(_str(f["n"]), _int(f["o"])),
    ),
    AttemptsStored: _Kind(
        "attempts",
        frozenset("a"),
        lambda c: {"a": _attempt_fields(c.attempts)},
        lambda f: AttemptsStored(_attempts(f["a"])),
    ),
    MessagesResent: _Kind(
        "resent",
        frozenset("tqo"),
        lambda c: {
            "t": c.key.topic,
            "q": c.key.queue_id,
            "o": list(map(list, c.offsets)),
            **({"n": c.key.group} if c.key.group else {}),
        },
        lambda f: MessagesResent(
            ResentKey(_str(f["t"]), _int(f["q"]), _str(f.get("n", ""))), _intervals(f["o"])
        ),
        optional=frozenset("n"),
    ),
    QueuesLocked: _Kind(
        "locks",
        frozenset("nclq"),
        lambda c: {
            "n": c.run.group,
            "c": c.run.grant.client_id,
            "l": c.run.grant.number,
            "q": c.run.queues,
        },
        lambda f: QueuesLocked(
            GrantRun(_str(f["n"]), Grant(_str(f["c"]), _int(f["l"])), _numbers(f["q"]))
        ),
    ),
    QueuesUnlocked: _Kind(
        "unlocks",
        frozenset("nq"),
        lambda c: {"n": c.group, "q": c.queues},
        lambda f: QueuesUnlocked(_str(f["n"]), _numbers(f["q"])),
    ),
    PopsMoved: _Kind(
        "pop",
        frozenset("btp"),
        lambda c: pop_wire.fields_of(c.queues),
        lambda f: PopsMoved(pop_wire.queues_of(_int(f["b"]), _int(f["t"]), f["p"])),
    ),
    TimersReached: _Kind(
        "timer",
        frozenset("war"),
        lambda c: {
            "w": list(c.mark.watermark),
            "a": c.mark.arrivals,
            "r": c.mark.rolled,
            **({"x": list(map(list, c.skips))} if c.skips else {}),
        },
        lambda f: TimersReached(
            TimerMark(_timer(f["w"]), _int(f["a"]), _int(f["r"])),
            tuple(map(_timer, f.get("x", ()))),
        ),
        optional=frozenset("x"),
    ),
    TimersDropped: _Kind(
        "timer-drop",
        frozenset("no"),
        lambda c: {"n": c.topic, "o": c.end},
        lambda f: TimersDropped(_str(f["n"]), _int(f["o"])),
    ),
    SecretAdded: _Kind(
        "secret",
        frozenset("ts"),
        lambda c: {"t": c.secret.created_ms, "s": c.secret.key.hex()},
        lambda f: SecretAdded(Secret(_int(f["t"]), bytes.fromhex(_str(f["s"])))),
    ),
    StreamsReached: _Kind(
        "streams",
        frozenset("s"),
        lambda c: {"s": _stream_fields(c.streams)} | ({"x": c.gone} if c.gone else {}),
        lambda f: StreamsReached(_streams(f["s"]), tuple(map(_str, f.get("x", ())))),
        optional=frozenset("x"),
    ),
}
# A writer writes them when all members of its group have said that they read them.
_NEWER_KINDS: dict[type[Change], _Kind] = {
    KindsUsed: _Kind(
        "kinds",
        frozenset("n"),
        lambda c: {"n": sorted(c.kinds)},
        lambda f: KindsUsed(_known_kinds(f["n"])),
    ),
    GroupLeft: _Kind(
        "group-leave",
        frozenset("nt"),
        lambda c: {"n": c.group, "t": c.topic},
        lambda f: GroupLeft(_str(f["n"]), _str(f["t"])),
    ),
    LimitsPut: _Kind(
        "quota",
        frozenset("sn"),
        lambda c: {"s": c.scope.value, "n": c.name, **_limit_fields(c.limits)},
        lambda f: LimitsPut(_limited(f["s"]), _str(f["n"]), _limits(f)),
        optional=frozenset("wr"),
    ),
}
_KINDS = _KINDS_OF_PROTOCOL_3 | _NEWER_KINDS
_to_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode
_BY_NAME = {kind.name: kind for kind in _KINDS.values()}
KINDS = frozenset(_BY_NAME)  # that this program reads
KINDS_OF_PROTOCOL_3 = frozenset(kind.name for kind in _KINDS_OF_PROTOCOL_3.values())


def newer_kinds(changes: Iterable[Change]) -> frozenset[str]:
    """Their kinds that not every release knows which replicates with this one."""
    kinds = set(map(type, changes))
    return frozenset(_KINDS[kind].name for kind in kinds if kind not in _KINDS_OF_PROTOCOL_3)


def _known_kinds(value: Json) -> frozenset[str]:
    kinds = frozenset(map(_str, value))
    if unknown := kinds - KINDS:
        raise StateTooNew(
            f"the state has changes of kinds that this program does not know: {sorted(unknown)}"
        )
    return kinds


def encode_change(change: Change) -> bytes:
    """One change as JSON, without the record around it."""
    kind = _KINDS[type(change)]
    fields = kind.to_fields(change)
    assert fields.keys() - kind.optional == kind.fields
    return _to_json({"k": kind.name, **fields}).encode()


def join(encoded: Sequence[bytes]) -> bytes:
    """The body of a state record that holds these encoded changes."""
    return b'{"v":%d,"c":[%s]}' % (VERSION, b",".join(encoded))


def encode(changes: Iterable[Change]) -> bytes:
    """The body of a state record that holds these changes; they take effect together, in order."""
    return join([encode_change(change) for change in changes])


def decode(body: bytes) -> tuple[Change, ...]:
    """The changes of a state record.

    Raises ``StateTooNew`` for what a later version wrote, ``StoreDamaged`` for anything else.
    """
    try:
        record = json.loads(body)
        if record["v"] != VERSION or record.keys() - {"v", "c"}:
            raise StateTooNew(
                f"a state record has version {record['v']!r}, this program reads {VERSION}"
            )
        return tuple(_decode_change(entry) for entry in record["c"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise StoreDamaged(f"a state record cannot be read: {error!r} in {body[:100]!r}") from error


def _decode_change(entry: dict[str, Json]) -> Change:
    name = entry.pop("k")
    kind = _BY_NAME.get(name)
    if kind is None:
        raise StateTooNew(
            f"a state record holds a change of kind {name!r}, which this program does not know"
        )
    unknown = entry.keys() - kind.fields - kind.optional
    if unknown:
        raise StateTooNew(
            f"a change of kind {name!r} has fields that this program does not know: "
            f"{sorted(unknown)}"
        )
    return kind.from_fields(entry)
