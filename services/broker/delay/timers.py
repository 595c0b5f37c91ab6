"""Delivers messages whose own time has come: each turn takes what is due and appends it, in one
batch, to the topics that the messages are meant for.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import TypeVar

from cometmq.clock import Clock
from cometmq.errors import (
    BrokerDraining,
    InternalError,
    MessageNotFound,
    PropertiesTooLarge,
    Shortage,
    StoreDamaged,
)
from cometmq.flight_recorder import named_threads
from cometmq.format import queueunit, timers
from cometmq.format.queueunit import LOST_SIZE, PREFILL_SIZE
from cometmq.format.record import Record
from cometmq.format.relay import Relayed, relay
from cometmq.format.timers import TIMER_QUEUE
from cometmq.member.metrics import MemberMetrics
from cometmq.member.read.records import read_units
from cometmq.member.relay import RelayWriter
from cometmq.member.state.keeper import StateKeeper
from cometmq.member.storage.member_storage import MemberStorage
from cometmq.messaging.timers import Timer
from cometmq.rpc.tasks import wait_at_most
from cometmq.store.log.commitlog import Span
from cometmq.store.queries import Boundary, offset_by_time
from cometmq.store.timers.catalog import Coverage
from cometmq.store.timers.entries import (
    ENTRY,
    ENTRY_BYTES,
    HASH_MAX,
    count_up_to,
    in_order,
    iterate,
    of_units,
)
from cometmq.store.timers.index import Job, JobDone
from cometmq.telemetry import fields
from cometmq.turns import Turns
from services.broker.delay.believed_time import BelievedTime
from services.broker.delay.delivery import Delivery

log = logging.getLogger(__name__)

Result = TypeVar("Result")

RETRY_S = 1.0  # after the disk took no more
LOOK_S = 1.0  # so often the clocks are looked at while messages wait: a clock may jump
REST_S = 0.001  # between two turns that deliver, so that sends hardly wait
PAUSE_S = 0.01  # between two others: so late a message may be that was sent a moment ago
UNITS_GAP_MAX = 256  # reading so many in vain is cheaper than a second call
ARRIVALS_MAX = 8192  # units that are read in one go
# Messages that came behind the watermark and wait, because a clock was ahead; no more are read
# while these wait. Some 250 bytes each.
LATE_MAX = 100_000
ROLL_LOOK_S = 10.0  # so often it is looked whether messages have to be stored again
# A message is stored again when so much of the time has gone for which the log is kept.
ROLL_SHARE = 2 / 3
LOADS_MAX = 3  # of a damaged index, before the loader waits


class TimerService:
    """Belongs to the event loop. :meth:`run` is a task of the writer. ``reserved_ms``: how long
    retention keeps the log.
    """

    def __init__(
        self,
        storage: MemberStorage,
        keeper: StateKeeper,
        relays: RelayWriter,
        metrics: MemberMetrics,
        clock: Clock,
        time: BelievedTime,
        reserved_ms: int,
    ) -> None:
        self._storage = storage
        self._keeper = keeper
        self._relays = relays
        self._metrics = metrics
        self._clock = clock
        self._reserved_ms = reserved_ms
        self.time = time
        self._is_loaded = False
        self._trusts_files = True  # False: one was damaged, and would be met again
        self._one_at_a_time = asyncio.Lock()  # turns, and others that change the index
        self._roll_at_s = 0.0
        self._thread = named_threads("timers")
        self._job: asyncio.Task[None] | None = None
        self.table = keeper.state.timers
        self.index = storage.store.new_timer_index()
        self._delivery = Delivery(
            *(storage, keeper, relays, clock, "a timer", self.table),
            lambda result: metrics.timers_out.labels(result).inc(),
        )

    async def run(self) -> None:
        """Deliver until cancelled. StoreFailed."""
        moved = asyncio.Event()
        turns = Turns("delivery of timers")
        with self._storage.moved.subscribed(moved):
            async with asyncio.TaskGroup() as tasks:
                while True:
                    moved.clear()
                    try:
                        wait_s = await self.turn()
                        if wait_s == 0:
                            turns.next(self._place)
                    except (Shortage, BrokerDraining) as error:
                        log.warning("timers wait", extra=fields(reason=str(error)))
                        await asyncio.sleep(RETRY_S)
                        continue
                    except (StoreDamaged, InternalError) as error:
                        # It may be the queue that is damaged, and the next index meets it again.
                        self._forget_index(error)
                        await asyncio.sleep(RETRY_S)
                        continue
                    if self._job is None and (job := await self._next_job()):
                        self._job = tasks.create_task(self._run_job(job), name="timer-index")
                    if wait_s is None:
                        await moved.wait()
                    elif wait_s > REST_S:
                        await wait_at_most(moved, min(wait_s, LOOK_S))
                    # Behind it there is often more at once, and sends are to meet few turns.
                    await asyncio.sleep(REST_S if wait_s == 0 else PAUSE_S)

    def close(self) -> None:
        """Wait for the thread; before the store is closed. Blocking."""
        self._thread.shutdown(wait=True)

    async def turn(self) -> float | None:
        """Deliver some of what is due. Seconds until there is more; None: nothing waits at all.
        StoreDamaged: the index is.
        """
        async with self._one_at_a_time:
            await self._load_if_needed()
            await self._take_arrivals()
            now_ms = self.time.now_ms()
            if await self._deliver_due(now_ms) or (self._has_arrivals and self._has_late_room()):
                return 0.0
            if await self._roll_if_due():
                return 0.0
            nexts_ms = (self.table.late.next_due_ms, self.index.next_due_ms)
            dues_ms = [next_ms for next_ms in nexts_ms if next_ms is not None]
            return max(1, min(dues_ms) - now_ms) / 1000 if dues_ms else None

    @property
    def _place(self) -> tuple[object, ...]:
        """How far deliveries, arrivals and messages that are stored again are."""
        table = self.table
        return table.watermark, table.rolled, table.read, len(table.late), self.index.after

    async def _deliver_due(self, now_ms: int) -> bool:
        """False: nothing was due."""
        late = self.table.late.due(now_ms, self._delivery.turn_count)
        if late:
            count = await self._deliver(late, now_ms)
            self.table.late_done(late[:count])
            return True
        due = self.index.peek(now_ms, self._delivery.turn_count)
        if due:
            found = _timers(due)
            count = await self._deliver(found, now_ms)
            # First what counts: a damaged index is made again from it.
            self.table.done(found[:count])
            self.index.take(due[: count * ENTRY_BYTES])
            self._metrics.timers_pending.set(len(self.index))
        return bool(due)

    # --- the index --------------------------------------------------------------------------------

    async def _load_if_needed(self) -> None:
        """Again, when a file turns out to be damaged meanwhile. StoreDamaged: a new one is, too."""
        for _ in range(LOADS_MAX):
            if self._is_loaded:
                return
            await self._load()
        if not self._is_loaded:
            raise StoreDamaged(f"the timer index was damaged {LOADS_MAX} times while it was made")

    async def _load(self) -> None:
        """Let the index have all that waits of what was read of the queue before."""
        low, _, _ = self._storage.bounds(TIMER_QUEUE)
        self._lose_before(low)
        mark = self.table.mark
        first = max(low, mark.rolled)
        begun_s = self._clock.monotonic_s()
        knows = self._knows if self._trusts_files else _knows_nothing
        at = await self._in_thread(
            lambda: self.index.load(mark.watermark, first, self.table.read, knows)
        )
        self._trusts_files = True
        while at < self.table.read:
            units = await self._units(at, min(ARRIVALS_MAX, self.table.read - at))
            if not units:
                break
            entries = await self._entries(units, at)
            self.index.add(entries[count_up_to(entries, self.index.after) * ENTRY_BYTES :])
            at += len(units) // queueunit.UNIT_BYTES
            if job := self.index.next_job(lambda: self._coverage(at)):  # noqa: B023
                self._finish(job, await self._done(job))
            if not self._trusts_files:  # one of them was damaged
                return
        self._is_loaded = True
        self._metrics.timers_pending.set(len(self.index))
        if len(self.index):
            seconds = round(self._clock.monotonic_s() - begun_s, 3)
            log.info("timers loaded", extra=fields(waiting=len(self.index), seconds=seconds))

    def _forget_index(self, error: StoreDamaged | InternalError) -> None:
        """Let the next turn make it again. A turn under way goes on with it."""
        log.error("the timer index is damaged and made again", extra=fields(reason=str(error)))
        self._is_loaded = self._trusts_files = False

    def _coverage(self, end: int) -> Coverage | None:
        """That the index has the queue up to ``end``; None: the last message of it is gone."""
        store = self._storage.store
        low, _, _ = self._storage.bounds(TIMER_QUEUE)
        unit = store.read_units(*TIMER_QUEUE, end - 1, 1) if end > low else b""
        if not unit:
            return None
        (log_offset, _, _) = queueunit.unit_at(unit, 0)
        epoch = max(number for number, start in store.epochs if start <= log_offset)
        first = max(low, self.table.rolled)
        return Coverage(store.store_id, epoch, log_offset, first, end, self.index.after)

    def _knows(self, covered: Coverage) -> bool:
        """Whether the log has the messages that the index was made from. In the thread."""
        store = self._storage.store
        unit = store.read_units(*TIMER_QUEUE, covered.end - 1, 1) if covered.end else b""
        if covered.store_id != store.store_id or not unit:
            return False
        epochs = [number for number, start in store.epochs if start <= covered.log_offset]
        is_there = queueunit.unit_at(unit, 0)[0] == covered.log_offset
        return is_there and bool(epochs) and max(epochs) == covered.epoch

    async def _next_job(self) -> Job | None:
        async with self._one_at_a_time:
            if not self._is_loaded:  # it has less than was read
                return None
            return self.index.next_job(lambda: self._coverage(self.table.read))

    async def _run_job(self, job: Job) -> None:
        """Turns go on while the job writes, and not while its end changes the index."""
        done = await self._done(job)
        async with self._one_at_a_time:
            self._finish(job, done)
        self._job = None

    def _finish(self, job: Job, done: JobDone | None) -> None:
        try:
            self.index.finish(job, done)
        except StoreDamaged as error:
            self._forget_index(error)

    async def _done(self, job: Job) -> JobDone | None:
        """What the job has written; None: it has failed."""
        try:
            return await self._in_thread(job.run)
        except Shortage as error:
            log.warning("the timer index stays in memory", extra=fields(reason=str(error)))
            await asyncio.sleep(RETRY_S)
        except StoreDamaged as error:
            self._forget_index(error)
        return None

    # --- what comes -------------------------------------------------------------------------------

    @property
    def _has_arrivals(self) -> bool:
        _, end, _ = self._storage.bounds(TIMER_QUEUE)
        return self.table.read < end

    def _has_late_room(self) -> bool:
        return len(self.table.late) < LATE_MAX

    async def take_all_arrivals(self) -> None:
        """Look at all messages that consumers may see by now. StoreDamaged: the index is."""
        _, end, _ = self._storage.bounds(TIMER_QUEUE)
        turns = Turns("reading the queue of timers")
        while not self._is_loaded or (self.table.read < end and self._has_late_room()):
            turns.next(self.table.read)
            async with self._one_at_a_time:
                await self._load_if_needed()
                await self._take_arrivals()

    async def between(
        self, first_ms: int, last_ms: int, count_max: int, after: Timer | None = None
    ) -> list[Timer]:
        """The next messages that wait for a time from ``first_ms`` to ``last_ms``, in its order, at
        most so many; those behind ``after``.
        """
        await self.take_all_arrivals()
        async with self._one_at_a_time:
            first = max(Timer(first_ms, -1), after or Timer(0, -1))
            # Of those that wait no more there are as many at most.
            room = count_max + len(self.table.skips)
            entries = await self._looked_up(lambda: self.index.between(first, last_ms, room))
            found = [Timer(*one) for one in entries]
            late = [timer for timer in self.table.late if timer > first and timer.due_ms <= last_ms]
            return sorted(self.table.wanted([*found, *late]))[:count_max]

    async def due_at(self, due_ms: int, count_max: int) -> list[Timer]:
        """The messages that wait for this ms, at most so many, also those that consumers could not
        see yet.
        """
        found = await self.between(due_ms, due_ms, count_max)
        async with self._one_at_a_time:
            first, (_, end) = self.table.read, self._storage.store.queue_bounds(*TIMER_QUEUE)
            while first < end:
                units = await self._units(first, min(ARRIVALS_MAX, end - first))
                unread = [Timer(*one) for one in iterate(await self._entries(units, first))]
                found += self.table.wanted(one for one in unread if one.due_ms == due_ms)
                first += max(1, len(units) // queueunit.UNIT_BYTES)
        return found

    def count_between(self, first_ms: int, end_ms: int) -> int:
        """About how many messages wait for a time from ``first_ms`` to before ``end_ms``."""
        try:
            return self.index.count_until(end_ms - 1) - self.index.count_until(first_ms - 1)
        except StoreDamaged as error:
            self._forget_index(error)
            return 0

    async def count_until(self, last_ms: int) -> int:
        """About how many messages wait for a time until then: recalled ones count too."""
        async with self._one_at_a_time:
            late = sum(timer.due_ms <= last_ms for timer in self.table.late)
            return late + await self._looked_up(lambda: self.index.count_until(last_ms))

    async def _looked_up(self, look: Callable[[], Result]) -> Result:
        """In the index, which is made again when it is damaged. Holds the lock."""
        try:
            return look()
        except StoreDamaged as error:
            self._forget_index(error)
            await self._load_if_needed()
            return look()

    async def _take_arrivals(self) -> None:
        """Look at some of the messages that were sent since the last time."""
        low, end, _ = self._storage.bounds(TIMER_QUEUE)
        self._lose_before(low)
        first = self.table.read
        if first >= end or not self._has_late_room():
            return
        units = await self._units(first, min(ARRIVALS_MAX, end - first))
        entries = await self._entries(units, first)
        cut = count_up_to(entries, self.index.after) * ENTRY_BYTES
        late = sorted((Timer(*one) for one in iterate(entries[:cut])), key=lambda one: one.offset)
        self.index.add(entries[cut:])
        count = len(units) // queueunit.UNIT_BYTES
        self.table.arrived(late, first + count)
        if not self._has_late_room():
            log.error(
                "timers come late: a clock was ahead, and too many wait for it to come right",
                extra=fields(waiting=len(self.table.late), until_ms=self.table.watermark.due_ms),
            )
        self._metrics.timers_in.inc(count)
        self._metrics.timers_pending.set(len(self.index) + len(self.table.late))

    def _lose_before(self, low: int) -> None:
        first = self.table.rolled
        lost = self.table.lost_before(low)
        if low > first:  # an earlier release removed log files before it said that nothing waits
            log.warning("timers may be lost", extra=fields(first=first, end=low))
        self._lose(lost)

    def _lose(self, count: int) -> None:
        if count:
            log.error("timers are lost", extra=fields(count=count))
            self._metrics.timers_out.labels("lost").inc(count)

    async def _units(self, offset: int, count: int) -> bytes:
        return await read_units(self._storage.store, TIMER_QUEUE, offset, count)

    async def _entries(self, units: bytes, first: int) -> bytes:
        """Sorted. Units that Apache RocketMQ wrote do not say when their messages are due; nor do
        damaged ones.
        """
        entries = of_units(units, first)
        if len(entries) // ENTRY_BYTES == len(units) // queueunit.UNIT_BYTES:
            return in_order(entries)
        others = [
            (offset, (place, size))
            for offset, (place, size, code) in enumerate(queueunit.iterate(units), first)
            if (code <= HASH_MAX or not LOST_SIZE < size < PREFILL_SIZE)
            and (place, size) != (0, PREFILL_SIZE)
        ]
        found = await self._read(dict(others))
        for (offset, span), one in zip(others, found, strict=True):
            due_ms = timers.due_ms(one.raw_properties) if isinstance(one, Record) else None
            if due_ms is not None:
                entries += ENTRY.pack(due_ms, offset)
            else:
                reason = "it names no time" if isinstance(one, Record) else str(one)
                self._delivery.lose(span[0], reason)
        return in_order(entries)

    async def _read(
        self, spans: Mapping[int, Span]
    ) -> list[Record | StoreDamaged | MessageNotFound]:
        """The messages at these offsets of the queue, which names these places of the log."""
        return await self._delivery.read(
            list(spans.values()), [TIMER_QUEUE] * len(spans), list(spans)
        )

    # --- what is due ------------------------------------------------------------------------------

    async def _deliver(self, due: Sequence[Timer], now_ms: int) -> int:
        """Append what has to be delivered of the first of these, all or nothing; how many of them
        are done.
        """
        offsets = [timer.offset for timer in self.table.wanted(due)]
        spans = await self.spans(offsets)
        if len(spans) < len(offsets):
            self._lose(len(offsets) - len(spans))
            offsets = [offset for offset in offsets if offset in spans]
        places = [spans[offset] for offset in offsets]
        queues, late_ms = [TIMER_QUEUE] * len(offsets), now_ms - due[0].due_ms
        done, appended = await self._delivery.deliver(places, queues, offsets, late_ms)
        if done < len(offsets):
            next_offset = offsets[done]
            due = due[: next(at for at, timer in enumerate(due) if timer.offset == next_offset)]
        self._note_done(due, appended, now_ms)
        return len(due)

    def _note_done(self, due: Sequence[Timer], delivered: int, now_ms: int) -> None:
        skips = self.table.skips
        recalled = sum(timer.offset in skips for timer in due) if skips else 0
        self._metrics.timers_out.labels("recalled").inc(recalled)
        self._metrics.timers_out.labels("delivered").inc(delivered)
        for timer in (due[0], due[-1]):
            self._metrics.timer_lateness_s.observe(max(0, now_ms - timer.due_ms) / 1000)

    async def spans(self, offsets: Sequence[int]) -> dict[int, Span]:
        """Where the log has the messages at these offsets of the queue. Those near each other are
        looked up together.
        """
        left = sorted(offsets)
        spans: dict[int, Span] = {}
        at = 0
        while at < len(left):
            first, end = left[at], bisect_left(left, left[at] + ARRIVALS_MAX)
            gaps = (n for n in range(at + 1, end) if left[n] - left[n - 1] > UNITS_GAP_MAX)
            end = next(gaps, end)
            units = await self._units(first, left[end - 1] + 1 - first)
            read = left[at : bisect_left(left, first + len(units) // queueunit.UNIT_BYTES, at, end)]
            for offset in read:
                place, size, _ = queueunit.unit_at(units, offset - first)
                spans[offset] = place, size
            at += max(1, len(read))
        return spans

    # --- before retention -------------------------------------------------------------------------

    async def _roll_if_due(self) -> bool:
        """Go on through the messages that may wait; whether there is more to do."""
        now_s = self._clock.monotonic_s()
        first, end = self.table.rolled, self.table.read
        if now_s < self._roll_at_s or first >= end:
            return False
        before_ms = self.time.wall_ms() - int(self._reserved_ms * ROLL_SHARE)
        stop = await self._in_thread(
            lambda: offset_by_time(
                self._storage.store, TIMER_QUEUE, (first, end), before_ms, Boundary.LOWER
            )
        )
        is_more = await self._roll_some(stop)
        if not is_more:
            self._roll_at_s = now_s + ROLL_LOOK_S
        return is_more

    async def roll_before(self, log_offset: int) -> None:
        """Store what waits once more that lies before ``log_offset``: the log goes there. May raise
        DiskFull, BrokerDraining, StoreFailed.
        """
        stop = self._storage.store.queue_offset_at(*TIMER_QUEUE, log_offset)
        is_more = self.table.rolled < stop
        turns = Turns("storing timers again")
        while is_more:
            turns.next(self._place)
            async with self._one_at_a_time:
                is_more = await self._roll_some(stop)
            await asyncio.sleep(REST_S)

    async def _roll_some(self, stop: int) -> bool:
        """Go through the messages that may wait, oldest first: some of those before ``stop`` are
        stored once more. False: the next one waits and may stay where it is, or there is none.
        """
        first, end = self.table.rolled, max(stop, self.table.read)
        units = await self._units(first, min(ARRIVALS_MAX, end - first))
        entries = [Timer(*entry) for entry in iterate(await self._entries(units, first))]
        waiting = sorted(
            (one for one in entries if self.table.is_pending(one)), key=lambda one: one.offset
        )
        old = [one for one in waiting if one.offset < stop][: self._delivery.turn_count]
        if old:
            spans = await self.spans([timer.offset for timer in old])
            old = old[: self._delivery.movable([spans.get(one.offset, (0, 0)) for one in old])]
            await self._store_again(
                {timer: spans[timer.offset] for timer in old if timer.offset in spans}
            )
        rest = waiting[len(old) :]
        reached = rest[0].offset if rest else first + len(units) // queueunit.UNIT_BYTES
        self.table.rolled_to(reached)
        if rest:
            return rest[0].offset < stop
        return first < self.table.rolled < end

    async def _store_again(self, spans: Mapping[Timer, Span]) -> None:
        found = await self._read({timer.offset: span for timer, span in spans.items()})
        relayed: list[Relayed] = []
        for (timer, span), one in zip(spans.items(), found, strict=True):
            if not isinstance(one, Record):
                self._delivery.lose(span[0], str(one))
            # In a newer record the deletion of its topic is not seen any more.
            elif self.table.is_pending(timer) and self._delivery.target(one):
                try:
                    again = relay(one, *TIMER_QUEUE, self._relays.host, due_ms=timer.due_ms)
                    relayed.append(again)
                except (StoreDamaged, PropertiesTooLarge) as error:
                    self._delivery.lose(one.log_offset, str(error))
        if relayed:
            self._relays.append(relayed)
            self._metrics.timers_rolled.inc(len(relayed))

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _timers(entries: bytes) -> list[Timer]:
    """Of sorted entries; no call of Python for each: there are many."""
    return list(map(tuple.__new__, repeat(Timer), iterate(entries)))


def _knows_nothing(_covered: Coverage) -> bool:
    return False
