"""Topics: names, settings, who may send and read, and the table of them.

Rules of names and permission bits are RocketMQ's (its TopicValidator and PermName); which system
topics are open is ours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache

from cometmq.errors import (
    InvalidRequest,
    LimitExceeded,
    MessageTypeMismatch,
    NoPermission,
    QueueCountInvalid,
    QueueNotFound,
    TopicNameInvalid,
    TopicNotFound,
)
from cometmq.model import (
    DLQ_PREFIX,
    PERMISSION_READ,
    PERMISSION_WRITE,
    QUEUES_PER_TOPIC_MAX,
    RETRY_PREFIX,
    TOPIC_NAME,
    FlushMode,
    MessageType,
    ReplicationMode,
    TopicConfig,
)
from cometmq.names import SYSTEM_TOPIC_PREFIX

TOPICS_MAX = 100_000
RESERVE_TIME_MS_MAX = 100 * 365 * 86_400_000

AUTO_CREATE_TOPIC = "TBW102"  # its route shows producers that this broker creates topics on demand

ATTRIBUTES_MAX = 32  # of one topic, and how long names and values may be together
ATTRIBUTES_BYTES_MAX = 4_096

_ANY_TYPE = frozenset({MessageType.UNSPECIFIED, MessageType.MIXED})

_UNTYPED = (MessageType.UNSPECIFIED, False, ())
_CLOSED = 0
_BOTH = PERMISSION_READ | PERMISSION_WRITE
# What clients may do with the topics that the system itself writes, by name and by prefix.
_SYSTEM_NAMES = {
    AUTO_CREATE_TOPIC: _CLOSED,
    "SCHEDULE_TOPIC_XXXX": _CLOSED,
    "RMQ_SYS_TRANS_HALF_TOPIC": _CLOSED,
    "RMQ_SYS_TRANS_OP_HALF_TOPIC": _CLOSED,
    "SELF_TEST_TOPIC": _CLOSED,
    "OFFSET_MOVED_EVENT": PERMISSION_READ,
    "TRANS_CHECK_MAX_TIME_TOPIC": PERMISSION_READ,
    "RMQ_SYS_TRACE_TOPIC": _BOTH,
}
_SYSTEM_PREFIXES = {
    SYSTEM_TOPIC_PREFIX: _CLOSED,
    RETRY_PREFIX: PERMISSION_READ,
    DLQ_PREFIX: PERMISSION_READ,
}


def check_name(name: str) -> None:
    """Raises ``TopicNameInvalid`` unless ``name`` is one to 127 characters of ``%|a-zA-Z0-9_-``: a
    topic may have it that is there. :mod:`cometmq.names` says which one may be made.
    """
    if not TOPIC_NAME.fullmatch(name):
        raise TopicNameInvalid(f"{name[:200]!r} is not a topic name")


@lru_cache(maxsize=4096)
def system_access(name: str) -> int | None:
    """What clients may do with a system topic, as permission bits; None for users' topics."""
    access = _SYSTEM_NAMES.get(name)
    if access is None:
        access = next(
            (bits for prefix, bits in _SYSTEM_PREFIXES.items() if name.startswith(prefix)), None
        )
    return access


def is_system(name: str) -> bool:
    """Whether the topic belongs to the system: users can neither create nor delete it."""
    return system_access(name) is not None


def is_closed(name: str) -> bool:
    """Whether no client may read or write the topic: its messages wait for their time or an end."""
    return system_access(name) == _CLOSED


def check_attributes(attributes: Iterable[tuple[str, str]]) -> None:
    """Raises ``ValueError`` for more than a topic may have of RocketMQ's attributes: 32, in order
    of their names, 4,096 printable ASCII characters in all, neither ``"`` nor ``\\``.
    """
    entries = list(attributes)
    names = [name for name, _ in entries]
    texts = "".join(name + value for name, value in entries)
    if len(entries) > ATTRIBUTES_MAX or len(texts) > ATTRIBUTES_BYTES_MAX:
        raise ValueError(
            f"{len(entries)} attributes of {len(texts)} characters, {ATTRIBUTES_MAX} of "
            f"{ATTRIBUTES_BYTES_MAX} are allowed"
        )
    if not (texts.isascii() and texts.isprintable()) or '"' in texts or "\\" in texts:
        raise ValueError("an attribute has a character that cannot be kept")
    if "" in names or names != sorted(set(names)):
        raise ValueError("attributes are not in order of their names")


def check_type(config: TopicConfig, sent: MessageType) -> None:
    """Raises ``MessageTypeMismatch`` unless the topic takes messages of the kind ``sent``: NORMAL,
    DELAY or TRANSACTION. A FIFO topic takes normal ones; each has to have a sharding key.
    """
    wanted = config.message_type
    if wanted is sent or wanted in _ANY_TYPE:
        return
    if wanted is MessageType.FIFO and sent is MessageType.NORMAL:
        return
    raise MessageTypeMismatch(
        f"topic {config.name} takes {wanted.name} messages, these are {sent.name}"
    )


