from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from cometmq.errors import InvalidRequest, MessageNotFound
from cometmq.member.read.throttle import CatchUpThrottle
from cometmq.member.storage.authority import SoleWriter
from cometmq.member.storage.flusher import FlushPolicy
from cometmq.member.storage.member_storage import MemberStorage
from cometmq.messaging.changes import KINDS
from cometmq.replication import follower
from cometmq.replication.follower import Ack, LogView
from cometmq.replication.lease import ReplicaId
from cometmq.replication.watermarks import HighWatermarks
from cometmq.store.log.commitlog import Chunk
from services.broker.replication import replicas as module
from services.broker.replication.replicas import MARKS_S, FollowerTable, Replicas
from tests.support.stores.small_stores import WallClock, append, open_store


@pytest.fixture
async def replicas(tmp_path: Path) -> AsyncIterator[Replicas]:
    """Of a writer that has a small log, nothing of it synced since."""
    clock = WallClock()
    store = open_store(tmp_path)
    storage = MemberStorage(store, FlushPolicy(), clock, SoleWriter())
    found = Replicas(storage, FollowerTable(), CatchUpThrottle(0), clock, AsyncMock(return_value=0))
    yield found
    found.close()
    storage.end_threads()
    store.abandon()


def grow(replicas: Replicas, size: int = 100) -> int:
    end = append(replicas.storage.store, ("A", 0, [bytes(size)])).end_offset
    replicas.storage.watermarks.append_to(end)
    replicas.storage.moved.notify()
    return end


def flush(replicas: Replicas) -> None:
    replicas.storage._synced(replicas.storage.store.flush_log(), 0.0)


async def test_what_there_is_is_sent_and_then_what_comes(replicas: Replicas) -> None:
    end = grow(replicas)
    with replicas.join(ReplicaId(1, "store"), 0, KINDS) as sender:
        first = await sender.next_frame()
        assert first is not None
        assert (first.offset, len(first.data), first.writer_end) == (0, end, end)
        waiting = asyncio.create_task(sender.next_frame())
        await asyncio.sleep(0)
        assert not waiting.done()
        sender.acked(Ack(end, 0, 0, 0))
        later = grow(replicas)
        second = await waiting
        assert second is not None
        assert (second.offset, second.writer_end) == (end, later)
        assert replicas.bytes_sent == later


async def test_what_comes_while_something_is_unanswered_is_sent_together(
    replicas: Replicas,
) -> None:
    end = grow(replicas)
    with replicas.join(ReplicaId(1, "store"), 0, KINDS) as sender:
        assert await sender.next_frame() is not None
        waiting = asyncio.create_task(sender.next_frame())
        for _ in range(3):
            grow(replicas)
            await asyncio.sleep(0)
            assert not waiting.done()
        sender.acked(Ack(end, 0, 0, 0))
        frame = await waiting
        assert frame is not None
        later = replicas.storage.store.appended_offset
        assert (frame.offset, len(frame.data)) == (end, later - end)


