"""Which keys a record is found by. Spec: docs/format/indexfile.md §3.

The producer's unique id (property UNIQ_KEY), then each part of KEYS between blanks; a record that
rolls a transaction back has none.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from cometmq.format import properties, record
from cometmq.format.indexfile import KEY, Keys, key_hash
from cometmq.native import accelerator

_TRANSACTION_BITS: Final = 12  # of SYSFLAG
_ROLLBACK: Final = 12
_UNIQ_KEY: Final = b"\x02" + properties.UNIQ_KEY.encode() + b"\x01"
_KEYS: Final = b"\x02" + properties.KEYS.encode() + b"\x01"

_FIELDS: Final = ("size", "log_offset", "sys_flag", "store_time_ms", "body_bytes")
_READERS: Final = {
    flags: (layout.reader(*_FIELDS).unpack_from, layout.head_bytes)
    for flags, layout in record.LAYOUTS.items()
}
_READ_V4, _V4_HEAD_BYTES = _READERS[0]


def keys_of(raw_properties: bytes, sys_flag: int) -> list[str]:
    """The keys of a record in their order; one may come twice."""
    if sys_flag & _TRANSACTION_BITS == _ROLLBACK:
        return []
    found = []
    unique_id = _value(raw_properties, _UNIQ_KEY)
    if unique_id:
        found.append(unique_id)
    keys = _value(raw_properties, _KEYS)
    if keys:
        found += [key for key in keys.split(properties.KEY_SEPARATOR) if key]
    return found


def keys_of_chunk(chunk: bytes) -> Keys:
    """The hashed keys of all records of a piece of the log, which holds them end to end, in their
    order. Hot: the framing is trusted: its writer has verified it.
    """
    if accelerator is None:
        return Keys(_keys_from(chunk, 0))
    at, packed = accelerator.index_keys(chunk, 0)
    # It stops at a key that is not UTF-8.
    return Keys(packed + _keys_from(chunk, at))


def _keys_from(chunk: bytes, at: int) -> bytes:
    found: list[bytes] = []
    end = len(chunk)
    while at < end:
        size, log_offset, sys_flag, time_ms, body_bytes = _READ_V4(chunk, at)
        body_at = at + _V4_HEAD_BYTES
        if sys_flag & record.SYS_FLAG_HOSTS:
            read, head_bytes = _READERS[sys_flag & record.SYS_FLAG_HOSTS]
            size, log_offset, sys_flag, time_ms, body_bytes = read(chunk, at)
            body_at = at + head_bytes
        topic_at = body_at + body_bytes + 1
        properties_at = topic_at + chunk[topic_at - 1] + 2
        for key in keys_of(chunk[properties_at : at + size], sys_flag):
            topic = _topic(chunk[topic_at : properties_at - 2])
            found.append(KEY.pack(key_hash(topic, key), log_offset, time_ms))
        at += size
    assert at == end, (at, end)
    return b"".join(found)


@lru_cache(maxsize=1024)
def _topic(name: bytes) -> str:
    return name.decode("utf-8", "replace")


def _value(raw: bytes, name: bytes) -> str:
    """The value of the property ``name``, which includes the separators; the last of several wins,
    an empty one does not count.
    """
    at = raw.rfind(name)
    if at >= 0:
        at += len(name)
    elif raw.startswith(name[1:]):
        at = len(name) - 1
    else:
        return ""
    end = raw.find(b"\x02", at)
    value = raw[at:] if end < 0 else raw[at:end]
    if not value:
        return properties.decode(raw).get(name[1:-1].decode(), "")
    return value.decode("utf-8", "replace")
