"""The nouns that cross rooms. Frozen, without protobuf and without I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum

PERMISSION_READ = 4
PERMISSION_WRITE = 2

MESSAGE_BODY_BYTES_MAX = 4 * 1024 * 1024
PROPERTIES_BYTES_MAX = 32_767
TOPIC_NAME_LENGTH_MAX = 127
GROUP_NAME_LENGTH_MAX = 255
QUEUES_PER_TOPIC_MAX = 1024


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

    @property
    def readable(self) -> bool:
        return bool(self.permission & PERMISSION_READ)

    @property
    def writable(self) -> bool:
        return bool(self.permission & PERMISSION_WRITE)


@dataclass(slots=True)  # not frozen: that would cost as much as encoding the message
class Message:
    """What an application sends. ``keys`` find it again, consumers filter by ``tag``."""

    topic: str
    body: bytes
    tag: str = ""
    keys: tuple[str, ...] = ()
    properties: dict[str, str] = field(default_factory=dict)
    flag: int = 0
    queue: QueueRef | None = None  # None: the producer chooses


@dataclass(frozen=True, slots=True)
class Subscription:
    """What a member of a consumer group reads. No tags: every message."""

    topic: str
    tags: frozenset[str] = frozenset()
