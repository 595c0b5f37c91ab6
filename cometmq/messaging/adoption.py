"""From Apache RocketMQ's tables to our state: the content of its ``config/*.json`` replaces what we
knew. docs/compatibility.md says which of its fields count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from cometmq.errors import (
    GroupNameInvalid,
    InvalidRequest,
    StoreDamaged,
    StoreForeignFile,
    TopicNameInvalid,
)
from cometmq.format.halves import HALF_TOPIC, OFFSETS_GROUP, OP_TOPIC, QUEUE_ID
from cometmq.messaging import groups, rocketmq_tables, topics
from cometmq.messaging.changes import (
    Change,
    DelaysReached,
    GroupDropped,
    GroupPolicyPut,
    GroupPut,
    HalvesReached,
    OffsetsCommitted,
    TopicDropped,
    TopicPut,
    TopicTyped,
)
from cometmq.messaging.group_policy import (
    DEFAULT,
    EXPONENTIAL,
    CustomizedRetry,
    ExponentialRetry,
    RetryPolicy,
    check_policy,
    kept_attributes,
)
from cometmq.messaging.groups import GroupSettings
from cometmq.messaging.offsets import CommittedOffset
from cometmq.messaging.state import BrokerState
from cometmq.messaging.transactions import HalfProgress
from cometmq.model import (
    GROUP_NAME,
    PERMISSION_READ,
    PERMISSION_WRITE,
    QUEUES_PER_TOPIC_MAX,
    FlushMode,
    MessageType,
    Position,
    TopicConfig,
)

Table = dict[str, Any]
Entry = TypeVar("Entry")

_NUMBER_MAX = 2**63 - 1
MESSAGE_TYPE = "message.type"
BATCH_QUEUE = "BatchCQ"  # queue.type of a topic whose records hold many messages


@dataclass(frozen=True, slots=True)
class Tables:
    """What RocketMQ knew. None: it has not written that file, so ours counts."""

    topics: Mapping[str, TopicConfig] | None = None
    groups: Mapping[str, GroupSettings] | None = None
    # By group, what RocketMQ 5 has of our policies; 4.9 has nothing of it, and ours stays.
    policies: Mapping[str, Table] | None = None
    offsets: Mapping[tuple[str, str, int], int] | None = None  # by group, topic, queue id
    delays: Mapping[int, int] | None = None  # offset in the queue of each delay level
    # Topics of a file without attributes: of RocketMQ 4.9, which knows none.
    silent: frozenset[str] = frozenset()
    left_out: tuple[str, ...] = ()  # entries whose names are none for us


# --- reading --------------------------------------------------------------------------------------


def read(files: Mapping[str, bytes]) -> Tables:
    """The tables of RocketMQ's files, by name (those of ``snapshots``).

    Raises StoreDamaged for what does not read as a table, StoreForeignFile for a topic that cannot
    be kept.
    """
    left_out: list[str] = []
    found: dict[str, Any] = {}
    for name, field, table_name, decode in _FILES:
        if name in files:
            found[field] = _decoded(name, files[name], table_name, decode, left_out)
    entries: dict[str, _Topic] = found.get("topics", {})
    if "topics" in found:
        found["topics"] = {name: entry.config for name, entry in entries.items()}
        left_out += [
            f"{rocketmq_tables.TOPICS}: {e.left_out}" for e in entries.values() if e.left_out
        ]
    silent = frozenset(name for name, entry in entries.items() if entry.is_silent)
    return Tables(**found, silent=silent, left_out=tuple(left_out))


class _Topic(NamedTuple):
    """A topic of RocketMQ's; ``is_silent``: nothing is said of attributes. ``left_out``: of its
    attributes, in words.
    """

    config: TopicConfig
    is_silent: bool
    left_out: str


def _decoded(
    name: str,
    content: bytes,
    table_name: str,
    decode: Callable[[str, Any], Iterator[tuple[Any, Any]]],
    left_out: list[str],
) -> dict[Any, Any]:
    try:
        entries = _table(rocketmq_tables.parse(content).get(table_name) or {})
        found: dict[Any, Any] = {}
        for key, value in entries.items():
            try:
                found.update(decode(key, value))
            except (TopicNameInvalid, GroupNameInvalid, InvalidRequest) as error:
                left_out.append(f"{name}: {error.message}")
    except (StoreDamaged, ValueError) as error:
        why = error.message if isinstance(error, StoreDamaged) else error
        raise StoreDamaged(
            f"config/{name} of Apache RocketMQ cannot be read: {why}. Mend it, or put it back; "
            "or move it out of the store, which then opens with what is known here"
        ) from error
    return found


def _topic(name: str, value: Any) -> Iterator[tuple[str, _Topic]]:
    if name == topics.AUTO_CREATE_TOPIC:
        return  # not a topic but an option: docs/format/rocketmq_tables.md
    topics.check_name(name)
    settings = _table(value)
    given = settings.get("attributes")
    attributes = _attributes(_table(given or {}))
    if BATCH_QUEUE in attributes.values():
        raise StoreForeignFile(
            f"topic {name} has queue.type {BATCH_QUEUE}: its records hold many messages each, "
            "which cannot be read here, and stay in the log when the topic is deleted. Nothing was "
            "changed: the folder is Apache RocketMQ's as before, which alone can read it; begin "
            "here with an empty folder"
        )
    read_count = _number(settings, "readQueueNums", 16)
    write_count = _number(settings, "writeQueueNums", 16)
    if max(read_count, write_count) > QUEUES_PER_TOPIC_MAX:
        raise StoreForeignFile(
            f"topic {name} has {max(read_count, write_count)} queues, {QUEUES_PER_TOPIC_MAX} are "
            "allowed. Lower them with RocketMQ's tools first; nothing was changed"
        )
    permission = _number(settings, "perm", 6) & (PERMISSION_READ | PERMISSION_WRITE)
    message_type, left_out = _message_type(attributes.get(MESSAGE_TYPE, ""))
    if message_type is not None:
        del attributes[MESSAGE_TYPE]
    kept = tuple(sorted(attributes.items()))
    try:
        topics.check_attributes(kept)
    except ValueError as error:
        kept, left_out = (), f"attributes of topic {name}: {error}"
    config = TopicConfig(
        name,
        read_count,
        write_count,
        permission,
        message_type=message_type or MessageType.UNSPECIFIED,
        is_ordered=settings.get("order") is True,
        attributes=kept,
    )
    yield name, _Topic(config, given is None, left_out and f"topic {name}: {left_out}")


def _attributes(table: Table) -> dict[str, str]:
    """Names without the ``+`` with which RocketMQ's tools set them; early releases stored it."""
    return {
        name.removeprefix("+"): value for name, value in table.items() if isinstance(value, str)
    }


