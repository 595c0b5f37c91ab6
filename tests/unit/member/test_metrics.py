from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from cometmq.errors import StoreFailed
from cometmq.format.properties import encode
from cometmq.member.metrics import DiskCollector, MemberCollector, MemberMetrics
from cometmq.messaging.groups import MemberTable
from cometmq.model import Position
from services.broker.groups.membership import Groups
from tests.support.cluster.members import Member, living_member
from tests.support.waiting import until

NODE = {"cluster": "c", "node_type": "broker", "node_id": "g1"}


class NothingInFlight:
    in_flight_bytes = 0


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry(auto_describe=True)


@pytest.fixture
def metrics(registry: CollectorRegistry) -> MemberMetrics:
    return MemberMetrics(registry, "c", "g1")


@pytest.fixture
async def member(tmp_path: Path) -> AsyncIterator[Member]:
    async with living_member(tmp_path) as member:
        await member.put("T", 2)
        yield member


def collected(
    member: Member, metrics: MemberMetrics, registry: CollectorRegistry
) -> tuple[MemberCollector, Groups]:
    groups = Groups(MemberTable())
    collector = MemberCollector(metrics, member.storage, member.state, groups, NothingInFlight())
    registry.register(collector)
    return collector, groups


def test_messages_are_counted_by_topic_and_group(
    metrics: MemberMetrics, registry: CollectorRegistry
) -> None:
    metrics.messages_in("T", 3, 300)
    metrics.messages_in("T", 2, 200)
    metrics.messages_out("T", "g", 4, 400)
    metrics.messages_out("T", "g", 0, 0)
    topic = {**NODE, "topic": "T", "is_system": "false"}
    group = {**topic, "consumer_group": "g", "is_retry": "false"}
    values = [
        registry.get_sample_value("rocketmq_messages_in_total", topic),
        registry.get_sample_value("rocketmq_throughput_in_total", topic),
        registry.get_sample_value("rocketmq_messages_out_total", group),
        registry.get_sample_value("rocketmq_throughput_out_total", group),
    ]
    assert values == [5, 500, 4, 400]


def test_a_deleted_group_leaves_no_series(
    metrics: MemberMetrics, registry: CollectorRegistry
) -> None:
    metrics.messages_in("T", 1, 1)
    metrics.messages_out("T", "g", 1, 1)
    metrics.messages_out("T", "gg", 1, 1)
    metrics.forget_group("g")
    metrics.forget_group("never counted")
    text = generate_latest(registry).decode()
    assert 'consumer_group="g"' not in text
    assert 'consumer_group="gg"' in text


def test_a_deleted_topic_leaves_no_series(
    metrics: MemberMetrics, registry: CollectorRegistry
) -> None:
    metrics.messages_in("T", 1, 1)
    metrics.messages_out("T", "g", 1, 1)
    metrics.messages_in("TT", 1, 1)
    metrics.forget_topic("T")
    metrics.forget_topic("never counted")
    text = generate_latest(registry).decode()
    assert 'topic="T"' not in text
    assert 'topic="TT"' in text
    metrics.messages_in("T", 1, 1)  # a new topic of the name counts from 0
    labels = {**NODE, "topic": "T", "is_system": "false"}
    assert registry.get_sample_value("rocketmq_messages_in_total", labels) == 1


async def test_what_is_read_off_at_a_scrape(
    member: Member, metrics: MemberMetrics, registry: CollectorRegistry
) -> None:
    collected(member, metrics, registry)
    member.append("T", 0, b"a", b"b", b"c")
    await member.on_disk()
    store = member.store
    values = {
        "rocketmq_topic_number": 1,
        "rocketmq_storage_size": store.appended_offset,
        "rocketmq_storage_flush_behind_bytes": 0,
        "cometmq_log_appended_offset": store.appended_offset,
        "cometmq_epoch": 1,
        "rocketmq_consumer_connections": 0,
    }
    assert {name: registry.get_sample_value(name, NODE) for name in values} == values


