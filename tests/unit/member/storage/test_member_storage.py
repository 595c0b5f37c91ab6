from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from cometmq.errors import BatchMalformed, BrokerDraining, StoreFailed
from cometmq.member.storage import member_storage
from cometmq.member.storage.authority import Replicated, SoleWriter
from cometmq.member.storage.member_storage import (
    AckQueue,
    IndexThread,
    MemberStorage,
    Notifier,
    Segment,
    readable_at_start,
)
from cometmq.model import FlushMode, TopicConfig
from cometmq.replication.watermarks import DurabilityClass, HighWatermarks
from cometmq.store.writer import MessageStore
from tests.support.cluster.broker import encoded
from tests.support.cluster.members import NEVER, Member, SetAuthority, living_member, opened
from tests.support.stores.small_stores import (
    HOST,
    FaultyFiles,
    WallClock,
    append_keyed,
    open_store,
)
from tests.support.waiting import until

A, C, S = ("A", 0), ("C", 0), ("S", 0)


@pytest.fixture
async def still(tmp_path: Path) -> Member:
    """A member whose flusher does not run: nothing reaches the disk unless the test syncs."""
    found = Member(opened(tmp_path), NEVER)
    for name, mode in (("A", FlushMode.ASYNC), ("S", FlushMode.SYNC)):
        config = TopicConfig(name, 1, 1, flush_mode=mode)
        found.state.apply(found.state.plan_topic(config))
    return found


async def sync(member: Member) -> None:
    member.storage._synced(member.store.flush_log(), 0.0)
    member.storage.validate()


async def test_async_is_acknowledged_at_once_and_readable_after_the_sync(still: Member) -> None:
    ticket = still.append("A", 0, b"a", b"b")
    assert ticket.acked is None
    assert still.storage.bounds(A) == (0, 0, 2)
    await sync(still)
    assert still.storage.bounds(A) == (0, 2, 2)


async def test_sync_is_acknowledged_by_the_sync(still: Member) -> None:
    ticket = still.append("S", 0, b"a")
    assert ticket.acked is not None
    assert not ticket.acked.done()
    await sync(still)
    assert ticket.acked.done()
    assert still.storage.bounds(S) == (0, 1, 1)


@pytest.mark.parametrize("topics", ["AS", "SA"])
async def test_a_batch_has_the_union_of_its_segments_demands(still: Member, topics: str) -> None:
    demands = {"A": DurabilityClass.ASYNC, "S": DurabilityClass.FLUSHED}
    records = b"".join(encoded(topic, 0, b"x") for topic in topics)
    segments = [Segment(topic, 0, 1, demands[topic]) for topic in topics]
    ticket = still.storage.append(records, segments, born_host=HOST, store_host=HOST)
    assert ticket.acked is not None
    await sync(still)
    assert ticket.acked.done()
    assert [still.storage.bounds(key) for key in (A, S)] == [(0, 1, 1)] * 2


async def test_a_refused_batch_changes_nothing(still: Member) -> None:
    before = still.store.appended_offset, still.storage.watermarks.appended
    segment = Segment("A", 0, 1, DurabilityClass.ASYNC)
    with pytest.raises(BatchMalformed):
        still.storage.append(b"x" * 100, [segment], born_host=HOST, store_host=HOST)
    assert (still.store.appended_offset, still.storage.watermarks.appended) == before
    assert still.storage.bounds(A) == (0, 0, 0)


async def test_one_sync_releases_all_before_it_and_nothing_behind(still: Member) -> None:
    tickets = [still.append("S", 0, b"%d" % n) for n in range(3)]
    await sync(still)
    late = still.append("S", 0, b"late")
    assert all(t.acked is not None and t.acked.done() for t in tickets)
    assert late.acked is not None
    assert not late.acked.done()
    assert still.storage.bounds(S) == (0, 3, 4)


async def test_nothing_is_acknowledged_while_another_may_write(still: Member) -> None:
    still.set_authority.allowed = False
    ticket = still.append("A", 0, b"a")
    assert ticket.acked is not None
    await sync(still)
    waiting = asyncio.create_task(
        still.storage.stored(still.store.flushed_offset, DurabilityClass.FLUSHED)
    )
    await asyncio.sleep(0)
    assert not ticket.acked.done()
    assert not waiting.done()
    assert still.storage.bounds(A) == (0, 0, 1)
    still.set_authority.allowed = True
    still.storage.settle()
    assert ticket.acked.done()
    await waiting
    assert still.storage.bounds(A) == (0, 1, 1)


