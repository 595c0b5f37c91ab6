from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from cometmq.errors import (
    DiskFull,
    GroupNotFound,
    LimitExceeded,
    NoPermission,
    SlaveNotAvailable,
    StateTooNew,
    TopicNotFound,
    VersionUnsupported,
)
from cometmq.member.state import keeper
from cometmq.member.state.statelog import load
from cometmq.messaging.groups import GroupSettings
from cometmq.messaging.state import STATE_TOPIC, BrokerState
from cometmq.model import FlushMode, Position, ReplicationMode, TopicConfig
from cometmq.replication.watermarks import DurabilityClass
from cometmq.store.writer import MessageStore
from tests.support.cluster.members import Member, living_member, opened
from tests.support.cluster.next_release import NOTE, next_release
from tests.support.stores.gates import HeldFlush
from tests.support.stores.small_stores import WallClock, append
from tests.support.waiting import until


def same_as_log(member: Member) -> bool:
    """The tables are what the log alone tells."""
    told = load(member.store, BrokerState)
    return list(told.as_changes()) == list(member.state.as_changes())


def full(*_: object, **__: object) -> None:
    raise DiskFull("no room")


def refuse() -> None:
    raise SlaveNotAvailable("1 of 2")


def state_records(member: Member) -> int:
    return member.store.queue_bounds(STATE_TOPIC, 0)[1]


async def test_a_change_counts_when_its_record_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldFlush(monkeypatch)
    async with living_member(tmp_path) as member:
        held.hold()
        putting = asyncio.create_task(member.put("T"))
        await until(lambda: held.waiting)
        assert "T" not in member.state.topics
        assert state_records(member) == 2  # the state snapshot and the change
        held.release()
        assert await putting
        assert "T" in member.state.topics
        assert member.told == ["changed"]
        assert same_as_log(member)


@pytest.mark.parametrize("waits", [True, False])
async def test_a_kind_that_not_every_release_knows_is_written_when_all_members_read_it(
    tmp_path: Path, waits: bool
) -> None:
    """And the log says so from then on, also where the change leaves no trace of its own."""

    async def write(member: Member) -> None:
        if waits:
            async with member.keeper._one_at_a_time:
                await member.keeper._commit(NOTE)
        else:
            member.keeper.write(NOTE)

    used = frozenset({"kinds", "note"})
    with next_release():
        async with living_member(tmp_path) as member:
            asked: list[frozenset[str]] = []
            member.set_authority.kinds_checked = asked.append
            member.set_authority.kinds_unread = {"note"}
            before = state_records(member)
            with pytest.raises(VersionUnsupported):
                await write(member)
            assert (state_records(member), member.state.kinds_used) == (before, frozenset())
            member.set_authority.kinds_unread = set()
            await write(member)
            assert (asked, member.state.kinds_used) == ([used, used], used)
            await write(member)  # it is in the log already
            assert (len(asked), state_records(member)) == (2, before + 2)
            assert same_as_log(member)
        async with living_member(tmp_path) as member:
            assert member.state.kinds_used == used  # by the snapshot, which has no note
            await write(member)
    with pytest.raises(StateTooNew, match=r"kinds that this program does not know: \['note'\]"):
        opened(tmp_path)


async def test_the_same_settings_again_write_nothing(tmp_path: Path) -> None:
    async with living_member(tmp_path) as member:
        await member.put("T")
        records = state_records(member)
        assert not await member.put("T")
        await member.keeper.put_group(GroupSettings("g"))
        await member.keeper.put_group(GroupSettings("g"))
        assert state_records(member) == records + 1
        assert member.told == ["changed"]


async def test_progress_is_written_when_it_has_changed_or_the_log_has_grown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next start reads the log from its last record on."""
    async with living_member(tmp_path) as member:
        await member.put("T")
        records = state_records(member)
        append(member.store, ("T", 0, [bytes(3_000)]))
        member.keeper.write_progress(1.0)
        assert state_records(member) == records
        monkeypatch.setattr(keeper, "PROGRESS_BYTES_MAX", 3_000)
        member.keeper.write_progress(1.0)
        assert state_records(member) == records + 1
        assert member.keeper.progress_bytes == 0


async def test_a_snapshot_comes_behind_the_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next writer looks for it behind the snapshot only."""
    async with living_member(tmp_path) as member:
        await member.put("T")
        monkeypatch.setattr(keeper, "PROGRESS_BYTES_MAX", 3_000)
        append(member.store, ("T", 0, [bytes(3_000)]))
        records = state_records(member)
        member.keeper.write_snapshot_if_due(0)
        assert state_records(member) == records + 2


async def test_creating_does_not_change_what_is_there(tmp_path: Path) -> None:
    async with living_member(tmp_path) as member:
        await member.put("T", 4)
        assert not await member.keeper.create_topic(TopicConfig("T", 1, 1))
        assert member.state.topics.get("T").write_queue_count == 4


