"""Delivers delayed messages: each turn takes what is due of all levels and appends it, in one
batch, to the topics that the messages are meant for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from cometmq.clock import Clock
from cometmq.errors import BrokerDraining, Shortage, StoreDamaged
from cometmq.format import delayed, queueunit
from cometmq.format.delayed import SCHEDULE_TOPIC
from cometmq.format.record import Record
from cometmq.format.relay import Relayed, relay
from cometmq.member.metrics import MemberMetrics
from cometmq.member.read.records import read_each, read_units
from cometmq.member.relay import RelayWriter
from cometmq.member.state.keeper import StateKeeper
from cometmq.member.storage.member_storage import MemberStorage
from cometmq.messaging.delay import LevelProgress, Now
from cometmq.telemetry import fields

log = logging.getLogger(__name__)

LOOK_S = 0.1  # so often it is looked for what came meanwhile; no level is shorter than 1 s
RETRY_S = 1.0  # after the disk took no more
# Of one turn, so that a producer hardly waits for it. A send needs some turns of the event loop
# from its arrival to its answer: it is to meet one delivery, not one in each of them.
TURNS_BETWEEN = 8
TURN_COUNT_MAX = 32
TURN_BYTES_MAX = 1 << 20


class ScheduleService:
    """Belongs to the event loop. :meth:`run` is a task of the writer."""

    def __init__(
        self,
        storage: MemberStorage,
        keeper: StateKeeper,
        relays: RelayWriter,
        metrics: MemberMetrics,
        clock: Clock,
    ) -> None:
        self.progress = keeper.delays
        self._storage = storage
        self._keeper = keeper
        self._relays = relays
        self._metrics = metrics
        self._clock = clock
        # A batch lies in one log file.
        self._turn_bytes_max = min(TURN_BYTES_MAX, storage.store.log_file_bytes // 4)

    async def run(self) -> None:
        """Deliver until cancelled. StoreFailed."""
        moved = asyncio.Event()
        with self._storage.moved.subscribed(moved):
            while True:
                moved.clear()
                try:
                    wait_s = await self.deliver_due()
                except (Shortage, BrokerDraining) as error:
                    log.warning("delayed messages wait", extra=fields(reason=str(error)))
                    await asyncio.sleep(RETRY_S)
                    continue
                if wait_s is None:
                    await moved.wait()
                    wait_s = LOOK_S
                for _ in range(TURNS_BETWEEN):
                    await asyncio.sleep(0)
                await asyncio.sleep(min(wait_s, LOOK_S))

    async def deliver_due(self) -> float | None:
        """Deliver some of what is due. Seconds until there is more; None: nothing waits at all."""
        now = Now(self._clock.wall_ms(), self._clock.monotonic_s())
        waits: list[float] = []
        due: list[tuple[LevelProgress, bytes]] = []
        room = _Room(self._turn_bytes_max)
        for number, level in self.progress:
            queue = (SCHEDULE_TOPIC, delayed.queue_id_of(number))
            low, end, _ = self._storage.bounds(queue)
            if level.offset < low:  # retention had to remove what was not due yet
                log.error("delayed messages are lost", extra=fields(level=number, to=low))
                level.delivered(low - level.offset)
            if level.offset >= end:
                continue
            count = min(TURN_COUNT_MAX, end - level.offset)
            units = await read_units(self._storage.store, queue, level.offset, count)
            count, wait_s = level.due_count(units, end, now)
            units = room.take(units[: count * queueunit.UNIT_BYTES])
            waits.append(wait_s if len(units) == count * queueunit.UNIT_BYTES else 0.0)
            if units:
                due.append((level, units))
        if due:
            self._deliver(due, await self._records(b"".join(units for _, units in due)), now)
        return min(waits, default=None)

    async def _records(self, units: bytes) -> list[Record]:
        """What the units name, but for messages that are damaged or gone."""
        spans = [(offset, size) for offset, size, _ in queueunit.iterate(units)]
        records: list[Record] = []
        for span, found in zip(spans, await read_each(self._storage.store, spans), strict=True):
            if isinstance(found, Record):
                records.append(found)
            else:
                log.error("a delayed message is lost", extra=fields(at=span[0], reason=str(found)))
        return records

    def _deliver(
        self, due: list[tuple[LevelProgress, bytes]], records: Sequence[Record], now: Now
    ) -> None:
        relayed: list[Relayed] = []
        for found in records:
            target = self._target(found)
            if target is not None:
                try:
                    relayed.append(relay(found, *target, self._relays.host))
                except StoreDamaged as error:
                    log.error("a delayed message is lost", extra=fields(reason=str(error)))
        if relayed:
            self._relays.append(relayed)  # all or nothing: no message is delivered twice
        for level, units in due:
            level.delivered(len(units) // queueunit.UNIT_BYTES)
            for _, _, due_ms in (queueunit.unit_at(units, 0), queueunit.unit_at(units, -1)):
                self._metrics.delay_latency_s.observe(max(0, now.wall_ms - due_ms) / 1000)

    def _target(self, found: Record) -> tuple[str, int] | None:
        """Where a message goes; None: nowhere, because its topic is gone."""
        target = delayed.target_of(found.raw_properties)
        topics, reason = self._keeper.state.topics, "it names no topic"
        if target is not None:
            topic, queue_id = target
            config = topics.find(topic)
            if config is None or topic in self._keeper.closing:
                reason = f"topic {topic} is gone"
            elif (delivery_queue_id := config.delivery_queue_id(queue_id)) is not None:
                return topic, delivery_queue_id
            else:
                reason = f"topic {topic} has no queue"
        log.warning(
            "a delayed message is dropped", extra=fields(at=found.log_offset, reason=reason)
        )
        return None


class _Room:
    """How much more of what is due fits into this turn."""

    def __init__(self, bytes_max: int) -> None:
        self._count = TURN_COUNT_MAX
        self._bytes = bytes_max

    def take(self, units: bytes) -> bytes:
        """The first of ``units``, as far as there is room; the turn's first message always has."""
        taken = 0
        for _, size, _ in queueunit.iterate(units):
            is_first = self._count == TURN_COUNT_MAX
            if not self._count or (size > self._bytes and not is_first):
                self._count = 0
                break
            self._count -= 1
            self._bytes -= size
            taken += 1
        return units[: taken * queueunit.UNIT_BYTES]
