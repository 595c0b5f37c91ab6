"""Who leads a group, as its members tell; and the election that only an operator can order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from cometmq.admin import reigns
from cometmq.admin.connection import Connection
from cometmq.admin.views import ElectedView
from cometmq.errors import GroupNotFound, InvalidRequest, LeaseUnavailable, NotFollower
from cometmq.v1 import common_pb2, member_pb2, member_pb2_grpc
from cometmq.v1 import namesrv_pb2 as n

from .conftest import FakeCluster, Serve, refuse

FOLLOWER = common_pb2.MEMBER_ROLE_FOLLOWER
WRITER = common_pb2.MEMBER_ROLE_WRITER
REIGN = member_pb2.Reign(
    in_sync=[0, 1],
    electable=[0, 1],
    min_in_sync=1,
    only_writer=True,
    reason="takeover",
    since_ms=1_700_000_000_000,
)


def standing(
    member_id: int, end: int = 100, *, reign: member_pb2.Reign | None = None, epoch: int = 3
) -> member_pb2.StandingResponse:
    """Of a writer if it has a reign, else of a follower."""
    return member_pb2.StandingResponse(
        broker_group="g9",
        member_id=member_id,
        epoch=epoch,
        log_end_offset=end,
        role=FOLLOWER if reign is None else WRITER,
        reign=reign,
    )


def changed(**fields: Any) -> member_pb2.Reign:
    """The reign of a healthy writer but for these fields."""
    known = {field.name: getattr(REIGN, field.name) for field in member_pb2.Reign.DESCRIPTOR.fields}
    return member_pb2.Reign(**{**known, **fields})


def view(*standings: member_pb2.StandingResponse, registered: tuple[int, ...] = (0, 1)) -> Any:
    members = [n.Member(broker_group="g9", member_id=each, epoch=2) for each in registered]
    return reigns.view_of("g9", members, {each.member_id: each for each in standings})


def test_all_is_well() -> None:
    found = view(standing(0, 100, reign=REIGN), standing(1, 90))
    assert (found.status, found.advice, found.silent) == ("ok", "", [])
    assert (found.writer, found.epoch, found.reason) == (0, 3, "takeover")
    assert (found.in_sync, found.electable, found.min_in_sync) == ([0, 1], [0, 1], 1)
    assert (found.since_ms, found.behind_bytes_max) == (1_700_000_000_000, 10)


def test_nobody_writes() -> None:
    found = view(standing(1))
    assert (found.status, found.writer, found.in_sync) == ("no writer", None, None)
    assert (found.members, found.silent) == ([0, 1], [0])
    assert found.behind_bytes_max is None
    assert "docs/runbooks.md" in found.advice


def test_nobody_answers() -> None:
    found = view()
    assert (found.status, found.epoch, found.silent) == ("no writer", 2, [0, 1])


@pytest.mark.parametrize(
    ("reign", "status"),
    [
        (changed(only_writer=False), "waiting"),
        (changed(in_sync=[0], min_in_sync=2), "refusing"),
        (changed(in_sync=[0]), "degraded"),
        (changed(only_writer=False, in_sync=[0], min_in_sync=2), "waiting"),
        (changed(in_sync=[0, 1], min_in_sync=2), "ok"),
    ],
)
def test_a_writer_may_have_its_troubles(reign: member_pb2.Reign, status: str) -> None:
    found = view(standing(0, reign=reign), standing(1))
    assert found.status == status
    assert bool(found.advice) == (status != "ok")


def test_a_writer_with_a_lease_and_without_a_follower_is_a_single_copy() -> None:
    found = view(standing(0, reign=changed(in_sync=[0])), registered=(0,))
    assert found.status == "degraded"
    assert "no follower" in found.advice


@pytest.mark.parametrize(
    ("in_sync", "expected", "registered", "status"),
    [
        ([0], 1, (0, 1), "ok"),  # nobody is to take over
        ([0, 1], 3, (0, 1), "degraded"),  # one has been away for so long that it is forgotten
        ([0, 1], 2, (0, 1, 2), "degraded"),  # one is being removed, and does not answer
        ([0, 1], 2, (0, 1), "ok"),  # it has been
        ([0], 0, (0, 1), "degraded"),  # nobody tells how many there should be
    ],
)
def test_the_set_is_as_large_as_it_should_be(
    in_sync: list[int], expected: int, registered: tuple[int, ...], status: str
) -> None:
    reign = changed(in_sync=in_sync, in_sync_expected=expected)
    found = view(standing(0, reign=reign), standing(1), registered=registered)
    assert found.status == status


def test_a_writer_without_a_lease_stands_alone_on_purpose() -> None:
    alone = standing(0)
    alone.role = WRITER
    found = view(alone, registered=(0,))
    assert (found.status, found.writer, found.reason, found.in_sync) == ("ok", 0, None, None)


def test_of_two_that_say_they_write_the_newer_does() -> None:
    """The older has not heard of its successor yet."""
    found = view(standing(0, reign=REIGN, epoch=3), standing(1, reign=REIGN, epoch=4))
    assert (found.writer, found.epoch) == (1, 4)


# --- over the wire --------------------------------------------------------------------------------


@dataclass
class FakeMember(member_pb2_grpc.MemberServiceServicer):
    """A member of ``g9``; told to lead it does, if ``obeys``."""

    now: member_pb2.StandingResponse
    obeys: bool = True
    told: int = 0

    async def Standing(
        self, request: member_pb2.StandingRequest, context: Any
    ) -> member_pb2.StandingResponse:
        return self.now

    async def Elect(
        self, request: member_pb2.ElectRequest, context: Any
    ) -> member_pb2.ElectResponse:
        assert request.force
        self.told += 1
        if self.now.role == WRITER:
            await refuse(context, NotFollower("it writes"))
        if self.obeys:
            member_id, epoch = self.now.member_id, self.now.epoch + 1
            self.now = standing(member_id, reign=changed(reason="forced"), epoch=epoch)
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
    members = {each: FakeMember(standing(each)) for each in (1, 2)}  # type: ignore[abstract]
    addresses = {0: "127.0.0.1:1"} | {each: await serve(members[each]) for each in members}
    cluster.namesrv.ghosts += [
        n.Member(broker_group="g9", member_id=each, internal_address=address)
        for each, address in addresses.items()
    ]
    return Group(connection, members)


async def test_who_does_not_answer_is_told(group: Group) -> None:
    [found] = await reigns.describe(group.connection)
    assert (found.broker_group, found.status) == ("g9", "no writer")
    assert (found.members, found.silent) == ([0, 1, 2], [0])


async def test_a_follower_is_made_the_writer(group: Group) -> None:
    found = await reigns.elect(group.connection, "g9", 2, force=True)
    assert found == ElectedView("g9", 2, 4)
    assert (group.members[1].told, group.members[2].told) == (0, 1)
    [view] = await reigns.describe(group.connection)
    assert (view.writer, view.reason) == (2, "forced")


async def test_it_has_to_be_meant(group: Group) -> None:
    with pytest.raises(InvalidRequest, match="--force"):
        await reigns.elect(group.connection, "g9", 1, force=False)
    assert not group.members[1].told


async def test_a_writer_that_answers_is_not_replaced(group: Group) -> None:
    group.members[1].now = standing(1, reign=REIGN)
    with pytest.raises(InvalidRequest, match="step-down"):
        await reigns.elect(group.connection, "g9", 2, force=True)
    assert not group.members[2].told


async def test_only_a_registered_member_can_be_told(group: Group) -> None:
    with pytest.raises(GroupNotFound, match="member 7 of g9"):
        await reigns.elect(group.connection, "g9", 7, force=True)
    with pytest.raises(GroupNotFound):
        await reigns.elect(group.connection, "other", 1, force=True)


async def test_an_election_that_does_not_come_about_is_told(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reigns, "ELECTED_S_MAX", 0.05)
    group.members[1].obeys = False
    with pytest.raises(LeaseUnavailable, match="does not yet"):
        await reigns.elect(group.connection, "g9", 1, force=True)
    assert group.members[1].told == 1
