from __future__ import annotations

import pytest

from cometmq.admin import brokers, ops
from cometmq.admin.connection import Connection
from cometmq.admin.views import CreatedTopicView
from cometmq.errors import GroupInUse, GroupNotFound, RouteNotFound, TopicNotFound, Unauthenticated
from cometmq.model import FlushMode
from cometmq.v1 import broker_pb2 as b
from cometmq.v1 import common_pb2 as c
from cometmq.v1 import namesrv_pb2 as n

from .conftest import FakeCluster


async def test_a_new_topic_is_on_every_broker_group(
    connection: Connection, cluster: FakeCluster
) -> None:
    rows = await ops.create_topic(connection, "T", read_queue_count=3, flush_mode=FlushMode.ASYNC)
    assert rows[0] == CreatedTopicView(
        "T", "g1", 3, 3, "rw", "async", "async", 0, "unspecified", False, "", True
    )
    assert [row.broker_group for row in rows] == ["g1", "g2"]
    assert "T" in cluster.g1.topics
    assert "T" in cluster.g2.topics


async def test_a_change_of_a_topic_says_that_it_was_there(
    connection: Connection, cluster: FakeCluster
) -> None:
    cluster.g1.put("T")
    rows = await ops.create_topic(connection, "T", broker_groups=("g1",))
    assert [(row.broker_group, row.created) for row in rows] == [("g1", False)]
    assert not cluster.g2.topics


async def test_an_unknown_broker_group_is_named_with_the_known_ones(connection: Connection) -> None:
    with pytest.raises(GroupNotFound, match=r"g9.*g1, g2"):
        await ops.create_topic(connection, "T", broker_groups=("g9",))


async def test_a_cluster_without_brokers_says_so(
    connection: Connection, cluster: FakeCluster
) -> None:
    cluster.namesrv.brokers.clear()
    with pytest.raises(RouteNotFound, match="no broker is registered"):
        await ops.list_topics(connection)


async def test_a_topic_that_no_name_server_shows_is_reported(
    connection: Connection, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "ROUTE_WAIT_S", 0.1)

    async def unknown(topic: str) -> n.TopicRoute:
        raise TopicNotFound(topic)

    monkeypatch.setattr(connection, "route", unknown)
    with pytest.raises(RouteNotFound, match="stored on g1, g2"):
        await ops.create_topic(connection, "T")


async def test_deleting_names_where_it_was(connection: Connection, cluster: FakeCluster) -> None:
    cluster.g2.put("T")
    rows = await ops.delete_topic(connection, "T")
    assert [row.broker_group for row in rows] == ["g2"]
    with pytest.raises(TopicNotFound):
        await ops.delete_topic(connection, "T")


async def test_the_list_leaves_system_topics_out(
    connection: Connection, cluster: FakeCluster
) -> None:
    for name in ("B", "A", "rmq_sys_cometmq_state"):
        cluster.g1.put(name)
    cluster.g2.put("A")
    rows = [(row.topic, row.broker_group) for row in await ops.list_topics(connection)]
    assert rows == [("A", "g1"), ("A", "g2"), ("B", "g1")]
    everything = await ops.list_topics(connection, system=True)
    assert "rmq_sys_cometmq_state" in {row.topic for row in everything}


async def test_the_route_names_the_writer(connection: Connection, cluster: FakeCluster) -> None:
    cluster.g1.put("T")
    [row] = await ops.topic_route(connection, "T")
    assert (row.writer, row.followers) == (cluster.g1.address, [])


async def test_the_status_counts_messages(connection: Connection, cluster: FakeCluster) -> None:
    cluster.g2.put("T", queue_count=2)
    for _ in range(3):
        cluster.g2.add("T", 1, b"x")
    cluster.g2.min_offsets["T", 1] = 1
    rows = await ops.topic_status(connection, "T")
    counts = [(row.broker_group, row.queue_id, row.message_count) for row in rows]
    assert counts == [("g2", 0, 0), ("g2", 1, 2)]
    with pytest.raises(TopicNotFound):
        await ops.topic_status(connection, "other")


async def test_a_member_that_does_not_answer_is_shown_as_such(
    connection: Connection, cluster: FakeCluster
) -> None:
    ghost = n.Member(broker_group="g3", role=c.MEMBER_ROLE_FOLLOWER, internal_address="127.0.0.1:1")
    cluster.namesrv.ghosts.append(ghost)
    rows = await ops.describe_cluster(connection)
    assert [(r.broker_group, r.role, r.reachable) for r in rows] == [
        ("g1", "writer", True),
        ("g2", "writer", True),
        ("g3", "follower", False),
    ]
    assert rows[0].log_appended_offset == 100
    assert rows[2].log_appended_offset is None
    assert {row.error for row in rows} == {None}


