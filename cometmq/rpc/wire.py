"""Fields as protobuf writes them, put around bytes that are serialized already: from a message of
its own, protobuf would copy them into each message that goes around it.

https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations


def tag(field_number: int) -> bytes:
    """Before a field with a length in front: bytes, text, a message."""
    assert field_number < 16, field_number  # else it is longer than a byte
    return bytes([field_number << 3 | 2])


def varint(number: int) -> bytes:
    """A number of 0 or more."""
    if number < 0x80:
        return _SMALL[number]
    digits = bytearray()
    while number > 0x7F:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    digits.append(number)
    return bytes(digits)


def field(its_tag: bytes, *parts: bytes) -> bytes:
    """A field whose content is ``parts``, end to end; ``its_tag`` comes from :func:`tag`."""
    return b"".join((its_tag, varint(sum(map(len, parts))), *parts))


_SMALL = [bytes([number]) for number in range(0x80)]
