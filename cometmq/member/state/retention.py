"""Retention at work: looks at the store now and then, removes old log files, refuses sends while
there is no room for them.

:mod:`cometmq.store.retention` decides, :mod:`cometmq.store.cleaner` removes, in a thread.
Everything else here belongs to the event loop. Writer and followers each do it for their own disk.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import NamedTuple, TypeAlias, TypeVar

from cometmq.clock import Clock
from cometmq.errors import BrokerDraining, CometError, Shortage, StoreFailed
from cometmq.flight_recorder import named_threads
from cometmq.member.config import MemberConfig
from cometmq.member.state.demands import topic_demands
from cometmq.member.state.statelog import Waiting, keep_from
from cometmq.member.storage.member_storage import BaseStorage
from cometmq.messaging.state import STATE_TOPIC, BrokerState
from cometmq.store.retention import (
    RESUME_MARGIN,
    LogFile,
    Look,
    MovePass,
    Reason,
    RetentionRules,
    Space,
    Verdict,
    decide,
    kept_back,
    quota_room,
    refuses,
)
from cometmq.telemetry import fields
from cometmq.turns import Turns

log = logging.getLogger(__name__)

LOOK_INTERVAL_S_MIN = 1.0  # also while appends find no room
GIB = 1024**3
# So long one look waits until followers have what was stored again. Then other files may go first.
COPIED_S_MAX = 1.0

T = TypeVar("T")
DueFile: TypeAlias = tuple[LogFile, Reason]


@dataclass(slots=True)
class Removed:
    """What retention removed, in one pass or since the start."""

    log_files: dict[Reason, int] = field(default_factory=lambda: dict.fromkeys(Reason, 0))
    log_bytes: int = 0
    queue_files: int = 0

    def add(self, other: Removed) -> None:
        for reason, count in other.log_files.items():
            self.log_files[reason] += count
        self.log_bytes += other.log_bytes
        self.queue_files += other.queue_files


@dataclass(frozen=True, slots=True)
class Fill:
    """How full it was at the last look."""

    ratio: float = 0.0  # of the disk or of the quota, whichever is fuller
    free_bytes: int = 0
    store_bytes: int = 0
    oldest_ms: int = 0  # store time of the oldest message; 0: there is none


def rules_of(config: MemberConfig) -> RetentionRules:
    """The rules that a member's options ask for."""
    return RetentionRules(
        reserved_ms=config.file_reserved_time * 3_600_000,
        delete_hours=frozenset(map(int, config.delete_when)),
        max_used_ratio=config.disk_max_used_space_ratio / 100,
        forcible_ratio=config.disk_space_clean_forcibly_ratio / 100,
        full_ratio=config.disk_space_warning_level_ratio / 100,
        quota_bytes=config.store_quota_bytes,
        files_max=config.delete_file_batch_max,
        forced_after_s=config.destroy_mapped_file_interval_forcibly / 1000,
        interval_s=config.clean_resource_interval / 1000,
    )


def _what_helps(verdict: Verdict) -> str:
    """What is being done about a full disk, or why nothing is."""
    if verdict.remove:
        return "the oldest messages are being removed to get there"
    if verdict.waits_for_messages:
        return (
            "messages that wait for their time or their end keep the oldest log files, until they "
            "are delivered, or stored again at every member in sync. Give the store more room, or "
            "bring followers back"
        )
    if verdict.waits_for_state:
        return (
            "the oldest messages can be removed as soon as two newer snapshots of the broker's "
            "state are in the log"
        )
    return (
        "no message can be removed: the newest log files always stay, and there are no older ones. "
        "Remove what else is on the volume, or give it more room"
    )


class _Mark(NamedTuple):
    """Nothing waits in the log below ``oldest``, by the state in the log that ends at ``end``."""

    end: int
    oldest: int


