"""Messages that a consumer group sends back: when they come again, and when they are dead letters.

RocketMQ's rules: a message that was sent back for the n-th time waits in the schedule topic for
level 2 + n (10 s to 2 h), unless its group has steps of its own, then comes to the group in its
topic ``%RETRY%group``. After the group's
number of tries it goes to ``%DLQ%group``, at once. Pure.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from cometmq.errors import DelayLevelInvalid, FlowControl, GroupNameInvalid, InvalidRequest
from cometmq.format import delayed, properties, timers
from cometmq.format.delayed import REAL_TOPIC
from cometmq.format.properties import ORIGIN_MESSAGE_ID, RETRY_TOPIC
from cometmq.format.record import Record
from cometmq.format.relay import with_properties
from cometmq.messaging.group_policy import RetryPolicy
from cometmq.messaging.groups import GroupSettings
from cometmq.model import (
    DLQ_PREFIX,
    PROPERTIES_BYTES_MAX,
    RETRY_PREFIX,
    TOPIC_NAME,
    check_delay,
)

FIRST_LEVEL = 3
DEAD = -1  # the delay level that asks for the dead letters at once
ATTEMPTS_KNOWN_MAX = 10_000  # of all groups, in the state
ATTEMPTS_MAX = 300_000  # in the memory of a writer, below 300 bytes each
KNOWN_S_MIN = 60.0  # a send-back that got no answer comes again within seconds

DLQ_ORIGIN_TOPIC, DLQ_ORIGIN_MESSAGE_ID = "DLQ_ORIGIN_TOPIC", "DLQ_ORIGIN_MESSAGE_ID"
_OF_DEAD_LETTERS = frozenset((DLQ_ORIGIN_TOPIC.encode(), DLQ_ORIGIN_MESSAGE_ID.encode()))


def retry_topic(group: str) -> str:
    """Where a group's messages come again. GroupNameInvalid: the group's name is too long."""
    return _topic_of(RETRY_PREFIX, group)


def dlq_topic(group: str) -> str:
    """Where a group's dead letters lie. GroupNameInvalid: the group's name is too long."""
    return _topic_of(DLQ_PREFIX, group)


def is_groups_retry_topic(topic: str, group: str, groups: Container[str]) -> bool:
    """Whether a group's messages come again there: in its own retry topic, or in one that RocketMQ
    made for the group and a topic (``%RETRY%group_topic``). That may be the name of the retry topic
    of another one of ``groups``, whose it is then.
    """
    own = RETRY_PREFIX + group
    is_theirs = topic.startswith(own + "_") and topic.removeprefix(RETRY_PREFIX) not in groups
    return topic == own or is_theirs


def _topic_of(prefix: str, group: str) -> str:
    topic = prefix + group
    if not TOPIC_NAME.fullmatch(topic):
        raise GroupNameInvalid(f"a topic {topic[:200]!r}, for messages sent back, cannot be")
    return topic


def queue_count_of(settings: GroupSettings) -> int:
    """How many queues the group's retry topic has: RocketMQ's tables may say 0."""
    return max(1, settings.retry_queue_count)


def queue_id_of(settings: GroupSettings, source: Record) -> int:
    """The queue of the group's retry topic in which a message is delivered again."""
    return source.queue_offset % queue_count_of(settings)


class Wait(NamedTuple):
    """How long a message waits that was sent back. ``level`` 0: for no delay level, but for so many
    ms from now.
    """

    level: int
    delay_ms: int


NO_WAIT = Wait(0, 0)  # of a dead letter


def wait_after(
    reconsume_times: int,
    delay_level: int,
    retry_times_max: int,
    policy: RetryPolicy | None = None,
    asked_ms: int = 0,
) -> Wait | None:
    """How long a message waits that was sent back ``reconsume_times`` before; None: it is a dead
    letter.

    ``delay_level``: what the consumer asks for; 0 = as the number of tries says, :data:`DEAD`.
    ``asked_ms``: the same in ms. ``policy``: its steps; one that is the time of a level waits
    there, with others in their order. Raises DelayLevelInvalid, DelayInvalid, InvalidRequest.
    """
    if delay_level == DEAD or reconsume_times >= retry_times_max:
        return None
    if asked_ms:
        check_delay(asked_ms)
        if delay_level:
            raise InvalidRequest("delay_level, delay_ms: only one of them")
        return Wait(0, asked_ms)
    if not delay_level and policy is not None:
        delay_ms = policy.delay_ms(reconsume_times)
        return Wait(delayed.level_of_delay(delay_ms), delay_ms)
    level = _level_after(reconsume_times, delay_level)
    return Wait(level, delayed.delay_ms(level))


def _level_after(reconsume_times: int, delay_level: int) -> int:
    if delay_level:
        if not 1 <= delay_level <= delayed.level_count():
            raise DelayLevelInvalid(
                f"a message is sent back for a level of 1 to {delayed.level_count()}, 0 (as its "
                f"tries say) or {DEAD} (a dead letter), not {delay_level}"
            )
        return delay_level
    return min(FIRST_LEVEL + reconsume_times, delayed.level_count())


def delay_after(reconsume_times: int, policy: RetryPolicy | None = None) -> int:
    """For how many ms a message waits at least that could not be consumed and failed
    ``reconsume_times`` times before.
    """
    if policy is not None:
        return policy.delay_ms(reconsume_times)
    return delayed.delay_ms(min(FIRST_LEVEL + reconsume_times, delayed.level_count()))


