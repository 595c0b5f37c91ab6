from __future__ import annotations

import pytest

from cometmq.admin import search
from cometmq.admin.connection import Connection
from cometmq.errors import RouteNotFound, TopicNotFound
from cometmq.v1 import broker_pb2 as b
from cometmq.v1 import common_pb2 as c

from .conftest import FakeCluster

START_MS = 1_700_000_000_000


async def test_messages_of_all_broker_groups_newest_first(
    connection: Connection, cluster: FakeCluster
) -> None:
    for number in range(3):
        cluster.g1.add("T", 0, b"g1-%d" % number, keys=["k"])
        cluster.g2.add("T", 0, b"g2-%d" % number, keys=["k", "j"])
    cluster.g1.put("T")
    cluster.g2.put("T")
    found = await search.query_messages(connection, "T", key="k")
    assert [m.store_time_ms - START_MS for m in found] == [2, 2, 1, 1, 0, 0]
    few = await search.query_messages(connection, "T", key="k", count_max=3)
    assert few == found[:3]
    only = await search.query_messages(connection, "T", key="j")
    assert [m.body_text for m in only] == ["g2-2", "g2-1", "g2-0"]


async def test_a_unique_id(connection: Connection, cluster: FakeCluster) -> None:
    cluster.g1.put("T")
    cluster.g1.add("T", 0, b"this", unique_id="ID")
    cluster.g1.add("T", 0, b"that", keys=["ID"])
    (found,) = await search.query_messages(connection, "T", unique_id="ID")
    assert found.body_text == "this"


async def test_what_is_not_in_the_index_yet_is_waited_for(
    connection: Connection, cluster: FakeCluster
) -> None:
    cluster.g1.put("T")
    cluster.g1.add("T", 0, b"x", keys=["k"])
    cluster.g1.indexed_offsets = [100, 1, 0, 0]
    assert len(await search.query_messages(connection, "T", key="k")) == 1
    assert cluster.g1.indexed_offsets == [100]
    cluster.g1.indexed_offsets = [77, 100, 50]
    assert await search.query_messages(connection, "T", key="nothing") == []
    assert cluster.g1.indexed_offsets == [77]


async def test_a_follower_is_asked_when_there_is_no_writer(
    connection: Connection, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.g1.put("T")
    cluster.g1.add("T", 0, b"x", keys=["k"])
    as_writer = cluster.namesrv.member

    def as_follower(broker: object) -> object:
        member = as_writer(cluster.g1)
        member.role = c.MEMBER_ROLE_FOLLOWER
        return member

    monkeypatch.setattr(cluster.namesrv, "member", as_follower)
    assert len(await search.query_messages(connection, "T", key="k")) == 1


async def test_a_topic_without_members_or_a_route(
    connection: Connection, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TopicNotFound):
        await search.query_messages(connection, "T", key="k")
    cluster.g1.put("T")
    route = await connection.route("T")
    del route.groups[0].members[:]

    async def memberless(topic: str) -> object:
        return route

    monkeypatch.setattr(connection, "route", memberless)
    with pytest.raises(RouteNotFound, match="T"):
        await search.query_messages(connection, "T", key="k")


@pytest.mark.parametrize(
    ("boundary", "time_ms", "offset", "stored_ms"),
    [
        (b.TIME_BOUNDARY_LOWER, START_MS + 1, 1, START_MS + 1),
        (b.TIME_BOUNDARY_LOWER, START_MS + 9, 3, 0),
        (b.TIME_BOUNDARY_UPPER, START_MS + 9, 2, START_MS + 2),
    ],
)
async def test_offsets_of_all_queues_by_time(
    connection: Connection,
    cluster: FakeCluster,
    boundary: b.TimeBoundary.ValueType,
    time_ms: int,
    offset: int,
    stored_ms: int,
) -> None:
    cluster.g1.put("T")
    cluster.g2.put("T", 1)
    for _ in range(3):
        cluster.g1.add("T", 0, b"x")
    rows = await search.offsets_by_time(connection, "T", time_ms, boundary)
    assert [(row.broker_group, row.queue_id) for row in rows] == [("g1", 0), ("g1", 1), ("g2", 0)]
    assert (rows[0].offset, rows[0].store_time_ms) == (offset, stored_ms)
    assert (rows[1].offset, rows[1].store_time_ms) == (0, 0)
