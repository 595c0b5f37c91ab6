from __future__ import annotations

import asyncio
from typing import Any

from cometmq.errors import MessageNotFound
from cometmq.format import queueunit, record
from cometmq.member.read.reader import QueueView
from cometmq.member.rpc.offset_snapshot import OffsetSnapshot, QueueRow, queue_proto
from cometmq.messaging.changes import GenerationsRaised, TopicDropped
from cometmq.messaging.groups import GroupSettings, MemberTable
from cometmq.messaging.offsets import CommittedOffset
from cometmq.messaging.state import BrokerState
from cometmq.model import Position, Subscription, TopicConfig

HOST = record.host_bytes("127.0.0.1", 1)
BOUNDS = (2, 10)  # of every queue


class Store:
    """Every offset of every queue has a message, stored at 1000 + offset. ``cold``: reads go to
    the disk; ``gone``: log offsets that retention has removed; ``before``: called at each read."""

    def __init__(self) -> None:
        self.cold = False
        self.gone: set[int] = set()
        self.wrong_queue = False
        self.before: Any = lambda: None
        self.reads = 0

    def read_units(
        self, topic: str, queue_id: int, offset: int, count: int, *, nowait: bool
    ) -> bytes:
        if nowait and self.cold:
            raise BlockingIOError
        self.before()
        self.reads += 1
        return queueunit.pack(offset * 1000, 100, 0)

    def read_records(self, spans: list[tuple[int, int]], *, nowait: bool) -> bytes:
        [(log_offset, _)] = spans
        if log_offset in self.gone:
            raise MessageNotFound("gone")
        offset = log_offset // 1000
        return record.encode(
            b"T", 7 if self.wrong_queue else 0, b"", b"",
            born_time_ms=1, born_host=HOST, store_host=HOST,
            queue_offset=offset, store_time_ms=1000 + offset,
        )  # fmt: skip


class Bounds:
    """A reader that knows only bounds."""

    def __init__(self, state: BrokerState) -> None:
        self._state = state

    def queue(self, topic: str, queue_id: int) -> QueueView:
        low, high = BOUNDS
        return QueueView(self._state.generations.of(topic, queue_id).current, low, high, high)


class Broker:
    """Topic T with one queue, and what a snapshot of it needs."""

    def __init__(self) -> None:
        self.state = BrokerState()
        self.members = MemberTable()
        self.store = Store()
        self.put("T")

    def put(self, name: str, queues: int = 1) -> None:
        config = TopicConfig(name, read_queue_count=queues, write_queue_count=queues)
        self.state.apply(self.state.plan_topic(config))

    def commit(self, group: str, offset: int, generation: int = 1, topic: str = "T") -> None:
        self.state.groups[group] = GroupSettings(group)
        commit = CommittedOffset(group, topic, 0, Position(generation, offset))
        self.state.offsets.restore(commit)

    async def rows(self) -> list[QueueRow]:
        reader: Any = Bounds(self.state)
        store: Any = self.store
        snapshot = OffsetSnapshot(store, reader, self.state, self.members)
        return [row async for piece in snapshot.pieces() for row in piece]

    async def row(self) -> QueueRow:
        [found] = await self.rows()
        return found


async def committed_time(broker: Broker) -> int:
    [group] = (await broker.row()).groups
    return group.store_time_ms


async def test_times_of_the_first_open_and_of_the_last_message() -> None:
    broker = Broker()
    broker.commit("G", 5)
    row = await broker.row()
    assert (row.max_store_time_ms, row.groups[0].store_time_ms) == (1009, 1005)
    assert (row.view.min_offset, row.view.max_offset, row.view.generation) == (2, 10, 1)


async def test_nothing_that_can_be_read_has_no_time() -> None:
    for offset in (0, 1, 10):  # removed by retention, removed, not written yet
        broker = Broker()
        broker.commit("G", offset)
        assert await committed_time(broker) == 0


async def test_a_position_of_an_older_generation_counts_as_far_as_it_holds() -> None:
    for offset, expected in ((4, 1004), (5, 1005), (6, 0)):
        broker = Broker()
        broker.commit("G", offset)
        broker.state.apply(GenerationsRaised(9, {"T": (5,)}))
        assert await committed_time(broker) == expected


async def test_groups_at_the_same_offset_cost_one_read() -> None:
    broker = Broker()
    for name in ("A", "B", "C"):
        broker.commit(name, 9)
    await broker.row()
    assert broker.store.reads == 1


async def test_a_message_that_went_meanwhile_has_no_time() -> None:
    broker = Broker()
    broker.commit("G", 5)
    broker.store.gone = {5000}
    assert await committed_time(broker) == 0


async def test_a_record_of_another_queue_is_not_believed() -> None:
    broker = Broker()
    broker.commit("G", 5)
    broker.store.wrong_queue = True
    assert await committed_time(broker) == 0


async def test_a_topic_made_anew_meanwhile_has_no_time() -> None:
    broker = Broker()
    broker.commit("G", 5)

    def again() -> None:
        broker.store.before = lambda: None
        broker.state.apply(TopicDropped("T"))
        broker.put("T")

    broker.store.before = again
    row = await broker.row()
    assert (row.view.generation, row.max_store_time_ms) == (1, 0)


async def test_cold_reads_leave_the_loop_free() -> None:
    broker = Broker()
    broker.commit("G", 5)
    broker.store.cold = True
    loop = asyncio.get_running_loop()
    turned = asyncio.Event()
    broker.store.before = lambda: loop.call_soon_threadsafe(turned.set)
    assert await committed_time(broker) == 1005
    await turned.wait()


async def test_members_read_the_queues_they_see_only() -> None:
    broker = Broker()
    broker.put("T", queues=3)
    broker.put("T", queues=2)  # queue 2 is hidden
    broker.members.put("G", "a", 1, [Subscription("T")])
    broker.members.put("G", "b", 2, [Subscription("T"), Subscription("elsewhere")])
    rows = await broker.rows()
    assert [[g.member_count for g in row.groups] for row in rows] == [[2], [2], []]
    assert rows[0].groups[0].committed is None


async def test_a_topic_deleted_between_two_pieces_is_left_out() -> None:
    broker = Broker()
    broker.put("A", queues=300)  # more than a piece
    reader: Any = Bounds(broker.state)
    store: Any = broker.store
    names = set()
    async for piece in OffsetSnapshot(store, reader, broker.state, broker.members).pieces():
        names |= {row.key[0] for row in piece}
        if "T" in broker.state.topics:
            broker.state.apply(TopicDropped("T"))
    assert names == {"A"}


async def test_on_the_wire_unknown_is_absent_or_0() -> None:
    broker = Broker()
    broker.commit("G", 0)
    broker.members.put("H", "a", 1, [Subscription("T")])
    queue = queue_proto(await broker.row())
    g, h = queue.groups
    assert (g.group, g.HasField("committed"), g.committed.offset) == ("G", True, 0)
    assert (g.member_count, g.committed_store_time_ms) == (0, 0)
    assert (h.group, h.HasField("committed"), h.member_count) == ("H", False, 1)
