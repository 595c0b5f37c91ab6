"""What RocketMQ 5 needs to go on with the timers of a store: docs/compatibility.md. Blocking.

While the writer runs, ``config/timercheck`` says that RocketMQ is to look at the timer queue from
the oldest message on that may wait. When it stops in order, ``timerlog`` lists exactly what waits.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator

from cometmq.clock import Clock
from cometmq.errors import MessageNotFound, StoreDamaged
from cometmq.format import queueunit, record, timers
from cometmq.format.belonging import is_message_at
from cometmq.format.delayed import target_of
from cometmq.format.timerlog import WaitingRecord, encode_check, encode_log, units_max
from cometmq.format.timers import TIMER_QUEUE
from cometmq.member.config import MemberConfig
from cometmq.member.state.exports import Exporter
from cometmq.messaging.state import BrokerState
from cometmq.messaging.timers import Timer
from cometmq.store.base import BaseStore
from cometmq.store.disk.files import FILE_MODE, make_folders
from cometmq.store.layout import CONFIG, TIMER_CHECK, TIMER_LOG, TIMER_WHEEL, offset_name
from cometmq.store.timers.entries import HASH_MAX
from cometmq.telemetry import fields

log = logging.getLogger(__name__)

LISTED_MAX = 1_000_000  # of the queue, from the oldest that waits on: some two seconds of a stop
_UNITS_AT_ONCE = 4_096


class TimerHandover:
    """Belongs to the writer."""

    def __init__(
        self, store: BaseStore, state: BrokerState, config: MemberConfig, clock: Clock
    ) -> None:
        self._store = store
        self._table = state.timers
        self._topics = state.topics
        self._root = config.store_path
        self._file_bytes = config.mapped_file_size_timer_log  # of the list
        self._clock = clock

    def check(self) -> dict[str, bytes]:
        """``config/timercheck`` by its name, as it is to be while the writer runs; nothing while
        there never was a timer.
        """
        low, end = self._store.queue_bounds(*TIMER_QUEUE)
        if not end:
            return {}
        now_ms = self._clock.wall_ms()
        time_ms = min(max(1, self._table.watermark.due_ms), now_ms)
        first = min(max(low, self._table.rolled), end)
        return {TIMER_CHECK: encode_check(time_ms, first, 0, now_ms)}

    def begin(self) -> None:
        """The list of the last stop, or RocketMQ's, does not hold any more. Raises OSError."""
        config = self._root / CONFIG
        old = [self._root / TIMER_LOG, *sorted(self._root.glob(f"{TIMER_WHEEL}*"))]
        if (config / TIMER_CHECK).exists() or any(path.exists() for path in old):
            # First what says that RocketMQ is to do without the list.
            Exporter(config).write(self.check())
            for path in old:
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)

    def finish(self) -> None:
        """List what waits; the table must not change any more. Raises OSError."""
        low, end = self._store.queue_bounds(*TIMER_QUEUE)
        first = max(low, self._table.rolled)
        room = min(LISTED_MAX, units_max(self._file_bytes) - 1)
        if low == end or end - first > room:
            if low < end:
                log.warning(
                    "RocketMQ would repeat timers: too many to be listed",
                    extra=fields(count=end - first, most=room),
                )
            return
        now_ms = self._clock.wall_ms()
        last, size, _ = queueunit.unit_at(self._store.read_units(*TIMER_QUEUE, end - 1, 1), 0)
        found = encode_log(self._waiting(first, end), (last, size), now_ms)
        if found.content:
            self._write_list(found.content)
        time_ms = min(found.first_ms, now_ms)
        content = encode_check(time_ms, end, len(found.content), now_ms)
        Exporter(self._root / CONFIG).write({TIMER_CHECK: content})

    def _write_list(self, content: bytearray) -> None:
        folder = self._root / TIMER_LOG
        make_folders(folder)
        path = folder / offset_name(0)
        with path.open("wb") as file:
            os.fchmod(file.fileno(), FILE_MODE)
            file.write(content)
            file.truncate(self._file_bytes)
            file.flush()
            os.fsync(file.fileno())

    def _waiting(self, first: int, end: int) -> Iterator[WaitingRecord]:
        """In the order of the queue."""
        table, dropped_end = self._table, max(self._table.dropped.values(), default=0)
        while first < end:
            units = self._store.read_units(*TIMER_QUEUE, first, min(_UNITS_AT_ONCE, end - first))
            if not units:
                return
            for offset, (place, size, code) in enumerate(queueunit.iterate(units), first):
                if not queueunit.LOST_SIZE < size < queueunit.PREFILL_SIZE:
                    continue
                due_ms: int | None = code
                if code <= HASH_MAX or offset < dropped_end:
                    due_ms = self._due_ms(offset, place, size)
                if due_ms is not None and table.is_pending(Timer(due_ms, offset)):
                    yield WaitingRecord(due_ms, place, size)
            first += len(units) // queueunit.UNIT_BYTES

    def _due_ms(self, offset: int, place: int, size: int) -> int | None:
        """As the record says; None: its topic is gone, or it is damaged."""
        try:
            found = record.decode(self._store.read_records([(place, size)]))
        except (MessageNotFound, StoreDamaged):
            return None
        target = target_of(found.raw_properties)
        if not is_message_at(found, (TIMER_QUEUE, offset)):
            return None
        if target is None or target[0] not in self._topics:
            return None
        if self._table.is_dropped(*target, offset):
            return None
        return timers.due_ms(found.raw_properties)
