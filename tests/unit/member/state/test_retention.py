from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from cometmq.errors import BrokerDraining, DiskFull, StoreDamaged, StoreFailed
from cometmq.format import record, timers
from cometmq.format.delayed import SCHEDULE_TOPIC
from cometmq.format.halves import HALF_TOPIC
from cometmq.format.relay import relay
from cometmq.format.timers import TIMER_QUEUE, TIMER_TOPIC
from cometmq.member.config import MemberConfig
from cometmq.member.state.retention import Retention, rules_of
from cometmq.member.state.statelog import keep_from, load
from cometmq.member.storage.authority import Replicated
from cometmq.messaging.changes import DelaysReached, HalvesReached, TimersReached
from cometmq.messaging.state import BrokerState
from cometmq.messaging.timers import TimerMark
from cometmq.messaging.transactions import HalfProgress
from cometmq.model import ReplicationMode, TopicConfig
from cometmq.replication.watermarks import DurabilityClass
from cometmq.store.retention import QuotaRoom, Reason, RetentionRules, Space
from tests.support.cluster.broker import encoded
from tests.support.cluster.members import NEVER, Member, living_member
from tests.support.stores.small_stores import HOST, START_MS, WallClock
from tests.support.waiting import until

FILE_BYTES = 64 * 1024
HOUR_MS = 3_600_000
# No hour of the day: files go by command, or for want of room.
RULES = RetentionRules(reserved_ms=HOUR_MS, delete_hours=frozenset(), interval_s=0.01)


class Scene:
    """A member with small log files, its retention, and the time of both."""

    def __init__(self, member: Member, retention: Retention, clock: WallClock) -> None:
        self.member = member
        self.retention = retention
        self.clock = clock

    @property
    def first_file(self) -> int:
        return self.member.store.min_offset // FILE_BYTES

    async def fill(self, log_files: int) -> None:
        """Append until so many files are full and, with their queues, on the disk."""
        store = self.member.store
        while store.appended_offset < log_files * FILE_BYTES + 1_000:
            self.member.append("T", 0, b"." * 20_000)
        await until(lambda: len(store.cleaner.log_files()) == log_files)

    async def copy_state(self) -> None:
        self.member.keeper.write_snapshot()
        await self.member.on_disk()


@asynccontextmanager
async def scene(
    directory: Path,
    rules: RetentionRules = RULES,
    *,
    writes_copies: bool = True,
    drop_waiting_s: float = 0.0,
) -> AsyncIterator[Scene]:
    async with living_member(directory, mapped_file_size_commit_log=FILE_BYTES) as member:
        await member.put("T")
        clock = WallClock()
        retention = Retention(
            member.storage,
            member.state,
            rules,
            clock,
            pause_s=0.0,
            drop_waiting_s=drop_waiting_s,
            write_snapshot=member.keeper.write_snapshot if writes_copies else None,
        )
        try:
            yield Scene(member, retention, clock)
        finally:
            retention.close()


def disk(percent: int) -> mock.Mock:
    return mock.Mock(return_value=[Space(percent, 100 - percent)])


