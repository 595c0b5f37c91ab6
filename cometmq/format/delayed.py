"""The stored form of a delayed message, and of one that waits for nothing, which their sender
encodes. Spec: docs/format/batch.md.

RocketMQ's form (docs/format/properties.md): the record lies in a queue of the schedule topic, one
for each delay level, and its properties name the topic and the queue that it is meant for. The
unit in the schedule queue holds the due time in place of the tag's hash.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

from cometmq.errors import DelayLevelInvalid
from cometmq.format.properties import decode
from cometmq.model import DELAY_LEVEL_MAX

SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"
DELAY, REAL_TOPIC, REAL_QID = "DELAY", "REAL_TOPIC", "REAL_QID"
PROPERTIES = frozenset(name.encode() for name in (DELAY, REAL_TOPIC, REAL_QID))

# RocketMQ's delay levels, 1 to 18, in seconds.
LEVELS_S: tuple[int, ...] = (1, 5, 10, 30, *range(60, 660, 60), 1_200, 1_800, 3_600, 7_200)
assert len(LEVELS_S) == DELAY_LEVEL_MAX


NO_WAIT_PREFIX = b"WAIT\x01false\x02"  # RocketMQ's waitStoreMsgOK=false


def check_level(level: int) -> None:
    """Raises ``DelayLevelInvalid`` unless there is such a level."""
    if not 1 <= level <= DELAY_LEVEL_MAX:
        raise DelayLevelInvalid(f"there is no delay level {level}, only 1 to {DELAY_LEVEL_MAX}")


def delay_ms(level: int) -> int:
    """How long a message of the level waits."""
    return 1000 * LEVELS_S[level - 1]


def queue_id_of(level: int) -> int:
    """The schedule queue of a level."""
    return level - 1


def level_of(queue_id: int) -> int:
    """The level of a schedule queue."""
    return queue_id + 1


@lru_cache(maxsize=4096)  # a producer repeats its queues
def prefix(level: int, topic: str, queue_id: int) -> bytes:
    """What the properties of such a record begin with, byte for byte."""
    pairs = ((DELAY, level), (REAL_TOPIC, topic), (REAL_QID, queue_id))
    return b"".join(f"{name}\x01{value}\x02".encode() for name, value in pairs)


def stored_prefix(level: int, topic: str, queue_id: int, *, wait_store: bool) -> bytes:
    """The same, also of messages that do not wait (``level`` 0), or that are acknowledged when they
    are appended.
    """
    delayed = prefix(level, topic, queue_id) if level else b""
    return delayed if wait_store else delayed + NO_WAIT_PREFIX


def level_named(properties: Mapping[str, str]) -> int:
    """The delay level that a record of the schedule topic names, by RocketMQ's rule: one above the
    last counts as the last. 0: it names none.
    """
    return min(_number(properties.get(DELAY, "")) or 0, DELAY_LEVEL_MAX)


def target_of(raw_properties: bytes) -> tuple[str, int] | None:
    """The topic and queue that a delayed message is meant for; None: it names none."""
    ours = _PREFIX.match(raw_properties)
    return _known_target(ours.group()) if ours else _target(raw_properties)


def _target(raw_properties: bytes) -> tuple[str, int] | None:
    properties = decode(raw_properties)
    topic, queue_id = properties.get(REAL_TOPIC, ""), _number(properties.get(REAL_QID, ""))
    return None if not topic or queue_id is None else (topic, queue_id)


_PREFIX = re.compile(
    rb"DELAY\x01\d{1,2}\x02REAL_TOPIC\x01[\x03-\xff]{1,255}\x02REAL_QID\x01\d{1,9}\x02"
)
_known_target = lru_cache(maxsize=4096)(_target)


def _number(text: str) -> int | None:
    """None: it is no number of so few digits that Java's int holds it."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None
