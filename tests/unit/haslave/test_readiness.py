from __future__ import annotations

from cometmq.errors import StateTooNew, VersionUnsupported
from cometmq.replication.lease import LeaseRecord, ReplicaId
from services.haslave.readiness import InSyncReadiness

WRITER, ME, BEFORE = ReplicaId(0, "a"), ReplicaId(1, "b"), ReplicaId(1, "of before")


def lease(*in_sync: ReplicaId) -> LeaseRecord:
    return LeaseRecord("g", *WRITER, "h:1", 1, in_sync, (WRITER, ME, BEFORE))


Seen = tuple[LeaseRecord | None, float]


def played(wait_s: float, *readings: Seen) -> list[tuple[bool, bool]]:
    """Of each reading whether something changed, and whether the follower is ready then."""
    ready = InSyncReadiness(wait_s)
    return [(ready.saw(record, ME, now_s), ready.is_ready) for record, now_s in readings]


def test_a_follower_is_ready_while_it_is_in_the_in_sync_set() -> None:
    assert played(
        60.0,
        (None, 0.0),  # nothing is known
        (lease(WRITER), 1.0),
        (None, 2.0),
        (lease(WRITER, BEFORE), 3.0),
        (lease(WRITER, ME), 4.0),
        (lease(WRITER, ME), 5.0),
    ) == [
        (False, True),
        (True, False),
        (False, False),
        (False, False),
        (True, True),
        (False, True),
    ]


def test_it_is_not_held_back_for_ever_and_each_time_counts_by_itself() -> None:
    assert played(
        60.0,
        (lease(WRITER), 0.0),
        (lease(WRITER), 59.9),
        (lease(WRITER), 60.0),
        (lease(WRITER, ME), 61.0),
        (lease(WRITER), 62.0),
    ) == [(True, False), (False, False), (True, True), (False, True), (True, False)]


def test_an_update_stops_at_a_follower_that_cannot_read_the_groups_state() -> None:
    """It goes on where the releases have no protocol in common: that brings them together."""
    for misfit, is_ready in (VersionUnsupported("3, not 2"), True), (StateTooNew("'x'"), False):
        ready = InSyncReadiness(60.0)
        ready.saw(lease(WRITER), ME, 0.0, misfit)
        assert not ready.is_ready
        assert ready.reason.endswith(f"it cannot follow the writer: {misfit.message}")
        ready.saw(lease(WRITER), ME, 600.0, misfit)
        assert ready.is_ready is is_ready


def test_zero_turns_it_off() -> None:
    assert played(0.0, (lease(WRITER), 0.0)) == [(False, True)]


def test_a_start_that_catches_up_is_not_worth_an_event() -> None:
    ready = InSyncReadiness(3_600.0)
    ready.saw(lease(WRITER), ME, 0.0)
    assert [ready.is_remarkable(now_s) for now_s in (0.0, 29.0, 30.0)] == [False, False, True]
    ready.saw(lease(WRITER, ME), ME, 40.0)
    assert not ready.is_remarkable(100.0)
    ready.saw(lease(WRITER), ME, 101.0)
    assert ready.is_remarkable(101.0), "it was in sync before"


def test_a_follower_that_is_ready_after_its_wait_is_nothing_new() -> None:
    ready = InSyncReadiness(60.0)
    for now_s in (0.0, 60.0):
        ready.saw(lease(WRITER), ME, now_s)
    assert ready.is_ready
    assert not ready.is_remarkable(60.0)