async def test_expired_files_go_when_asked_for(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        await s.fill(4)
        s.clock.now_ms = START_MS + HOUR_MS - 1
        assert (await s.retention.clean()).log_bytes == 0
        s.clock.now_ms = START_MS + HOUR_MS
        verdict, _ = await s.retention.look()
        assert not verdict.remove, "it is not the hour"
        for _ in range(3):  # the state is copied further up first
            await s.retention.clean()
            await s.member.on_disk()
        assert s.retention.removed.log_files[Reason.AGE] == s.first_file == 4
        assert s.retention.removed.log_bytes == 4 * FILE_BYTES
        low, high = s.member.store.queue_bounds("T", 0)
        assert 0 < low <= high


async def test_the_hour_is_the_local_days(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    try:
        rules = replace(RULES, delete_hours=frozenset({4}))
        async with scene(tmp_path, rules) as s:
            await s.fill(1)
            for _ in range(2):
                await s.copy_state()
            s.clock.now_ms = 1_800_000_000_000  # 2027-01-15, 08:00 UTC, 13:30 in Kolkata
            assert not (await s.retention.look())[0].remove
            s.clock.now_ms -= 9 * HOUR_MS  # half past four
            assert (await s.retention.look())[0].remove
    finally:
        monkeypatch.undo()
        time.tzset()


async def test_the_state_is_never_lost(tmp_path: Path) -> None:
    """Files stay until two complete copies behind them are on the disk; a writer sees to that."""
    async with scene(tmp_path) as s:
        await s.fill(3)
        s.clock.now_ms = START_MS + 2 * HOUR_MS
        copies = []
        while not s.first_file:
            verdict, _ = await s.retention.look(commanded=True)
            copies.append(verdict.waits_for_state)
            await s.member.on_disk()
        assert copies == [True, True, False], "the file goes when there is one copy to spare"
        assert keep_from(s.member.store) >= s.member.store.min_offset
        told = load(s.member.store, BrokerState)
        assert list(told.as_changes()) == list(s.member.state.as_changes())


async def test_a_follower_waits_for_its_writers_copies(tmp_path: Path) -> None:
    async with scene(tmp_path, writes_copies=False) as s:
        await s.fill(3)
        s.clock.now_ms = START_MS + 2 * HOUR_MS
        for _ in range(3):
            verdict, _ = await s.retention.look(commanded=True)
            assert verdict.waits_for_state
        assert s.first_file == 0


async def test_readers_are_waited_for_and_not_for_ever(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        await s.fill(2)
        for _ in range(2):
            await s.copy_state()
        s.clock.now_ms = START_MS + 2 * HOUR_MS
        with s.member.store.cleaner.pins.hold(FILE_BYTES + 10):
            await s.retention.clean()
            assert s.first_file == 1, "up to the reader"
            s.clock.now_ms += 119_000
            await s.retention.clean()
            assert s.first_file == 1
            s.clock.now_ms += 1_000
            await s.retention.clean()
            assert s.first_file == 2


@pytest.mark.parametrize(
    ("topic", "queue_id", "change"),
    [
        (HALF_TOPIC, 0, HalvesReached(HalfProgress(floor=1))),
        (SCHEDULE_TOPIC, 2, DelaysReached({3: 1})),
    ],
)
async def test_a_follower_keeps_what_waits_until_its_writer_is_done_with_it(
    tmp_path: Path, topic: str, queue_id: int, change: HalvesReached | DelaysReached
) -> None:
    """Its writer gives open halves up, and moves messages of delay levels."""
    async with scene(tmp_path) as s:
        await s.fill(1)
        s.member.append(topic, queue_id, b"waits")
        await s.fill(2)
        for _ in range(2):
            await s.copy_state()
        s.clock.now_ms = START_MS + 2 * HOUR_MS
        await s.retention.clean()
        assert s.first_file == 1, "up to the message, which waits for all that the state knows"
        s.member.state.apply(change)
        await s.retention.clean()
        assert s.first_file == 2


async def expired(s: Scene, log_files: int) -> None:
    """So many log files may go, with what was appended before."""
    await s.fill(log_files)
    for _ in range(2):
        await s.copy_state()
    s.clock.now_ms = START_MS + 2 * HOUR_MS


async def test_what_is_stored_once_more_is_on_the_disk_before_its_source_goes(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path) as s:
        await expired(s, 2)
        store, ends = s.member.store, [0]
        s.member.storage.flusher._policy = NEVER  # but for what is asked for

        async def store_again(log_offset: int) -> None:
            assert log_offset == 2 * FILE_BYTES
            s.member.append("T", 0, b"once more")
            ends.append(store.appended_offset)

        def forget_before(offset: int) -> None:
            assert store.flushed_offset >= ends[-1]
            ends.clear()
            forget(offset)

        s.retention.before_removal = store_again
        forget = store.cleaner.forget_before
        with mock.patch.object(store.cleaner, "forget_before", forget_before):
            await s.retention.look(commanded=True)
        assert not ends
        assert s.first_file == 2


async def test_files_stay_until_members_in_sync_have_what_was_stored_again(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        storage, authority = s.member.storage, s.member.set_authority

        def copy_all() -> bool:
            end = storage.watermarks.flushed
            authority.set_replicated(Replicated(end, end, is_alone=False))
            storage.settle()
            return put.done()

        replicated = TopicConfig("R", 1, 1, replication_mode=ReplicationMode.APPENDED)
        put = asyncio.create_task(s.member.keeper.put_topic(replicated))
        await until(copy_all)
        await wait_for_an_hour(s)
        await expired(s, 2)
        await s.member.on_disk_alone()
        copy_all()

        async def store_again(_log_offset: int) -> None:
            s.member.append("T", 0, b"once more")
            s.member.state.apply(TimersReached(TimerMark(rolled=1), ()))

        s.retention.before_removal = store_again
        with mock.patch("cometmq.member.state.retention.COPIED_S_MAX", 0.0):
            for _ in range(3):
                verdict, _ = await s.retention.look(commanded=True)
                assert not verdict.remove
                assert verdict.next_look_s == RULES.interval_s
        assert s.first_file == 0, "a member in sync has the log of before only"
        await s.member.on_disk_alone()
        copy_all()
        await s.retention.look(commanded=True)
        assert s.first_file == 2


async def wait_for_an_hour(s: Scene) -> None:
    """A message with a time of its own."""
    due_ms = START_MS + HOUR_MS
    properties = timers.with_time(timers.prefix("T", 0), due_ms)
    found = record.decode(encoded(*TIMER_QUEUE, b"waits", properties=properties))
    waits = relay(found, *TIMER_QUEUE, HOST, due_ms=due_ms)
    s.member.storage.append_relayed([waits], {TIMER_TOPIC: DurabilityClass.ASYNC}, HOST)


async def test_without_room_those_files_go_in_which_nothing_waits(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        await s.fill(2)
        await wait_for_an_hour(s)
        await expired(s, 4)
        s.retention.before_removal = mock.AsyncMock(side_effect=DiskFull("no room"))
        await s.retention.look(commanded=True)
        assert s.first_file == 2, "the one that waits is in the third"
        for error in (BrokerDraining("its next writer removes it"), StoreDamaged("a unit")):
            s.retention.before_removal = mock.AsyncMock(side_effect=error)
            await s.retention.clean()
            assert s.first_file == 2
        s.retention.before_removal = mock.AsyncMock(side_effect=DiskFull("no room"))
        for _ in range(3):
            s.member.storage.note_no_space()
            await s.retention.look(commanded=True)
            s.clock.now_ms += 24 * HOUR_MS
        assert s.first_file == 2, "a full disk refuses sends, and gives up nothing"


async def test_a_full_disk_refuses_sends_while_messages_wait_in_its_oldest_files(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path) as s:
        await wait_for_an_hour(s)
        await expired(s, 4)
        s.retention.before_removal = mock.AsyncMock(side_effect=DiskFull("no room"))
        with mock.patch.object(s.retention._cleaner, "spaces", disk(95)):
            await s.retention.look()
            assert "messages that wait for their time" in s.retention.refusal
            with pytest.raises(DiskFull):
                s.member.storage.check_room(0)
            s.member.state.apply(TimersReached(TimerMark(rolled=1), ()))  # it was delivered
            s.retention.before_removal = mock.AsyncMock()
            await s.retention.look()
        assert s.first_file > 0


async def test_an_option_drops_what_waits_in_a_store_that_stays_full(tmp_path: Path) -> None:
    async with scene(tmp_path, drop_waiting_s=60.0) as s:
        await wait_for_an_hour(s)
        await expired(s, 2)
        s.retention.before_removal = mock.AsyncMock(side_effect=DiskFull("no room"))
        await s.retention.look(commanded=True)
        s.clock.now_ms += 61_000
        await s.retention.look(commanded=True)
        assert s.first_file == 0, "it is old, and the store is not full"
        s.member.storage.note_no_space()
        await s.retention.look(commanded=True)
        s.clock.now_ms += 59_000
        s.member.storage.note_no_space()
        await s.retention.look(commanded=True)
        assert s.first_file == 0, "it may be full for a moment"
        s.clock.now_ms += 1_000
        s.member.storage.note_no_space()
        await s.retention.look(commanded=True)
        assert s.first_file == 2


async def test_sends_and_deliveries_leave_a_quota_the_room_in_which_what_waits_moves(
    tmp_path: Path,
) -> None:
    quota = replace(RULES, quota_bytes=8 * FILE_BYTES)
    async with scene(tmp_path, quota) as s:
        await s.retention.look()
        storage = s.member.storage
        state_bytes, *others = storage.quota_room
        assert not any(others)
        await wait_for_an_hour(s)
        await s.fill(3)
        await s.retention.look()
        room = storage.quota_room
        assert room.state == state_bytes
        assert room.moves > FILE_BYTES
        checks = storage.check_room, storage.check_delivery_room, storage.check_moving_room
        full_at: list[int] = []
        while len(full_at) < len(checks):
            try:
                checks[len(full_at)](1_000)
                s.member.append("T", 0, b"." * 500)
            except DiskFull:
                assert storage.out_of_space, "retention looks for a file to remove"
                storage.out_of_space = False
                full_at.append(s.member.store.appended_offset)
        assert full_at[1] - full_at[0] >= room.deliveries
        assert full_at[2] - full_at[1] >= FILE_BYTES
        s.member.keeper.write_snapshot()


async def test_the_time_of_waiting_begins_anew_with_each_wait(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        await s.fill(2)
        for _ in range(2):
            await s.copy_state()
        s.clock.now_ms = START_MS + 2 * HOUR_MS
        pins = s.member.store.cleaner.pins
        with pins.hold(0):
            await s.retention.look(commanded=True)
        await s.retention.look()  # nothing is due: nobody waits
        s.clock.now_ms += 120_000
        with pins.hold(0):
            await s.retention.look(commanded=True)
            assert s.first_file == 0


# --- room -----------------------------------------------------------------------------------------


async def test_a_full_disk_refuses_sends_until_there_is_room(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        storage = s.member.storage
        for percent, refused in ((90, False), (91, True), (90, True), (89, False)):
            with mock.patch.object(s.retention._cleaner, "spaces", disk(percent)):
                await s.retention.look()
            assert bool(s.retention.refusal) is refused, percent
            if refused:
                with pytest.raises(DiskFull, match=rf"{percent}\.0% .* taken again at 89%"):
                    storage.check_room(0)
            else:
                storage.check_room(0)
        with mock.patch.object(s.retention._cleaner, "spaces", disk(95)):
            await s.retention.look()
        s.member.keeper.write_snapshot()  # what the system writes itself goes on


async def test_a_refusal_says_truly_what_is_being_done(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        with mock.patch.object(s.retention._cleaner, "spaces", disk(95)):
            await s.retention.look()
            assert "no message can be removed" in s.retention.refusal
            await s.fill(3)
            await s.retention.look()
            assert "newer snapshots of the broker's state" in s.retention.refusal
            for _ in range(2):
                await s.copy_state()
            await s.retention.look()
            assert "are being removed" in s.retention.refusal
        assert s.first_file > 0


async def test_sends_are_taken_again_once_there_is_room_not_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with scene(tmp_path) as s:
        await s.fill(3)
        for _ in range(2):
            await s.copy_state()
        full, room = [[Space(n * FILE_BYTES, (100 - n) * FILE_BYTES)] for n in (92, 80)]
        with (
            mock.patch.object(s.retention._cleaner, "log_files", return_value=[]),
            mock.patch.object(s.retention._cleaner, "spaces", return_value=full),
        ):
            await s.retention.look()
        found = mock.Mock(side_effect=[full, full, room])
        with mock.patch.object(s.retention._cleaner, "spaces", found):
            await s.retention.look()
            assert s.first_file == 3
            assert s.retention.refusal, "files went, and the room is not there yet"
            await s.retention.look()
        assert not s.retention.refusal
        [line] = [r for r in caplog.records if r.getMessage() == "sends are taken again"]
        assert vars(line)["fields"]["used"] == "80.0%"


async def test_files_of_any_age_go_when_the_disk_is_nearly_full(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        await s.fill(3)
        for _ in range(2):
            await s.copy_state()
        full = mock.Mock(return_value=[Space(9 * FILE_BYTES, FILE_BYTES)])
        with (
            mock.patch.object(s.retention._cleaner, "spaces", full),
            s.member.store.cleaner.pins.hold(0),
        ):
            await s.retention.look()
        assert s.retention.removed.log_files == {Reason.AGE: 0, Reason.SPACE: 1}
        assert s.first_file == 1


async def test_an_append_without_room_is_helped_at_once(tmp_path: Path) -> None:
    """A disk may take no more long before its ratio says so: one file goes, without waiting."""
    async with scene(tmp_path, replace(RULES, interval_s=3_600.0)) as s:
        await s.fill(3)
        for _ in range(2):
            await s.copy_state()
        with mock.patch("cometmq.member.state.retention.LOOK_INTERVAL_S_MIN", 0.001):
            running = asyncio.create_task(s.retention.run())
            with (
                mock.patch.object(s.member.store, "append", side_effect=DiskFull("no room")),
                pytest.raises(DiskFull),
            ):
                s.member.append("T", 0, b"x")
            async with asyncio.timeout(10):
                while not s.first_file:  # noqa: ASYNC110
                    await asyncio.sleep(0.002)
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
        assert s.first_file == 1


async def test_a_disk_that_fails_ends_it(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        failing = mock.Mock(side_effect=StoreFailed("Input/output error"))
        with (
            mock.patch.object(s.retention._cleaner, "spaces", failing),
            pytest.raises(StoreFailed),
        ):
            await s.retention.run()
        assert s.member.storage.failed


# --- topics ---------------------------------------------------------------------------------------


async def test_a_topic_may_show_less_than_the_log_has(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        await s.member.put("U")
        await s.member.keeper.put_topic(TopicConfig("T", 1, 1, reserve_time_ms=60_000))
        for topic in "TU":
            s.member.append(topic, 0, b"old")
        await s.member.on_disk()
        s.clock.now_ms = START_MS + 60_000
        await s.retention.look()
        assert s.member.store.queue_bounds("T", 0) == (0, 1)
        s.clock.now_ms += 1
        await s.retention.look()
        assert s.member.store.queue_bounds("T", 0) == (1, 1)
        assert s.member.store.queue_bounds("U", 0) == (0, 1)


# --- options --------------------------------------------------------------------------------------


def test_the_rules_are_the_options() -> None:
    assert rules_of(MemberConfig()) == RetentionRules(), "RocketMQ's, both"
    config = MemberConfig(
        file_reserved_time=1,
        delete_when=("02", "14"),
        disk_max_used_space_ratio=60.0,
        store_quota_bytes=10 * 1024**3,
        clean_resource_interval=500,
    )
    rules = rules_of(config)
    assert (rules.reserved_ms, rules.delete_hours) == (HOUR_MS, frozenset({2, 14}))
    assert (rules.max_used_ratio, rules.forcible_ratio, rules.full_ratio) == (0.6, 0.85, 0.9)
    assert (rules.quota_bytes, rules.interval_s) == (10 * 1024**3, 0.5)


async def test_sends_leave_a_quota_room_for_the_state(tmp_path: Path) -> None:
    """However fast they come: without two snapshots nothing could ever be removed."""
    async with living_member(tmp_path) as member:
        await member.put("T")
        storage = member.storage
        member.store.cleaner.limit(1)  # as few files as there may be
        storage.quota_room = QuotaRoom(state=4 * member.state.copy_bytes())
        assert storage.quota_room.state < member.store.log_file_bytes // 2
        data = encoded("T", 0, b"x" * 900)
        with suppress(DiskFull):
            while True:
                storage.check_room(len(data))
                member.append("T", 0, b"x" * 900)
        assert storage.out_of_space
        for _ in range(2):
            member.keeper.write_snapshot()
