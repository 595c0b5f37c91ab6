from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.replication.follower import Ack, Replica
from cometmq.replication.insync import (
    Own,
    SetPolicy,
    replicated_positions,
    unchanged_until_s,
    wanted_sets,
)
from cometmq.replication.lease import LeaseRecord, ReplicaId, ReplicaIds
from cometmq.replication.watermarks import HighWatermarks

W, A, B = ReplicaId(0, "store-0"), ReplicaId(1, "store-1"), ReplicaId(2, "store-2")
ALONE = LeaseRecord("g1", 0, "store-0", "host-0:1", 4)
SHARED = replace(ALONE, in_sync=(W, A), electable=(W, A))
OWN = Own(W, appended=1000, flushed=900, marks=HighWatermarks(900, 500, 400), since_s=0.0)
NOW_S = 100.0
POLICY = SetPolicy(async_lag_bytes_max=300)


def replica(
    replica_id: ReplicaId = A,
    appended: int = 1000,
    flushed: int = 1000,
    *,
    in_step_s: float = NOW_S,
    heard_s: float = NOW_S,
    connected: bool = True,
) -> Replica:
    found = Replica(replica_id, 0, in_step_s)
    found.sent_to(appended)
    found.framed(int(heard_s * 1000), 10**9)
    found.acked(Ack(appended, flushed, int(heard_s * 1000), 0), 10**9)
    found.in_step_s, found.connected, found.caught_up = in_step_s, connected, True
    return found


def wanted(
    record: LeaseRecord,
    *replicas: Replica,
    replicated: bool = True,
    policy: SetPolicy = POLICY,
    own: Own = OWN,
) -> tuple[ReplicaIds, ReplicaIds]:
    by_replica_id = {found.replica_id: found for found in replicas}
    return wanted_sets(record, own, by_replica_id, policy, NOW_S, replicated=replicated)


@pytest.mark.parametrize(
    ("follower", "joins"),
    [
        (replica(), True),
        (replica(appended=500, flushed=400), True),
        (replica(appended=499, flushed=400), False),
        (replica(appended=500, flushed=399), False),
        (replica(in_step_s=NOW_S - 1.1), False),
        (replica(connected=False), False),
        (Replica(A, 1000, NOW_S), False),  # never heard
    ],
)
def test_who_has_what_counts_and_keeps_step_is_taken_in(follower: Replica, joins: bool) -> None:
    assert wanted(ALONE, follower)[0] == ((W, A) if joins else (W,))


@pytest.mark.parametrize(
    ("follower", "stays"),
    [
        (replica(in_step_s=NOW_S - 2.9), True),
        (replica(in_step_s=NOW_S - 2.9, connected=False), True),
        (replica(in_step_s=NOW_S - 3.1), False),
        (replica(appended=499, flushed=0), False),  # it has lost what it had
    ],
)
def test_who_falls_out_of_step_is_taken_out(follower: Replica, stays: bool) -> None:
    assert wanted(SHARED, follower)[0] == ((W, A) if stays else (W,))


def test_a_newcomer_is_taken_in_when_it_has_had_all_whatever_counts_as_copied() -> None:
    """Of a new writer nothing counts as copied yet; the one before has acknowledged messages."""
    new = replace(OWN, marks=HighWatermarks(900))
    newcomer = Replica(A, 0, NOW_S)
    newcomer.sent_to(1000)
    newcomer.framed(int(NOW_S * 1000), 1000)
    newcomer.acked(Ack(10, 10, int(NOW_S * 1000), 0), 1000)
    assert wanted(ALONE, newcomer, own=new)[0] == (W,)
    newcomer.acked(Ack(1000, 10, int(NOW_S * 1000), 0), 1000)
    assert wanted(ALONE, newcomer, own=new)[0] == (W, A)


def test_a_new_writer_waits_a_moment_for_its_followers() -> None:
    assert wanted(SHARED, own=replace(OWN, since_s=NOW_S - 2.9))[0] == (W, A)
    assert wanted(SHARED, own=replace(OWN, since_s=NOW_S - 3.1))[0] == (W,)


def test_with_copies_demanded_only_who_is_in_sync_may_be_elected() -> None:
    near = replica(B, appended=800, flushed=0, in_step_s=NOW_S - 9)
    assert wanted(SHARED, replica(), near) == ((W, A), (W, A))


@pytest.mark.parametrize(
    ("follower", "electable"),
    [
        (replica(B, appended=700, flushed=0, in_step_s=0), True),
        (replica(B, appended=699, flushed=0, in_step_s=0), False),
        (replica(B, appended=700, flushed=0, in_step_s=0, heard_s=NOW_S - 5.1), False),
        (replica(B, appended=700, flushed=0, in_step_s=0, connected=False), True),
    ],
)
def test_without_one_that_is_near_may_be_too(follower: Replica, electable: bool) -> None:
    found = wanted(SHARED, replica(), follower, replicated=False)
    assert found == ((W, A), (W, A, B) if electable else (W, A))