def _message_type(name: str) -> tuple[MessageType | None, str]:
    """The type. None: there is none, or one that stays an attribute; with what is left out."""
    if not name:
        return None, ""
    try:
        return MessageType[name], ""
    except KeyError:
        return None, f"{MESSAGE_TYPE} {name[:60]} is none here, it takes every message"


def _group(name: str, value: Any) -> Iterator[tuple[str, GroupSettings]]:
    groups.check_name(name)
    f = _table(value)
    yield (
        name,
        GroupSettings(
            name,
            consume_enable=_flag(f, "consumeEnable"),
            consume_from_min_enable=_flag(f, "consumeFromMinEnable"),
            consume_broadcast_enable=_flag(f, "consumeBroadcastEnable"),
            retry_queue_count=_number(f, "retryQueueNums", 1),
            retry_times_max=_number(f, "retryMaxTimes", 16),
            broker_id=_number(f, "brokerId", 0),
            broker_id_when_slow=_number(f, "whichBrokerWhenConsumeSlowly", 1),
            notify_members_enable=_flag(f, "notifyConsumerIdsChangedEnable"),
        ),
    )


def _policy(name: str, value: Any) -> Iterator[tuple[str, Table]]:
    """What of a group's policy the file names. Raises InvalidRequest for a retry policy that cannot
    be kept.
    """
    if not GROUP_NAME.fullmatch(name):
        return  # in its other settings
    f = _table(value)
    found: Table = {}
    if f.get("consumeMessageOrderly") is not None:
        found["is_orderly"] = _flag(f, "consumeMessageOrderly")
    if f.get("consumeTimeoutMinute") is not None:
        found["consume_timeout_min"] = _number(f, "consumeTimeoutMinute", 0)
    if f.get("groupSysFlag") is not None:
        found["system_flag"] = _number(f, "groupSysFlag", 0)
    if f.get("attributes") is not None:
        attributes = _table(f["attributes"])
        found["attributes"] = kept_attributes({key: str(v) for key, v in attributes.items()})
    if f.get("groupRetryPolicy") is not None:
        found["retry"] = _retry(_table(f["groupRetryPolicy"]))
    try:
        check_policy(replace(DEFAULT, **found))
    except InvalidRequest as error:
        raise InvalidRequest(f"of group {name}: {error.message}") from error
    if found:
        yield name, found


