"""The stored form of a message that waits until a time of its own, which its sender encodes. Spec:
docs/format/batch.md.

RocketMQ's form: the record lies in queue 0 of the timer topic, and its properties name the time,
the topic and the queue that it is meant for. Ours begins with these properties, so one comparison
verifies them, and the time has a fixed place where the broker can write it. The unit in the queue
holds the time in place of the tag's hash.
"""

from __future__ import annotations

import re
from enum import IntEnum
from functools import lru_cache

from cometmq.format import delayed
from cometmq.format.delayed import NO_WAIT_PREFIX, REAL_QID, REAL_TOPIC
from cometmq.format.properties import decode
from cometmq.model import TIMER_MS_MAX

TIMER_TOPIC = "rmq_sys_wheel_timer"
TIMER_QUEUE_ID = 0
TIMER_QUEUE = (TIMER_TOPIC, TIMER_QUEUE_ID)

TIMER_OUT_MS = "TIMER_OUT_MS"  # when it is due
TIMER_DELIVER_MS = "TIMER_DELIVER_MS"  # RocketMQ's: what its sender asked for
TIMER_DELAYS = ("TIMER_DELAY_SEC", "TIMER_DELAY_MS")  # the same, from when it was sent
TIMER_DEL_UNIQKEY = "TIMER_DEL_UNIQKEY"  # of a tombstone: which message it recalls
# What a message carries that waits, or has waited, for a level or a time.
PROPERTIES = delayed.PROPERTIES | frozenset(
    name.encode()
    for name in (
        *(TIMER_OUT_MS, TIMER_DELIVER_MS, *TIMER_DELAYS, TIMER_DEL_UNIQKEY, "TIMER_DELAY_LEVEL"),
        *("TIMER_ENQUEUE_MS", "TIMER_DEQUEUE_MS", "TIMER_ROLL_TIMES"),
    )
)

# Where the time is in the properties.
DIGITS = 13
DIGITS_AT = len(TIMER_OUT_MS) + 1
DIGITS_END = DIGITS_AT + DIGITS
NO_DIGITS = b"0" * DIGITS
ROCKETMQ_PRECISION_MS = 1000  # it rounds down


class TimerForm(IntEnum):
    """The way in which a sender names the time: not at all, as a time, or as a delay."""

    NONE = 0
    AT = 1
    AFTER = 2


def digits_of(time_ms: int) -> bytes:
    """A time or a delay in the form of the properties."""
    assert 0 <= time_ms <= TIMER_MS_MAX, time_ms
    return b"%013d" % time_ms


@lru_cache(maxsize=4096)  # a producer repeats its queues
def prefix(topic: str, queue_id: int, *, wait_store: bool = True) -> bytes:
    """What the properties of such a record begin with, byte for byte, but for the digits, which are
    all 0 here.
    """
    names = (f"{TIMER_OUT_MS}\x01", f"\x02{REAL_TOPIC}\x01{topic}\x02{REAL_QID}\x01{queue_id}\x02")
    whole = NO_DIGITS.join(name.encode() for name in names)
    return whole if wait_store else whole + NO_WAIT_PREFIX


def with_time(properties: bytes, time_ms: int, at: int = DIGITS_AT) -> bytes:
    """The same bytes with another time in the digits, which begin at ``at``."""
    return properties[:at] + digits_of(time_ms) + properties[at + DIGITS :]


def prefix_at(topic: str, queue_id: int, due_ms: int, *, wait_store: bool = True) -> bytes:
    """As :func:`prefix`, with the time when the record is due."""
    return with_time(prefix(topic, queue_id, wait_store=wait_store), due_ms)


def due_ms(properties: bytes) -> int | None:
    """When a record of the timer topic is due, by its properties; None: it names no time.

    RocketMQ rounds its TIMER_OUT_MS down, so what its sender asked for counts, or a second more.
    """
    ours = OUR_TIME.match(properties)
    if ours and FOREIGN_NAME not in properties:
        return int(ours[1])
    pairs = decode(properties)
    out_ms = _number(pairs.get(TIMER_OUT_MS, ""))
    if out_ms is None:
        return None
    asked_ms = _number(pairs.get(TIMER_DELIVER_MS, ""))
    if asked_ms is not None:
        return asked_ms
    has_delay = any(name in pairs for name in TIMER_DELAYS)
    return out_ms + ROCKETMQ_PRECISION_MS if has_delay else out_ms


def recalls(properties: bytes) -> str:
    """Which message a tombstone recalls; empty for any other record."""
    if FOREIGN_NAME not in properties:
        return ""
    return decode(properties).get(TIMER_DEL_UNIQKEY, "")


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= DIGITS else None


# How our form begins: the time; then the target follows (cometmq/format/delayed.py).
OUR_TIME = re.compile(rb"TIMER_OUT_MS\x01([0-9]{13})\x02REAL_TOPIC\x01")
# Names that say more of the time, or that the record is a tombstone.
FOREIGN_NAME = b"\x02TIMER_DEL"
