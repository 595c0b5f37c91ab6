from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cometmq.errors import DiskFull, PositionFenced, StoreDamaged, StoreLocked
from cometmq.format import queueunit
from cometmq.format.batch import BatchLimits
from cometmq.member.state import opening
from cometmq.member.state.opening import can_lead, open_copy, open_writer
from cometmq.member.state.statelog import append_now
from cometmq.messaging.changes import TopicDropped, TopicPut
from cometmq.messaging.generations import EPOCH_SHIFT
from cometmq.messaging.state import STATE_TOPIC, change_records
from cometmq.model import Position, TopicConfig
from cometmq.replication.epoch_history import EpochBranch
from cometmq.store.layout import offset_name
from tests.support.cluster.broker import config_for
from tests.support.cluster.members import living_member, opened
from tests.support.stores.small_stores import HOST, START_MS, WallClock, append


async def make(directory: Path, *, clean: bool = True) -> int:
    """A store with topic T, two messages and a commit; the queue's generation."""
    async with living_member(directory, clean=clean) as member:
        await member.put("T", 2)
        member.append("T", 0, b"a", b"b")
        await member.on_disk()
        history = member.state.generations.of("T", 0)
        member.state.offsets.commit("g", ("T", 0), Position(0, 1), history, 2)
        member.keeper.write_offsets()
        return history.current


async def test_a_clean_start_keeps_generations(tmp_path: Path) -> None:
    generation = await make(tmp_path)
    found = opened(tmp_path)
    assert found.store.clean_start
    assert found.store.epoch == 2
    assert found.state.generations.of("T", 0).current == generation
    found.store.abandon()


async def test_the_time_of_the_last_record_is_known_as_it_was_before_the_opening(
    tmp_path: Path,
) -> None:
    """Also the opening stores records."""
    clock = WallClock()
    first = opened(tmp_path, clock)
    assert first.stored_ms == 0
    first.store.close()
    clock.now_ms += 3_600_000
    found = opened(tmp_path, clock)
    assert found.stored_ms == START_MS
    assert found.store.last_store_time_ms == START_MS + 3_600_000
    found.store.abandon()


async def test_an_unclean_start_raises_all_generations_at_their_maxima(tmp_path: Path) -> None:
    generation = await make(tmp_path, clean=False)
    found = opened(tmp_path)
    assert not found.store.clean_start
    histories = found.state.generations.topic("T")
    assert all(h.current > generation for h in histories)
    assert [h.pairs[-1][1] for h in histories] == [2, 0]
    found.store.abandon()


async def test_damage_that_is_passed_over_raises_generations_after_a_clean_stop_too(
    tmp_path: Path,
) -> None:
    """The last message of a queue is gone with it, and the next one gets its offset."""
    generation = await make(tmp_path)
    found = opened(tmp_path)
    place, size, _ = queueunit.unit_at(found.store.read_units("T", 0, 1, 1), 0)
    found.store.close()
    root = config_for(tmp_path).store_path
    log = root / "commitlog" / offset_name(0)
    with log.open("r+b") as file:
        file.seek(place)
        file.write(b"\xff" * size)
    shutil.rmtree(root / "consumequeue")
    found = opened(tmp_path)
    assert found.store.clean_start
    assert found.store.queue_bounds("T", 0) == (0, 1)
    with pytest.raises(PositionFenced):
        found.state.generations.of("T", 0).validate(Position(generation, 2))
    found.store.abandon()


@pytest.mark.parametrize("floor", [0, 5], ids=["before it", "after it, raising nothing"])
async def test_what_a_writer_in_between_gave_out_is_fenced_where_it_began(
    tmp_path: Path, floor: int
) -> None:
    """It had not got our last message when it went on, and died before we heard of it. ``floor``:
    of our own last epoch.
    """
    await make(tmp_path)
    config, clock = config_for(tmp_path), WallClock()
    ours = open_writer(config, BatchLimits(), HOST, clock, epoch_floor=floor).store
    place, _, _ = queueunit.unit_at(ours.read_units("T", 0, 1, 1), 0)
    ours.close()
    begun = [
        EpochBranch(1, 0, 0),
        EpochBranch(4, place, 1),
        EpochBranch(ours.epoch, ours.epochs[-1][1], 1),
    ]
    found = open_writer(
        config,
        BatchLimits(),
        HOST,
        clock,
        epoch_floor=4,
        keeps_positions=False,
        branches=tuple(sorted(begun)),
    )
    history = found.state.generations.of("T", 0)
    assert (history.pairs[-1][1], history.current >> EPOCH_SHIFT) == (1, max(5, ours.epoch + 1))
    with pytest.raises(PositionFenced) as fenced:
        history.validate(Position((4 << EPOCH_SHIFT) + 1, 2))
    assert fenced.value.fence == (history.current, 1)
    found.store.abandon()


