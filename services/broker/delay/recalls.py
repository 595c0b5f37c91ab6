"""Recalls messages that wait for a time of their own, and signs the handles that name them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from cometmq.errors import CometError, PropertiesTooLarge, RecallHandleInvalid
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
from cometmq.turns import Turns
from services.broker.delay.timer_slots import TimerSlots
from services.broker.delay.timers import TimerService
from services.broker.delay.tombstones import Sought, TombstoneSearch

ITEMS_MAX = 1_024
KNOWN_MAX = 10_000  # recalled messages that memory has; for others the log is read
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
        # The last ones: a recall that is repeated is answered as before.
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
        found = await self._find_all(handles)
        turns = Turns("recalls of messages that were delivered or stored again meanwhile")
        while stale := [number for number, one in enumerate(found) if self._is_stale(one)]:
            turns.next()
            again = await self._find_all([handles[number] for number in stale])
            for number, one in zip(stale, again, strict=True):
                found[number] = one
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

    async def _find_all(self, handles: Sequence[str]) -> list[Found | bool | CometError]:
        """The messages that handles name; True: it is recalled already, False: it does not wait any
        more.
        """
        same_time: dict[int, list[Found]] = {}
        found = [await self._find(handle, same_time) for handle in handles]
        all_sought = [one for one in found if isinstance(one, Sought)]
        answers = iter(await TombstoneSearch(self._storage.store, all_sought).run())
        return [next(answers) if isinstance(one, Sought) else one for one in found]

    async def _find(
        self, text: str, same_time: dict[int, list[Found]]
    ) -> Found | Sought | bool | CometError:
        """``same_time``: what waits, by its time, as far as the call has looked."""
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
            return await self._stored_again(timer, handle, same_time)
        except CometError as error:
            return error

    async def _stored_again(
        self, timer: Timer, handle: Handle, same_time: dict[int, list[Found]]
    ) -> Found | Sought | bool:
        """Where a message is that does not wait at its place: it was stored again before retention.
        True: it was recalled, or lost its topic; False: it was delivered.
        """
        is_early = timer.due_ms > self._timers.time.now_ms()
        low, _ = self._storage.store.queue_bounds(*TIMER_QUEUE)
        if not handle.unique_id and is_early and timer.offset < low:
            # Among those of the same time it cannot be found.
            raise RecallHandleInvalid("the message has no unique id, and may be stored again")
        if handle.unique_id:
            if timer.due_ms not in same_time:
                same_time[timer.due_ms] = await self._due_at(timer.due_ms)
            for candidate in same_time[timer.due_ms]:
                if candidate.timer.offset > timer.offset and _is_meant(candidate.record, handle):
                    return candidate
        if timer.offset >= max(self._complete_from, self._keeper.state.timers.rolled):
            return False  # else memory had it
        source = await self._read(timer)
        if source is not None and not _is_meant(source, handle):
            raise RecallHandleInvalid("the handle names another message than is at its place")
        if source is None and is_early:
            return True  # it does not wait, and its time has not come
        log_offset = None if source is None else source.log_offset
        return Sought(timer, names_of(handle.run.topic, handle.unique_id), log_offset)

    async def _due_at(self, due_ms: int) -> list[Found]:
        """The messages that wait for this ms, in the order of the queue."""
        offsets = [timer.offset for timer in await self._timers.due_at(due_ms, SAME_TIME_MAX)]
        spans = await self._timers.spans(offsets)
        places = list(spans.values())
        waiting = [Timer(due_ms, offset) for offset in spans]
        found: list[Found] = []
        for part in slices(places, SAME_TIME_MAX, READ_BYTES_MAX):
            at = [(TIMER_QUEUE, timer.offset) for timer in waiting[part]]
            records = await read_each(self._storage.store, places[part], at)
            found += [
                Found(timer, _without_body(one))
                for timer, one in zip(waiting[part], records, strict=True)
                if isinstance(one, Record)
            ]
        return found

    async def _read(self, timer: Timer) -> Record | None:
        """Also one that consumers could not see yet."""
        store = self._storage.store
        low, end = store.queue_bounds(*TIMER_QUEUE)
        if not low <= timer.offset < end:
            return None
        unit = await self._units(timer.offset, 1)
        log_offset, size, _ = queueunit.unit_at(unit, 0)
        place = (TIMER_QUEUE, timer.offset)
        [found] = await read_each(store, [(log_offset, size)], [place])
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
