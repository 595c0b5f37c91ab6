"""Recalls messages that wait for a time of their own, and signs the handles that name them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from cometmq.errors import CometError, MessageNotFound, PropertiesTooLarge, RecallHandleInvalid
from cometmq.format import delayed, queueunit, recall, timers
from cometmq.format.recall import PURPOSE, Handle, RecallRun, Tombstone, names_of
from cometmq.format.record import Record
from cometmq.format.timers import TIMER_QUEUE, TIMER_TOPIC
from cometmq.member.read.records import read_each, read_units, slices
from cometmq.member.relay import RelayWriter, batch_bytes_max
from cometmq.member.state.demands import topic_demands
from cometmq.member.state.keeper import StateKeeper
from cometmq.member.storage.member_storage import MemberStorage
from cometmq.messaging.timers import Timer
from cometmq.model import Position
from cometmq.store.log.commitlog import Span
from services.broker.delay.timer_slots import TimerSlots
from services.broker.delay.timers import TimerService

ITEMS_MAX = 1_024
KNOWN_MAX = 10_000  # recalled messages that memory has; for others the log is read
SEARCH_UNITS_MAX = 1_000_000  # of the timer queue, that are read for one handle: 20 MB
UNITS_AT_ONCE = 8_192
READ_BYTES_MAX = 1 << 20
BATCH_BYTES_MAX = 1 << 20  # of what says that messages were recalled, appended at once
SAME_TIME_MAX = 1_024  # messages due in one ms that are looked at for one that was stored again


class Found(NamedTuple):
    """A message that waits, and its record."""

    timer: Timer
    record: Record


class RecallService:
    """Belongs to the event loop. ``timer_slots``: which may take more messages after a recall."""

    def __init__(
        self,
        storage: MemberStorage,
        keeper: StateKeeper,
        relays: RelayWriter,
        timer_service: TimerService,
        broker_group: str,
        timer_slots: TimerSlots | None = None,
    ) -> None:
        self._storage = storage
        self._keeper = keeper
        self._relays = relays
        self._timers = timer_service
        self._broker_group = broker_group
        self._timer_slots = timer_slots
        self._batch_bytes_max = batch_bytes_max(storage.store.log_file_bytes, BATCH_BYTES_MAX)
        # The last ones: a recall that comes again is answered as before.
        self._recalled: OrderedDict[Timer, None] = OrderedDict()
        # Of messages from this offset on it has all: of older ones, an earlier writer may have.
        self._complete_from = storage.store.queue_bounds(*TIMER_QUEUE)[1]

    # --- handles ----------------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """Of the timer queue now; 0: there is none."""
        history = self._keeper.state.generations.find(*TIMER_QUEUE)
        return 0 if history is None else history.current

    def mac(self, topic: str, first: int, count: int) -> bytes:
        """The signature in the handles of messages for ``topic`` that were stored beside each
        other.
        """
        run = RecallRun(self._broker_group, topic, self.generation, first, count)
        return self._keeper.state.secrets.mac(PURPOSE, run.signed())

    def handle(self, topic: str, offset: int, due_ms: int, unique_id: str) -> str:
        """The handle of one message."""
        run = RecallRun(self._broker_group, topic, self.generation, offset, 1)
        mac = self._keeper.state.secrets.mac(PURPOSE, run.signed())
        return Handle(run, 0, due_ms, unique_id, mac).encode()

    def _checked(self, text: str) -> Handle:
        handle = recall.decode(text)
        run = handle.run
        if run.broker_group != self._broker_group:
            raise RecallHandleInvalid(f"this handle is of broker group {run.broker_group[:100]}")
        if not self._keeper.state.secrets.verifies(PURPOSE, run.signed(), handle.mac):
            raise RecallHandleInvalid("this broker group has not given this handle")
        history = self._keeper.state.generations.of(TIMER_TOPIC, 0)
        history.validate(Position(run.generation, handle.offset))
        return handle

    # --- recalls ----------------------------------------------------------------------------------

    async def recall(self, handles: Sequence[str]) -> list[bool | CometError]:
        """Whether each message was recalled in time; decided when that is as safe as a message.
        Raises what appending raises, LimitExceeded.
        """
        found = [await self._find(handle) for handle in handles]
        # While others were read some were delivered, or stored again: they are looked for again.
        while stale := [number for number, one in enumerate(found) if self._is_stale(one)]:
            for number in stale:
                found[number] = await self._find(handles[number])
        answers: list[bool | CometError] = []
        tombstones: dict[Timer, Tombstone] = {}
        for one in found:
            if not isinstance(one, Found):
                answers.append(one)
                continue
            try:
                if one.timer not in self._recalled:
                    tombstones[one.timer] = Tombstone.of(one.record, self._relays.host)
                answers.append(True)
            except PropertiesTooLarge as error:  # it names the message twice
                answers.append(error)
        await self._bury(tombstones)
        return answers

    def _is_stale(self, one: Found | bool | CometError) -> bool:
        if not isinstance(one, Found) or one.timer in self._recalled:
            return False
        return not self._keeper.state.timers.is_pending(one.timer)

    async def _bury(self, tombstones: dict[Timer, Tombstone]) -> None:
        table = self._keeper.state.timers
        table.check_room(len(tombstones))
        waiting, records = list(tombstones), list(tombstones.values())
        spans = [(0, one.size_bytes) for one in records]
        for part in slices(spans, ITEMS_MAX, self._batch_bytes_max):
            self._relays.append(records[part])
            for timer in waiting[part]:
                table.skip(timer)
                self._recalled[timer] = None
                if self._timer_slots is not None:
                    self._timer_slots.recalled(timer.due_ms)
        while len(self._recalled) > KNOWN_MAX:
            oldest, _ = self._recalled.popitem(last=False)
            self._complete_from = max(self._complete_from, oldest.offset + 1)
        # Also of a recall that came before: its caller may not have got the answer.
        demands = topic_demands(self._keeper.state.topics, TIMER_TOPIC)
        await self._storage.stored(self._storage.store.appended_offset, demands)

    async def _find(self, text: str) -> Found | bool | CometError:
        """The message that a handle names; True: it is recalled already, False: it does not wait
        any more.
        """
        try:
            handle = self._checked(text)
            timer = Timer(handle.due_ms, handle.offset)
            if self._keeper.state.timers.is_pending(timer):
                found = await self._read(timer)
                if found is not None and _is_meant(found, handle):
                    return Found(timer, found)
                raise RecallHandleInvalid("the handle names another message than is at its place")
            if timer in self._recalled:
                return True
            return await self._stored_again(timer, handle)
        except CometError as error:
            return error

    async def _stored_again(self, timer: Timer, handle: Handle) -> Found | bool:
        """Where a message is that does not wait at its place: it was stored again before retention.
        True: it was recalled, or lost its topic; False: it was delivered. Raises MessageNotFound:
        nothing tells.
        """
        is_early = timer.due_ms > self._timers.time.now_ms()
        low, _ = self._storage.store.queue_bounds(*TIMER_QUEUE)
        if not handle.unique_id and is_early and timer.offset < low:
            # Among those of the same time it cannot be told.
            raise RecallHandleInvalid("the message has no unique id, and may be stored again")
        if handle.unique_id:
            for candidate in await self._timers.due_at(timer.due_ms, SAME_TIME_MAX):
                found = await self._read(candidate) if candidate.offset > timer.offset else None
                if found is not None and _is_meant(found, handle):
                    return Found(candidate, found)
        if timer.offset >= max(self._complete_from, self._keeper.state.timers.rolled):
            return False  # else memory had it
        return await self._has_tombstone(timer, handle, is_early=is_early)

    async def _has_tombstone(self, timer: Timer, handle: Handle, *, is_early: bool) -> bool:
        """Whether the log says that a message was recalled, by this writer or an earlier one: the
        tombstone lies behind the message in the timer queue. MessageNotFound: the message is gone
        from the log, or too much was stored behind it.
        """
        source = await self._read(timer)
        if source is not None and not _is_meant(source, handle):
            raise RecallHandleInvalid("the handle names another message than is at its place")
        made = set() if source is None else {source.log_offset}  # the message, and its copies
        names = names_of(handle.run.topic, handle.unique_id)
        low, end = self._storage.store.queue_bounds(*TIMER_QUEUE)
        stop = min(end, timer.offset + 1 + SEARCH_UNITS_MAX)
        first = max(low, timer.offset + 1)
        while first < stop:
            count = min(UNITS_AT_ONCE, stop - first)
            units = await self._units(first, count)
            for found in await self._due_among(units, timer.due_ms):
                name = timers.recalls(found.raw_properties)
                if found.prepared_offset in made and not name:
                    made.add(found.log_offset)
                elif found.prepared_offset in made if made else name in names:
                    return True
            first += max(1, len(units) // queueunit.UNIT_BYTES)
        if source is None and is_early:
            return True  # it does not wait, and its time has not come
        if source is None or stop < end:
            raise MessageNotFound("the log does not tell any more whether the message was recalled")
        return False

    async def _due_among(self, units: bytes, due_ms: int) -> list[Record]:
        """The records of those units that are due at this time."""
        spans: list[Span] = []
        wanted, at = due_ms.to_bytes(8, "big"), -1
        while (at := units.find(wanted, at + 1)) >= 0:
            number, place = divmod(at, queueunit.UNIT_BYTES)
            if place == queueunit.UNIT_BYTES - len(wanted):
                log_offset, size, _ = queueunit.unit_at(units, number)
                if queueunit.is_message(log_offset, size):
                    spans.append((log_offset, size))
        found: list[Record] = []
        for part in slices(spans, SAME_TIME_MAX, READ_BYTES_MAX):
            read = await read_each(self._storage.store, spans[part])
            found += [_without_body(one) for one in read if isinstance(one, Record)]
        return found

    async def _read(self, timer: Timer) -> Record | None:
        """Also one that consumers could not see yet."""
        store = self._storage.store
        low, end = store.queue_bounds(*TIMER_QUEUE)
        if not low <= timer.offset < end:
            return None
        unit = await self._units(timer.offset, 1)
        log_offset, size, _ = queueunit.unit_at(unit, 0)
        [found] = await read_each(store, [(log_offset, size)])
        return _without_body(found) if isinstance(found, Record) else None

    async def _units(self, offset: int, count: int) -> bytes:
        return await read_units(self._storage.store, TIMER_QUEUE, offset, count)


def _without_body(found: Record) -> Record:
    """A call keeps a thousand of them."""
    return found._replace(body=b"")


def _is_meant(found: Record, handle: Handle) -> bool:
    target = delayed.target_of(found.raw_properties)
    return (
        target is not None
        and target[0] == handle.run.topic
        and timers.due_ms(found.raw_properties) == handle.due_ms
        and found.unique_id == handle.unique_id
        and not timers.recalls(found.raw_properties)
    )