async def test_a_member_that_refuses_to_tell_does_not_hide_the_others(
    connection: Connection, cluster: FakeCluster
) -> None:
    cluster.g2.refusal = Unauthenticated("another secret")
    for rows in (await ops.describe_cluster(connection), await brokers.describe(connection)):
        assert [(row.broker_group, row.reachable, row.error) for row in rows] == [
            ("g1", True, None),
            ("g2", False, "UNAUTHENTICATED"),
        ]
    cluster.g1.refusal = cluster.g2.refusal
    with pytest.raises(Unauthenticated):  # then it is the caller whose secret is wrong
        await ops.describe_cluster(connection)


def _progress(queue_id: int, committed: int | None, low: int, high: int) -> b.GroupProgress:
    row = b.GroupProgress(
        queue=c.QueueRef(topic="T", queue_id=queue_id),
        generation=1,
        min_offset=low,
        max_offset=high,
    )
    if committed is not None:
        row.committed.generation, row.committed.offset = 1, committed
    return row


async def test_lag_counts_what_can_still_be_read(
    connection: Connection, cluster: FakeCluster
) -> None:
    cluster.g1.groups["G"] = b.DescribeGroupResponse(
        members=[b.GroupMember(client_id="c2"), b.GroupMember(client_id="c1")],
        progress=[_progress(1, 5, 10, 30), _progress(0, 7, 0, 10)],
    )
    cluster.g2.groups["G"] = b.DescribeGroupResponse(
        members=[b.GroupMember(client_id="c1")], progress=[_progress(0, None, 0, 4)]
    )
    view = await ops.group_progress(connection, "G")
    assert [member.client_id for member in view.members] == ["c1", "c2"]
    rows = [(row.broker_group, row.queue_id, row.lag_count) for row in view.queues]
    assert rows == [("g1", 0, 3), ("g1", 1, 20), ("g2", 0, None)]
    assert view.lag_count == 23


async def test_groups_are_listed_with_where_they_are_known(
    connection: Connection, cluster: FakeCluster
) -> None:
    cluster.g1.groups = {"B": b.DescribeGroupResponse(), "A": b.DescribeGroupResponse()}
    cluster.g2.groups = {"B": b.DescribeGroupResponse()}
    rows = [(row.group, row.broker_groups) for row in await ops.list_groups(connection)]
    assert rows == [("A", ["g1"]), ("B", ["g1", "g2"])]
    with pytest.raises(GroupNotFound):
        await ops.group_progress(connection, "C")


async def test_groups_that_are_left_over_are_listed_and_deleted(
    connection: Connection, cluster: FakeCluster
) -> None:
    used = b.DescribeGroupResponse(members=[b.GroupMember(client_id="c")])
    cluster.g1.groups = {"idle": b.DescribeGroupResponse(), "used": b.DescribeGroupResponse()}
    cluster.g2.groups = {"used": used, "idle": b.DescribeGroupResponse()}
    cluster.g1.idle_ms, cluster.g2.idle_ms = 9_000, 7_000
    rows = [(row.group, row.member_count, row.idle_ms) for row in await ops.list_groups(connection)]
    assert rows == [("idle", 0, 7_000), ("used", 1, 0)]
    assert [row.group for row in await ops.list_groups(connection, idle_ms=7_000)] == ["idle"]
    assert not await ops.list_groups(connection, idle_ms=7_001)
    with pytest.raises(GroupInUse):
        await ops.delete_group(connection, "used")
    assert "used" in cluster.g1.groups, "a member anywhere keeps it everywhere"
    deleted = await ops.delete_group(connection, "idle")
    assert [(row.group, row.broker_group) for row in deleted] == [("idle", "g1"), ("idle", "g2")]
    with pytest.raises(GroupNotFound):
        await ops.delete_group(connection, "idle")


async def test_waiting_for_brokers_ends_with_the_missing_one(
    connection: Connection, cluster: FakeCluster
) -> None:
    await ops.wait_for_brokers(connection, ("g1", "g2"), deadline_s=1)
    with pytest.raises(GroupNotFound, match="g3"):
        await ops.wait_for_brokers(connection, ("g1", "g3"), deadline_s=0.1)