class Retention:
    """``write_snapshot`` appends a snapshot of the state; a follower has none to write.
    ``pause_s`` lies between two files that are removed. ``drop_waiting_s``: a full store of a
    writer drops messages that wait, when it could not store them again for so long; 0: never.

    Invariant: a log file goes when nothing waits in it, by state that is as safe as the topics ask:
    on this disk, and at every member in sync. So no member that may write has lost what waits.
    """

    def __init__(
        self,
        storage: BaseStorage,
        state: BrokerState,
        rules: RetentionRules,
        clock: Clock,
        *,
        pause_s: float = 0.1,
        drop_waiting_s: float = 0.0,
        write_snapshot: Callable[[], None] | None = None,
    ) -> None:
        self.rules = rules
        self.removed = Removed()  # since the start
        self.fill = Fill()
        self._storage = storage
        self._store = storage.store
        self._cleaner = storage.store.cleaner
        self._state = state
        self._clock = clock
        self._pause_s = pause_s
        self._write_snapshot = write_snapshot
        self._drop_waiting_s = drop_waiting_s
        # Called with the log offset below which files are about to go: stores again what waits
        # there, and writes the state that says so.
        self.before_removal: Callable[[int], Awaitable[None]] | None = None
        self._pinned_since_s: float | None = None
        self._blocked_since_s: float | None = None  # what waits keeps all files that should go
        self._pass = MovePass()
        self._oldest = 0  # log offset: nothing waits below, and that is safe
        self._mark: _Mark | None = None  # that is not safe yet
        self._one_at_a_time = asyncio.Lock()
        self._closing = threading.Event()
        self._thread = named_threads("retention")

    @property
    def refusal(self) -> str:
        """Why sends are refused for want of room; empty: they are not."""
        return self._storage.refusal

    async def run(self) -> None:
        """Look again and again, sooner when the log has got a file or an append found no room,
        until cancelled. Ends with StoreFailed.
        """
        while True:
            try:
                verdict, _ = await self.look()
                next_look_s = verdict.next_look_s
            except Shortage as error:
                log.error("retention waits", extra=fields(reason=str(error)))
                next_look_s = LOOK_INTERVAL_S_MIN
            at_once_s = min(LOOK_INTERVAL_S_MIN, next_look_s)
            await asyncio.sleep(at_once_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(next_look_s - at_once_s):
                    await self._storage.look_wanted.wait()

    async def clean(self) -> Removed:
        """Remove all that is expired, whatever the hour, and what is left of queues behind the log.
        Raises StoreFailed.
        """
        total, turns = Removed(), Turns("removal of expired log files")
        while True:
            turns.next(self._store.min_offset)
            verdict, removed = await self.look(commanded=True)
            total.add(removed)
            if not verdict.remove:
                return total

    async def look(self, *, commanded: bool = False) -> tuple[Verdict, Removed]:
        """One look, and what follows from it. Raises StoreFailed."""
        async with self._one_at_a_time:
            try:
                return await self._look(commanded)
            except StoreFailed as error:
                self._storage.fail(error)
                raise

    async def _look(self, commanded: bool) -> tuple[Verdict, Removed]:
        assert self._one_at_a_time.locked()
        out_of_space = self._storage.out_of_space
        self._storage.out_of_space = False
        if not out_of_space:
            self._storage.no_room = ""
        self._storage.look_wanted.clear()
        state_bytes, file_bytes = self._state.copy_bytes(), self._store.log_file_bytes
        waiting_bytes = self._store.appended_offset - await self.waits_from()
        log_bytes = self._store.appended_offset - self._store.min_offset
        self._storage.quota_room = quota_room(state_bytes, waiting_bytes, log_bytes, file_bytes)
        await self._in_thread(lambda: self._store.keep_room(state_bytes))
        look = await self._in_thread(lambda: self._take_look(commanded, out_of_space))
        verdict = decide(self.rules, look)
        # Only now is it worth while to look for the state snapshots.
        if verdict.remove or look.ratio > self.rules.max_used_ratio:
            keep = await self._in_thread(lambda: keep_from(self._store))
            assert keep <= look.keep_from
            verdict = decide(self.rules, replace(look, keep_from=keep))
        if not verdict.waits_for_readers:
            self._pinned_since_s = None
        elif self._pinned_since_s is None:
            self._pinned_since_s = self._clock.monotonic_s()
        if verdict.waits_for_state and self._write_snapshot is not None:
            # The next pass, or the one after it, finds the last but one snapshot further up.
            with suppress(Shortage, BrokerDraining):
                self._write_snapshot()
        if verdict.remove:
            free_count = await self._make_way(verdict.remove)
            if not free_count:
                free_count = self._dropped_count(verdict.remove, out_of_space)
            verdict = kept_back(self.rules, look, verdict, free_count)
        if verdict.refuse or not verdict.remove:
            self._refuse(verdict.refuse, look.spaces, verdict)
        # The topics that keep their messages for a time of their own, and the oldest store time
        # that they show.
        reserves = [
            (config.name, look.now_ms - config.reserve_time_ms)
            for config in self._state.topics
            if config.reserve_time_ms
        ]
        removed = await self._in_thread(lambda: self._remove(verdict, reserves))
        self.removed.add(removed)
        if self.refusal and removed.log_bytes:  # is there room now?
            spaces = await self._in_thread(lambda: self._cleaner.spaces(self.rules.quota_bytes))
            self._refuse(refuses(self.rules, spaces, refusing=True), spaces, verdict)
        return verdict, removed

    async def _make_way(self, due: Sequence[DueFile]) -> int:
        """Store again what waits in these files; how many of them may go."""
        try:
            await self._move(due)
        except BrokerDraining:  # the next writer does it
            return 0
        except StoreFailed:
            raise
        except CometError as error:
            log.warning("what waits is not stored again", extra=fields(reason=str(error)))
        if self._mark is not None:
            await self._settle(self._mark)
        if self._oldest < due[-1][0].end:
            await self._settle(_Mark(self._store.appended_offset, await self.waits_from()))
        return sum(file.end <= self._oldest for file, _ in due)

    async def _move(self, due: Sequence[DueFile]) -> None:
        """Raises what keeps messages from being stored again."""
        if self.before_removal is None:  # the writer does it
            return
        begin, oldest = self._store.appended_offset, await self.waits_from()
        kept = [file.end for file, _ in due if file.end > oldest]
        aged = [file.end for file, reason in due if reason is Reason.AGE]
        stop = max(aged, default=0)
        room = self._store.room_behind(1)
        if (
            kept
            and (room is None or room >= self._storage.quota_room.behind_moves)
            and self._pass.may_go_on(due[0][0].start, begin, self._store.log_file_bytes)
        ):
            stop = max(stop, kept[0])  # each file makes the room for the next one
        if not kept or not stop:
            return
        try:
            await self.before_removal(stop)
        finally:
            self._pass.moved(self._store.appended_offset - begin)

    async def _settle(self, mark: _Mark) -> None:
        """Let files go by this mark, if it is safe soon."""
        demands = topic_demands(self._state.topics, STATE_TOPIC)
        if await self._storage.is_safe(mark.end, demands, COPIED_S_MAX):
            self._oldest, self._mark = max(self._oldest, mark.oldest), None
        elif self._mark is None:
            self._mark = mark

    def _dropped_count(self, due: Sequence[DueFile], out_of_space: bool) -> int:
        """How many files go although messages wait in all of them."""
        is_full = out_of_space or bool(self.refusal) or due[0][1] is Reason.SPACE
        if self.before_removal is None or not self._drop_waiting_s or not is_full:
            self._blocked_since_s = None
            return 0
        now_s = self._clock.monotonic_s()
        if self._blocked_since_s is None:
            self._blocked_since_s = now_s
        if now_s - self._blocked_since_s < self._drop_waiting_s:
            return 0
        log.error("messages that wait are dropped: the store is full")
        return len(due)

    async def waits_from(self) -> int:
        """Log offset of the oldest message that may wait for its time or its end, by the state in
        the log; the log's end if there is none.
        """
        state = self._state
        waiting = Waiting(state.halves.written.floor, state.timers.rolled_written, state.delays)
        return await self._in_thread(lambda: waiting.oldest(self._store))

    def _refuse(self, refuse: bool, spaces: Sequence[Space], verdict: Verdict) -> None:
        """Refuse sends from now on, or take them again."""
        fullest = max(spaces, key=lambda space: space.ratio)
        if refuse != bool(self.refusal):
            log.warning(
                "sends are refused" if refuse else "sends are taken again",
                extra=fields(used=f"{fullest.ratio:.1%}", free_bytes=fullest.free_bytes),
            )
        self._storage.refusal = ""
        if refuse:
            mark, again = self.rules.full_ratio, self.rules.full_ratio - RESUME_MARGIN
            self._storage.refusal = (
                f"{fullest.ratio:.1%} of the store's room is used, {fullest.free_bytes / GIB:.2f} "
                f"GiB are free: sends are refused above {mark:.0%} and taken again at {again:.0%}; "
                f"{_what_helps(verdict)}"
            )

    # --- in the thread ----------------------------------------------------------------------------

    def _take_look(self, commanded: bool, out_of_space: bool) -> Look:
        now_ms, since_s = self._clock.wall_ms(), self._pinned_since_s
        spaces = self._cleaner.spaces(self.rules.quota_bytes)
        self._cleaner.limit(self.rules.quota_bytes)
        look = Look(
            files=self._cleaner.log_files(),
            now_ms=now_ms,
            hour=datetime.fromtimestamp(now_ms / 1000).hour,
            spaces=spaces,
            keep_from=self._store.appended_offset,
            pinned_from=self._cleaner.pins.lowest(),
            pinned_s=0.0 if since_s is None else self._clock.monotonic_s() - since_s,
            out_of_space=out_of_space,
            commanded=commanded,
            refusing=bool(self.refusal),
        )
        fullest = max(spaces, key=lambda space: space.ratio)
        self.fill = Fill(
            fullest.ratio,
            fullest.free_bytes,
            self._cleaner.store_bytes(),
            self._cleaner.oldest_time_ms(),
        )
        return look

    def _remove(self, verdict: Verdict, reserves: list[tuple[str, int]]) -> Removed:
        removed = Removed()
        if verdict.remove:
            self._cleaner.forget_before(verdict.remove[-1][0].end)
        for file, reason in verdict.remove:
            assert file.end <= self._store.flushed_offset
            removed.log_bytes += self._cleaner.remove_first()
            removed.log_files[reason] += 1
            log.info(
                "log file removed",
                extra=fields(start=file.start, reason=reason.value, newest_ms=file.newest_ms),
            )
            assert self._store.min_offset >= file.end
            if self._closing.wait(self._pause_s):
                return removed
        removed.queue_files = self._cleaner.remove_spare_files()
        for topic, oldest_ms in reserves:
            self._cleaner.forget_older(topic, oldest_ms)
        return removed

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        """Wait for the thread; before the store is closed, cut or replaced. Blocking."""
        self._closing.set()
        self._thread.shutdown(wait=True)
