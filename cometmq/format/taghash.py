"""The tag hash of consume-queue units: Java's ``String.hashCode``. Spec: docs/format/taghash.md."""

from __future__ import annotations

import struct
from functools import lru_cache

_CACHED_TAG_BYTES_MAX = 256  # with the next line: the cache stays under 2 MiB
_CACHED_TAGS_MAX = 4096


def java_hash(text: str) -> int:
    """Java's hash of a string: h = 31 * h + c over its UTF-16 code units, as a signed 32-bit
    int."""
    raw = text.encode("utf-16-be", "surrogatepass")
    code = 0
    for unit in struct.unpack(f">{len(raw) // 2}H", raw):
        code = (31 * code + unit) & 0xFFFFFFFF
    return code - (1 << 32) if code & 0x80000000 else code


def tags_code(tag: bytes) -> int:
    """The tagsCode of a unit, from the value of a record's TAGS property; 0 for an empty one, which
    means no tag.

    Signed, so a 64-bit field holds it sign-extended. Tags that repeat cost a look into a cache.
    """
    return _cached_code(tag) if len(tag) <= _CACHED_TAG_BYTES_MAX else _code(tag)


def _code(tag: bytes) -> int:
    return java_hash(tag.decode("utf-8", "replace"))


_cached_code = lru_cache(maxsize=_CACHED_TAGS_MAX)(_code)
