"""An open store that copies the writer's log. Readers see its messages and its state when the
writer shows them, and not before they are on this member's disk.

The event loop owns everything here. A large chunk is verified and written in a thread, so that
readers do not wait for it; nothing else is written meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

from cometmq.clock import Clock
from cometmq.errors import DiskFull, ReplicationBroken, StateTooNew, StoreDamaged
from cometmq.flight_recorder import named_threads
from cometmq.format import record
from cometmq.member.state.statelog import topic_deletions
from cometmq.member.storage.flusher import FlushPolicy
from cometmq.member.storage.member_storage import BaseStorage
from cometmq.messaging.changes import Change, GroupDropped, TopicDropped, TopicPut, decode
from cometmq.messaging.queuechanges import QueueChanges, QueueEdits
from cometmq.messaging.state import (
    SNAPSHOT_LAST,
    SNAPSHOT_ONLY,
    BrokerState,
    StateLoader,
    check_tag,
)
from cometmq.messaging.topics import is_system
from cometmq.model import TopicConfig
from cometmq.replication.watermarks import (
    STRICTEST,
    DurabilityClass,
    FollowerWatermarks,
    HighWatermarks,
    ReadableMaxima,
)
from cometmq.store.base import BaseStore
from cometmq.store.follower import FollowerStore
from cometmq.telemetry import fields

log = logging.getLogger(__name__)

# Below it a chunk is appended on the loop: the way to a thread and back costs as much.
INLINE_BYTES_MAX = 32 * 1024


class FollowerStorage(BaseStorage):
    """The store of a member that follows. ``on_drop`` hears the name of a topic that is deleted,
    ``on_drop_group`` of a group.
    """

    store: FollowerStore

    def __init__(
        self,
        store: FollowerStore,
        state: FollowerState,
        policy: FlushPolicy,
        clock: Clock,
        on_flush_s: Callable[[float], None] = lambda _seconds: None,
        on_drop: Callable[[str], None] = lambda _topic: None,
        on_drop_group: Callable[[str], None] = lambda _group: None,
    ) -> None:
        super().__init__(store, _unseen(store), policy, clock, on_flush_s)
        self._on_drop = on_drop
        self._on_drop_group = on_drop_group
        self.watermarks = FollowerWatermarks(store.appended_offset, store.flushed_offset)
        self._state = state
        self._thread = named_threads("copy")

    async def copy(self, offset: int, data: bytes) -> None:
        """Append a chunk. Raises what ``FollowerStore.append`` raises."""
        collected, append = _Collected(), self.store.append
        try:
            if len(data) <= INLINE_BYTES_MAX:
                end = append(offset, data, collected)
            else:
                loop = asyncio.get_running_loop()
                end = await loop.run_in_executor(self._thread, append, offset, data, collected)
        except DiskFull as error:
            self.note_no_space(error.message)
            raise
        self.no_room = ""
        assert end == self.store.appended_offset, "one chunk at a time"
        self.watermarks.append_to(end)
        for event in collected.events:
            self._apply(event)
        self._show()  # all of it may be on the disk already, see _flushed
        self.flusher.appended()
        self._sync_as_the_writer()
        self.moved.notify()

    def raise_marks(self, visible: HighWatermarks, flush_to: int) -> None:
        """The writer says what consumers may see, and up to where it waits for our disk."""
        self.watermarks.raise_to(visible)
        self.flusher.demand(min(flush_to, self.store.appended_offset))
        self._sync_as_the_writer()
        self._show()

    async def is_safe(self, end: int, demands: DurabilityClass, patience_s: float) -> bool:
        safe_to = self.watermarks.shown.least(demands | DurabilityClass.FLUSHED)
        return end <= min(self.watermarks.flushed, safe_to)

    def _sync_as_the_writer(self) -> None:
        # What the writer has on its disk is synced here at once too: a send or a reader waited for
        # it there, or the writer's interval was over. So a follower needs no rule of its own. What
        # consumers see without any disk is synced when a reader here waits for it.
        on_disk = self.watermarks.announced_on_disk
        self.flusher.demand(min(on_disk, self.store.appended_offset))

    def _flushed(self, position: int) -> None:
        # A chunk that a thread is appending may be on the disk before the loop hears of it.
        self.watermarks.append_to(max(position, self.watermarks.appended))
        self.watermarks.flush_to(position)
        self._show()

    def _show(self) -> None:
        # State first, whatever it demands itself: a message of a new topic can only be read when
        # the topic is known, and one of a new writer only under that writer's generation.
        visible = self.watermarks.most_visible
        assert visible <= self.watermarks.flushed <= self.store.flushed_offset
        for topic in self._state.advance(visible):
            self.arrivals.topic_changed(topic)
        self.arrivals.advanced(self.maxima.advance(self.watermarks))

    def _apply(self, event: _Event) -> None:
        """An event of a chunk; they come in the order of the log."""
        match event:
            case _QueueAdvanced(topic, queue_id, end, next_offset):
                self.maxima.push(self._state.demands(topic), end, (topic, queue_id), next_offset)
            case _StateRecord(end, tag, body):
                self._state.put(end, tag, body)
            case TopicPut(config, _):
                self._state.expect(config)
            case TopicDropped(topic):
                self.maxima.forget_topic(topic)
                self.arrivals.topic_changed(topic)
                self._on_drop(topic)
            case GroupDropped(group):
                self._on_drop_group(group)

    def validate(self) -> None:
        """Assert that no position passes another that bounds it, and that all visible records of
        the state have changed it.
        """
        marks, log = self.watermarks, self.store
        assert 0 <= marks.flushed <= marks.appended <= log.appended_offset
        assert marks.flushed <= log.flushed_offset
        self._state.validate(marks.most_visible)
        if marks.appended == log.appended_offset:  # else a thread appends: the loop plans later
            self.flusher.validate()

    def end_threads(self) -> None:
        self._thread.shutdown(wait=True)
        super().end_threads()


class _QueueAdvanced(NamedTuple):
    topic: str
    queue_id: int
    end: int  # in the log
    next_offset: int


class _StateRecord(NamedTuple):
    end: int  # in the log
    tag: str
    body: bytes


_Event: TypeAlias = _QueueAdvanced | _StateRecord | TopicPut | TopicDropped | GroupDropped


class _Collected(QueueChanges):
    """The events of a chunk, which may be copied in a thread; the loop applies them afterwards."""

    def __init__(self) -> None:
        self.events: list[_Event] = []
        self._approved: deque[tuple[record.Record, tuple[Change, ...]]] = deque()

    def approve_record(self, topic: str, log_offset: int, data: bytes) -> None:
        """StateTooNew: a release wrote the record that knows more. ReplicationBroken: none did."""
        found = record.decode(data)
        try:
            check_tag(found.tag)
            self._approved.append((found, decode(found.body)))
        except StateTooNew as error:
            raise StateTooNew(f"{error.message}, at {log_offset} of the writer's log") from error
        except StoreDamaged as error:
            raise ReplicationBroken(
                f"a record of the state came for {log_offset}: {error.message}"
            ) from error

    def queue_advanced(self, topic: str, queue_id: int, end: int, next_offset: int) -> None:
        self.events.append(_QueueAdvanced(topic, queue_id, end, next_offset))

    def observe_record(self, topic: str, log_offset: int, data: bytes, queues: QueueEdits) -> None:
        found, changes = self._approved.popleft()
        assert found.log_offset == log_offset, "records are observed as they were approved"
        for change in changes:
            self.apply_change(change, queues)
        self.events.append(_StateRecord(log_offset + len(data), found.tag, found.body))

    def apply_change(self, change: Change, queues: QueueEdits) -> None:
        super().apply_change(change, queues)
        if isinstance(change, TopicPut | TopicDropped | GroupDropped):
            self.events.append(change)


def _unseen(store: BaseStore) -> ReadableMaxima:
    """What a follower has when it starts: readable when the writer says that all of it is."""
    maxima = ReadableMaxima()
    for key in store.queues():
        low, high = store.queue_bounds(*key)
        if high > low:
            maxima.push(STRICTEST, store.appended_offset, key, high)
    return maxima


class FollowerState:
    """The state of a follower: records wait until they are visible, then they change ``state``.

    ``whole``: ``state`` is the state in the log so far. Else it is empty until a snapshot comes.
    Invariant: the waiting records are in log order.
    """

    def __init__(
        self, state: BrokerState, new_state: Callable[[], BrokerState], *, whole: bool = True
    ) -> None:
        self.state = state
        self._loader = StateLoader(state if whole else None, new_state)
        self._waiting: deque[tuple[int, str, bytes]] = deque()  # end in the log, tag, body
        self._expected: dict[str, DurabilityClass] = {}  # of topics, by what waits

    def demands(self, topic: str) -> DurabilityClass:
        """What the topic's messages demand; of an unknown topic the strictest. While a change of
        the topic waits, what it demands before and after it.
        """
        config = None if is_system(topic) else self.state.topics.find(topic)
        if config is None:
            return STRICTEST
        return DurabilityClass.of_topic(config) | self._expected.get(topic, DurabilityClass.ASYNC)

    def expect(self, config: TopicConfig) -> None:
        """Messages that come now may obey a change of the topic that still waits: consumers must
        not see them by the rule from before it.
        """
        before = self._expected.get(config.name, DurabilityClass.ASYNC)
        self._expected[config.name] = before | DurabilityClass.of_topic(config)

    def put(self, end: int, tag: str, body: bytes) -> None:
        """A state record came that ends at ``end`` of the log."""
        assert not self._waiting or self._waiting[-1][0] < end
        self._waiting.append((end, tag, body))

    def advance(self, visible: int) -> set[str]:
        """Apply what has become visible; returns the topics that may have changed."""
        touched: set[str] = set()
        while self._waiting and self._waiting[0][0] <= visible:
            _, tag, body = self._waiting.popleft()
            touched.update(self._apply(tag, body))
        if not self._waiting:
            self._expected.clear()
        return touched

    def _apply(self, tag: str, body: bytes) -> Iterable[str]:
        changes = self._loader.feed(tag, body)
        if tag in (SNAPSHOT_ONLY, SNAPSHOT_LAST) and self._loader.complete:
            self.state.become(self._loader.state)
            return [config.name for config in self.state.topics]
        puts = [change.config.name for change in changes if isinstance(change, TopicPut)]
        return puts + [change.topic for change in changes if isinstance(change, TopicDropped)]

    def validate(self, visible: int) -> None:
        """Assert the invariant, and that no record waits that ends at or below ``visible``."""
        ends = [visible, *(end for end, _, _ in self._waiting)]
        assert all(map(int.__lt__, ends, ends[1:])), ends


def cut(store: FollowerStore, offset: int) -> None:
    """Cut a follower's log at ``offset``, and keep aside what is cut, as far as the disk takes it.
    Nothing else may use the store.

    The queues of a topic that was deleted behind ``offset`` are gone, and only the whole log could
    bring them back. Then all of the log goes, to be copied from the start.
    """
    end = store.appended_offset
    assert store.min_offset <= offset <= end
    try:
        kept = store.keep_aside(offset)
    except DiskFull:
        kept = 0
    log.warning(
        "the group has gone on without the end of this log",
        extra=fields(first=offset, end=end, bytes=end - offset, kept_bytes=kept),
    )
    if topic_deletions(store, offset):
        store.reset_to(store.min_offset)
    else:
        store.truncate(offset)
    assert store.appended_offset <= offset
