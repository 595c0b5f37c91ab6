"""A frame as it goes over the wire: the message that protobuf would make, its data copied once.

protobuf would copy them into the message, and with the message once more; for a large chunk that
costs as much as reading it. So protobuf makes everything else, and the data follow as the last
field.
"""

from __future__ import annotations

from cometmq.native import crc32
from cometmq.rpc.wire import field, tag, varint
from cometmq.v1 import member_pb2
from services.broker.replication.replicas import Frame

_CHUNK = tag(member_pb2.ReplicateResponse.CHUNK_FIELD_NUMBER)
_DATA = tag(member_pb2.LogChunk.DATA_FIELD_NUMBER)


def pack(frame: Frame, epoch: int, sent_ms: int, answers_boot_ms: int | None = None) -> bytes:
    """A ``ReplicateResponse`` with a ``LogChunk``, serialized. ``answers_boot_ms`` None: the
    follower has not said its own.
    """
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
        answers_boot_ms=answers_boot_ms,
    ).SerializeToString()
    return field(_CHUNK, head, _DATA, varint(len(data)), data)
