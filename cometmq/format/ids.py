"""Ids of messages: of the place in a log, and of the producer. Spec: docs/format/ids.md."""

from __future__ import annotations

import os
import re
import secrets
from typing import NamedTuple

from cometmq.clock import Clock
from cometmq.errors import MessageIdInvalid
from cometmq.format.record import HOST_V4_BYTES, HOST_V6_BYTES
from cometmq.model import GROUP_NAME, NAME_CHARACTER

_LOG_OFFSET_MAX = (1 << 63) - 1
_OFFSET_DIGITS_MAX = len(str(_LOG_OFFSET_MAX))
_NAME = rf"{GROUP_NAME.pattern}(?:@{NAME_CHARACTER}+)?"
_GROUP_ID = re.compile(rf"({_NAME})/(0|[1-9][0-9]{{0,{_OFFSET_DIGITS_MAX - 1}}})")
_HEX_IDS = {2 * (host_bytes + 8): host_bytes for host_bytes in (HOST_V4_BYTES, HOST_V6_BYTES)}
_HEX = re.compile(r"[0-9a-fA-F]+")


class MessageId(NamedTuple):
    """Where a message was stored. Ours names the broker group, RocketMQ's the broker's address; the
    other one is None."""

    broker_group: str | None
    store_host: bytes | None  # a record's host field: 4 or 16 bytes of address, port as int32
    log_offset: int


def message_id(broker_group: str, log_offset: int) -> str:
    """The id of the message at a log offset: ``<broker group>/<log offset>``."""
    assert log_offset >= 0
    return f"{broker_group}/{log_offset}"


def offset_id(store_host: bytes, log_offset: int) -> str:
    """RocketMQ's id of a message: its broker's host field and the log offset, hexadecimal."""
    return (store_host + log_offset.to_bytes(8, "big")).hex().upper()


def parse_message_id(text: str) -> MessageId:
    """Reads ours, and RocketMQ's 32 (IPv4) or 56 (IPv6) hexadecimal digits in either case. Raises
    MessageIdInvalid."""
    ours = _GROUP_ID.fullmatch(text)
    if ours is not None and int(ours[2]) <= _LOG_OFFSET_MAX:
        return MessageId(ours[1], None, int(ours[2]))
    host_bytes = _HEX_IDS.get(len(text))
    if host_bytes is not None and _HEX.fullmatch(text):
        raw = bytes.fromhex(text)
        log_offset = int.from_bytes(raw[host_bytes:], "big")
        if log_offset <= _LOG_OFFSET_MAX:
            return MessageId(None, raw[:host_bytes], log_offset)
    raise MessageIdInvalid(f"not a message id: {text[:100]!r}")


UNIQUE_ID_COUNTER_MAX = (1 << 32) - 1
_UNIQUE_ID_VERSION = 1
_EPOCH_2021_S = 1_609_459_200  # 2021-01-01 00:00:00 UTC


class UniqueIds:
    """The ids that a producer gives its messages (property UNIQ_KEY), in RocketMQ's gRPC id layout,
    version 1.

    All ids of one stream share their first 13 bytes: version, six random bytes, the process, the
    stream's start; the last four count from 0 without gaps. A stream never wraps: when its counter
    is used up a new one starts by itself. A caller that must not change streams within a batch asks
    for ``remaining`` first and calls :meth:`renew` itself. Not for several threads at once.
    """

    __slots__ = ("_clock", "_next", "_prefix")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.renew()

    def renew(self) -> None:
        """Starts a new stream with its counter at 0."""
        started_s = (self._clock.wall_ms() // 1000 - _EPOCH_2021_S) & 0xFFFFFFFF
        pid = os.getpid() & 0xFFFF
        self._prefix = (
            f"{_UNIQUE_ID_VERSION:02X}{secrets.token_hex(6).upper()}{pid:04X}{started_s:08X}"
        )
        self._next = 0

    @property
    def stream(self) -> str:
        """The 26 hexadecimal digits that all ids of the present stream start with."""
        return self._prefix

    @property
    def remaining(self) -> int:
        """Ids left in the present stream."""
        return UNIQUE_ID_COUNTER_MAX + 1 - self._next

    def next(self) -> str:
        """The next id: 34 upper-case hexadecimal digits."""
        number = self._next
        if number > UNIQUE_ID_COUNTER_MAX:
            self.renew()
            number = 0
        self._next = number + 1
        return self._prefix + "%08X" % number  # noqa: UP031 - twice as fast as the f-string
