"""Recalls messages that wait for a time of their own, and signs the handles that name them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from cometmq.errors import CometError, RecallHandleInvalid
from cometmq.format import queueunit, recall, timers
from cometmq.format.recall import PURPOSE, Handle, RecallRun, Tombstone
from cometmq.format.record import Record
from cometmq.format.timers import TIMER_QUEUE, TIMER_TOPIC
from cometmq.member.read.records import read_each
from cometmq.member.relay import RelayWriter
from cometmq.member.state.keeper import StateKeeper
from cometmq.member.storage.member_storage import MemberStorage
from cometmq.messaging.timers import Timer
from cometmq.model import Position
from cometmq.replication.watermarks import DurabilityClass
from services.broker.delay.timers import TimerService

ITEMS_MAX = 1_024
KNOWN_MAX = 10_000  # recalled messages whose handles are answered as before
SAME_TIME_MAX = 1_024  # messages due in one ms that are looked at for one that was stored again


class Found(NamedTuple):
    """A message that waits, and its record."""

    timer: Timer
    record: Record


class RecallService:
    """Belongs to the event loop."""

    def __init__(
        self,
        storage: MemberStorage,
        keeper: StateKeeper,
        relays: RelayWriter,
        timer_service: TimerService,
        broker_group: str,
    ) -> None:
        self._storage = storage
        self._keeper = keeper
        self._relays = relays
        self._timers = timer_service
        self._broker_group = broker_group
        # The last ones: a recall that comes again is answered as before.
        self._recalled: OrderedDict[Timer, None] = OrderedDict()

    # --- handles ----------------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """Of the timer queue now; 0: there is none."""
        history = self._keeper.state.generations.find(*TIMER_QUEUE)
        return 0 if history is None else history.current

    def mac(self, topic: str, first: int, count: int) -> bytes:
        """What signs the handles of messages for ``topic`` that were stored beside each other."""
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
        answers: list[bool | CometError] = []
        tombstones: dict[Timer, Tombstone] = {}
        table = self._keeper.state.timers
        for one in found:
            if not isinstance(one, Found):
                answers.append(one)
            elif one.timer in tombstones or one.timer in self._recalled:
                answers.append(True)
            elif table.is_pending(one.timer):
                tombstones[one.timer] = Tombstone.of(one.record, self._relays.host)
                answers.append(True)
            else:  # it was delivered while it was read
                answers.append(False)
        await self._bury(tombstones)
        return answers

    async def _bury(self, tombstones: dict[Timer, Tombstone]) -> None:
        table = self._keeper.state.timers
        if tombstones:
            table.check_room(len(tombstones))
            self._relays.append(list(tombstones.values()))
            for timer in tombstones:
                table.skip(timer)
                self._recalled[timer] = None
            while len(self._recalled) > KNOWN_MAX:
                self._recalled.popitem(last=False)
        # Also of a recall that came before: its caller may not have got the answer.
        demands = DurabilityClass.of(*self._keeper.state.topics.demands(TIMER_TOPIC))
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
        Else False: it was delivered, or True: its time has not come, so it was recalled or lost its
        topic.
        """
        is_early = timer.due_ms > self._timers.now_ms()
        if not handle.unique_id and is_early:  # among those of the same time it cannot be told
            raise RecallHandleInvalid("the message has no unique id, and may be stored again")
        for candidate in await self._timers.due_at(timer.due_ms, SAME_TIME_MAX):
            found = await self._read(candidate) if candidate.offset > timer.offset else None
            if found is not None and _is_meant(found, handle):
                return Found(candidate, found)
        return is_early

    async def _read(self, timer: Timer) -> Record | None:
        """Also one that consumers could not see yet."""
        store = self._storage.store
        low, end = store.queue_bounds(*TIMER_QUEUE)
        if not low <= timer.offset < end:
            return None
        unit = await asyncio.to_thread(store.read_units, *TIMER_QUEUE, timer.offset, 1)
        log_offset, size, _ = queueunit.unit_at(unit, 0)
        [found] = await read_each(store, [(log_offset, size)])
        return found if isinstance(found, Record) else None


def _is_meant(found: Record, handle: Handle) -> bool:
    target = timers.target_of(found.raw_properties)
    return (
        target is not None
        and target[0] == handle.run.topic
        and timers.due_ms(found.raw_properties) == handle.due_ms
        and found.unique_id == handle.unique_id
        and not timers.recalls(found.raw_properties)
    )