async def test_much_waits_for_no_answer(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GATHER_BYTES", 1000)
    grow(replicas)
    with replicas.join(ReplicaId(1, "store"), 0, KINDS) as sender:
        assert await sender.next_frame() is not None
        while replicas.storage.store.appended_offset - sender.replica.sent < 1000:
            grow(replicas)
        frame = await sender.next_frame()
        assert frame is not None
        assert len(frame.data) >= 1000


async def test_positions_that_move_are_told_without_bytes(replicas: Replicas) -> None:
    clock = replicas.clock
    assert isinstance(clock, WallClock)
    end = grow(replicas)
    with replicas.join(ReplicaId(1, "store"), 0, KINDS) as sender:
        first = await sender.next_frame()
        assert first is not None
        assert first.visible == HighWatermarks()
        sender.acked(Ack(end, 0, 0, 0))
        waiting = asyncio.create_task(sender.next_frame())
        await asyncio.sleep(0)
        clock.now_ms += int(MARKS_S * 1000) + 1
        flush(replicas)
        second = await waiting
        assert second is not None
        assert (second.data, second.visible) == (b"", HighWatermarks(end, end, end))


async def test_bytes_do_not_wait_with_the_marks(replicas: Replicas) -> None:
    end = grow(replicas)
    with replicas.join(ReplicaId(1, "store"), 0, KINDS) as sender:
        assert await sender.next_frame() is not None
        sender.acked(Ack(end, 0, 0, 0))
        flush(replicas)
        waiting = asyncio.create_task(sender.next_frame())
        await asyncio.sleep(0)
        grow(replicas)
        frame = await waiting
        assert frame is not None
        assert frame.data
        assert frame.visible == HighWatermarks(end, end, end)


async def test_who_waits_for_its_disk_is_told_at_once(replicas: Replicas) -> None:
    end = grow(replicas)
    with replicas.join(ReplicaId(1, "store"), 0, KINDS) as sender:
        assert await sender.next_frame() is not None
        replicas.storage.followers_flush_to = end
        frame = await sender.next_frame()
        assert frame is not None
        assert (frame.data, frame.flush_to) == (b"", end)


async def test_a_wait_for_its_disk_is_told_with_the_bytes_that_are_to_be_there(
    replicas: Replicas,
) -> None:
    end = grow(replicas)
    with replicas.join(ReplicaId(1, "store"), 0, KINDS) as sender:
        assert await sender.next_frame() is not None
        replicas.storage.followers_flush_to = later = grow(replicas)
        waiting = asyncio.create_task(sender.next_frame())
        await asyncio.sleep(0)
        assert not waiting.done()
        sender.acked(Ack(end, 0, 0, 0))
        frame = await waiting
        assert frame is not None
        assert (frame.offset + len(frame.data), frame.flush_to) == (later, later)


async def test_a_heartbeat_comes_when_nothing_happens(replicas: Replicas) -> None:
    clock = replicas.clock
    assert isinstance(clock, WallClock)
    with replicas.join(ReplicaId(1, "store"), 0, KINDS) as sender:
        assert await sender.next_frame() is not None
        clock.now_ms += int(follower.HEARTBEAT_S * 1000)
        frame = await sender.next_frame()
        assert frame is not None
        assert frame.data == b""


async def test_the_window_holds_back_until_the_follower_has_it(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "WINDOW_BYTES_MAX", 1000)
    for user in (follower, module):
        monkeypatch.setattr(user, "CHUNK_BYTES_MAX", 400)
    monkeypatch.setattr(module, "GATHER_BYTES", 1)
    for _ in range(20):
        grow(replicas)
    with replicas.join(ReplicaId(1, "store"), 0, KINDS) as sender:
        replica = sender.replica
        for _ in range(3):
            while replica.has_room:
                assert await sender.next_frame() is not None
            assert 1000 - 400 < replica.sent - replica.appended <= 1000
            waiting = asyncio.create_task(sender.next_frame())
            await asyncio.sleep(0)
            assert not waiting.done(), "there is more, but it waits"
            sender.acked(Ack(replica.sent, 0, 0, 0))
            frame = await waiting
            assert frame is not None
            assert frame.data
        with pytest.raises(InvalidRequest):
            sender.acked(Ack(replica.sent + 1, 0, 0, 0))


async def test_a_newer_stream_takes_the_place_of_an_older(replicas: Replicas) -> None:
    with ExitStack() as ending:
        older = ending.enter_context(replicas.join(ReplicaId(1, "store"), 0, KINDS))
        assert [r.member_id for r in replicas.connected()] == [1]
        with replicas.join(ReplicaId(1, "store"), 0, KINDS) as newer:
            assert await older.next_frame() is None
            ending.close()
            assert await newer.next_frame() is not None
            assert replicas.connected() == [newer.replica]
            assert newer.replica.connected
    assert replicas.connected() == []


async def test_what_an_older_stream_was_reading_is_not_skipped_by_the_newer(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share the replica: what the older counted as sent the newer would leave out."""
    grow(replicas)
    read, goes_on = replicas.read_chunk, asyncio.Event()

    async def slowly(offset: int, bytes_max: int) -> Chunk | None:
        await goes_on.wait()
        return await read(offset, bytes_max)

    with replicas.join(ReplicaId(1, "store"), 0, KINDS) as older:
        with monkeypatch.context() as patch:
            patch.setattr(replicas, "read_chunk", slowly)
            reading = asyncio.create_task(older.next_frame())
            await asyncio.sleep(0)
        with replicas.join(ReplicaId(1, "store"), 0, KINDS) as newer:
            goes_on.set()
            assert await reading is None
            frame = await newer.next_frame()
            assert frame is not None
            assert (frame.offset, bool(frame.data)) == (0, True)


async def test_what_is_still_to_be_sent_is_kept_if_possible(replicas: Replicas) -> None:
    pins = replicas.storage.store.cleaner.pins
    end = grow(replicas)
    with replicas.join(ReplicaId(1, "store"), 0, KINDS) as sender:
        assert pins.lowest() == 0
        await sender.next_frame()
        assert pins.lowest() == end
    assert pins.lowest() is None


async def test_a_follower_that_fell_off_is_told_to_begin_anew(replicas: Replicas) -> None:
    store = replicas.storage.store
    for _ in range(4):
        grow(replicas, 10_000)
    flush(replicas)
    store.flush_queues()
    with replicas.join(ReplicaId(1, "store"), 0, KINDS) as sender:
        store.cleaner.forget_before(store.cleaner.log_files()[0].end)
        store.cleaner.remove_first()
        with pytest.raises(MessageNotFound):
            await sender.next_frame()
    behind = LogView(((1, 0),), 0, 500, 0, 0)
    assert await replicas.start_of_copy(behind) == store.min_offset > 500