def retry_properties(source: Record, level: int, topic: str, queue_id: int, origin: str) -> bytes:
    """Of a message that comes in ``topic``, a retry topic. ``origin``: the source's id."""
    return delayed.prefix(level, topic, queue_id) + with_origin(source, origin)


def timed_properties(source: Record, due_ms: int, topic: str, queue_id: int, origin: str) -> bytes:
    """The same, of one that comes at a time of its own."""
    return timers.prefix_at(topic, queue_id, due_ms) + with_origin(source, origin)


def dead_properties(source: Record, origin: str) -> bytes:
    """Of a dead letter. Where there is no room for its origin, it has those of the source alone."""
    found = source.properties
    first = properties.encode(
        {
            DLQ_ORIGIN_TOPIC: found.get(RETRY_TOPIC, source.topic),
            DLQ_ORIGIN_MESSAGE_ID: found.get(ORIGIN_MESSAGE_ID, origin),
        }
    )
    whole = first + with_origin(source, origin)
    if len(whole) <= PROPERTIES_BYTES_MAX:
        return whole
    return with_properties(source.raw_properties, b"", timers.PROPERTIES)


def resent_properties(dead: Record) -> bytes:
    """Of a dead letter that its group gets again: as if it had never been tried."""
    return with_properties(dead.raw_properties, b"", _OF_DEAD_LETTERS)


def with_origin(source: Record, origin: str) -> bytes:
    missing = {
        name: value
        for name, value in ((RETRY_TOPIC, source.topic), (ORIGIN_MESSAGE_ID, origin))
        if name not in source.properties
    }
    return with_properties(source.raw_properties, properties.encode(missing), timers.PROPERTIES)


class Attempt(NamedTuple):
    """One send-back: the group, the record that it sends back, and the number of the try."""

    group: str
    source: int  # log offset
    reconsume_times: int  # of the record that was made


def attempt_of(found: Record) -> Attempt | None:
    """The send-back that has made a relayed record; None: it was made for another reason."""
    for topic in (found.topic, found.properties.get(REAL_TOPIC, "")):
        for prefix in (RETRY_PREFIX, DLQ_PREFIX):
            # A record in the retry topic itself was made from the delayed one, not by a send-back.
            is_due = topic == found.topic and prefix == RETRY_PREFIX
            if topic.startswith(prefix) and not is_due:
                group = topic.removeprefix(prefix)
                return Attempt(group, found.prepared_offset, found.reconsume_times)
    return None


class AttemptTable:
    """The last send-backs, each with the end of the log behind its record: one that is sent twice
    is stored once (RocketMQ stores it twice: #1589).

    A writer knows all of the last minute, and the newest ``ATTEMPTS_KNOWN_MAX``. These are the
    state: a reader of the log has no times.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[Attempt, tuple[int, float]] = OrderedDict()  # end, and since when
        self._unwritten: dict[Attempt, None] = {}  # that the state log does not know, in order

    def __len__(self) -> int:
        """Those of the state."""
        return min(len(self._known), ATTEMPTS_KNOWN_MAX)

    def __iter__(self) -> Iterator[Attempt]:
        """Those of the state, the oldest first."""
        return islice(self._known, len(self._known) - len(self), None)

    def end_of(self, attempt: Attempt) -> int | None:
        """Log offset behind the record; 0: an earlier writer has stored it; None: this send-back is
        new.
        """
        known = self._known.get(attempt)
        return None if known is None else known[0]

    def check_room(self, count: int, now_s: float) -> None:
        """Raises FlowControl while so many more would make it forget some of the last minute."""
        while len(self._known) > ATTEMPTS_KNOWN_MAX:
            _, (_, since_s) = next(iter(self._known.items()))
            if now_s - since_s < KNOWN_S_MIN:
                break
            self._forget_oldest()
        if len(self._known) + count > ATTEMPTS_MAX:
            raise FlowControl(
                f"groups have sent {ATTEMPTS_MAX} messages back within {KNOWN_S_MIN:g} s; which "
                "these were is kept as long"
            )

    def add(self, attempt: Attempt, end: int, now_s: float) -> None:
        """The record is in the log."""
        self._known[attempt] = end, now_s
        self._unwritten[attempt] = None

    def restore(self, attempts: Iterable[Attempt]) -> None:
        """Takes send-backs as the state log has them, the oldest first."""
        for attempt in attempts:
            self._known.setdefault(attempt, (0, 0.0))
        self._forget_beyond_the_state()

    def forget_group(self, group: str) -> None:
        """A group is gone, or begins again."""
        self._forget_beyond_the_state()  # readers do not know them
        for attempt in [attempt for attempt in self._known if attempt.group == group]:
            del self._known[attempt]
            self._unwritten.pop(attempt, None)

    def _forget_beyond_the_state(self) -> None:
        while len(self._known) > ATTEMPTS_KNOWN_MAX:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        gone, _ = self._known.popitem(last=False)
        self._unwritten.pop(gone, None)

    @property
    def has_unwritten(self) -> bool:
        """Whether the state log does not know all of them."""
        return bool(self._unwritten)

    def unwritten(self) -> list[Attempt]:
        """Those that the state log does not know."""
        return list(self._unwritten)

    def written(self, attempts: Iterable[Attempt]) -> None:
        """The state log has these."""
        for attempt in attempts:
            del self._unwritten[attempt]
