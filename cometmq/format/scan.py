"""Many records of a log file at a time, without an object for each: the scanner of recovery, repair
and verification.

:func:`scan_run` takes what is plain. Where it stops, :func:`cometmq.format.record.check` finds out
why: the end, damage, or a record that its caller wants to see by itself.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import NamedTuple
from zlib import crc32

from cometmq.format import delayed, properties, queueunit, taghash, timers
from cometmq.format.compression import SYS_FLAG_COMPRESSED, SYS_FLAG_COMPRESSION_SHIFT
from cometmq.format.record import (
    BLANK_BYTES,
    BODY_CRC_MASK,
    LAYOUTS,
    MAGIC_V1,
    SYS_FLAG_HOSTS,
)
from cometmq.model import TOPIC_NAME
from cometmq.native import accelerator

PLAIN_SYS_FLAGS = SYS_FLAG_COMPRESSED | 7 << SYS_FLAG_COMPRESSION_SHIFT | SYS_FLAG_HOSTS

_PLAIN_TOPIC = re.compile(TOPIC_NAME.pattern.encode())
_READERS = {
    flags: layout.reader(
        "size",
        "magic",
        "body_crc",
        "queue_offset",
        "log_offset",
        "sys_flag",
        "store_time_ms",
        "body_bytes",
    )
    for flags, layout in LAYOUTS.items()
}
_QUEUE_ID_AT, _FLAG_AT = (LAYOUTS[0].offsets[name] for name in ("queue_id", "flag"))
assert _FLAG_AT - _QUEUE_ID_AT == 4
_INT64_MAX = 2**63 - 1
_SCHEDULE_TOPIC = delayed.SCHEDULE_TOPIC.encode()
_TIMER_KEY = timers.TIMER_QUEUE_ID.to_bytes(4, "big") + timers.TIMER_TOPIC.encode()


class QueueRun(NamedTuple):
    """Records that follow each other in one queue, though not in the log."""

    topic: str
    queue_id: int
    first_queue_offset: int
    units: bytes  # one for each, docs/format/queueunit.md

    @property
    def unit_count(self) -> int:
        return len(self.units) // queueunit.UNIT_BYTES


class Run(NamedTuple):
    """Good records, end to end."""

    end: int  # in the chunk, behind the last of them
    record_count: int
    last_bytes: int  # size of the last; 0 = there is none
    first_time_ms: int  # store times
    last_time_ms: int
    times_fall: bool  # some record is older than the one before it
    queues: list[QueueRun]  # in the order of their first records


def topic_list(topics: Iterable[str]) -> bytes:
    """Topics as :func:`scan_run` takes them: each behind a byte with its length."""
    names = [topic.encode() for topic in sorted(topics)]
    return b"".join(bytes((len(name),)) + name for name in names)


def scan_run(chunk: bytes, at: int, *, log_offset: int, file_left: int, apart: bytes = b"") -> Run:
    """The records from ``at`` on, up to the first that is not plain, not good or not whole.

    ``log_offset`` is that place's position in the log, ``file_left`` counts from there to the end
    of the *file*; the chunk may end before. Plain: SYSFLAG has no bits but those of compression and
    addresses, and the topic is none of ``apart`` (a :func:`topic_list`); a message that waits for a
    level or a time has our stored form (:mod:`cometmq.format.delayed`, ``timers``). Good: as
    :func:`cometmq.format.record.check` has it. Never raises.
    """
    assert 0 <= at <= len(chunk), (at, len(chunk))
    assert log_offset >= 0, log_offset
    if accelerator is None:
        return _scan_run(chunk, at, log_offset, file_left, apart)
    # A record leaves room for the file's end mark behind it.
    left = max(0, file_left - BLANK_BYTES)
    found = accelerator.scan(chunk, at, log_offset, left, apart, delayed.delays_ms())
    return Run(*found[:-1], [QueueRun(*queue) for queue in found[-1]])


def _scan_run(chunk: bytes, at: int, log_offset: int, file_left: int, apart: bytes) -> Run:
    start, time_ms, first_time_ms, size, times_fall = at, 0, 0, 0, False
    groups: dict[bytes, _Group] = {}
    done: list[_Group] = []
    count = 0
    offset_of_chunk = log_offset - at
    stop = min(len(chunk), at + file_left - BLANK_BYTES)  # what records may reach
    is_plain = _plain_topics(apart)
    framed = properties.STORED_FRAMING.fullmatch
    reader = _READERS[0]
    read, head_bytes, pack = reader.unpack_from, reader.size, queueunit.UNIT.pack
    while True:
        try:
            found = read(chunk, at)
            body_at = at + head_bytes
            if found[5] & ~SYS_FLAG_COMPRESSED:
                if found[5] & ~PLAIN_SYS_FLAGS:
                    break
                reader = _READERS[found[5] & SYS_FLAG_HOSTS]
                found = reader.unpack_from(chunk, at)
                body_at = at + reader.size
            record_bytes, magic, body_crc, queue_offset, place, _, store_time_ms, body = found
            topic_at = body_at + body + 1
            topic_end = topic_at + chunk[topic_at - 1]
            properties_at = topic_end + 2
            end = properties_at + (chunk[topic_end] << 8 | chunk[topic_end + 1])
        except (struct.error, IndexError):
            break
        if (
            magic != MAGIC_V1
            or end - at != record_bytes
            or body < 0
            or end > stop
            or place != offset_of_chunk + at
            or crc32(chunk[body_at : topic_at - 1]) & BODY_CRC_MASK != body_crc
            or framed(chunk, properties_at, end) is None
        ):
            break
        topic = chunk[topic_at:topic_end]
        key = chunk[at + _QUEUE_ID_AT : at + _FLAG_AT] + topic
        pairs = chunk[properties_at:end]
        code = _tags_code(key, topic, pairs, store_time_ms)
        if code is None or not is_plain(topic):
            break
        group = groups.get(key)
        if group is None or group.next_queue_offset != queue_offset:
            group = groups[key] = _Group(key, queue_offset)
            done.append(group)
        group.next_queue_offset += 1
        group.units.append(pack(place, record_bytes, code))
        if not count:
            first_time_ms = store_time_ms
        elif store_time_ms < time_ms:
            times_fall = True
        count += 1
        time_ms, size, at = store_time_ms, record_bytes, end
    assert at >= start
    return Run(at, count, size, first_time_ms, time_ms, times_fall, [g.run() for g in done])


def _tags_code(key: bytes, topic: bytes, pairs: bytes, store_time_ms: int) -> int | None:
    """What a unit holds of a message; None: it has to be looked at."""
    if topic == _SCHEDULE_TOPIC:
        return _level_due_ms(pairs, store_time_ms)
    if key == _TIMER_KEY:
        return _due_ms(pairs)
    return taghash.tags_code(properties.tag_of(pairs))


def _due_ms(pairs: bytes) -> int | None:
    """When a message of the timer topic is due; None: it has another form than ours."""
    match = timers.OUR_TIME.match(pairs)
    return None if match is None or timers.FOREIGN_NAME in pairs else int(match[1])


def _level_due_ms(pairs: bytes, store_time_ms: int) -> int | None:
    """The same of a message of the schedule topic."""
    match = delayed.OUR_LEVEL.match(pairs)
    level = min(int(match[1]), delayed.level_count()) if match else 0
    if not level or delayed.OTHER_LEVEL in pairs:
        return None
    due_ms = store_time_ms + delayed.delay_ms(level)
    return due_ms if due_ms <= _INT64_MAX else None


@lru_cache(maxsize=16)
def _plain_topics(apart: bytes) -> Callable[[bytes], bool]:
    """Whether a name is a topic's, and none of ``apart``."""
    names, at = set(), 0
    while at < len(apart):
        names.add(apart[at + 1 : at + 1 + apart[at]])
        at += 1 + apart[at]

    @lru_cache(maxsize=4096)  # a log repeats its topics
    def is_plain(topic: bytes) -> bool:
        return topic not in names and _PLAIN_TOPIC.fullmatch(topic) is not None

    return is_plain


class _Group:
    """A :class:`QueueRun` that grows. ``key``: queue id (4 bytes), then topic."""

    __slots__ = ("first_queue_offset", "key", "next_queue_offset", "units")

    def __init__(self, key: bytes, first_queue_offset: int) -> None:
        self.key = key
        self.first_queue_offset = self.next_queue_offset = first_queue_offset
        self.units: list[bytes] = []

    def run(self) -> QueueRun:
        queue_id = int.from_bytes(self.key[:4], "big", signed=True)
        topic = self.key[4:].decode("ascii")
        return QueueRun(topic, queue_id, self.first_queue_offset, b"".join(self.units))
