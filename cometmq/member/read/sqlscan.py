"""Pulls with an SQL filter: the records themselves are read and looked at, 1 MiB at a time."""

from __future__ import annotations

from cometmq.filters import sql
from cometmq.format import queueunit
from cometmq.member.read.damage import Limits, Queue, read_before_damage
from cometmq.messaging import pull
from cometmq.messaging.pull import SQL_SCAN_BYTES_MAX, SQL_SCAN_COUNT_MAX, Choice
from cometmq.store.base import BaseStore

# So few messages are looked at on the event loop; more take milliseconds.
IN_PLACE_COUNT_MAX = 64


def scan(
    store: BaseStore,
    program: sql.Program,
    queue: Queue,
    offset: int,
    count: int,
    limits: Limits,
    *,
    nowait: bool,
) -> tuple[bytes, Choice]:
    """What a pull at ``offset`` finds among the next ``count`` messages. Raises StoreDamaged and
    MessageNotFound, and BlockingIOError with ``nowait``.
    """
    units = store.read_units(*queue, offset, min(count, SQL_SCAN_COUNT_MAX), nowait=nowait)
    window = pull.choose(units, offset, SQL_SCAN_COUNT_MAX, SQL_SCAN_BYTES_MAX)
    records = b""
    if window.spans:
        records = store.read_messages(queue, offset, units, window.spans, nowait=nowait)
    sizes, _ = pull.sizes_and_codes(units[: window.count * queueunit.UNIT_BYTES])
    return pull.choose_matching(program, records, sizes, window.spans, offset, *limits)


def scan_before_damage(
    store: BaseStore,
    program: sql.Program,
    queue: Queue,
    offset: int,
    count: int,
    limits: Limits,
) -> tuple[bytes, Choice]:
    """As :func:`scan`, up to the first damaged message. Blocking. Raises StoreDamaged when the
    message at ``offset`` is damaged, because the filter cannot be applied to it.
    """
    wanted = min(count, pull.SCAN_COUNT_MAX)
    window = (wanted, SQL_SCAN_BYTES_MAX)
    records, found = read_before_damage(store, queue, offset, wanted, window, frozenset())
    units = store.read_units(*queue, offset, found.count)
    sizes, _ = pull.sizes_and_codes(units)
    return pull.choose_matching(program, records, sizes, found.spans, offset, *limits)