@pytest.mark.parametrize("others_at_first", [False, True])
async def test_who_is_alone_brings_to_its_disk_what_waits_for_copies(
    tmp_path: Path, others_at_first: bool
) -> None:
    async with living_member(tmp_path, policy=NEVER) as member:
        storage, on_disk = member.storage, member.store.flushed_offset
        member.set_authority.set_replicated(Replicated(on_disk, on_disk, not others_at_first))
        storage.settle()
        segment = Segment("C", 0, 1, DurabilityClass.REPLICATED)
        ticket = storage.append(encoded("C", 0, b"c"), [segment], born_host=HOST, store_host=HOST)
        assert ticket.acked is not None
        member.set_authority.set_replicated(Replicated(on_disk, on_disk, is_alone=True))
        storage.settle()
        await member.on_disk_alone()
        end = member.store.appended_offset
        member.set_authority.set_replicated(Replicated(end, end, is_alone=True))
        storage.settle()
        await until(ticket.acked.done)


async def test_waiting_for_a_position_that_is_on_disk_takes_no_time(still: Member) -> None:
    await still.storage.stored(still.store.flushed_offset, DurabilityClass.FLUSHED)


async def test_one_may_wait_for_less_than_others_wait_for_already(still: Member) -> None:
    first = still.append("S", 0, b"1")
    still.append("S", 0, b"2")
    waiting = asyncio.create_task(
        still.storage.stored(first.appended.end_offset, DurabilityClass.FLUSHED)
    )
    await asyncio.sleep(0)
    assert not waiting.done()
    await sync(still)
    await waiting


async def test_what_has_gone_counts_as_readable(still: Member) -> None:
    """Retention may be faster than the loop, which hears of a sync a moment later."""
    still.append("A", 0, b"a", b"b")
    still.store.flush_log()
    still.store.cleaner.forget_older("A", still.store.last_store_time_ms + 1)
    assert still.storage.bounds(A) == (2, 2, 2)


async def test_after_recovery_everything_is_readable(tmp_path: Path) -> None:
    async with living_member(tmp_path, clean=False) as member:
        await member.put("A")
        member.append("A", 0, b"a", b"b")
    found = opened(tmp_path)
    storage = MemberStorage(found.store, NEVER, WallClock(), SoleWriter())
    assert storage.bounds(A) == (0, 2, 2)
    storage.close()


async def test_what_was_shown_before_is_readable_from_the_start(tmp_path: Path) -> None:
    """The rest of a topic that waits for copies is when others have it."""
    async with living_member(tmp_path) as member:
        for name in ("A", "C"):
            await member.put(name)
        member.append("A", 0, b"a", b"b")
        shown = member.append("C", 0, b"1", b"2").appended.end_offset
        member.append("C", 0, b"3")
    found = opened(tmp_path)

    def demands_of(topic: str) -> DurabilityClass:
        return DurabilityClass.REPLICATED if topic == "C" else DurabilityClass.ASYNC

    nothing = readable_at_start(found.store, demands_of, HighWatermarks())
    assert [nothing.readable(key) for key in (A, C)] == [2, 0]
    end = found.store.appended_offset
    both = DurabilityClass.FLUSHED | DurabilityClass.REPLICATED
    unflushed = readable_at_start(found.store, lambda _topic: both, HighWatermarks(shown, end, 0))
    assert unflushed.readable(C) == 2, "the rest had been copied, but was on no writer's disk"
    maxima = readable_at_start(found.store, demands_of, HighWatermarks(0, shown, 0))
    authority = SetAuthority()
    authority.set_replicated(None)
    storage = MemberStorage(found.store, NEVER, WallClock(), authority, maxima=maxima)
    assert [storage.bounds(key) for key in (A, C)] == [(0, 2, 2), (0, 2, 3)]
    authority.set_replicated(Replicated(end - 1, 0, is_alone=False))
    storage.settle()
    assert storage.bounds(C) == (0, 2, 3)
    authority.set_replicated(Replicated(end, 0, is_alone=False))
    storage.settle()
    assert storage.bounds(C) == (0, 3, 3)
    storage.close()


async def test_dropping_a_topic_takes_what_waits_with_it(still: Member) -> None:
    still.append("A", 0, b"a", b"b")
    still.storage.drop_topic("A")
    assert still.storage.bounds(A) == (0, 0, 0)
    still.append("A", 0, b"new")
    await sync(still)
    assert still.storage.bounds(A) == (0, 1, 1)


async def test_a_failed_sync_ends_it_and_fails_all_who_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(store: MessageStore, write_fd: int = -1) -> int:
        raise StoreFailed("fdatasync: Input/output error")

    store = open_store(tmp_path)
    storage = MemberStorage(store, NEVER, WallClock(), SoleWriter())
    for name in ("flush_log", "flush_log_while_wanted"):
        monkeypatch.setattr(MessageStore, name, fail)
    segment = Segment("S", 0, 1, DurabilityClass.FLUSHED)
    ticket = storage.append(encoded("S", 0, b"x"), [segment], born_host=HOST, store_host=HOST)
    with pytest.raises(StoreFailed):
        await asyncio.wait_for(storage.run(3600), 10)
    assert storage.failed
    assert ticket.acked is not None
    with pytest.raises(StoreFailed):
        await ticket.acked
    storage.close()
    monkeypatch.undo()
    again = open_store(tmp_path)
    assert not again.clean_start, "after a failed sync there is no clean mark"
    again.abandon()


