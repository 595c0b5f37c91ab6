"""The list of messages with a time of their own, page by page, and their number by time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NamedTuple

from cometmq.format import delayed, ids, timers
from cometmq.format.record import Record
from cometmq.format.timers import TIMER_QUEUE
from cometmq.member.read.records import read_each, slices
from cometmq.member.storage.member_storage import MemberStorage
from cometmq.messaging.timers import Timer
from services.broker.delay.recalls import READ_BYTES_MAX, RecallService
from services.broker.delay.timers import TimerService

PAGE_MAX = 1_000
COUNTS_MAX = 64


class Wanted(NamedTuple):
    """``topic`` empty: of all topics. ``after`` None: from the first on."""

    topic: str
    first_ms: int
    last_ms: int
    after: Timer | None


class DelayedMessage(NamedTuple):
    """A message that waits."""

    timer: Timer
    topic: str
    queue_id: int
    message_id: str
    unique_id: str
    store_time_ms: int
    size_bytes: int
    recall_handle: str


class Page(NamedTuple):
    """``next`` None: there are no more."""

    messages: list[DelayedMessage]
    next: Timer | None


class DelayedList:
    """Belongs to the event loop."""

    def __init__(
        self,
        timer_service: TimerService,
        recalls: RecallService,
        storage: MemberStorage,
        broker_group: str,
    ) -> None:
        self._timers = timer_service
        self._recalls = recalls
        self._storage = storage
        self._broker_group = broker_group

    async def count_until(self, last_ms: int) -> int:
        """How many messages are due until then, recalled ones too."""
        return await self._timers.count_until(last_ms)

    async def page(self, wanted: Wanted, count_max: int) -> Page:
        """The next messages; of a topic fewer than there are, perhaps none."""
        if not count_max:
            return Page([], None)
        first_ms = max(wanted.first_ms, wanted.after.due_ms if wanted.after else 0)
        found = await self._timers.between(first_ms, wanted.last_ms, PAGE_MAX, wanted.after)
        messages: list[DelayedMessage] = []
        async for timer, message in self._records(found):
            target = delayed.target_of(message.raw_properties)
            is_tombstone = bool(timers.recalls(message.raw_properties))
            if target is None or is_tombstone or wanted.topic not in ("", target[0]):
                continue
            if len(messages) == count_max:
                return Page(messages, messages[-1].timer)
            messages.append(self._described(timer, message, target))
        return Page(messages, found[-1] if len(found) == PAGE_MAX else None)

    def _described(self, timer: Timer, message: Record, target: tuple[str, int]) -> DelayedMessage:
        topic, queue_id = target
        handle = self._recalls.handle(topic, timer.offset, timer.due_ms, message.unique_id)
        message_id = ids.message_id(self._broker_group, message.log_offset)
        return DelayedMessage(
            timer,
            topic,
            queue_id,
            message_id,
            message.unique_id,
            message.store_time_ms,
            message.size,
            handle,
        )

    async def _records(self, found: list[Timer]) -> AsyncIterator[tuple[Timer, Record]]:
        """Those that are there and not damaged."""
        spans = await self._timers.spans([timer.offset for timer in found])
        named = [timer for timer in found if timer.offset in spans]
        places = [spans[timer.offset] for timer in named]
        for part in slices(places, PAGE_MAX, READ_BYTES_MAX):
            at = [(TIMER_QUEUE, timer.offset) for timer in named[part]]
            records = await read_each(self._storage.store, places[part], at)
            for timer, one in zip(named[part], records, strict=True):
                if isinstance(one, Record):
                    yield timer, one
