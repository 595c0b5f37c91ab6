"""The stored form of a delayed message, and of one that waits for nothing, which their sender
encodes. Spec: docs/format/batch.md.

RocketMQ's form (docs/format/properties.md): the record lies in a queue of the schedule topic, one
for each delay level, and its properties name the topic and the queue that it is meant for. The
unit in the schedule queue holds the due time in place of the tag's hash.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping
from functools import lru_cache

from cometmq.errors import ConfigInvalid, DelayLevelInvalid
from cometmq.format.properties import decode
from cometmq.model import DELAY_LEVEL_MAX

SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"
DELAY, REAL_TOPIC, REAL_QID = "DELAY", "REAL_TOPIC", "REAL_QID"
PROPERTIES = frozenset(name.encode() for name in (DELAY, REAL_TOPIC, REAL_QID))

DEFAULT_LEVELS = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"  # RocketMQ's
DELAY_S_MAX = 40 * 86_400
_UNIT_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


def parse_levels(text: str) -> tuple[int, ...]:
    """The times of a list of levels as RocketMQ writes it, in seconds by level from 1. Raises
    ConfigInvalid.
    """
    words = text.split()
    if not 1 <= len(words) <= DELAY_LEVEL_MAX:
        raise ConfigInvalid(
            f"option message_delay_level: 1 to {DELAY_LEVEL_MAX} levels, not {len(words)}"
        )
    return tuple(map(_seconds, words))


def _seconds(word: str) -> int:
    number, unit = word[:-1], _UNIT_S.get(word[-1:], 0)
    time_s = int(number) * unit if number.isascii() and number.isdigit() and len(number) < 8 else 0
    if not 1 <= time_s <= DELAY_S_MAX:
        raise ConfigInvalid(
            f"option message_delay_level: {word[:20]!r} is no time from 1s to 40d, such as 30m"
        )
    return time_s


class _Process:
    """The list of this process: the store's rules need it wherever a record becomes a unit, and a
    process is a member of one broker group.
    """

    levels_s = parse_levels(DEFAULT_LEVELS)


def use_levels(levels_s: tuple[int, ...]) -> None:
    """This process has these levels. Before it opens its store."""
    assert 1 <= len(levels_s) <= DELAY_LEVEL_MAX
    _Process.levels_s = levels_s


def level_count() -> int:
    """How many levels there are."""
    return len(_Process.levels_s)


NO_WAIT_PREFIX = b"WAIT\x01false\x02"  # RocketMQ's waitStoreMsgOK=false


def check_level(level: int) -> None:
    """Raises ``DelayLevelInvalid`` unless there is such a level."""
    if not 1 <= level <= level_count():
        raise DelayLevelInvalid(f"there is no delay level {level}, only 1 to {level_count()}")


def delay_ms(level: int) -> int:
    """How long a message of the level waits."""
    return 1000 * _Process.levels_s[level - 1]


def delays_ms() -> array[int]:
    """How long the messages of each level wait (int64), from level 1 on."""
    return array("q", [1000 * time_s for time_s in _Process.levels_s])


def level_for(wanted_ms: int) -> int:
    """The level with the shortest time that is not below; the one with the longest, if all are."""
    longer = [(s, level) for level, s in enumerate(_Process.levels_s, 1) if 1000 * s >= wanted_ms]
    if longer:
        return min(longer)[1]
    return _Process.levels_s.index(max(_Process.levels_s)) + 1


def level_of_delay(wanted_ms: int) -> int:
    """The level with exactly this time; 0: there is none."""
    level = level_for(wanted_ms)
    return level if delay_ms(level) == wanted_ms else 0


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
    return min(_number(properties.get(DELAY, "")) or 0, level_count())


def target_of(raw_properties: bytes) -> tuple[str, int] | None:
    """The topic and queue that a message is meant for which waits for a level or a time; None: it
    names none.
    """
    text = target_text(raw_properties)
    return _target(raw_properties) if text is None else _known_target(text)


def target_text(raw_properties: bytes) -> bytes | None:
    """The part of our form that names the target; None: the message has another form."""
    ours = _TARGET.match(raw_properties)
    return ours[1] if ours else None


def target_of_text(text: bytes) -> tuple[str, int]:
    """The topic and queue that such a text names."""
    target = _known_target(text)
    assert target is not None, text
    return target


def _target(raw_properties: bytes) -> tuple[str, int] | None:
    properties = decode(raw_properties)
    topic, queue_id = properties.get(REAL_TOPIC, ""), _number(properties.get(REAL_QID, ""))
    return None if not topic or queue_id is None else (topic, queue_id)


# How our form begins that waits for a level; and what would name another one behind.
OUR_LEVEL = re.compile(rb"DELAY\x01([0-9]{1,2})\x02REAL_TOPIC\x01")
OTHER_LEVEL = b"\x02DELAY\x01"
# How our form begins: a level or a time (cometmq/format/timers.py), then the target.
_TARGET = re.compile(
    rb"(?:DELAY\x01[0-9]{1,2}|TIMER_OUT_MS\x01[0-9]{13})\x02"
    rb"(REAL_TOPIC\x01[\x03-\xff]{1,255}\x02REAL_QID\x01[0-9]{1,9}\x02)"
)
_known_target = lru_cache(maxsize=4096)(_target)


def _number(text: str) -> int | None:
    """None: it is no number of so few digits that Java's int holds it."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None
