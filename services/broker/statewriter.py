"""Writes the state of a writer now and then: offsets and state snapshots into the log, exports into
``config/*.json``.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from cometmq.clock import Clock
from cometmq.errors import BrokerDraining, CometError, Shortage, StoreFailed
from cometmq.member.config import MemberConfig
from cometmq.member.state.exports import Exporter
from cometmq.member.state.keeper import PROGRESS_BYTES_MAX, StateKeeper
from cometmq.member.state.timer_handover import TimerHandover
from cometmq.member.storage.member_storage import MemberStorage
from cometmq.messaging import rocketmq_tables
from cometmq.messaging.state import STATE_QUEUE_ID, STATE_TOPIC
from cometmq.rpc.ticks import until_tick_s
from cometmq.telemetry import fields

log = logging.getLogger(__name__)


PROGRESS_PAUSE_S = 0.1  # at least, between two writings


class StateWriter:
    """Belongs to the event loop. :meth:`write` and :meth:`export` are tasks."""

    def __init__(
        self, config: MemberConfig, keeper: StateKeeper, storage: MemberStorage, clock: Clock
    ) -> None:
        self._config = config
        self._keeper = keeper
        self._storage = storage
        self._clock = clock
        self._exporter = Exporter(config.store_path / "config")
        self._timers = TimerHandover(storage.store, keeper.state, config, clock)
        self._exported = -1  # state records that the last export knew of

    async def write(self) -> None:
        """Write commits that a full disk has not taken before, and state snapshots when they are
        due, about once a second, until cancelled.
        """
        interval_s = self._config.offset_record_interval_s
        grown = asyncio.Event()
        with self._storage.moved.subscribed(grown):
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(until_tick_s(interval_s)):
                        await self._until_much_to_read(grown)
                for _ in self._keeper.state.halves.count_checks():
                    await asyncio.sleep(0)
                self._write_now()

    async def _until_much_to_read(self, grown: asyncio.Event) -> None:
        """Until the next start would have to read too much of the log. Waits always: a full disk
        takes nothing, however often progress is written.
        """
        while True:
            await grown.wait()
            grown.clear()
            await asyncio.sleep(PROGRESS_PAUSE_S)
            if self._keeper.progress_bytes >= PROGRESS_BYTES_MAX:
                return

    def _write_now(self) -> None:
        try:
            self._keeper.write_offsets()
            self._keeper.write_pops()
            self._keeper.write_progress(self._clock.monotonic_s())
            self._keeper.write_snapshot_if_due(self._config.state_copy_interval_bytes)
        except (Shortage, BrokerDraining) as error:
            log.error("offsets are not written", extra=fields(reason=str(error)))

    async def export(self) -> None:
        """Write the exports when there is something new, until cancelled."""
        while True:
            await asyncio.sleep(self._config.flush_consumer_offset_interval / 1000)
            await self._export_if_changed()

    async def _export_if_changed(self) -> None:
        store = self._storage.store
        _, records = store.queue_bounds(STATE_TOPIC, STATE_QUEUE_ID)
        assert records >= self._exported, "the queue of the state only grows"
        if records == self._exported:
            return
        mark = rocketmq_tables.SnapshotMark(store.epoch, store.appended_offset)
        files = rocketmq_tables.export(self._keeper.state, mark, self._clock.wall_ms())
        files |= self._timers.check()
        try:
            await asyncio.to_thread(self._exporter.write, files)
        except OSError as error:  # a full disk, say: the state log is the truth, these are copies
            log.warning("exports not written", extra=fields(reason=error.strerror))
        else:
            self._exported = records

    async def finish(self) -> None:
        """The rest of the offsets, unless the log was handed over, and the exports."""
        try:
            if not self._storage.sealed:
                self._write_now()
            await self._export_if_changed()
            if not self._storage.sealed:  # else the log goes on elsewhere, and here as a copy
                await asyncio.to_thread(self._timers.finish)
        except StoreFailed as error:
            log.error("the last offsets are not written", extra=fields(reason=str(error)))
        except (OSError, CometError) as error:
            log.warning("RocketMQ would repeat timers", extra=fields(reason=str(error)))
