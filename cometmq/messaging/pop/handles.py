"""Handles of messages that a member has received: what it acknowledges them by. Pure.

A handle names a lease: queue, generation, lease number, range of messages, and until when they are
its member's. Its MAC covers the group's name as well, so no handle is good for another group, and
none of another broker group is good here. A member changes nothing in it.
"""

from __future__ import annotations

import base64
import binascii
import struct
from dataclasses import dataclass

from cometmq.errors import HandleInvalid
from cometmq.messaging.handle_secrets import MAC_BYTES, HandleSecrets
from cometmq.messaging.pop.masks import dense
from cometmq.model import TOPIC_NAME, QueueKey

PURPOSE = b"pop"
VERSION = 1
HANDLE_LENGTH_MAX = 256
WIDTH_MAX = 1 << 20  # of the range that one handle names

# version, queue id, generation, lease number, first offset, width, visible again (ms); the topic
# follows, then the MAC.
_HEAD = struct.Struct(">BiQQqIQ")


@dataclass(frozen=True, slots=True)
class Handle:
    """``first``, ``width``: the range of the messages. ``visible_ms``: others get them then."""

    key: QueueKey
    generation: int
    number: int
    first: int
    width: int
    visible_ms: int

    @property
    def end(self) -> int:
        return self.first + self.width

    def mask(self, first: int, count: int) -> int:
        """The messages from ``first`` on that an item names, bit 0 for the handle's own first;
        ``count`` 0: all of the handle. Raises HandleInvalid for others than the handle's.
        """
        if not count:
            return dense(self.width)
        if not self.first <= first < first + count <= self.end:
            raise HandleInvalid(
                f"the handle is of the messages {self.first} to {self.end - 1}, not of "
                f"{first} to {first + count - 1}"
            )
        return dense(count) << (first - self.first)


def encode(secrets: HandleSecrets, group: str, handle: Handle) -> str:
    """The handle as members get it: letters, digits, ``-`` and ``_``."""
    topic, queue_id = handle.key
    head = _HEAD.pack(
        VERSION,
        queue_id,
        handle.generation,
        handle.number,
        handle.first,
        handle.width,
        handle.visible_ms,
    )
    data = head + topic.encode()
    mac = secrets.mac(PURPOSE, _signed(data, group))
    return _text_of(data + mac)


def decode(secrets: HandleSecrets, group: str, text: str) -> Handle:
    """Raises HandleInvalid for what this broker group did not give to this group."""
    raw = _bytes_of(text)
    data, mac = raw[:-MAC_BYTES], raw[-MAC_BYTES:]
    if len(data) <= _HEAD.size or data[0] != VERSION:
        raise HandleInvalid("this is no handle of a received message")
    if not secrets.verifies(PURPOSE, _signed(data, group), mac):
        raise HandleInvalid(f"this handle was not given to group {group} by this broker group")
    _, queue_id, generation, number, first, width, visible_ms = _HEAD.unpack_from(data)
    topic = data[_HEAD.size :].decode()
    assert TOPIC_NAME.fullmatch(topic)
    return Handle((topic, queue_id), generation, number, first, width, visible_ms)


def _signed(data: bytes, group: str) -> bytes:
    return data + b"\0" + group.encode()


def _bytes_of(text: str) -> bytes:
    try:
        raw = base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), b"-_", validate=True)
    except (UnicodeEncodeError, binascii.Error) as error:
        raise HandleInvalid("a handle is letters, digits, '-' and '_'") from error
    # Each handle has one form: else bits that the encoding leaves over could be changed.
    if not 0 < len(text) <= HANDLE_LENGTH_MAX or _text_of(raw) != text:
        raise HandleInvalid("this is no handle of a received message")
    return raw


def _text_of(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()
