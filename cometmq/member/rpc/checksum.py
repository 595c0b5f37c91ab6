"""Checksums of ranges of the log, to compare members."""

from __future__ import annotations

import asyncio
import hashlib

from cometmq.errors import OffsetInvalid
from cometmq.store.base import BaseStore
from cometmq.v1 import member_pb2

PIECE_BYTES = 1024 * 1024


async def checksum_log(
    store: BaseStore, request: member_pb2.ChecksumLogRequest
) -> member_pb2.ChecksumLogResponse:
    """``MemberService.ChecksumLog``: SHA-256 of a range, read in a thread. OffsetInvalid: the range
    is not within the log; MessageNotFound: it no longer is.
    """
    low, end = store.min_offset, store.written_offset
    if not low <= request.from_offset <= request.to_offset <= end:
        raise OffsetInvalid(
            f"{request.from_offset} to {request.to_offset} is not within the log, {low} to {end}"
        )
    digest = await asyncio.to_thread(_digest, store, request.from_offset, request.to_offset)
    return member_pb2.ChecksumLogResponse(log_min_offset=low, log_end_offset=end, sha256=digest)


def _digest(store: BaseStore, at: int, end: int) -> str:
    digest = hashlib.sha256()
    with store.cleaner.pins.hold(at) as pin:
        while at < end:
            piece = store.read_raw(at, min(PIECE_BYTES, end - at))
            assert piece, at
            digest.update(piece)
            at += len(piece)
            pin.offset = at
    return digest.hexdigest()
