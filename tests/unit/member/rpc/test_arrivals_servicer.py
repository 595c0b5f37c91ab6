"""WatchArrivals on the wire: what a stream takes at once, and what it reports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from cometmq.clock import SystemClock
from cometmq.format.queueunit import iterate
from cometmq.member.metrics import MemberMetrics
from cometmq.member.read.group_progress import GroupReads
from cometmq.member.read.replica_selector import ReplicaSelector
from cometmq.member.rpc import arrivals_servicer
from cometmq.member.rpc.arrivals_servicer import ArrivalCounts, ArrivalsServicer
from cometmq.messaging.groups import MemberTable
from cometmq.rpc.gate import Gate
from cometmq.v1 import common_pb2, member_pb2
from tests.support.cluster.members import Member, living_member
from tests.support.waiting import until

QUEUES = 8


class SlowStream:
    """A stream whose client takes messages as long as the test lets it."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[Any] = asyncio.Queue()
        self.written: list[member_pb2.WatchArrivalsResponse] = []
        self.flowing = asyncio.Event()
        self.flowing.set()

    async def read(self) -> Any:
        return await self.requests.get()

    async def room(self, size_bytes: int) -> None:
        """As much as it wants."""

    def leave_room(self) -> None:
        """There was enough."""

    async def write(self, message: bytes) -> None:
        self.written.append(member_pb2.WatchArrivalsResponse.FromString(message))
        await self.flowing.wait()


class Watched:
    """A member's arrivals and one stream of them."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.registry = CollectorRegistry()
        metrics = MemberMetrics(self.registry, "c", "g1")
        adviser = ReplicaSelector(False, 40.0, list)
        groups = GroupReads(
            member.state, member.reader, MemberTable(10), adviser, SystemClock(), lambda *_: None
        )
        storage = member.storage
        counts = ArrivalCounts(metrics, groups, member.state)
        self.servicer = ArrivalsServicer(
            storage.arrivals, member.reader, storage.flusher.flush_now, Gate(), counts
        )
        self.stream = SlowStream()

    async def say(self, **fields: Any) -> None:
        await self.stream.requests.put(member_pb2.WatchArrivalsRequest(**fields))
        await until(self.stream.requests.empty)

    @property
    def arrivals(self) -> list[member_pb2.Arrival]:
        return [arrival for message in self.stream.written for arrival in message.arrivals]

    async def told(self, maxima: dict[int, int]) -> None:
        """Wait until this was told last of each queue."""
        await until(lambda: {a.queue.queue_id: a.max_offset for a in self.arrivals} == maxima)

    def value(self, name: str, **labels: str) -> float:
        return sum(
            sample.value
            for metric in self.registry.collect()
            for sample in metric.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    async with living_member(tmp_path) as member:
        await member.put("T", QUEUES)
        found = Watched(member)
        serving = asyncio.create_task(found.servicer.WatchArrivals(None, found.stream))
        yield found
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


def queues(*numbers: int) -> list[common_pb2.QueueRef]:
    return [common_pb2.QueueRef(topic="T", queue_id=number) for number in numbers]


async def test_wanted_messages_come_along_and_are_counted(watched: Watched) -> None:
    await watched.say(add=queues(0, 1), inline_wanted=queues(0))
    await watched.told({0: 0, 1: 0})
    watched.member.append("T", 0, b"one", b"two")
    watched.member.append("T", 1, b"three")
    await watched.member.on_disk()
    await watched.told({0: 2, 1: 1})
    with_messages, without = sorted(watched.arrivals[2:], key=lambda one: one.queue.queue_id)
    messages = with_messages.messages
    assert (messages.first_offset, len(messages.sizes), with_messages.max_offset) == (0, 2, 2)
    store = watched.member.store
    assert messages.records == store.read_records(spans(watched.member, 0), nowait=False)
    assert not without.HasField("messages")
    assert watched.value("cometmq_arrival_bytes_total") == len(messages.records)


def spans(member: Member, queue_id: int) -> list[tuple[int, int]]:
    _, end = member.store.queue_bounds("T", queue_id)
    units = member.store.read_units("T", queue_id, 0, end, nowait=False)
    return [(log_offset, size) for log_offset, size, _ in iterate(units)]


async def test_a_slow_stream_has_one_bounded_message_under_way(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals_servicer, "INLINE_BYTES_PER_MESSAGE_MAX", 3_000)
    every = queues(*range(QUEUES))
    await watched.say(add=every, inline_wanted=every)
    await watched.told(dict.fromkeys(range(QUEUES), 0))
    watched.stream.flowing.clear()
    for _ in range(3):
        for queue_id in range(QUEUES):
            watched.member.append("T", queue_id, b"x" * 1_000)
        await watched.member.on_disk()
        await asyncio.sleep(0)
    assert len(watched.stream.written) <= 2
    watched.stream.flowing.set()
    await watched.told(dict.fromkeys(range(QUEUES), 3))
    sizes = [
        sum(len(arrival.messages.records) for arrival in message.arrivals)
        for message in watched.stream.written
    ]
    assert max(sizes) < 3_000 + 3 * 1_200, "the last arrival of a message may exceed it"
    assert len(sizes) > 3


async def test_what_was_delivered_counts_as_messages_out(watched: Watched) -> None:
    one = {"message_count": 3, "record_bytes": 70}
    delivered = [
        member_pb2.InlineDelivery(topic="T", group="made-up", **one),
        member_pb2.InlineDelivery(topic="deleted", group="", **one),
    ]
    await watched.say(inline_deliveries=delivered)
    await until(lambda: watched.value("rocketmq_messages_out_total") > 0)
    assert watched.value("rocketmq_messages_out_total") == 3, "a deleted topic has no series"
    assert watched.value("rocketmq_throughput_out_total", topic="T", consumer_group="") == 70


async def test_who_only_half_closes_goes_on_watching(watched: Watched) -> None:
    await watched.say(add=queues(0))
    await watched.told({0: 0})
    await watched.stream.requests.put(grpc.aio.EOF)
    watched.member.append("T", 0, b"one")
    await watched.member.on_disk()
    await watched.told({0: 1})
