"""The nouns that cross rooms. Frozen, without protobuf and without I/O."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum, IntEnum
from typing import cast

from cometmq.errors import DelayInvalid, DelayLevelInvalid, InvalidRequest, PropertiesInvalid
from cometmq.native import untracked

PERMISSION_READ = 4
PERMISSION_WRITE = 2

PORT_MAX = 65_535
MESSAGE_BODY_BYTES_MAX = 4 * 1024 * 1024
PROPERTIES_BYTES_MAX = 32_767
TOPIC_NAME_LENGTH_MAX = 127
GROUP_NAME_LENGTH_MAX = 255
# '.' and '/' are not among the characters, so a topic's name is never a path to somewhere else.
NAME_CHARACTER = r"[%|a-zA-Z0-9_-]"
TOPIC_NAME = re.compile(rf"{NAME_CHARACTER}{{1,{TOPIC_NAME_LENGTH_MAX}}}")
GROUP_NAME = re.compile(rf"{NAME_CHARACTER}{{1,{GROUP_NAME_LENGTH_MAX}}}")
BROKER_GROUP_NAME_LENGTH_MAX = 127
# A name alone, or `room@name`, by which machine-room strategies know where a broker group is.
BROKER_GROUP_NAME = re.compile(
    rf"(?=.{{1,{BROKER_GROUP_NAME_LENGTH_MAX}}}\Z){NAME_CHARACTER}+(?:@{NAME_CHARACTER}+)?"
)
QUEUES_PER_TOPIC_MAX = 1024
# What a broker remembers of a producer, and so what options of producers may ask for at most.
BATCHES_KNOWN_MAX = 64  # the newest of a stream of ids
SENDER_KNOWN_MS = 900_000  # that a stream of ids is known which sends nothing
BUSY_COUNT = 32  # messages in an answer: a queue that has so many is read without a pull-hold
DELAY_LEVEL_MAX = 64  # of a list of levels; RocketMQ's, and our default, has 18
IMMUNITY_S_MAX = 3_600  # that the producer of a half message is not asked about it
# Of a time that a sender names for a delivery: 13 digits, in 2001 and in 2286.
TIMER_MS_MIN, TIMER_MS_MAX = 10**12, 10**13 - 1
DELAY_MS_MAX = 40 * 86_400_000  # of any broker
DEAD_LETTER_LEVEL = -1  # of a message sent back: it is a dead letter at once
# Of the group that keeps the offsets of one broadcasting consumer.
BROADCAST_PREFIX = "%BROADCAST%"
DLQ_PREFIX = "%DLQ%"  # of the topic with the dead letters of a group
RETRY_PREFIX = "%RETRY%"  # of the topic with the messages that a group sent back
# Generations begin with the epoch and are int64: half of their range. No group gets there by
# restarts, so a number above is no group's epoch.
EPOCH_MAX = 1 << 30
# What is further above a known epoch is none either: each is a restart, or a take-over.
EPOCH_LEAP_MAX = 1_000
COUNTER_MAX = 2**63 - 1  # of what only grows and is compared

QueueKey = tuple[str, int]  # topic, queue id: a queue of one broker group


class FlushMode(Enum):
    """When a message counts as stored on the writer's disk; the values are those of
    ``cometmq.v1.FlushMode``.
    """

    ASYNC = 1  # acknowledged when in the page cache; consumers see it when it is on disk
    SYNC = 2  # acknowledged and seen when it is on disk


class ReplicationMode(IntEnum):
    """Which copies a message has to have before it counts as stored; the values are those of
    ``cometmq.v1.ReplicationMode``, and a greater one asks for more.
    """

    ASYNC = 1  # the writer's alone
    APPENDED = 2  # every in-sync member has it in its page cache
    FLUSHED = 3  # every in-sync member has it on its disk


class MessageType(Enum):
    """Which messages a topic takes, RocketMQ's ``message.type``; the values are those of
    ``cometmq.v1.MessageType``.
    """

    UNSPECIFIED = 1  # every message
    NORMAL = 2
    FIFO = 3  # readable at once, and each with a sharding key
    DELAY = 4
    TRANSACTION = 5
    MIXED = 6  # every message


class SendStatus(Enum):
    """What a stored message is assured of; the values are those of ``cometmq.v1.SendStatus``. In
    all cases it is stored: sending it again stores it twice.
    """

    SEND_OK = 1  # everything that its topic demands
    FLUSH_DISK_TIMEOUT = 2  # its topic demands the disk, which has not answered in time
    FLUSH_SLAVE_TIMEOUT = 3  # its topic demands copies, which were not there in time


@dataclass(frozen=True, slots=True, order=True)
class QueueRef:
    """One queue of one topic on one broker group."""

    topic: str
    queue_id: int
    broker_group: str = ""  # empty inside a broker, where there is only one

    def is_of(self, topic: str) -> bool:
        """Whether it surely is a queue of the topic."""
        return (
            self.topic.__class__ is self.broker_group.__class__ is str
            and self.topic == topic
            and self.queue_id.__class__ is int
            and 0 <= self.queue_id < 2**31
        )


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """A place in a queue. Generation 0: the caller does not track generations."""

    generation: int
    offset: int


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """The settings of a topic on one broker group; RocketMQ's topics.json plus what a message has
    to have before it counts as stored, and how long messages are shown.
    """

    name: str
    read_queue_count: int = 4
    write_queue_count: int = 4
    permission: int = PERMISSION_READ | PERMISSION_WRITE
    flush_mode: FlushMode = FlushMode.ASYNC
    replication_mode: ReplicationMode = ReplicationMode.ASYNC
    reserve_time_ms: int = 0  # older messages are not shown; 0 = what the log has is shown
    message_type: MessageType = MessageType.UNSPECIFIED
    is_ordered: bool = False  # over all broker groups: producers wait for the one of a message
    # Attributes of RocketMQ's that say nothing here, by name; kept for the way back to it.
    attributes: tuple[tuple[str, str], ...] = ()

    @property
    def readable(self) -> bool:
        return bool(self.permission & PERMISSION_READ)

    @property
    def writable(self) -> bool:
        return bool(self.permission & PERMISSION_WRITE)

    def delivery_queue_id(self, queue_id: int) -> int | None:
        """The queue for a message that was stored for ``queue_id`` and is delivered later: the
        topic may have fewer queues by now. None: it has none. RocketMQ's topics may have none for
        writers.
        """
        count = self.write_queue_count or self.read_queue_count
        return queue_id % count if count else None

    def plain(self) -> TopicConfig:
        """Without what the state has changes of its own for: reserve time, type, order."""
        return TopicConfig(
            self.name,
            self.read_queue_count,
            self.write_queue_count,
            self.permission,
            self.flush_mode,
            self.replication_mode,
        )

    def with_extras_of(self, other: TopicConfig) -> TopicConfig:
        """These settings, with the values of ``other`` for all that :meth:`plain` leaves out."""
        return replace(
            self,
            reserve_time_ms=other.reserve_time_ms,
            message_type=other.message_type,
            is_ordered=other.is_ordered,
            attributes=other.attributes,
        )


class JoinedKeys(tuple[str, ...]):
    """Keys of a message as one text with blanks between them, which were looked at before."""

    __slots__ = ()


@untracked
@dataclass(slots=True, init=False)  # not frozen: that would cost as much as encoding the message
class Message:
    """What an application sends. ``keys`` find it again, consumers filter by ``tag``.

    InvalidRequest for a field that is not of its kind: a text where texts are wanted would be taken
    for its letters.
    """

    topic: str
    body: bytes
    tag: str
    keys: tuple[str, ...]
    properties: dict[str, str]
    flag: int
    queue: QueueRef | None  # None: the producer chooses
    # 1 (1 s) to 18 (2 h), unless the broker has another list: consumers read it after that time;
    # 0 = at once
    delay_level: int
    sharding_key: str  # messages of one key go to one queue, in order; empty = none
    wait_store: bool  # False: acknowledged when appended, whatever the topic asks for
    # When consumers read it: a time, or so long after it was stored; 0 = at once. Only one of them.
    deliver_at_ms: int
    delay_ms: int

    def __init__(
        self,
        topic: str,
        body: bytes,
        tag: str = "",
        keys: tuple[str, ...] = (),
        properties: dict[str, str] | None = None,
        flag: int = 0,
        queue: QueueRef | None = None,
        delay_level: int = 0,
        sharding_key: str = "",
        wait_store: bool = True,
        deliver_at_ms: int = 0,
        delay_ms: int = 0,
    ) -> None:
        self.topic = topic
        self.body = body
        self.tag = tag
        self.keys = keys
        self.properties = {} if properties is None else properties
        self.flag = flag
        self.queue = queue
        self.delay_level = delay_level
        self.sharding_key = sharding_key
        self.wait_store = wait_store
        self.deliver_at_ms = deliver_at_ms
        self.delay_ms = delay_ms
        if (
            keys
            or properties
            or flag
            or (delay_level and not _is_delay_level(delay_level))
            or deliver_at_ms
            or delay_ms
            or sharding_key
            or wait_store is not True
            or queue is not None
            or body.__class__ is not bytes
            or topic.__class__ is not str
            or tag.__class__ is not str
        ):
            self.check()

    def __reduce__(self) -> tuple[type[Message], tuple[object, ...]]:
        return type(self), tuple(getattr(self, field.name) for field in fields(self))

    def check(self) -> None:
        """InvalidRequest for the first field that is not of its kind."""
        if not self._is_usual():
            self._check_each()

    def _is_usual(self) -> bool:
        """The quick look, for each message with keys or properties: False says nothing yet."""
        if (
            self.keys.__class__ is not tuple
            or self.properties.__class__ is not dict
            or self.flag
            or not self._has_usual_time()
            or self.sharding_key.__class__ is not str
            or self.wait_store is not True
            or self.body.__class__ is not bytes
            or self.topic.__class__ is not str
            or self.tag.__class__ is not str
        ):
            return False
        queue = self.queue
        if queue is not None and not (queue.__class__ is QueueRef and queue.is_of(self.topic)):
            return False
        for key in self.keys:
            if key.__class__ is not str or not key or " " in key or not key.isprintable():
                return False
        for name, value in self.properties.items():
            if name.__class__ is not str or value.__class__ is not str:
                return False
        return True

    def _has_usual_time(self) -> bool:
        level, at_ms, after_ms = self.delay_level, self.deliver_at_ms, self.delay_ms
        if not at_ms and not after_ms:
            return not level or _is_delay_level(level)
        if level or (at_ms and after_ms):
            return False
        if at_ms:
            return at_ms.__class__ is int and TIMER_MS_MIN <= at_ms <= TIMER_MS_MAX
        return after_ms.__class__ is int and 0 < after_ms <= DELAY_MS_MAX

    def _check_time(self) -> None:
        if self.delay_ms.__class__ is not int or self.delay_ms:
            check_delay(self.delay_ms)
        if self.deliver_at_ms.__class__ is not int or self.deliver_at_ms:
            check_time(self.deliver_at_ms)
        if bool(self.delay_ms) + bool(self.deliver_at_ms) + bool(self.delay_level) > 1:
            raise InvalidRequest("A message has one of deliver_at_ms, delay_ms and delay_level.")

    def _check_each(self) -> None:
        _check_text("topic", self.topic)
        body: object = self.body
        if not isinstance(body, bytes):
            raise InvalidRequest(
                f"The body must be bytes, not {type(body).__name__}: {_as_bytes(body)}."
            )
        _check_text("tag", self.tag)
        _check_text("sharding_key", self.sharding_key)
        check_keys(self.keys)
        _check_properties(self.properties)
        if type(self.flag) is not int or not -(2**31) <= self.flag < 2**31:
            raise InvalidRequest(f"flag must be a whole number of 32 bits, not {self.flag!r}.")
        if self.delay_level.__class__ is not int or not 0 <= self.delay_level <= DELAY_LEVEL_MAX:
            raise DelayLevelInvalid(
                f"delay_level is 0 (none) to {DELAY_LEVEL_MAX}, not {self.delay_level!r}."
            )
        self._check_time()
        wait_store: object = self.wait_store
        if not isinstance(wait_store, bool):
            raise InvalidRequest(f"wait_store is True or False, not {wait_store!r}.")
        if self.queue is not None:
            check_queue(self.queue)
            if self.queue.topic != self.topic:
                raise InvalidRequest(
                    f"The message is for topic {self.topic!r}, its queue of {self.queue.topic!r}."
                )


def _as_bytes(body: object) -> str:
    """How it becomes bytes, in words."""
    if isinstance(body, str):
        return "body.encode()"
    if isinstance(body, bytearray | memoryview):
        return "bytes(body)"
    if body is None:
        return 'b"" for a message without one'
    if isinstance(body, dict | list | tuple | int | float):
        return "json.dumps(body).encode()"
    return "encode it, as JSON or otherwise"


def check_delay(delay_ms: object) -> None:
    """DelayInvalid for what is no delay that some broker takes."""
    if delay_ms.__class__ is not int or not 0 <= delay_ms <= DELAY_MS_MAX:
        raise DelayInvalid(f"A delay is 0 to {DELAY_MS_MAX} ms (40 days), not {delay_ms!r}.")


def check_time(time_ms: object) -> None:
    """DelayInvalid for what is no time at which a message can be delivered."""
    is_time = time_ms.__class__ is int and TIMER_MS_MIN <= time_ms <= TIMER_MS_MAX
    if not is_time:
        raise DelayInvalid(
            f"{time_ms!r} is no time for a delivery: ms since 1970, {TIMER_MS_MIN} (in 2001) to "
            f"{TIMER_MS_MAX} (in 2286)."
        )


def _is_delay_level(level: int) -> bool:
    return level.__class__ is int and 0 < level <= DELAY_LEVEL_MAX


def check_queue(queue: object) -> None:
    """InvalidRequest for what is no queue."""
    if not isinstance(queue, QueueRef):
        raise InvalidRequest(
            f"A queue is a QueueRef(topic, queue_id, broker_group), not {queue!r}."
        )
    _check_text("topic", queue.topic)
    _check_text("broker_group", queue.broker_group)
    if type(queue.queue_id) is not int or not 0 <= queue.queue_id < 2**31:
        raise InvalidRequest(f"queue_id counts from 0, it cannot be {queue.queue_id!r}.")


def check_texts(name: str, texts: object) -> None:
    """InvalidRequest for what is no collection of texts, a single text among it."""
    if isinstance(texts, str):
        raise InvalidRequest(
            f"{name} must be a collection of texts: ({texts!r},), not {texts!r}, "
            "which Python reads as one text a letter."
        )
    if not isinstance(texts, tuple | list | set | frozenset):
        raise InvalidRequest(f"{name} must be a tuple of texts, not {texts!r}.")
    for text in texts:
        _check_text(f"each of {name}", text)


def check_keys(keys: object) -> None:
    """InvalidRequest for what is no collection of texts, PropertiesInvalid for a text that is no
    key.
    """
    if isinstance(keys, JoinedKeys):
        return
    check_texts("keys", keys)
    for key in cast("Collection[str]", keys):
        if key.split() != [key]:
            raise PropertiesInvalid(f"Key {key!r}: a key is not empty and has no blanks.").advising(
                "Give several keys in place of one with blanks, or join its words with '-'."
            )


def _check_text(name: str, text: object) -> None:
    if not isinstance(text, str):
        raise InvalidRequest(f"{name} must be a text (str), not {type(text).__name__}: {text!r}.")


def _check_properties(properties: object) -> None:
    if not isinstance(properties, Mapping):
        raise InvalidRequest(f"properties must be a dict of text to text, not {properties!r}.")
    for name, value in properties.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidRequest(
                f"Property {name!r}: name and value must be texts (str), not "
                f"{type(name).__name__} and {type(value).__name__}; write str({value!r})."
            )


@dataclass(frozen=True, slots=True)
class Filter:
    """Which messages a consumer wants: those with one of the tags, or those for which the SQL92
    expression is true. Neither: every message.
    """

    tags: frozenset[str] = frozenset()
    sql: str = ""

    def __bool__(self) -> bool:
        return bool(self.tags or self.sql)


@dataclass(frozen=True, slots=True)
class Subscription:
    """What a member of a consumer group reads. No tags and no SQL92 expression: every message."""

    topic: str
    tags: frozenset[str] = frozenset()
    sql: str = ""
