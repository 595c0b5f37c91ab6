from __future__ import annotations

from zlib import crc32

import pytest

from cometmq.replication.watermarks import HighWatermarks
from cometmq.v1 import member_pb2
from services.broker.replication.frames import pack
from services.broker.replication.replicas import Frame


@pytest.mark.parametrize("size", [0, 1, 60, 127, 128, 16_383, 16_384, 1_048_576])
def test_it_is_the_message_that_protobuf_would_make(size: int) -> None:
    data = bytes(index % 251 for index in range(size))
    frame = Frame(2**40, data, 2**40 + size, HighWatermarks(3, 2, 1), 7, 12_345)
    wanted = member_pb2.ReplicateResponse(
        chunk=member_pb2.LogChunk(
            epoch=9,
            offset=2**40,
            data=data,
            data_crc32=crc32(data),
            writer_end_offset=2**40 + size,
            visible_flushed_offset=3,
            visible_replicated_offset=2,
            visible_replicated_flushed_offset=1,
            flush_to_offset=7,
            sent_boot_ms=12_345,
            sent_ms=67_890,
        )
    )
    assert member_pb2.ReplicateResponse.FromString(pack(frame, 9, 67_890)) == wanted
