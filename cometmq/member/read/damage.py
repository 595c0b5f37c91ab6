"""Pulls around damaged messages: what comes before one is answered; at the message itself the
consumer learns which one it is, and where the next good one is. Units of a queue that are damaged,
or name messages of another queue, are written again from the log first. Blocking.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from cometmq.errors import MessageNotFound, StoreDamaged
from cometmq.format import queueunit
from cometmq.messaging import pull
from cometmq.messaging.pull import Choice
from cometmq.store.base import BaseStore

log = logging.getLogger(__name__)

LOOK_AHEAD_COUNT = 1_000  # messages behind a damaged one that are tried

Queue = tuple[str, int]  # topic and queue id
Limits = tuple[int, int]  # messages and bytes


def read_before_damage(
    store: BaseStore, queue: Queue, offset: int, wanted: int, limits: Limits, codes: frozenset[int]
) -> tuple[bytes, Choice]:
    """As much as a pull at ``offset`` can have: ``wanted`` units are looked at, ``codes`` are the
    low 32 bits of the tag hashes that pass, empty = all.

    Raises StoreDamaged when nothing good comes before the first damaged message.
    """
    while True:
        units = _mended_units(store, queue, offset, wanted)
        index = _first_damaged(store, queue, offset, units, codes)
        if index is None or not store.mend_units(*queue, offset + index):
            break
    if index is not None:
        if not index:
            raise _damaged(store, queue, offset, codes)
        units = units[: index * queueunit.UNIT_BYTES]
        assert units, "something good comes before the damage"
    choice = pull.choose(units, offset, *limits, codes)
    if not choice.spans:
        return b"", choice
    return store.read_messages(queue, offset, units, choice.spans), choice


def _mended_units(store: BaseStore, queue: Queue, offset: int, wanted: int) -> bytes:
    try:
        return store.read_units(*queue, offset, wanted)
    except StoreDamaged as error:  # of the queue, not of the log
        log.error(str(error))
        if not store.mend_units(*queue, offset):
            raise
        return store.read_units(*queue, offset, wanted)


def _first_damaged(
    store: BaseStore, queue: Queue, offset: int, units: bytes, codes: frozenset[int]
) -> int | None:
    """The first unit that passes and whose message cannot be read."""
    for index in _matching(units, codes):
        if _is_damaged(store, queue, offset, units, index):
            return index
    return None


def _matching(units: bytes, codes: frozenset[int]) -> Iterator[int]:
    """The units that pass, and those of lost messages, whose tags are not known."""
    for index, (_, size, code) in enumerate(queueunit.iterate(units)):
        if not codes or code & 0xFFFFFFFF in codes or size == queueunit.LOST_SIZE:
            yield index


def _is_damaged(store: BaseStore, queue: Queue, offset: int, units: bytes, index: int) -> bool:
    unit = units[index * queueunit.UNIT_BYTES : (index + 1) * queueunit.UNIT_BYTES]
    log_offset, size, _ = queueunit.unit_at(unit, 0)
    try:
        store.read_messages(queue, offset + index, unit, [(log_offset, size)])
    except (StoreDamaged, MessageNotFound):  # the unit may point to outside of the log
        return True
    return False


def _damaged(store: BaseStore, queue: Queue, offset: int, codes: frozenset[int]) -> StoreDamaged:
    topic, queue_id = queue
    units = store.read_units(topic, queue_id, offset, LOOK_AHEAD_COUNT)
    log_offset, _, _ = queueunit.unit_at(units, 0)
    matching = _matching(units, codes)
    good = next((at for at in matching if not _is_damaged(store, queue, offset, units, at)), None)
    where = (
        f"none of the {len(units) // queueunit.UNIT_BYTES} from there on can"
        if good is None
        else f"the next one that can is {offset + good}: go on there"
    )
    complaint = (
        f"message {offset} of queue {queue_id} of {topic}, at {log_offset} of the log, is damaged "
        f"and cannot be read; {where}"
    )
    log.error(complaint)
    return StoreDamaged(complaint)