async def test_changes_keep_their_order_whoever_asks(tmp_path: Path) -> None:
    async with living_member(tmp_path) as member:
        await asyncio.gather(*(member.put("T", n) for n in range(1, 9)), member.put("U"))
        assert len(member.state.generations.topic("T")) == 8
        assert same_as_log(member)


async def test_a_change_goes_on_when_its_caller_goes_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldFlush(monkeypatch)
    async with living_member(tmp_path) as member:
        held.hold()
        putting = asyncio.create_task(member.put("T"))
        await until(lambda: held.waiting)
        putting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await putting
        held.release()
        await member.keeper.settled()
        assert "T" in member.state.topics
        assert same_as_log(member)


async def test_nothing_is_sent_to_a_topic_that_is_being_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldFlush(monkeypatch)
    async with living_member(tmp_path) as member:
        await member.put("T")
        member.keeper.check_open("T")
        held.hold()
        dropping = asyncio.create_task(member.keeper.drop_topic("T"))
        await until(lambda: held.waiting)
        with pytest.raises(TopicNotFound):
            member.keeper.check_open("T")
        held.release()
        await dropping
        assert member.told == ["changed", "dropped T", "changed"]
        assert member.store.queue_bounds("T", 0) == (0, 0)
        assert same_as_log(member)


async def test_a_change_that_does_not_fit_leaves_no_record(tmp_path: Path) -> None:
    async with living_member(tmp_path, topics_max=1) as member:
        await member.put("T")
        records = state_records(member)
        with pytest.raises(LimitExceeded):
            await member.put("U")
        with pytest.raises(NoPermission):
            await member.put("rmq_sys_x")
        with pytest.raises(TopicNotFound):
            await member.keeper.drop_topic("U")
        assert state_records(member) == records
        await member.keeper.drop_topic("T")  # and the keeper still works
        assert same_as_log(member)


async def test_a_full_disk_refuses_a_change_and_the_next_may_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with living_member(tmp_path) as member:
        await member.put("T")
        with monkeypatch.context() as patch:
            patch.setattr(MessageStore, "append", full)
            with pytest.raises(DiskFull):
                await member.put("U")
            with pytest.raises(DiskFull):
                await member.keeper.drop_topic("T")
        member.keeper.check_open("T")  # it is not being deleted any more
        assert await member.put("U")
        assert same_as_log(member)


async def test_offsets_reach_the_log_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with living_member(tmp_path) as member:
        await member.put("T", 3)
        for queue_id in range(3):
            member.append("T", queue_id, b"a", b"b")
            history = member.state.generations.of("T", queue_id)
            member.state.offsets.commit("g", ("T", queue_id), Position(0, 1), history, 2)
        records = state_records(member)

        with monkeypatch.context() as patch:
            patch.setattr(MessageStore, "append", full)
            with pytest.raises(DiskFull):
                member.keeper.write_offsets()
        member.keeper.write_offsets()
        assert state_records(member) == records + 1
        member.keeper.write_offsets()  # nothing new
        assert state_records(member) == records + 1
        assert same_as_log(member)


def commit(member: Member, group: str, offset: int, topic: str = "T") -> None:
    history = member.state.generations.of(topic, 0)
    member.state.offsets.commit(group, (topic, 0), Position(0, offset), history, 9)


async def test_commits_of_one_turn_are_one_record_and_as_safe_as_their_topic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldFlush(monkeypatch)
    async with living_member(tmp_path) as member:
        await member.put("T")
        await member.put("S", mode=FlushMode.SYNC)
        records = state_records(member)
        held.hold()
        for group in ("a", "b", "c"):
            commit(member, group, 1)
        await asyncio.gather(*[member.keeper.offsets_stored({"T"}) for _ in range(3)])
        assert state_records(member) == records + 1, "in the log, and no disk was waited for"
        commit(member, "a", 2)
        commit(member, "a", 2, "S")
        waiting = asyncio.create_task(member.keeper.offsets_stored({"T", "S"}))
        again = asyncio.create_task(member.keeper.offsets_stored({"S"}))  # repeated: nothing new
        await until(lambda: state_records(member) == records + 2)
        await until(lambda: held.waiting)
        assert not waiting.done()
        assert not again.done()
        held.release()
        await asyncio.gather(waiting, again)
        assert same_as_log(member)


async def test_commits_that_cannot_be_stored_count_and_are_not_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with living_member(tmp_path) as member:
        await member.put("T")
        commit(member, "g", 1)

        with monkeypatch.context() as patch:
            patch.setattr(MessageStore, "append", full)
            with pytest.raises(DiskFull):
                await member.keeper.offsets_stored({"T"})
        assert member.state.offsets.get("g", ("T", 0)) is not None
        await member.keeper.offsets_stored({"T"})
        assert same_as_log(member)

        await member.keeper.put_topic(TopicConfig("R", replication_mode=ReplicationMode.APPENDED))

        member.set_authority.check = refuse
        commit(member, "g", 1, "R")
        with pytest.raises(SlaveNotAvailable):
            await member.keeper.offsets_stored({"R"})
        assert same_as_log(member), "written all the same"
        await member.keeper.offsets_stored({"T"})


