"""Pulls around damaged messages: what comes before one is answered; at the message itself the
consumer learns which one it is, and where the next good one is. Blocking.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from cometmq.errors import MessageNotFound, StoreDamaged
from cometmq.format import queueunit
from cometmq.messaging import pull
from cometmq.messaging.pull import Choice
from cometmq.store.base import BaseStore
from cometmq.store.log.commitlog import Span

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
    try:
        units = store.read_units(*queue, offset, wanted)
    except StoreDamaged as error:  # of the queue, not of the log
        log.error(str(error))
        raise
    for index, span in _matching(units, codes):
        if _is_damaged(store, span):
            if not index:
                raise _damaged(store, queue, offset, codes)
            units = units[: index * queueunit.UNIT_BYTES]
            assert units, "something good comes before the damage"
            break
    choice = pull.choose(units, offset, *limits, codes)
    return store.read_records(choice.spans) if choice.spans else b"", choice


def _matching(units: bytes, codes: frozenset[int]) -> Iterator[tuple[int, Span]]:
    """(index, span) of the units that pass, and of the units of lost messages, whose tags are not
    known.
    """
    for index, (log_offset, size, code) in enumerate(queueunit.iterate(units)):
        if not codes or code & 0xFFFFFFFF in codes or size == queueunit.LOST_SIZE:
            yield index, (log_offset, size)


def _is_damaged(store: BaseStore, span: Span) -> bool:
    try:
        store.read_records([span])
    except (StoreDamaged, MessageNotFound):  # the unit may point to outside of the log
        return True
    return False


def _damaged(store: BaseStore, queue: Queue, offset: int, codes: frozenset[int]) -> StoreDamaged:
    topic, queue_id = queue
    units = store.read_units(topic, queue_id, offset, LOOK_AHEAD_COUNT)
    log_offset, _, _ = queueunit.unit_at(units, 0)
    good = next((i for i, s in _matching(units, codes) if not _is_damaged(store, s)), None)
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
