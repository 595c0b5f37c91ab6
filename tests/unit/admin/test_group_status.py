"""Who leads a group is asked of its members; and the election that only an operator can order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from cometmq.admin import group_status
from cometmq.admin.connection import Connection
from cometmq.admin.views import ElectedView
from cometmq.errors import (
    BrokerStarting,
    CometError,
    GroupNotFound,
    InvalidRequest,
    LeaseConflict,
    LeaseUnavailable,
    NotFollower,
    RouteNotFound,
    Unauthenticated,
)
from cometmq.v1 import common_pb2, member_pb2, member_pb2_grpc
from cometmq.v1 import namesrv_pb2 as n

from .conftest import FakeCluster, Serve, refuse

FOLLOWER = common_pb2.MEMBER_ROLE_FOLLOWER
WRITER = common_pb2.MEMBER_ROLE_WRITER


def replica_status(
    member_id: int, *, reason: str | None = None, epoch: int = 3
) -> member_pb2.DescribeReplicaResponse:
    """Of a writer if it has a reason to be, else of a follower."""
    found = member_pb2.DescribeReplicaResponse(broker_group="g9", member_id=member_id, epoch=epoch)
    found.role = FOLLOWER if reason is None else WRITER
    if reason is not None:
        found.writer_status.CopyFrom(member_pb2.WriterStatus(reason=reason, only_writer=True))
    return found


@dataclass
class FakeMember(member_pb2_grpc.MemberServiceServicer):
    """A member of ``g9``; told to lead it does, if ``obeys``."""

    now: member_pb2.DescribeReplicaResponse
    obeys: bool = True
    observed: int = 0
    refusal: CometError | None = None  # with which it answers instead
    heard: Callable[[], None] = lambda: None  # what happens then

    async def DescribeReplica(
        self, request: member_pb2.DescribeReplicaRequest, context: Any
    ) -> member_pb2.DescribeReplicaResponse:
        if self.refusal is not None:
            await refuse(context, self.refusal)
        return self.now

    async def Elect(
        self, request: member_pb2.ElectRequest, context: Any
    ) -> member_pb2.ElectResponse:
        assert request.force
        self.observed += 1
        self.heard()
        if self.now.role == WRITER:
            await refuse(context, NotFollower("it writes"))
        if self.obeys:
            member_id, epoch = self.now.member_id, self.now.epoch + 1
            self.now = replica_status(member_id, reason="forced", epoch=epoch)
        return member_pb2.ElectResponse()


@dataclass
class Group:
    """Member 0 has gone; 1 and 2 follow nobody."""

    connection: Connection
    members: dict[int, FakeMember]


@pytest.fixture
async def group(connection: Connection, cluster: FakeCluster, serve: Serve) -> Group:
    cluster.namesrv.brokers.clear()
    # They serve only what the operations ask for.
    members = {each: FakeMember(replica_status(each)) for each in (1, 2)}  # type: ignore[abstract]
    addresses = {0: "127.0.0.1:1"} | {each: await serve(members[each]) for each in members}
    cluster.namesrv.ghosts += [
        n.Member(broker_group="g9", member_id=each, internal_address=address)
        for each, address in addresses.items()
    ]
    return Group(connection, members)


async def test_who_does_not_answer_is_told(group: Group) -> None:
    [found] = await group_status.describe(group.connection)
    assert (found.broker_group, found.status) == ("g9", "no writer")
    assert (found.members, found.silent) == ([0, 1, 2], [0])


async def test_a_group_that_refuses_to_tell_is_not_one_without_a_writer(group: Group) -> None:
    for member in group.members.values():
        member.refusal = Unauthenticated("no secret")
    with pytest.raises(Unauthenticated):
        await group_status.describe(group.connection)
    with pytest.raises(Unauthenticated):
        await group_status.elect(group.connection, "g9", 1, force=True)
    group.members[1].refusal = None
    with pytest.raises(Unauthenticated):  # member 2 may write, for all that is known
        await group_status.elect(group.connection, "g9", 1, force=True)
    assert not group.members[1].observed


async def test_beside_a_writer_a_member_that_refuses_is_a_trouble(group: Group) -> None:
    group.members[1].now = replica_status(1, reason="failover")
    group.members[2].refusal = Unauthenticated("another secret")
    [found] = await group_status.describe(group.connection)
    assert (found.writer, found.silent) == (1, [0, 2])
    assert "UNAUTHENTICATED" in found.troubles[-1]


async def test_a_group_that_is_starting_is_one_without_a_writer(group: Group) -> None:
    group.members[2].refusal = BrokerStarting("not yet")
    [found] = await group_status.describe(group.connection)
    assert (found.status, found.silent) == ("no writer", [0, 2])


async def test_a_cluster_of_nobody_is_no_healthy_one(
    connection: Connection, cluster: FakeCluster
) -> None:
    cluster.namesrv.brokers.clear()
    with pytest.raises(RouteNotFound):
        await group_status.describe(connection)


async def test_a_follower_is_made_the_writer(group: Group) -> None:
    found = await group_status.elect(group.connection, "g9", 2, force=True)
    assert found == ElectedView("g9", 2, 4)
    assert (group.members[1].observed, group.members[2].observed) == (0, 1)
    [view] = await group_status.describe(group.connection)
    assert (view.writer, view.reason) == (2, "forced")


async def test_it_has_to_be_meant(group: Group) -> None:
    with pytest.raises(InvalidRequest, match="--force"):
        await group_status.elect(group.connection, "g9", 1, force=False)
    assert not group.members[1].observed


async def test_a_writer_that_answers_is_not_replaced(group: Group) -> None:
    group.members[1].now = replica_status(1, reason="failover")
    with pytest.raises(InvalidRequest, match="step-down"):
        await group_status.elect(group.connection, "g9", 2, force=True)
    assert not group.members[2].observed


async def test_only_a_registered_member_can_be_told(group: Group) -> None:
    with pytest.raises(GroupNotFound, match="member 7 of g9"):
        await group_status.elect(group.connection, "g9", 7, force=True)
    with pytest.raises(GroupNotFound):
        await group_status.elect(group.connection, "other", 1, force=True)


async def test_an_order_ends_when_another_leads(group: Group) -> None:
    chosen, other = group.members[1], group.members[2]
    chosen.obeys, chosen.heard = (
        False,
        lambda: setattr(other, "now", replica_status(2, reason="failover")),
    )
    with pytest.raises(LeaseConflict, match="member 2 of g9 writes"):
        await group_status.elect(group.connection, "g9", 1, force=True)


async def test_an_election_that_does_not_come_about_is_told(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_status, "ELECTED_S_MAX", 0.05)
    group.members[1].obeys = False
    with pytest.raises(LeaseUnavailable, match="does not yet"):
        await group_status.elect(group.connection, "g9", 1, force=True)
    assert group.members[1].observed == 1