async def test_files_are_built_ahead_and_queues_synced(tmp_path: Path) -> None:
    async with living_member(tmp_path) as member:
        await member.put("A")
        while not member.store.next_file_wanted:
            member.append("A", 0, b"." * 20_000)
        checkpoint = tmp_path / "store/checkpoint"
        await until(lambda: not member.store.next_file_wanted)
        await until(member.storage.look_wanted.is_set)  # a file more may be one too many
        await until(lambda: any(checkpoint.read_bytes()))


async def test_a_deposed_writers_log_stays_sealed(tmp_path: Path) -> None:
    async with living_member(tmp_path) as member:
        member.storage.sealed = True
        member.storage.unseal()
        member.storage.check_open()
        member.storage.depose()
        member.storage.unseal()  # by the hand-over that it was in the middle of
        with pytest.raises(BrokerDraining):
            member.storage.check_open()


async def test_an_ack_queue_releases_exactly_what_the_position_covers() -> None:
    acks = AckQueue()
    first, second, third = acks.wait(10), acks.wait(20), acks.wait(20)
    acks.release(19)
    assert first.done()
    assert not second.done()
    acks.release(20)
    assert second.done()
    assert third.done()
    acks.validate(1 << 60)


async def test_a_cancelled_waiter_does_not_hold_up_the_others() -> None:
    acks = AckQueue()
    gone, kept = acks.wait(10), acks.wait(20)
    gone.cancel()
    acks.release(20)
    await asyncio.wait_for(kept, 1)


async def test_a_failure_reaches_every_waiter() -> None:
    acks = AckQueue()
    waiting = [acks.wait(10), acks.wait(20)]
    acks.fail(StoreFailed("fdatasync: input/output error"))
    for future in waiting:
        with pytest.raises(StoreFailed):
            await future


async def test_ends_in_an_ack_queue_may_not_go_back() -> None:
    acks = AckQueue()
    acks.wait(20)
    with pytest.raises(AssertionError):
        acks.wait(10)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MessageStore]:
    store = open_store(tmp_path)
    yield store
    store.abandon()


async def test_the_index_follows_what_is_on_the_disk(store: MessageStore) -> None:
    thread = IndexThread(store)
    moved = Notifier()
    running = asyncio.create_task(thread.run(moved))
    for _ in range(5):
        end = append_keyed(store, "T", 0, "k", "j k").end_offset
        store.flush_log()
        moved.notify()
        await until(lambda: store.index.status.position == store.appended_offset)
        assert store.index.status.position == end
    assert store.index.status.entry_count == 15
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    thread.close()


async def test_nothing_is_looked_for_while_the_log_rests(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member_storage, "INDEX_PAUSE_S", 0.0)
    thread, moved, looks = IndexThread(store), Notifier(), list[str]()

    def take_steps() -> bool:
        looks.append("look")
        return False

    monkeypatch.setattr(thread, "take_steps", take_steps)
    running = asyncio.create_task(thread.run(moved))
    for count in (1, 2, 3):
        await until(lambda: len(looks) == count)  # noqa: B023  it is done in this round
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(looks) == count
        moved.notify()
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    thread.close()


async def test_a_disk_that_fails_ends_it(tmp_path: Path) -> None:
    files = FaultyFiles()
    store = open_store(tmp_path, files=files)
    append_keyed(store, "T", 0, "k")
    store.flush_log()

    def refused(path: object) -> None:
        raise StoreFailed(f"cannot sync {path}")

    files.sync_directory = refused  # type: ignore[method-assign]
    thread = IndexThread(store)
    with pytest.raises(StoreFailed, match="sync"):
        await thread.run(Notifier())
    thread.close()
    store.abandon()


class Rests(threading.Event):
    """Notes how long was rested."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths_s: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.lengths_s.append(timeout)
        return self.is_set()


@pytest.mark.parametrize("sending", [False, True])
def test_it_rests_while_somebody_sends(
    store: MessageStore, sending: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member_storage, "INDEX_REST_S_PER_KEY", 0.001)
    thread = IndexThread(store)
    thread._closing = rests = Rests()
    append_keyed(store, "T", 0, "k j", "k i")
    store.flush_log()
    index_some = store.index_some

    def step() -> bool:
        done = index_some()
        if sending:
            append_keyed(store, "T", 0, "k")
        return done

    monkeypatch.setattr(store, "index_some", step)
    assert not thread.take_steps(), "what comes meanwhile is not on the disk"
    assert rests.lengths_s == ([0.004] if sending else [])
    thread.close()


def test_closing_waits_for_one_step_only(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = IndexThread(store)
    steps = []

    def step() -> bool:
        steps.append("one")
        thread._closing.set()
        return True

    monkeypatch.setattr(store, "index_some", step)
    assert not thread.take_steps()
    assert steps == ["one"]
    thread.close()
