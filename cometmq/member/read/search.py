"""Messages by key and by time. Belongs to the loop; files are read in threads.

The rules are :mod:`cometmq.store.queries`'s; here is added what consumers may see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from cometmq.errors import CometError, IndexDisabled
from cometmq.member.read.reader import QueueView, Reader
from cometmq.model import Position, QueueKey
from cometmq.store.queries import Boundary, Found, KeySearch, offset_by_time, store_time_ms

COUNT_MAX = 64  # RocketMQ's maxMsgsNumBatch
COUNT_DEFAULT = 32
BYTES_MAX = 4 * 1024 * 1024
READS_MAX = 16_384  # messages that are looked at for one answer, a third of a second in memory
QUEUES_AT_ONCE = 16  # that are searched by time before another caller gets the thread


@dataclass(frozen=True, slots=True)
class KeyQuery:
    """A search. ``is_unique_id``: not among the keys, but as the producer's id."""

    topic: str
    key: str
    is_unique_id: bool
    first_ms: int
    last_ms: int
    max_count: int  # 0 = COUNT_DEFAULT


@dataclass(frozen=True, slots=True)
class KeyAnswer:
    """What was found, newest first. ``has_more``: the limits cut it short, there may be more."""

    found: list[Found]
    has_more: bool
    indexed_offset: int  # the keys of all messages before it are known


@dataclass(frozen=True, slots=True)
class TimeAnswer:
    """Where a time is in a queue. ``store_time_ms`` 0: there is no message."""

    position: Position
    store_time_ms: int


class Finder:
    """Answers from the reader's store and its key index, as far as consumers may see them."""

    def __init__(self, reader: Reader) -> None:
        self._store = reader.store
        self._reader = reader

    async def by_key(self, query: KeyQuery) -> KeyAnswer:
        """Raises TopicNotFound, IndexDisabled."""
        if not self._store.index.enabled:
            raise IndexDisabled("no key index is kept here (message_index_enable)")
        self._reader.queue(query.topic, 0)  # every topic has one
        indexed_offset = self._store.index.status.position  # before looking: no less is known then
        shown, has_more = await self._shown(query)
        if not shown:
            self._reader.flush_promptly()
        assert len(shown) <= COUNT_MAX
        return KeyAnswer(shown, has_more, indexed_offset)

    async def _shown(self, query: KeyQuery) -> tuple[list[Found], bool]:
        count_max = min(query.max_count or COUNT_DEFAULT, COUNT_MAX)
        search = KeySearch(self._store, query.topic, query.key, query.first_ms, query.last_ms)
        shown: list[Found] = []
        bytes_left = BYTES_MAX
        while not search.is_over:
            if search.read_count >= READS_MAX:
                return shown, True
            for one in await self._reader.aside(search.piece):
                if not await self._is_meant(query, one):
                    continue
                if len(shown) == count_max or (shown and len(one.raw) > bytes_left):
                    return shown, True
                shown.append(one)
                bytes_left -= len(one.raw)
        return shown, False

    async def _is_meant(self, query: KeyQuery, found: Found) -> bool:
        if query.is_unique_id and found.message.unique_id != query.key:
            return False
        return await self._reader.shows(found.message)

    async def by_time(
        self, queues: Sequence[QueueKey], time_ms: int, boundary: Boundary
    ) -> list[TimeAnswer | CometError]:
        """One answer for each queue, in their order: TopicNotFound and QueueNotFound are answers,
        too, and where no message is so late the errors of :meth:`Reader.uncertain_ends`.
        """
        uncertain = await self._reader.uncertain_ends(queues)
        views = [(key, self._view(*key)) for key in queues]
        answers: list[TimeAnswer | CometError] = []
        while some := views[len(answers) : len(answers) + QUEUES_AT_ONCE]:
            answers += await self._reader.aside(partial(self._all_at, some, time_ms, boundary))
        assert len(answers) == len(queues), "each queue has one answer"
        return [
            uncertain[key] if key in uncertain and _is_at_end(view, answer) else answer
            for (key, view), answer in zip(views, answers, strict=True)
        ]

    def _all_at(
        self,
        views: Sequence[tuple[QueueKey, QueueView | CometError]],
        time_ms: int,
        boundary: Boundary,
    ) -> list[TimeAnswer | CometError]:
        return [
            view if isinstance(view, CometError) else self._at(key, view, time_ms, boundary)
            for key, view in views
        ]

    def _view(self, topic: str, queue_id: int) -> QueueView | CometError:
        try:
            return self._reader.queue(topic, queue_id)
        except CometError as error:
            return error

    def _at(self, key: QueueKey, view: QueueView, time_ms: int, boundary: Boundary) -> TimeAnswer:
        bounds = (view.min_offset, view.max_offset)
        offset = offset_by_time(self._store, key, bounds, time_ms, boundary)
        assert view.min_offset <= offset <= view.max_offset
        found_ms = store_time_ms(self._store, key, offset) if offset < view.max_offset else None
        return TimeAnswer(Position(view.generation, offset), found_ms or 0)


def _is_at_end(view: QueueView | CometError, answer: TimeAnswer | CometError) -> bool:
    return (
        isinstance(view, QueueView)
        and isinstance(answer, TimeAnswer)
        and answer.position.offset == view.max_offset
    )
