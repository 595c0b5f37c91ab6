from __future__ import annotations

import asyncio
import shutil
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import pytest

from cometmq.errors import CometError, ReplicationBroken, StateTooNew
from cometmq.format.batch import BatchLimits
from cometmq.member.state.follower import INLINE_BYTES_MAX, FollowerStorage, cut
from cometmq.member.state.opening import open_copy, open_writer
from cometmq.member.state.statelog import append_now, encode_record
from cometmq.member.storage.flusher import FlushPolicy
from cometmq.messaging.changes import Change
from cometmq.messaging.groups import GroupSettings
from cometmq.messaging.state import STATE_QUEUE_ID, STATE_TOPIC, change_records
from cometmq.model import ReplicationMode, TopicConfig
from cometmq.replication.watermarks import DurabilityClass, HighWatermarks
from cometmq.store.writer import MessageStore
from tests.support.cluster.broker import config_for
from tests.support.stores.small_stores import HOST, WallClock, bodies, encoded

T = TypeVar("T")


class Pair:
    """A writer's store, and a copy that follows when told."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        found = open_writer(config_for(directory / "writer"), BatchLimits(), HOST, WallClock())
        self.writer: MessageStore = found.store
        self.state = found.state
        self.open()

    def open(self) -> None:
        found = open_copy(config_for(self._directory / "copy"), WallClock())
        self.replicated = found.state.state
        self.dropped_groups: list[str] = []
        self.copy = FollowerStorage(
            found.store,
            found.state,
            FlushPolicy(),
            WallClock(),
            on_drop_group=self.dropped_groups.append,
        )
        found.store.adopt_epochs(self.writer.epochs)

    def close(self) -> None:
        self.writer.abandon()
        self.copy.close()

    def change(self, change: Change) -> int:
        [record] = change_records([change])
        end = self.append(encode_record(record, HOST, 0))
        self.state.apply(change)
        return end

    def append(self, state_record: bytes) -> int:
        segment = (STATE_TOPIC, STATE_QUEUE_ID, 1)
        written = self.writer.append(state_record, [segment], born_host=HOST, store_host=HOST)
        return written.end_offset

    def put(self, topic: str, queues: int = 1) -> int:
        return self.change(self.state.plan_topic(TopicConfig(topic, queues, queues)))

    def send(self, topic: str, *found: bytes) -> int:
        records = b"".join(encoded(topic, 0, body) for body in found)
        segments = [(topic, 0, len(found))]
        return self.writer.append(records, segments, born_host=HOST, store_host=HOST).end_offset

    def follow(self) -> None:
        store = self.copy.store
        while chunk := self.writer.read_chunk(store.appended_offset, INLINE_BYTES_MAX):
            at_once(self.copy.copy(store.appended_offset, chunk.data))
            self.copy.validate()

    def show(self, position: int) -> None:
        """All of ours is on the disk, and the writer shows so much."""
        self.copy._synced(self.copy.store.flush_log(), 0.0)
        self.copy.raise_marks(HighWatermarks(position, position, position), 0)
        self.copy.validate()

    def forget(self, log_files: int) -> None:
        """The writer lets so many files of its log go, and all that is in no others."""
        self.writer.flush_log()
        self.writer.flush_queues()
        cleaner = self.writer.cleaner
        cleaner.forget_before(cleaner.log_files()[log_files - 1].end)
        for _ in range(log_files):
            cleaner.remove_first()
        cleaner.remove_spare_files()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path)
    yield pair
    pair.close()


def at_once(work: Coroutine[Any, Any, T]) -> None:
    try:
        work.send(None)
    except StopIteration:
        return
    raise AssertionError("it waits")


def test_state_takes_effect_when_it_is_visible(pair: Pair) -> None:
    put = pair.put("T")
    sent = pair.send("T", b"a", b"b")
    pair.follow()
    assert pair.copy.bounds(("T", 0)) == (0, 0, 2)
    pair.show(put - 1)
    assert "T" not in pair.replicated.topics
    pair.show(put)
    assert "T" in pair.replicated.topics
    assert pair.copy.bounds(("T", 0)) == (0, 0, 2)
    pair.show(sent)
    assert pair.copy.bounds(("T", 0)) == (0, 2, 2)


@pytest.mark.parametrize(
    ("tag", "body", "error"),
    [
        ("CHANGE", b'{"v":1,"c":[{"k":"note","t":"x"}]}', StateTooNew),
        ("CHANGE", b'{"v":1,"c":[{"k":"kinds","n":["kinds","note"]}]}', StateTooNew),
        ("CHANGE", b'{"v":1,"c":[{"k":"topic-drop","n":"T","why":"x"}]}', StateTooNew),
        ("CHANGE", b'{"v":2,"c":[]}', StateTooNew),
        ("COPY_ALL", b'{"v":1,"c":[]}', StateTooNew),
        ("CHANGE", b'{"v":1,"c":[{"k":"topic-drop"}]}', ReplicationBroken),
        ("CHANGE", b"no state", ReplicationBroken),
    ],
)
@pytest.mark.parametrize("large", [False, True])
def test_state_that_a_follower_does_not_know_does_not_enter_its_log(
    pair: Pair, tag: str, body: bytes, error: type[CometError], large: bool
) -> None:
    pair.show(pair.put("T"))
    pair.follow()
    store = pair.copy.store
    end = store.appended_offset
    pair.send("T", b"before" * (large and 10_000))
    pair.append(encoded(STATE_TOPIC, STATE_QUEUE_ID, body, tag=tag))
    pair.send("T", b"behind")
    chunk = pair.writer.read_chunk(end, 1 << 20)
    assert chunk is not None
    with pytest.raises(error):
        asyncio.run(pair.copy.copy(end, chunk.data))
    assert store.appended_offset == end
    assert store.queue_bounds("T", 0) == (0, 0)
    pair.copy.validate()


def test_a_change_of_the_topic_holds_for_what_was_sent_after_it(pair: Pair) -> None:
    pair.put("T")
    pair.follow()
    pair.show(pair.writer.appended_offset)
    replicated = TopicConfig("T", 1, 1, replication_mode=ReplicationMode.APPENDED)
    pair.change(pair.state.plan_topic(replicated))
    sent = pair.send("T", b"a")
    pair.follow()
    pair.copy._synced(pair.copy.store.flush_log(), 0.0)
    pair.copy.raise_marks(HighWatermarks(sent, 0, 0), 0)
    assert pair.replicated.topics.get("T") == replicated
    assert pair.copy.bounds(("T", 0)) == (0, 0, 1), "on disks, but not copied yet"
    pair.copy.raise_marks(HighWatermarks(sent, sent, 0), 0)
    assert pair.copy.bounds(("T", 0)) == (0, 1, 1)


def test_a_change_that_waits_holds_also_when_one_before_it_takes_effect(pair: Pair) -> None:
    pair.put("T")
    other = pair.put("U")
    replicated = TopicConfig("T", 1, 1, replication_mode=ReplicationMode.APPENDED)
    pair.change(pair.state.plan_topic(replicated))
    pair.follow()
    pair.show(other)
    sent = pair.send("T", b"a")
    pair.follow()
    pair.copy._synced(pair.copy.store.flush_log(), 0.0)
    pair.copy.raise_marks(HighWatermarks(sent, 0, 0), 0)
    assert pair.replicated.topics.get("T") == replicated
    assert pair.copy.bounds(("T", 0)) == (0, 0, 1), "on disks, but not copied yet"


def test_no_message_is_seen_before_the_state_that_it_belongs_to(pair: Pair) -> None:
    """A new writer's state snapshot waits for all in sync; an asynchronous topic's messages do
    not.
    """
    pair.put("T")
    pair.follow()
    pair.show(pair.writer.appended_offset)
    before = pair.replicated.generations.of("T", 0).current
    [raised] = pair.state.plan_raise(lambda *_queue: 0)
    pair.change(raised)
    sent = pair.send("T", b"a")
    pair.follow()
    pair.copy._synced(pair.copy.store.flush_log(), 0.0)
    pair.copy.raise_marks(HighWatermarks(sent, 0, 0), 0)
    assert pair.copy.bounds(("T", 0)) == (0, 1, 1)
    assert pair.replicated.generations.of("T", 0).current > before


def test_what_is_there_at_a_start_is_shown_when_the_writer_shows_all_of_it(pair: Pair) -> None:
    pair.put("T")
    sent = pair.send("T", b"a")
    pair.follow()
    pair.copy.close()
    pair.open()
    pair.show(sent - 1)
    assert pair.copy.bounds(("T", 0)) == (0, 0, 1)
    pair.show(sent)
    assert pair.copy.bounds(("T", 0)) == (0, 1, 1)


def test_a_topic_that_is_deleted_and_comes_again(pair: Pair) -> None:
    pair.put("T")
    pair.send("T", b"old", b"older")
    pair.change(pair.state.plan_drop("T"))
    pair.writer.drop_topic("T")
    pair.put("T")
    end = pair.send("T", b"new")
    pair.follow()
    pair.show(end)
    assert pair.copy.bounds(("T", 0)) == (0, 1, 1)
    assert bodies(pair.copy.store, "T", 0) == [b"new"]
    assert list(pair.replicated.as_changes()) == list(pair.state.as_changes())


def test_a_group_that_is_deleted_goes_from_the_copy_too(pair: Pair) -> None:
    pair.change(pair.state.plan_group(GroupSettings("g")))
    end = pair.change(pair.state.plan_group_drop("g"))
    pair.follow()
    pair.show(end)
    assert pair.dropped_groups == ["g"]
    assert not pair.replicated.groups


def test_a_cut_that_takes_a_deletion_back_begins_anew(pair: Pair) -> None:
    pair.put("T")
    end = pair.send("T", b"a", b"b")
    pair.change(pair.state.plan_drop("T"))
    pair.follow()
    pair.copy.end_threads()
    cut(pair.copy.store, end)
    assert pair.copy.store.appended_offset == 0
    pair.copy.close()
    pair.open()
    pair.writer.drop_topic("T")
    pair.follow()
    assert pair.copy.store.appended_offset == pair.writer.appended_offset


def test_a_copy_of_a_log_whose_beginning_has_gone_counts_on(tmp_path: Path) -> None:
    """A queue that nobody writes to any more has left no message; the state snapshot tells of
    it.
    """
    pair = Pair(tmp_path)
    pair.put("idle", 2)
    pair.put("T")
    pair.send("idle", b"a", b"b", b"c")
    for _ in range(15):
        pair.send("T", bytes(20_000))
    copy = pair.state.snapshot_records(
        next_offset_of=lambda *queue: pair.writer.queue_bounds(*queue)[1]
    )
    append_now(pair.writer, copy, HOST, 0)
    pair.forget(1)
    pair.copy.store.reset_to(pair.writer.min_offset)
    pair.follow()
    assert pair.copy.store.queue_bounds("idle", 0) == (3, 3)
    assert pair.copy.store.queue_bounds("idle", 1) == (0, 0)
    assert pair.copy.store.queue_bounds("T", 0) == pair.writer.queue_bounds("T", 0)
    pair.close()
    found = open_writer(config_for(tmp_path / "copy"), BatchLimits(), HOST, WallClock())
    records = encoded("idle", 0, b"d")
    appended = found.store.append(records, [("idle", 0, 1)], born_host=HOST, store_host=HOST)
    assert appended.queue_offsets == [3]
    found.store.abandon()


def test_queues_that_are_made_anew_count_on(tmp_path: Path) -> None:
    """As above, when only the queues' files are lost."""
    pair = Pair(tmp_path)
    pair.put("idle")
    pair.put("T")
    pair.send("idle", b"a", b"b", b"c")
    for _ in range(15):
        pair.send("T", bytes(20_000))
    copy = pair.state.snapshot_records(
        next_offset_of=lambda *queue: pair.writer.queue_bounds(*queue)[1]
    )
    append_now(pair.writer, copy, HOST, 0)
    pair.forget(1)
    pair.close()
    shutil.rmtree(tmp_path / "writer/store/consumequeue")
    found = open_writer(config_for(tmp_path / "writer"), BatchLimits(), HOST, WallClock())
    assert found.store.queue_bounds("idle", 0) == (3, 3)
    found.store.abandon()