def _retry(f: Table) -> RetryPolicy | None:
    """RocketMQ keeps both forms, and uses the one that ``type`` names."""
    if f.get("type") == "EXPONENTIAL":
        exponential = _table(f.get("exponentialRetryPolicy") or {})
        return ExponentialRetry(
            _number(exponential, "initial", EXPONENTIAL.initial_ms),
            _number(exponential, "multiplier", EXPONENTIAL.multiplier),
            _number(exponential, "max", EXPONENTIAL.max_ms),
        )
    steps = _table(f.get("customizedRetryPolicy") or {}).get("next")
    if not steps:
        return None
    if not isinstance(steps, list):
        raise ValueError(f"{str(steps)[:60]!r} is where retry steps should be")
    return CustomizedRetry(tuple(_number({"next": step}, "next", 0) for step in steps))


def _queues(key: str, value: Any) -> Iterator[tuple[tuple[str, str, int], int]]:
    """``topic@group`` → queue id → offset."""
    topic, _, group = key.partition("@")
    topics.check_name(topic)
    groups.check_name(group)
    queues = _table(value)
    for queue_id in queues:
        yield (group, topic, _digits(queue_id)), _number(queues, queue_id, 0)


def _level(key: str, value: Any) -> Iterator[tuple[int, int]]:
    yield _digits(key), _number({key: value}, key, 0)


_FILES: tuple[tuple[str, str, str, Callable[[str, Any], Iterator[tuple[Any, Any]]]], ...] = (
    (rocketmq_tables.TOPICS, "topics", "topicConfigTable", _topic),
    (rocketmq_tables.GROUPS, "groups", "subscriptionGroupTable", _group),
    (rocketmq_tables.GROUPS, "policies", "subscriptionGroupTable", _policy),
    (rocketmq_tables.OFFSETS, "offsets", "offsetTable", _queues),
    (rocketmq_tables.DELAYS, "delays", "offsetTable", _level),
)


def _table(value: Any) -> Table:
    if not isinstance(value, dict):
        raise ValueError(f"{str(value)[:60]!r} is where a table should be")
    return value


def _flag(fields: Table, name: str) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name} is neither true nor false")
    return value is not False  # all of them are true by default


def _number(fields: Table, name: str, otherwise: int) -> int:
    """A number from 0; RocketMQ takes its digits in quotes too. Negative ones, its sign of an
    offset that is not known, count as 0.
    """
    value = fields.get(name)
    if value is None:
        return otherwise
    number = value if type(value) is int else _digits(str(value))
    if number > _NUMBER_MAX:
        raise ValueError(f"{name} is {number}, more than {_NUMBER_MAX}")
    return max(0, number)


def _digits(text: str) -> int:
    if not (text.isascii() and text.lstrip("-").isdigit()):
        raise ValueError(f"{text[:60]!r} is where a number should be")
    return int(text)


