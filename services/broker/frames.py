"""A frame as it goes over the wire: the message that protobuf would make, its data copied once.

protobuf would copy them into the message, and with the message once more; for a large chunk that
costs as much as reading it. So protobuf makes everything else, and the data follow as the last
field.
"""

from __future__ import annotations

from cometmq.native import crc32
from cometmq.v1 import member_pb2
from services.broker.replicas import Frame


def _tag(field_number: int) -> bytes:
    """Before a field that tells its length: https://protobuf.dev/programming-guides/encoding/."""
    assert field_number < 16, field_number  # else it is longer than a byte
    return bytes([field_number << 3 | 2])


_CHUNK = _tag(member_pb2.ReplicateResponse.CHUNK_FIELD_NUMBER)
_DATA = _tag(member_pb2.LogChunk.DATA_FIELD_NUMBER)


def pack(frame: Frame, epoch: int, sent_ms: int) -> bytes:
    """A ``ReplicateResponse`` with a ``LogChunk``, serialized."""
    data = frame.data
    assert frame.offset + len(data) <= frame.writer_end, frame.offset
    head = member_pb2.LogChunk(
        epoch=epoch,
        offset=frame.offset,
        data_crc32=crc32(data),
        writer_end_offset=frame.writer_end,
        visible_flushed_offset=frame.visible.flushed,
        visible_replicated_offset=frame.visible.replicated,
        visible_replicated_flushed_offset=frame.visible.replicated_flushed,
        flush_to_offset=frame.flush_to,
        sent_boot_ms=frame.sent_boot_ms,
        sent_ms=sent_ms,
    ).SerializeToString()
    head += _DATA + _varint(len(data))
    return b"".join((_CHUNK, _varint(len(head) + len(data)), head, data))


def _varint(number: int) -> bytes:
    digits = bytearray()
    while number > 0x7F:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    digits.append(number)
    return bytes(digits)
