"""A group at a glance, as its members tell."""

from __future__ import annotations

from typing import Any

import pytest

from cometmq.admin.group_judgement import GroupObservation, view_of
from cometmq.errors import CometError, Unauthenticated
from cometmq.v1 import common_pb2, member_pb2
from cometmq.v1 import namesrv_pb2 as n

FOLLOWER = common_pb2.MEMBER_ROLE_FOLLOWER
WRITER = common_pb2.MEMBER_ROLE_WRITER
HEALTHY = member_pb2.WriterStatus(
    in_sync=[0, 1],
    electable=[0, 1],
    min_in_sync=1,
    only_writer=True,
    reason="failover",
    since_ms=1_700_000_000_000,
)


def replica_status(
    member_id: int,
    end: int = 100,
    *,
    writer_status: member_pb2.WriterStatus | None = None,
    epoch: int = 3,
) -> member_pb2.DescribeReplicaResponse:
    """Of a writer if it has a writer status, else of a follower."""
    return member_pb2.DescribeReplicaResponse(
        broker_group="g9",
        member_id=member_id,
        epoch=epoch,
        log_end_offset=end,
        role=FOLLOWER if writer_status is None else WRITER,
        writer_status=writer_status,
    )


def changed(**fields: Any) -> member_pb2.WriterStatus:
    """The status of a healthy writer but for these fields."""
    known = {
        field.name: getattr(HEALTHY, field.name)
        for field in member_pb2.WriterStatus.DESCRIPTOR.fields
    }
    return member_pb2.WriterStatus(**{**known, **fields})


def view(
    *statuses: member_pb2.DescribeReplicaResponse,
    registered: tuple[int, ...] = (0, 1),
    refusals: dict[int, CometError] | None = None,
) -> Any:
    members = [n.Member(broker_group="g9", member_id=each, epoch=2) for each in registered]
    answers = {each.member_id: each for each in statuses}
    return view_of(GroupObservation("g9", members, answers, refusals or {}))


def test_all_is_well() -> None:
    found = view(replica_status(0, 100, writer_status=HEALTHY), replica_status(1, 90))
    assert (found.status, found.advice, found.silent) == ("ok", "", [])
    assert (found.writer, found.epoch, found.reason) == (0, 3, "failover")
    assert (found.in_sync, found.electable, found.min_in_sync) == ([0, 1], [0, 1], 1)
    assert (found.since_ms, found.behind_bytes_max) == (1_700_000_000_000, 10)


FULL = "97.0 % of the store's room is used"


@pytest.mark.parametrize("lease", [True, False])
def test_a_writer_that_refuses_sends_is_degraded_with_the_reason(lease: bool) -> None:
    writer = replica_status(0, writer_status=HEALTHY)
    writer.send_refusal = FULL
    if not lease:
        writer.ClearField("writer_status")
    found = view(writer, replica_status(1))
    assert found.status == "degraded"
    assert found.advice.startswith("it refuses sends: free space")
    assert f"member 0 refuses sends: {FULL}" in found.troubles


@pytest.mark.parametrize(("is_full", "told"), [(False, True), (True, False)])
def test_a_follower_with_room_is_named(is_full: bool, told: bool) -> None:
    """The operator decides: its log grows as the writer's did."""
    writer, follower = replica_status(0, writer_status=HEALTHY), replica_status(1)
    writer.send_refusal = FULL
    follower.send_refusal = FULL if is_full else ""
    found = view(writer, follower)
    assert ("broker step-down --broker-group g9 --to 1" in found.advice) is told
    assert (f"member 1 has no room for sends: {FULL}" in found.troubles) is is_full


def test_a_follower_without_room_is_told_before_it_leads() -> None:
    follower = replica_status(1)
    follower.send_refusal = FULL
    found = view(replica_status(0, writer_status=HEALTHY), follower)
    assert (found.status, found.troubles) == ("ok", [f"member 1 has no room for sends: {FULL}"])