# --- taking over ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Queues:
    """What the taken-over store holds."""

    known: Iterable[tuple[str, int]]  # (topic, queue id) of all queues with messages
    verified: Callable[[str, int], int]  # queue offset up to which the messages are as we left them
    maximum: Callable[[str, int], int]  # offset of the message to come


def adopt_tables(state: BrokerState, tables: Tables, queues: Queues, flush_mode: FlushMode) -> None:
    """Let ``state`` hold RocketMQ's tables, and begin a generation in all queues: what was known of
    messages behind those that are as we left them may be said of others now.

    ``flush_mode`` is that of topics new to us; none of them waits for followers. As after an
    unclean start, no change of its own stands in the log: the state snapshot that begins the epoch
    has it all.
    """
    _apply(state, state.plan_raise(queues.verified))
    _apply(state, _topic_changes(state, tables, queues, flush_mode))
    _apply(state, _group_changes(state, tables))
    _apply(state, _offset_changes(state, tables, queues))
    if tables.delays is not None:
        state.apply(DelaysReached(dict(tables.delays)))
    if tables.offsets is not None:
        floor, op_floor = (
            tables.offsets.get((OFFSETS_GROUP, topic, QUEUE_ID), 0)
            for topic in (HALF_TOPIC, OP_TOPIC)
        )
        state.apply(HalvesReached(HalfProgress(floor, op_floor)))


def _apply(state: BrokerState, changes: Iterable[Change]) -> None:
    for change in list(changes):
        state.apply(change)


def _topic_changes(
    state: BrokerState, tables: Tables, queues: Queues, flush_mode: FlushMode
) -> Iterator[Change]:
    found = tables.topics
    if found is None:
        found = _topics_of_queues(state, queues)
    else:
        yield from (TopicDropped(known.name) for known in state.topics if known.name not in found)
    for config in found.values():
        known = state.topics.find(config.name)
        before = known or TopicConfig(config.name, flush_mode=flush_mode)
        put = replace(
            config.plain(), flush_mode=before.flush_mode, replication_mode=before.replication_mode
        )
        yield TopicPut(put, state.generations.allocate())
        typed = config
        if config.name in tables.silent:
            typed = replace(config, message_type=before.message_type, attributes=before.attributes)
        if TopicTyped.of(typed) != TopicTyped.of(before):
            yield TopicTyped.of(typed)


def _topics_of_queues(state: BrokerState, queues: Queues) -> dict[str, TopicConfig]:
    """Settings for the topics that have messages and none: topics.json is lost."""
    counts: dict[str, int] = {}
    for topic, queue_id in queues.known:
        if topic not in state.topics and not topics.is_system(topic):
            counts[topic] = max(counts.get(topic, 0), queue_id + 1)
    return {topic: TopicConfig(topic, count, count) for topic, count in sorted(counts.items())}


def _group_changes(state: BrokerState, tables: Tables) -> Iterator[Change]:
    """Groups that are dropped and put again have lost what they had committed."""
    found = dict(state.groups) if tables.groups is None else tables.groups
    if tables.offsets is not None:
        yield from (GroupDropped(name) for name in sorted({c.group for c in state.offsets}))
    yield from (GroupDropped(name) for name in sorted(state.groups) if name not in found)
    yield from (GroupPut(settings) for settings in found.values())
    for name in found:
        before = state.groups[name].policy if name in state.groups else DEFAULT
        policy = replace(before, **(tables.policies or {}).get(name, {}))
        if (before, policy) != (DEFAULT, DEFAULT):
            yield GroupPolicyPut(name, policy)


def _offset_changes(state: BrokerState, tables: Tables, queues: Queues) -> Iterator[Change]:
    commits = []
    for (group, topic, queue_id), offset in (tables.offsets or {}).items():
        history = state.generations.find(topic, queue_id)
        if history is not None and group != OFFSETS_GROUP:
            # A crash of RocketMQ's may leave an offset behind the last message.
            reached = min(offset, queues.maximum(topic, queue_id))
            position = Position(history.current, reached)
            commits.append(CommittedOffset(group, topic, queue_id, position))
    if commits:
        yield OffsetsCommitted(tuple(commits))