async def test_how_far_the_index_is_is_read_off_too(
    member: Member, metrics: MemberMetrics, registry: CollectorRegistry
) -> None:
    collected(member, metrics, registry)
    member.append("T", 0, b"a", b"b", properties=encode({"KEYS": "k j"}))
    await member.on_disk()
    store = member.store
    await until(lambda: store.index.status.position == store.appended_offset)
    values = {
        "cometmq_index_behind_bytes": 0,
        "cometmq_index_files": 1,
        "cometmq_index_entries": 4,
        "cometmq_index_stalled": 0,
    }
    assert {name: registry.get_sample_value(name, NODE) for name in values} == values


async def test_without_an_index_nothing_is_behind(
    tmp_path: Path, metrics: MemberMetrics, registry: CollectorRegistry
) -> None:
    async with living_member(tmp_path, message_index_enable=False) as member:
        await member.put("T")
        collected(member, metrics, registry)
        member.append("T", 0, b"a")
        await member.on_disk()
        assert registry.get_sample_value("cometmq_index_behind_bytes", NODE) == 0


async def test_what_the_disk_did_is_read_off(
    member: Member, metrics: MemberMetrics, registry: CollectorRegistry
) -> None:
    collected(member, metrics, registry)
    assert registry.get_sample_value("cometmq_damaged_pulls_total", NODE) == 0
    assert registry.get_sample_value("cometmq_store_failed", NODE) == 0
    assert registry.get_sample_value("cometmq_store_unreadable_pages_total", NODE) == 0
    member.storage.damaged_pulls += 2
    member.store._opened.files.unreadable_count += 3
    member.storage.fail(StoreFailed("the disk"))
    assert registry.get_sample_value("cometmq_damaged_pulls_total", NODE) == 2
    assert registry.get_sample_value("cometmq_store_unreadable_pages_total", NODE) == 3
    assert registry.get_sample_value("cometmq_store_failed", NODE) == 1


async def test_lag_counts_what_is_readable_and_not_committed(
    member: Member, metrics: MemberMetrics, registry: CollectorRegistry
) -> None:
    collected(member, metrics, registry)
    for queue_id, bodies in ((0, [b"a", b"b", b"c"]), (1, [b"d"])):
        member.append("T", queue_id, *bodies)
        await member.on_disk()
        history = member.state.generations.of("T", queue_id)
        member.state.offsets.commit("g", ("T", queue_id), Position(0, 0), history, 3)
    labels = {
        **NODE,
        "topic": "T",
        "consumer_group": "g",
        "is_retry": "false",
        "is_system": "false",
    }
    assert registry.get_sample_value("rocketmq_consumer_lag_messages", labels) == 4
    history = member.state.generations.of("T", 0)
    member.state.offsets.commit("g", ("T", 0), Position(0, 2), history, 3)
    assert registry.get_sample_value("rocketmq_consumer_lag_messages", labels) == 2


def test_the_volume_of_the_store(
    metrics: MemberMetrics, registry: CollectorRegistry, tmp_path: Path
) -> None:
    registry.register(DiskCollector(metrics, tmp_path / "store"))
    assert registry.get_sample_value("cometmq_disk_size_bytes", NODE) is None
    (tmp_path / "store").mkdir()
    size = registry.get_sample_value("cometmq_disk_size_bytes", NODE)
    free = registry.get_sample_value("cometmq_disk_free_bytes", NODE)
    assert size is not None
    assert free is not None
    assert size >= free > 0


def test_refusals_that_alerts_wait_for_start_at_0(
    metrics: MemberMetrics, registry: CollectorRegistry
) -> None:
    for error in ("DISK_FULL", "FLOW_CONTROL", "STORE_FAILED"):
        assert registry.get_sample_value("cometmq_batches_refused_total", {"error": error}) == 0


def test_what_names_the_process(metrics: MemberMetrics) -> None:
    assert metrics.process_labels == NODE


async def test_scrapes_in_a_thread_while_members_come_and_go(
    member: Member, metrics: MemberMetrics, registry: CollectorRegistry
) -> None:
    _, groups = collected(member, metrics, registry)
    failures: list[BaseException] = []
    stop = threading.Event()

    def scrape() -> None:
        try:
            while not stop.is_set():
                generate_latest(registry)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=scrape)
    thread.start()
    for number in range(2_000):
        streams = [groups.join(f"g{number}-{n}", "c", []) for n in range(3)]
        for stream in streams:
            stream.leave()
    stop.set()
    thread.join()
    assert failures == []
