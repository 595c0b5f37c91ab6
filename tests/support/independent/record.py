"""Records, as ``docs/format/record.md`` and its neighbours have them."""

from __future__ import annotations

import mmap
import re
import struct
import zlib
from functools import lru_cache
from ipaddress import ip_address
from typing import NamedTuple, NoReturn

QueueKey = tuple[str, int]

MAGIC_RECORD = bytes.fromhex("DAA320A7")
RECORD_HEAD = struct.Struct(">i4siiiqqiq")  # the first nine fields
RECORD_HEAD_BYTES = 48
RECORD_BYTES_MIN = 91
FREE_BYTES = 8  # stay free behind each record of a log file
TRANSACTION = 12  # bits of SYSFLAG
PREPARED, ROLLED_BACK = 4, 12
SCHEDULED = "SCHEDULE_TOPIC_XXXX"
TIMERS = ("rmq_sys_wheel_timer", 0)
# By delay level, from 1.
DELAYS_S: tuple[int, ...] = (1, 5, 10, 30, *range(60, 660, 60), 1200, 1800, 3600, 7200)
TOPIC = re.compile(rb"[%|a-zA-Z0-9_-]{1,127}")
INT32_MAX = 2**31 - 1


class Broken(Exception):
    """The store does not keep a promise of the documents."""


def broken(place: object, what: str) -> NoReturn:
    raise Broken(f"{place}: {what}")


def expect(condition: bool, place: object, what: str) -> None:
    if not condition:
        broken(place, what)


class Host(NamedTuple):
    address: str
    port: int


class Message(NamedTuple):
    """A record of the log, as it lies there: a compressed body is still compressed."""

    topic: str
    queue_id: int
    queue_offset: int
    log_offset: int
    size: int
    body: bytes
    raw_properties: bytes
    flag: int
    sys_flag: int
    born_time_ms: int
    born_host: Host
    store_time_ms: int
    store_host: Host
    reconsume_times: int
    prepared_offset: int

    @property
    def properties(self) -> dict[str, str]:
        """By the rules for reading what lies in a log."""
        found = {}
        for piece in self.raw_properties.split(b"\x02"):
            name, _, value = piece.partition(b"\x01")
            if name and value:
                found[name.decode(errors="replace")] = value.decode(errors="replace")
        return found

    @property
    def tag(self) -> str:
        return self.properties.get("TAGS", "")

    @property
    def keys(self) -> list[str]:
        return self.properties.get("KEYS", "").split()


@lru_cache(maxsize=4096)
def tag_hash(tag: str) -> int:
    """Java's hash over UTF-16 code units, as a signed 32-bit number."""
    number = 0
    for (unit,) in struct.iter_unpack(">H", tag.encode("utf-16-be", errors="surrogatepass")):
        number = (31 * number + unit) & 0xFFFF_FFFF
    return number - 2**32 if number >= 2**31 else number


@lru_cache(maxsize=4096)
def _host(raw: bytes) -> Host:
    return Host(str(ip_address(raw[:-4])), int.from_bytes(raw[-4:], "big", signed=True))


def _is_framed(properties: bytes) -> bool:
    """Framed as recovery demands it of stored records."""
    pieces = properties.split(b"\x02")
    return b"\x00" not in properties and all(not piece or b"\x01" in piece for piece in pieces)


def has_unit(message: Message) -> bool:
    """A message that was only prepared, or taken back, is in no queue."""
    return message.sys_flag & TRANSACTION not in (PREPARED, ROLLED_BACK)


def tags_code(message: Message) -> int:
    """What a unit says of its message's tag; of a delayed message, when it is due, in ms."""
    level = message.properties.get("DELAY", "")
    if message.topic == SCHEDULED and level.isdigit() and int(level):
        return message.store_time_ms + 1000 * DELAYS_S[min(int(level), len(DELAYS_S)) - 1]
    due = _timer_due(message)
    return tag_hash(message.tag) if due is None else due


def _timer_due(message: Message) -> int | None:
    """When a message of the timer queue is due."""
    if (message.topic, message.queue_id) != TIMERS:
        return None
    found = {
        name: int(value)
        for name, value in message.properties.items()
        if name.startswith("TIMER_") and re.fullmatch("[0-9]{1,13}", value)
    }
    if "TIMER_OUT_MS" not in found:
        return None
    late = {"TIMER_DELAY_SEC", "TIMER_DELAY_MS"} & message.properties.keys()
    return found.get("TIMER_DELIVER_MS", found["TIMER_OUT_MS"] + 1000 * bool(late))


def decode(view: mmap.mmap | bytes, at: int, log_offset: int) -> Message:
    """The record that starts at ``view[at]``, checked by all that makes a good record."""
    place = log_offset
    size, magic, crc, queue_id, flag, queue_offset, own_offset, sys_flag, born_ms = (
        RECORD_HEAD.unpack_from(view, at)
    )
    expect(magic == MAGIC_RECORD, place, "no record")
    fits = RECORD_BYTES_MIN <= size <= len(view) - at - FREE_BYTES
    expect(fits, place, "the record does not fit into its file")
    expect(own_offset == log_offset, place, "the record says another log offset")
    raw = view[at : at + size]
    born_end = RECORD_HEAD_BYTES + (20 if sys_flag & 16 else 8)
    store_host_end = born_end + 8 + (20 if sys_flag & 32 else 8)
    expect(store_host_end + 16 <= size, place, "the lengths do not add up")
    (store_ms,) = struct.unpack_from(">q", raw, born_end)
    reconsumed, prepared, body_bytes = struct.unpack_from(">iqi", raw, store_host_end)
    body_at = store_host_end + 16
    topic_at = body_at + body_bytes + 1
    expect(body_bytes >= 0 and topic_at < size, place, "the lengths do not add up")
    properties_at = topic_at + raw[topic_at - 1] + 2
    expect(properties_at <= size, place, "the lengths do not add up")
    properties = raw[properties_at:]
    said = int.from_bytes(raw[properties_at - 2 : properties_at], "big")
    expect(said == len(properties) <= 32_767, place, "the lengths do not add up")
    body, topic = raw[body_at : topic_at - 1], raw[topic_at : properties_at - 2]
    expect(zlib.crc32(body) & INT32_MAX == crc, place, "the body does not fit BODYCRC")
    expect(TOPIC.fullmatch(topic) is not None, place, "the topic's name is not legal")
    expect(_is_framed(properties), place, "the properties are not framed")
    return Message(
        topic.decode(),
        queue_id,
        queue_offset,
        log_offset,
        size,
        body,
        properties,
        flag,
        sys_flag,
        born_ms,
        _host(raw[RECORD_HEAD_BYTES:born_end]),
        store_ms,
        _host(raw[born_end + 8 : store_host_end]),
        reconsumed,
        prepared,
    )


def expect_sane(message: Message) -> None:
    """What a good record must moreover keep to when a CometMQ broker wrote it."""
    place = message.log_offset
    expect(message.queue_id >= 0, place, "negative queue id")
    existing = message.sys_flag & ~0x7FF == 0 and (message.sys_flag >> 8) & 7 <= 3
    expect(existing, place, "the system flag has bits that do not exist")
    expect(message.reconsume_times >= 0 and message.prepared_offset >= 0, place, "negative field")
    expect(min(message.born_host.port, message.store_host.port) >= 0, place, "negative port")