def check_settings(config: TopicConfig) -> None:
    """Raises ``TopicNameInvalid``, ``QueueCountInvalid`` or ``InvalidRequest`` (permission)."""
    check_name(config.name)
    for which, count in (("read", config.read_queue_count), ("write", config.write_queue_count)):
        if not 1 <= count <= QUEUES_PER_TOPIC_MAX:
            raise QueueCountInvalid(f"{count} {which} queues for topic {config.name}")
    if config.permission not in (PERMISSION_READ, PERMISSION_WRITE, _BOTH):
        raise InvalidRequest(
            f"permission {config.permission} is none of 2 (write), 4 (read), 6 (both)"
        )
    if not 0 <= config.reserve_time_ms <= RESERVE_TIME_MS_MAX:
        raise InvalidRequest(
            f"a reserve time is 0 (none) to {in_hours(RESERVE_TIME_MS_MAX)}, not "
            f"{in_hours(config.reserve_time_ms)}"
        )
    try:
        check_attributes(config.attributes)
    except ValueError as error:
        raise InvalidRequest(f"topic {config.name}: {error}") from error


def in_hours(time_ms: int) -> str:
    """``360000000`` → ``100 h``: operators think of reserve times in hours."""
    return f"{time_ms / 3_600_000:.10g} h"


def _typed_bytes(config: TopicConfig) -> int:
    if (config.message_type, config.is_ordered, config.attributes) == _UNTYPED:
        return 0
    attributes = sum(len(name) + len(value) + 6 for name, value in config.attributes)
    return len(config.name) + 80 + attributes


class TopicTable:
    """The topics of one broker group by name; ``version`` counts their changes."""

    def __init__(self, topics_max: int = TOPICS_MAX) -> None:
        self.topics_max = topics_max
        self.version = 0  # changes since this table was made
        self._topics: dict[str, TopicConfig] = {}
        # Of the users' topics, by what their messages have to have before they are acknowledged.
        self._flush_counts: Counter[FlushMode] = Counter()
        self._copy_counts: Counter[ReplicationMode] = Counter()
        # The strictest of all users' topics: asked for with each answer of a follower.
        self._strictest = (FlushMode.ASYNC, ReplicationMode.ASYNC)
        self.typed_bytes = 0  # about what the types of all topics add to a state snapshot

    def __len__(self) -> int:
        return len(self._topics)

    def __contains__(self, name: object) -> bool:
        return name in self._topics

    def __iter__(self) -> Iterator[TopicConfig]:
        """All topics in order of name."""
        return iter([self._topics[name] for name in sorted(self._topics)])

    def get(self, name: str) -> TopicConfig:
        """The topic's settings.

        Raises ``TopicNotFound``, or ``TopicNameInvalid`` for what can never be there.
        """
        config = self._topics.get(name)
        if config is None:
            check_name(name)
            raise TopicNotFound(f"there is no topic {name} here")
        return config

    def find(self, name: str) -> TopicConfig | None:
        """The topic's settings, or None."""
        return self._topics.get(name)

    def for_send(self, name: str, queue_id: int) -> TopicConfig:
        """The topic, if a client may write this queue.

        Raises ``NoPermission``, ``TopicNameInvalid``, ``TopicNotFound``, ``QueueNotFound``.
        """
        self._check_access(name, PERMISSION_WRITE)
        config = self.get(name)
        if not config.writable:
            raise NoPermission(f"topic {name} is not open for writing")
        self._check_queue(name, queue_id, config.write_queue_count)
        return config

    def for_read(self, name: str, queue_id: int) -> TopicConfig:
        """The topic, if a client may read this queue. Raises as :meth:`for_send`."""
        self._check_access(name, PERMISSION_READ)
        config = self.get(name)
        if not config.readable:
            raise NoPermission(f"topic {name} is not open for reading")
        self._check_queue(name, queue_id, config.read_queue_count)
        return config

    def demands(self, name: str) -> tuple[FlushMode, ReplicationMode]:
        """What a message of the topic has to have before it counts as stored.

        System topics ask for all that any of the users' topics asks for.
        """
        if is_system(name):
            return self._strictest
        config = self.get(name)
        return config.flush_mode, config.replication_mode

    def check_room(self, name: str) -> None:
        """Raises ``LimitExceeded`` when the topic is new and the table is full."""
        if name not in self._topics and len(self._topics) >= self.topics_max:
            raise LimitExceeded(
                f"this broker group holds its {self.topics_max} topics (topics_max)"
            )

    def put(self, config: TopicConfig) -> None:
        """Adds a topic or changes its settings."""
        self._uncount(config.name)
        self._topics[config.name] = config
        self._count(config, 1)
        self.version += 1

    def drop(self, name: str) -> None:
        """Takes a topic out; an absent one is no error."""
        self._uncount(name)
        if self._topics.pop(name, None) is not None:
            self.version += 1

    def _uncount(self, name: str) -> None:
        before = self._topics.get(name)
        if before is not None:
            self._count(before, -1)

    def _count(self, config: TopicConfig, change: int) -> None:
        self.typed_bytes += change * _typed_bytes(config)
        if not is_system(config.name):
            self._flush_counts[config.flush_mode] += change
            self._copy_counts[config.replication_mode] += change
            self._strictest = (
                FlushMode.SYNC if self._flush_counts[FlushMode.SYNC] else FlushMode.ASYNC,
                max(+self._copy_counts, default=ReplicationMode.ASYNC),
            )

    @staticmethod
    def _check_access(name: str, permission: int) -> None:
        access = system_access(name)
        if access is not None and not access & permission:
            raise NoPermission(f"{name} is a system topic")

    @staticmethod
    def _check_queue(name: str, queue_id: int, count: int) -> None:
        if not 0 <= queue_id < count:
            raise QueueNotFound(f"topic {name} has no queue {queue_id} here, only 0 to {count - 1}")