def test_a_group_may_want_no_asynchronous_promotion() -> None:
    policy = replace(POLICY, promote_async=False)
    assert wanted(SHARED, replica(), replicated=False, policy=policy) == ((W,), (W,))
    assert wanted(SHARED, replica(), policy=policy) == ((W, A), (W, A))


def test_how_many_should_be_in_sync() -> None:
    policy = replace(POLICY, promote_async=False, group_size=3)
    found = [
        each.expected(replicated=replicated)
        for each in (policy, replace(policy, promote_async=True), POLICY)
        for replicated in (True, False)
    ]
    assert found == [3, 1, 3, 3, 0, 0]


def test_a_member_has_one_replica_id() -> None:
    new = ReplicaId(1, "new")
    assert wanted(SHARED, replica(), replica(new))[0] == (W, A)
    assert wanted(ALONE, replica(new))[0] == (W, new)


# --- how far everybody has come -------------------------------------------------------------------


def test_copied_is_what_the_last_of_them_has() -> None:
    found = {A: replica(A, 700, 300), B: replica(B, 800, 200)}
    assert replicated_positions({W, A, B}, {A, B}, OWN, found) == (700, 200)
    assert replicated_positions({W, A}, {A}, OWN, found) == (700, 300)
    assert replicated_positions({W, A}, {A}, replace(OWN, flushed=250), found) == (700, 250)


def test_alone_the_writers_disk_counts() -> None:
    assert replicated_positions({W}, set(), OWN, {}) == (900, 900)


def test_who_is_not_here_has_nothing() -> None:
    assert replicated_positions({W, A}, {A}, OWN, {}) == (0, 0)


def test_while_somebody_may_lead_who_is_not_waited_for_nothing_counts() -> None:
    assert replicated_positions({W, A}, {A, B}, OWN, {A: replica()}) is None


@pytest.mark.parametrize("record", [ALONE, SHARED, replace(ALONE, electable=(W, A))])
@pytest.mark.parametrize("replicated", [True, False])
def test_a_leaving_follower_is_in_no_set_until_it_reconnects(
    record: LeaseRecord, replicated: bool
) -> None:
    leaving = replica()
    leaving.acked(Ack(1000, 1000, int(NOW_S * 1000), 0, leaving=True), 10**9)
    assert wanted(record, leaving, replicated=replicated) == ((W,), (W,))
    leaving.acked(Ack(1000, 1000, int(NOW_S * 1000), 0), 10**9)
    leaving.connected = False
    assert wanted(record, leaving, replicated=replicated) == ((W,), (W,))
    leaving.join(1000)
    assert wanted(record, leaving, replicated=replicated) == ((W, A), (W, A))


ages_s = st.floats(0.0, 8.0)
followers = st.builds(
    lambda replica_id, appended, in_step, heard, connected: replica(
        replica_id,
        appended,
        appended,
        in_step_s=NOW_S - in_step,
        heard_s=NOW_S - heard,
        connected=connected,
    ),
    st.sampled_from([A, B]),
    st.integers(400, 1000),
    ages_s,
    ages_s,
    st.booleans(),
)


@given(st.lists(followers, max_size=2), ages_s, st.booleans(), st.floats(0.0, 10.0))
def test_settled_sets_stay_as_long_as_is_said(
    some: list[Replica], since: float, replicated: bool, later_s: float
) -> None:
    replicas = {one.replica_id: one for one in some}
    own = replace(OWN, since_s=NOW_S - since)

    def sets(record: LeaseRecord, now_s: float) -> tuple[ReplicaIds, ReplicaIds]:
        return wanted_sets(record, own, replicas, POLICY, now_s, replicated=replicated)

    in_sync, electable = sets(SHARED, NOW_S)
    settled = replace(SHARED, in_sync=in_sync, electable=electable)
    until_s = unchanged_until_s(settled, own, replicas, POLICY, NOW_S)
    assert until_s >= NOW_S
    now_s = min(NOW_S + later_s, until_s)
    assert sets(settled, now_s) == (in_sync, electable)


def test_who_lags_is_taken_out_as_soon_as_is_said() -> None:
    replicas = {A: replica(A, in_step_s=NOW_S - 1.0)}
    until_s = unchanged_until_s(SHARED, OWN, replicas, POLICY, NOW_S)
    assert until_s == NOW_S - 1.0 + POLICY.lag_s_max
    in_sync, _ = wanted_sets(SHARED, OWN, replicas, POLICY, until_s + 0.001, replicated=True)
    assert in_sync == (W,)