async def test_what_a_group_committed_does_not_outlive_it_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldFlush(monkeypatch)
    async with living_member(tmp_path) as member:
        await member.put("T")
        await member.keeper.put_group(GroupSettings("g"))
        commit(member, "g", 1)
        held.hold()
        dropping = asyncio.create_task(member.keeper.drop_group("g"))
        await until(lambda: member.keeper.closing_groups == {"g"} and held.waiting)
        member.keeper.write_offsets()
        held.release()
        await dropping
        assert not member.keeper.closing_groups
        assert not list(member.state.offsets)
        assert same_as_log(member)
        with pytest.raises(GroupNotFound):
            await member.keeper.drop_group("g")


async def test_a_copy_knows_the_changes_on_their_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldFlush(monkeypatch)
    async with living_member(tmp_path) as member:
        await member.put("T")
        held.hold()
        dropping = asyncio.create_task(member.keeper.drop_topic("T"))
        await until(lambda: held.waiting)
        member.keeper.write_snapshot_if_due(0)
        held.release()
        await dropping
        assert "T" not in load(member.store, BrokerState).topics
        assert same_as_log(member)


async def test_a_copy_is_due_after_so_many_bytes(tmp_path: Path) -> None:
    async with living_member(tmp_path) as member:
        await member.put("T")
        records = state_records(member)
        member.keeper.write_snapshot_if_due(10_000)
        assert state_records(member) == records
        member.append("T", 0, b"." * 10_000)
        member.keeper.write_snapshot_if_due(10_000)
        assert state_records(member) == records + 1
        member.keeper.write_snapshot_if_due(10_000)
        assert state_records(member) == records + 1


async def test_no_change_is_begun_that_cannot_be_copied(tmp_path: Path) -> None:
    async with living_member(tmp_path) as member:
        replicated = TopicConfig("C", 1, 1, replication_mode=ReplicationMode.APPENDED)
        await member.keeper.put_topic(replicated)
        member.set_authority.check = refuse
        records = state_records(member)
        with pytest.raises(SlaveNotAvailable):
            await member.put("T")
        with pytest.raises(SlaveNotAvailable):
            await member.keeper.drop_topic("C")
        member.keeper.check_open("C")
        assert state_records(member) == records


async def test_the_first_topic_that_asks_for_copies_waits_for_followers_to_be_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it comes nobody looks who is in sync; so who is there is not refused at once."""
    monkeypatch.setattr(keeper, "RETRY_S", 0.001)

    def refuse_twice() -> None:
        if len(refusals) < 2:
            refusals.append(member.demands.now)
            raise SlaveNotAvailable("1 of 2")

    refusals: list[DurabilityClass] = []
    async with living_member(tmp_path) as member:
        member.set_authority.check = refuse_twice
        replicated = TopicConfig("C", 1, 1, replication_mode=ReplicationMode.APPENDED)
        assert await member.keeper.put_topic(replicated)
        assert refusals == [DurabilityClass.REPLICATED] * 2


async def test_first_topics_that_wait_for_followers_wait_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else is changed meanwhile, and clients ask again and again."""
    monkeypatch.setattr(keeper, "RETRY_S", 0.001)
    clock = WallClock()
    refusals_s: list[float] = []

    def refuse() -> None:
        clock.now_ms += 1000
        refusals_s.append(clock.monotonic_s())
        raise SlaveNotAvailable("1 of 2")

    async with living_member(tmp_path) as member:
        monkeypatch.setattr(member.keeper, "_clock", clock)
        member.set_authority.check = refuse
        copy = TopicConfig("", 1, 1, replication_mode=ReplicationMode.APPENDED)
        replicated = [replace(copy, name=name) for name in "ABCD"]
        asked_s = clock.monotonic_s()
        made = await asyncio.gather(
            *map(member.keeper.put_topic, replicated), return_exceptions=True
        )
        assert [type(error) for error in made] == [SlaveNotAvailable] * 4
        waited_s = keeper.FIRST_COPIES_S_MAX
        assert [at - asked_s for at in refusals_s if at - asked_s > waited_s] == [
            waited_s + 1,
            waited_s + 2,
            waited_s + 3,
        ]


async def test_a_topic_whose_copies_cannot_be_had_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "FIRST_COPIES_S_MAX", 0.0)

    async with living_member(tmp_path) as member:
        member.set_authority.check = refuse
        records = state_records(member)
        replicated = TopicConfig("C", 1, 1, replication_mode=ReplicationMode.APPENDED)
        with pytest.raises(SlaveNotAvailable):
            await member.keeper.put_topic(replicated)
        assert (state_records(member), member.demands.now) == (records, DurabilityClass.ASYNC)
        await member.put("T")
