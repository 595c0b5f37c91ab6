"""Delivers delayed messages: each turn takes what is due of all levels and appends it, in one
batch, to the topics that the messages are meant for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cometmq.clock import Clock
from cometmq.errors import BrokerDraining, CometError, Shortage, StoreDamaged
from cometmq.format import delayed, queueunit, timers
from cometmq.format.delayed import SCHEDULE_TOPIC
from cometmq.format.record import Record
from cometmq.format.relay import Relayed, relay, with_properties
from cometmq.format.timers import TIMER_QUEUE
from cometmq.member.metrics import MemberMetrics
from cometmq.member.read.records import read_units
from cometmq.member.relay import RelayWriter
from cometmq.member.state.keeper import StateKeeper
from cometmq.member.storage.member_storage import MemberStorage
from cometmq.messaging.delay import LevelProgress, Now
from cometmq.model import QueueKey
from cometmq.store.log.commitlog import Span
from cometmq.telemetry import fields
from cometmq.turns import Turns
from services.broker.delay.believed_time import BelievedTime
from services.broker.delay.delivery import EACH_COUNT_MAX, Delivery

log = logging.getLogger(__name__)

LOOK_S = 0.1  # so often it is looked for what came meanwhile; no level is shorter than 1 s
RETRY_S = 1.0  # after the disk took no more
REST_S = 0.001  # between two turns that deliver, so that sends hardly wait
PAUSE_S = 0.01  # between two others: what becomes due meanwhile goes together


class ScheduleService:
    """Belongs to the event loop. :meth:`run` is a task of the writer."""

    def __init__(
        self,
        storage: MemberStorage,
        keeper: StateKeeper,
        relays: RelayWriter,
        metrics: MemberMetrics,
        clock: Clock,
        time: BelievedTime,
    ) -> None:
        self.progress = keeper.delays
        self._storage = storage
        self._metrics = metrics
        self._clock = clock
        self._time = time
        self._delivery = Delivery(
            *(storage, keeper, relays, clock, "a delayed message", keeper.state.delay_drops),
            lambda result: metrics.delay_out.labels(result).inc(),
        )
        self._relays = relays
        self._one_at_a_time = asyncio.Lock()  # what moves the progress of a level
        self._first = 0  # of all levels, the next turn begins with this one

    async def run(self) -> None:
        """Deliver until cancelled. StoreFailed."""
        moved = asyncio.Event()
        turns = Turns("delivery of delayed messages")
        with self._storage.moved.subscribed(moved):
            while True:
                moved.clear()
                try:
                    wait_s = await self.deliver_due()
                    if wait_s == 0:
                        turns.next([level.offset for _, level in self.progress])
                except (Shortage, BrokerDraining, StoreDamaged) as error:
                    log.warning("delayed messages wait", extra=fields(reason=str(error)))
                    await asyncio.sleep(RETRY_S)
                    continue
                if wait_s is None:
                    await moved.wait()
                    wait_s = LOOK_S
                pause_s = REST_S if wait_s == 0 else max(PAUSE_S, min(wait_s, LOOK_S))
                await asyncio.sleep(pause_s)

    async def deliver_due(self) -> float | None:
        """Deliver some of what is due. Seconds until there is more; None: nothing waits at all."""
        async with self._one_at_a_time:
            return await self._deliver_due()

    async def _deliver_due(self) -> float | None:
        now = Now(self._time.now_ms(), self._clock.monotonic_s())
        waits_s: list[float] = []
        parts: list[_Part] = []
        left = self._delivery.turn_count
        for level, queue in self._queues():
            low, end, _ = self._storage.bounds(queue)
            if level.offset < low:  # retention had to remove what was not due yet
                log.error("delayed messages are lost", extra=fields(queue=queue[1], to=low))
                self._metrics.delay_out.labels("lost").inc(low - level.offset)
                level.delivered(low - level.offset)
            if level.offset >= end:
                continue
            if not left:
                waits_s.append(0.0)
                break
            units = await read_units(
                self._storage.store, queue, level.offset, min(left, end - level.offset)
            )
            count, wait_s = level.due_count(units, end, now)
            waits_s.append(wait_s)
            left -= count
            if count:
                parts.append(_Part(level, queue, units[: count * queueunit.UNIT_BYTES]))
        if parts and not await self._deliver(parts, now):
            return 0.0
        return min(waits_s, default=None)

    def _queues(self) -> Iterator[tuple[LevelProgress, QueueKey]]:
        """All levels, with their queues. Each comes first in its turn: where one has more than a
        turn delivers, the others are not to wait until it has not.
        """
        levels = list(self.progress)
        self._first = (self._first + 1) % len(levels)
        for number, level in levels[self._first :] + levels[: self._first]:
            yield level, (SCHEDULE_TOPIC, delayed.queue_id_of(number))

    async def _deliver(self, parts: Sequence[_Part], now: Now) -> bool:
        """Whether all of them are done."""
        spans: list[Span] = []
        queues: list[QueueKey] = []
        offsets: list[int] = []
        late_ms = 0
        for level, queue, units in parts:
            part = [(place, size) for place, size, _ in queueunit.iterate(units)]
            spans += part
            queues += [queue] * len(part)
            offsets += range(level.offset, level.offset + len(part))
            _, _, due_ms = queueunit.unit_at(units, 0)
            late_ms = max(late_ms, now.wall_ms - due_ms)
        done, appended = await self._delivery.deliver(spans, queues, offsets, late_ms)
        self._metrics.delay_out.labels("delivered").inc(appended)
        left = done
        for level, _, units in parts:
            count = min(left, len(units) // queueunit.UNIT_BYTES)
            left -= count
            if count:
                level.delivered(count)
                for number in (0, count - 1):
                    _, _, due_ms = queueunit.unit_at(units, number)
                    late_s = max(0, now.wall_ms - due_ms) / 1000
                    self._metrics.delay_latency_s.observe(late_s)
        return done == len(spans)

    # --- before retention -------------------------------------------------------------------------

    async def leave(self, log_offset: int) -> None:
        """The log before this place is about to go: what waits there gets a time of its own, the
        same one. Raises what appending raises, StoreDamaged.
        """
        for level, queue in self._queues():
            stop = self._storage.store.queue_offset_at(*queue, log_offset)
            is_more = level.offset < stop
            turns = Turns("moving of delayed messages")
            while is_more:
                turns.next(level.offset)
                async with self._one_at_a_time:
                    is_more = await self._move_some(level, queue, stop)
                await asyncio.sleep(REST_S)

    async def _move_some(self, level: LevelProgress, queue: QueueKey, stop: int) -> bool:
        """Whether more of the level waits before ``stop``."""
        first, store = level.offset, self._storage.store
        units = await read_units(store, queue, first, min(EACH_COUNT_MAX, stop - first))
        waiting = list(queueunit.iterate(units))
        spans = [(place, size) for place, size, _ in waiting]
        fitting = self._delivery.movable(spans)
        waiting, spans = waiting[:fitting], spans[:fitting]
        offsets = range(first, first + len(spans))
        found = await self._delivery.read(spans, [queue] * len(spans), offsets)
        moved: list[Relayed] = []
        for (place, _, due_ms), one in zip(waiting, found, strict=True):
            try:
                if isinstance(one, CometError):
                    raise one
                if target := self._delivery.target(one):
                    moved.append(self._with_own_time(one, due_ms, *target))
            except CometError as error:
                self._delivery.lose(place, str(error))
        if moved:
            self._relays.append(moved)
        level.delivered(len(waiting))
        return bool(waiting) and level.offset < stop

    def _with_own_time(self, found: Record, due_ms: int, topic: str, queue_id: int) -> Relayed:
        """Raises StoreDamaged, PropertiesTooLarge."""
        prefix = timers.prefix_at(topic, queue_id, due_ms)
        properties = with_properties(found.raw_properties, prefix, timers.PROPERTIES)
        host = self._relays.host
        return relay(found, *TIMER_QUEUE, host, properties=properties, due_ms=due_ms)


class _Part(NamedTuple):
    """The messages of one level that are due."""

    level: LevelProgress
    queue: QueueKey
    units: bytes