async def test_generations_rise_again_when_the_start_itself_was_cut_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await make(tmp_path, clean=False)

    def full(*_: object) -> None:
        raise DiskFull("no room for the copy")

    with monkeypatch.context() as patch:
        patch.setattr(opening, "append_now", full)
        with pytest.raises(DiskFull):
            opened(tmp_path)
    found = opened(tmp_path)  # the folder was let go
    assert found.state.generations.of("T", 0).pairs[-1][1] == 2
    found.store.abandon()


@pytest.mark.parametrize("clean", [True, False])
async def test_committed_offsets_survive(tmp_path: Path, clean: bool) -> None:
    generation = await make(tmp_path, clean=clean)
    found = opened(tmp_path)
    assert found.state.offsets.get("g", ("T", 0)) == Position(generation, 1)
    found.state.validate()
    found.store.abandon()


async def test_everything_is_on_disk_before_anybody_is_served(tmp_path: Path) -> None:
    found = opened(tmp_path)
    assert found.store.flushed_offset == found.store.appended_offset > 0
    assert found.store.queue_bounds(STATE_TOPIC, 0) == (0, 1)  # the epoch's state snapshot
    found.store.abandon()


async def test_a_folder_can_be_opened_once(tmp_path: Path) -> None:
    found = opened(tmp_path)
    with pytest.raises(StoreLocked):
        opened(tmp_path)
    found.store.abandon()


@pytest.mark.parametrize("rolled", [False, True])
async def test_a_deletion_that_only_reached_the_log_counts(tmp_path: Path, rolled: bool) -> None:
    """The process ended between the record and the removal of the files; when the log has gone on
    to another file since, recovery does not read the record again.
    """
    await make(tmp_path, clean=False)
    found = opened(tmp_path)
    records = change_records([TopicDropped("T")])
    append_now(found.store, records, HOST, START_MS)
    if rolled:
        other = change_records([TopicPut(TopicConfig("other"), found.state.generations.allocate())])
        append_now(found.store, other, HOST, START_MS)
        start = found.store.appended_offset
        while found.store.appended_offset < start + 2 * 256 * 1024:
            append(found.store, ("other", 0, [b"." * 10_000]))
    found.store.abandon()
    found = opened(tmp_path)
    assert "T" not in found.state.topics
    assert found.store.queue_bounds("T", 0) == (0, 0)
    assert found.store.queue_bounds(STATE_TOPIC, 0)[1] > 0
    found.store.abandon()


async def test_a_topic_that_is_created_again_starts_at_0_with_a_higher_generation(
    tmp_path: Path,
) -> None:
    async with living_member(tmp_path, clean=False) as member:
        await member.put("T")
        member.append("T", 0, b"old", b"older")
        before = member.state.generations.of("T", 0).current
        await member.keeper.drop_topic("T")
    async with living_member(tmp_path, clean=False) as member:
        assert "T" not in member.state.topics
        await member.put("T")
        assert member.append("T", 0, b"new").appended.queue_offsets == [0]
        after = member.state.generations.of("T", 0)
        assert after.current > before
        assert after.born > before
    found = opened(tmp_path)
    assert found.store.queue_bounds("T", 0) == (0, 1)
    assert found.state.generations.of("T", 0).born == after.born
    found.store.abandon()


async def test_two_who_take_over_from_the_same_log_begin_different_generations(
    tmp_path: Path,
) -> None:
    """The second has nothing of the first, which has told consumers of its generation."""
    await make(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    found = []
    for name, floor in (("a", 7), ("b", 8)):
        config = config_for(tmp_path / name)
        writer = open_writer(
            config, BatchLimits(), HOST, WallClock(), epoch_floor=floor, keeps_positions=False
        )
        found.append(writer.state.generations.of("T", 0).current)
        writer.store.abandon()
    assert found[0] < found[1]


@pytest.mark.parametrize("reason", ["", "queues", "pool"])
async def test_what_only_an_opening_mends_is_opened_again(tmp_path: Path, reason: str) -> None:
    await make(tmp_path)
    pool = {"transient_store_pool_enable": True} if reason == "pool" else {}
    config = config_for(tmp_path, **pool)
    follower = open_copy(config, WallClock()).store
    if reason == "queues":
        follower._opened.dispatcher.is_damaged = True
    assert can_lead(config, follower) == (not reason)
    follower.close()
    assert not can_lead(config, follower), "it is closed"


async def test_a_store_that_is_led_on_is_the_store_that_was_copied(tmp_path: Path) -> None:
    generation = await make(tmp_path)
    config, clock = config_for(tmp_path), WallClock()
    follower = open_copy(config, clock).store
    end = follower.appended_offset
    with pytest.raises(StoreDamaged, match=f"handed over up to {end + 1}"):
        open_writer(config, BatchLimits(), HOST, clock, log_end=end + 1, follower=follower)
    follower = open_copy(config, clock).store  # the folder is free again
    found = open_writer(config, BatchLimits(), HOST, clock, log_end=end, follower=follower)
    assert found.store.epochs[-1] == (found.store.epoch, end)
    assert found.state.generations.of("T", 0).current == generation
    assert found.store.queue_bounds("T", 0) == (0, 2)
    found.store.close()