def test_any_other_cut_keeps_what_is_before_it(pair: Pair) -> None:
    pair.put("T")
    pair.put("U")
    pair.change(pair.state.plan_drop("U"))
    end = pair.send("T", b"a")
    pair.send("T", b"b")
    pair.follow()
    pair.copy.end_threads()
    cut(pair.copy.store, end)
    assert pair.copy.store.appended_offset == end
    assert bodies(pair.copy.store, "T", 0) == [b"a"]


async def test_a_sync_may_be_ahead_of_the_loop(pair: Pair) -> None:
    """A thread appends a large chunk while another syncs: the loop hears of the sync first."""
    pair.put("T")
    end = pair.send("T", b"x" * 2 * INLINE_BYTES_MAX)
    store = pair.copy.store
    chunk = pair.writer.read_chunk(0, 10 * INLINE_BYTES_MAX)
    assert chunk is not None
    append = store.append

    def sync() -> None:
        try:
            pair.show(store.appended_offset)
        except AssertionError as error:
            heard.set_exception(error)
        else:
            heard.set_result(None)

    def append_and_sync(*arguments: Any) -> int:
        result = append(*arguments)
        loop.call_soon_threadsafe(sync)
        return result

    loop = asyncio.get_running_loop()
    heard: asyncio.Future[None] = loop.create_future()
    with mock.patch.object(store, "append", append_and_sync):
        await pair.copy.copy(0, chunk.data)
    await heard
    pair.show(end)
    assert pair.copy.bounds(("T", 0)) == (0, 1, 1)
    assert pair.copy.watermarks.flushed == end


async def test_a_follower_counts_as_safe_what_its_writer_has_shown_to_be(tmp_path: Path) -> None:
    """What a topic asks for, and both disks: then other followers in sync have it, too."""
    pair = Pair(tmp_path)
    pair.put("T")
    end = pair.send("T", b"a")
    pair.follow()
    asked = DurabilityClass.REPLICATED

    async def is_safe(demands: DurabilityClass) -> bool:
        return await pair.copy.is_safe(end, demands, 0.0)

    pair.copy.raise_marks(HighWatermarks(end, end, end), 0)
    assert not await is_safe(asked), "it is not on the follower's own disk"
    pair.copy._synced(pair.copy.store.flush_log(), 0.0)
    assert await is_safe(asked)
    pair.close()
    pair.open()
    pair.show(0)
    pair.copy.raise_marks(HighWatermarks(end, end - 1, end - 1), 0)
    assert await is_safe(DurabilityClass.ASYNC)
    assert not await is_safe(asked), "another follower lacks it"
    pair.copy.close()