def test_a_follower_whose_release_does_not_fit_is_told_with_the_reason() -> None:
    follower = replica_status(1)
    follower.cannot_follow = "VERSION_UNSUPPORTED 4 to 5, not 3"
    found = view(
        replica_status(0, writer_status=changed(in_sync=[0], in_sync_expected=2)), follower
    )
    assert found.status == "degraded"
    assert found.troubles == [
        "member 1 cannot follow the writer: VERSION_UNSUPPORTED 4 to 5, not 3"
    ]


def test_nobody_writes() -> None:
    found = view(replica_status(1))
    assert (found.status, found.writer, found.in_sync) == ("no writer", None, None)
    assert (found.members, found.silent) == ([0, 1], [0])
    assert found.behind_bytes_max is None
    assert "docs/runbooks.md" in found.advice


def test_nobody_answers() -> None:
    found = view()
    assert (found.status, found.epoch, found.silent) == ("no writer", 2, [0, 1])
    assert found.advice.startswith("no member answers: ")


@pytest.mark.parametrize(
    ("writer_status", "status"),
    [
        (changed(only_writer=False), "waiting"),
        (changed(in_sync=[0], min_in_sync=2), "refusing"),
        (changed(in_sync=[0]), "degraded"),
        (changed(only_writer=False, in_sync=[0], min_in_sync=2), "waiting"),
        (changed(in_sync=[0, 1], min_in_sync=2), "ok"),
    ],
)
def test_a_writer_may_have_its_troubles(
    writer_status: member_pb2.WriterStatus, status: str
) -> None:
    found = view(replica_status(0, writer_status=writer_status), replica_status(1))
    assert found.status == status
    assert bool(found.advice) == (status != "ok")


def test_a_writer_with_a_lease_and_without_a_follower_is_a_single_copy() -> None:
    found = view(replica_status(0, writer_status=changed(in_sync=[0])), registered=(0,))
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
    writer_status = changed(in_sync=in_sync, in_sync_expected=expected)
    found = view(
        replica_status(0, writer_status=writer_status), replica_status(1), registered=registered
    )
    assert found.status == status


def test_a_writer_without_a_lease_stands_alone_on_purpose() -> None:
    alone = replica_status(0)
    alone.role = WRITER
    found = view(alone, registered=(0,))
    assert (found.status, found.writer, found.reason, found.in_sync) == ("ok", 0, None, None)


def test_of_two_that_say_they_write_the_newer_does() -> None:
    """The older has not heard of its successor yet."""
    found = view(
        replica_status(0, writer_status=HEALTHY, epoch=3),
        replica_status(1, writer_status=HEALTHY, epoch=4),
    )
    assert (found.writer, found.epoch) == (1, 4)


# --- replicas -------------------------------------------------------------------------------------


def lease(
    *in_sync: tuple[int, str], electable: tuple[tuple[int, str], ...] = (), renewals: int = 0
) -> member_pb2.LeaseRecord:
    def replica_ids(wanted: tuple[tuple[int, str], ...]) -> list[member_pb2.ReplicaId]:
        return [member_pb2.ReplicaId(member_id=each, store_id=store) for each, store in wanted]

    both = replica_ids(in_sync), replica_ids(electable or in_sync)
    return member_pb2.LeaseRecord(in_sync=both[0], electable=both[1], renewals=renewals)


def seated(
    member_id: int, store_id: str, known: member_pb2.LeaseRecord | None = None, **fields: Any
) -> member_pb2.DescribeReplicaResponse:
    found = replica_status(member_id, **fields)
    found.MergeFrom(member_pb2.DescribeReplicaResponse(store_id=store_id, lease=known))
    return found


BOTH = lease((0, "s0"), (1, "s1"))


def test_every_replica_in_sync_is_there() -> None:
    found = view(seated(0, "s0", BOTH, writer_status=HEALTHY), seated(1, "s1"))
    assert (found.status, found.troubles) == ("ok", [])


def test_an_empty_disk_is_not_in_sync_because_the_old_one_was() -> None:
    """For seconds after a follower's disk was replaced the lease still names the old store."""
    found = view(seated(0, "s0", BOTH, writer_status=HEALTHY), seated(1, "new"))
    assert (found.status, found.in_sync) == ("degraded", [0, 1])
    assert found.troubles == ["member 1 has another store than the one that was in sync"]
    assert found.advice


