"""Reads messages of a queue that are not neighbours, as their records."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from cometmq.errors import CometError, MessageNotFound, OffsetInvalid, StoreDamaged
from cometmq.format.record import LAYOUTS
from cometmq.member.read.records import read_mended_message, read_message_now
from cometmq.member.storage.member_storage import BaseStorage
from cometmq.model import QueueKey
from cometmq.store.base import BaseStore

_SIZE_OFFSET = LAYOUTS[0].reader("size", "queue_offset")


def places(records: bytes) -> list[tuple[int, int, int]]:
    """(queue offset, start, end) of each record of ``records``, which lie end to end."""
    found = []
    at = 0
    while at < len(records):
        size, offset = _SIZE_OFFSET.unpack_from(records, at)
        found.append((offset, at, at + size))
        at += size
    return found


async def read_offsets(
    storage: BaseStorage,
    key: QueueKey,
    offsets: Sequence[int],
    bytes_max: int,
    *,
    with_hidden: bool = False,
) -> list[tuple[int, bytes | CometError]]:
    """The records of these messages of a queue, or why one cannot be read. MessageNotFound and
    StoreDamaged are final. OffsetInvalid: consumers may not see it yet; not with ``with_hidden``.
    As many as have ``bytes_max`` together, at least one. Raises StoreFailed, Shortage.
    """
    low, readable, appended = storage.bounds(key)
    bounds = low, appended if with_hidden else readable, appended
    try:
        return _read(storage.store, key, bounds, offsets, bytes_max, nowait=True)
    except BlockingIOError:
        read = partial(_read, storage.store, key, bounds, offsets, bytes_max, nowait=False)
        return await asyncio.to_thread(read)


def _read(
    store: BaseStore,
    key: QueueKey,
    bounds: tuple[int, int, int],
    offsets: Sequence[int],
    bytes_max: int,
    *,
    nowait: bool,
) -> list[tuple[int, bytes | CometError]]:
    found: list[tuple[int, bytes | CometError]] = []
    left, (low, readable, appended) = bytes_max, bounds
    for offset in offsets:
        one: bytes | CometError
        if low <= offset < readable:
            one = _one(store, key, offset, nowait=nowait)
        elif readable <= offset < appended:
            # An earlier writer delivered it. This one does not know yet which members have a copy.
            one = _hidden(key, offset)
        else:  # above the end: a fault took it back
            one = _gone(key, offset)
        size = len(one) if isinstance(one, bytes) else 0
        if found and size > left:
            break
        left -= size
        found.append((offset, one))
    return found


def _one(store: BaseStore, key: QueueKey, offset: int, *, nowait: bool) -> bytes | CometError:
    try:
        if not nowait:
            return read_mended_message(store, key, offset) or _gone(key, offset)
        return read_message_now(store, key, offset, nowait=True) or _gone(key, offset)
    except (MessageNotFound, StoreDamaged) as error:
        if nowait:  # it may be mended
            raise BlockingIOError from error
        return error


def _hidden(key: QueueKey, offset: int) -> OffsetInvalid:
    topic, queue_id = key
    return OffsetInvalid(
        f"consumers may not see message {offset} of queue {queue_id} of {topic} yet"
    )


def _gone(key: QueueKey, offset: int) -> MessageNotFound:
    topic, queue_id = key
    return MessageNotFound(f"message {offset} of queue {queue_id} of {topic} is gone")