def test_a_follower_that_has_just_stopped_is_missed() -> None:
    """It has left the name servers, and stands in the lease for a while."""
    found = view(seated(0, "s0", lease((0, "s0"), (1, "s1"), (2, "s2")), writer_status=HEALTHY),
                 seated(1, "s1"))  # fmt: skip
    assert (found.status, found.missing) == ("degraded", [2])
    assert found.troubles == ["member 2 is not registered"]


@pytest.mark.parametrize(
    ("writer_status", "status"),
    [
        (changed(in_sync=[0], electable=[0], in_sync_expected=2), "degraded"),
        (changed(in_sync=[0], electable=[0], in_sync_expected=2, min_in_sync=2), "refusing"),
    ],
)
def test_who_has_gone_for_good_is_named(
    writer_status: member_pb2.WriterStatus, status: str
) -> None:
    """After a take-over no name server lists the old writer, nor the lease: option peers does."""
    writer = seated(0, "s0", lease((0, "s0")), writer_status=writer_status)
    writer.peers.extend([0, 1])
    found = view(writer, registered=(0,))
    assert (found.status, found.missing) == (status, [1])
    assert found.troubles == ["member 1 is not registered"]


def test_who_is_catching_up_is_named() -> None:
    writer_status = changed(in_sync=[0], in_sync_expected=2)
    found = view(seated(0, "s0", lease((0, "s0")), writer_status=writer_status), seated(1, "s1"))
    assert (found.status, found.troubles) == ("degraded", ["member 1 is not in sync"])


def test_who_refuses_to_tell_is_named_with_the_reason() -> None:
    refusals: dict[int, CometError] = {1: Unauthenticated("another secret")}
    found = view(seated(0, "s0", BOTH, writer_status=HEALTHY), refusals=refusals)
    assert (found.status, found.silent) == ("degraded", [1])
    assert found.troubles == ["member 1 refuses to answer: UNAUTHENTICATED, another secret"]


def test_whose_clock_is_off_is_named() -> None:
    fast, slow = replica_status(1), replica_status(2)
    fast.clock_skew_ms, fast.clock_is_off = 600_000, True
    slow.clock_skew_ms, slow.clock_is_off = -2_500, True
    writer = replica_status(0, writer_status=HEALTHY)
    writer.clock_skew_ms = 1_000
    found = view(writer, fast, slow, registered=(0, 1))
    assert found.troubles == [
        "member 1 has a clock 600.0 s ahead of what most clocks show: "
        "docs/runbooks.md#cometmqclockskew",
    ]
    assert (
        view(writer, slow, registered=(0, 2))
        .troubles[-1]
        .startswith("member 2 has a clock 2.5 s behind what")
    )


# --- without a writer -----------------------------------------------------------------------------


def test_without_a_writer_followers_tell_who_was_in_sync() -> None:
    """The newest of what they have read."""
    old = lease((0, "s0"), (1, "s1"), (2, "s2"), renewals=4)
    new = lease((0, "s0"), (1, "s1"), electable=((0, "s0"), (1, "s1"), (2, "s2")), renewals=5)
    found = view(seated(2, "s2", old), seated(1, "s1", new), registered=(0, 1, 2))
    assert (found.status, found.writer, found.min_in_sync) == ("no writer", None, None)
    assert (found.in_sync, found.electable) == ([0, 1], [0, 1, 2])
    assert "member 1 or 2 takes over" in found.advice
    assert found.troubles == ["member 0 does not answer"]


def test_nobody_is_said_to_take_over_who_may_not() -> None:
    found = view(seated(1, "new", BOTH), registered=(1,))
    assert found.missing == [0]
    assert "bring back member 0 or 1, with its disk" in found.advice
    found = view(seated(1, "s1", lease((0, "s0"))), registered=(1,))
    assert "bring back member 0, with its disk" in found.advice


def test_when_all_have_lost_ends_of_their_logs_the_longest_leads() -> None:
    back = [seated(0, "n0", BOTH), seated(1, "n1", BOTH)]
    for number, member in enumerate(back):
        member.former_store_id = f"s{number}"
    assert "the longest leads" in view(*back).advice
