from __future__ import annotations

from prometheus_client import CollectorRegistry

from cometmq.member.election_metrics import Elections
from cometmq.member.role_change import RoleChange
from cometmq.replication.lease import Reason


def change(before: Elections, *, heard_s: float | None = None) -> RoleChange:
    """What the follower tells the writer that comes next."""
    elections = before.counts
    told = RoleChange("services.broker", "failover", heard_s=heard_s, elections=elections)
    return told.after(None, 100.0)


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, labels)


def test_every_reason_is_there_from_the_start() -> None:
    registry = CollectorRegistry()
    Elections(registry, None)
    counts = [value(registry, "cometmq_elections_total", reason=r.value) for r in Reason]
    assert counts == [0.0] * len(Reason)


def test_counts_go_on_through_changes_of_role() -> None:
    first = Elections(CollectorRegistry(), None)
    first.won(Reason.FIRST)
    second = Elections(CollectorRegistry(), change(first))
    registry = CollectorRegistry()
    third = Elections(registry, change(second))
    third.won(Reason.FAILOVER)
    third.won(Reason.FAILOVER)
    assert value(registry, "cometmq_elections_total", reason="first") == 1
    assert value(registry, "cometmq_elections_total", reason="failover") == 2
    assert third.counts == {"first": 1, "failover": 2}


def test_a_take_over_is_timed_from_what_is_known() -> None:
    registry = CollectorRegistry()
    nobody = Elections(CollectorRegistry(), None)
    Elections(registry, change(nobody, heard_s=93.5)).ready(101.25)
    assert value(registry, "cometmq_failover_seconds", since="lease_taken") == 1.25
    assert value(registry, "cometmq_failover_seconds", since="writer_heard") == 7.75


def test_a_take_over_soon_after_another_change_of_role_is_timed_by_itself() -> None:
    registry = CollectorRegistry()
    told = RoleChange("services.broker", "failover", changed_s=(90.0, 100.0))
    Elections(registry, told).ready(101.25)
    assert value(registry, "cometmq_failover_seconds", since="lease_taken") == 1.25


def test_who_has_never_heard_a_writer_does_not_say_how_long_it_was_silent() -> None:
    registry = CollectorRegistry()
    nobody = Elections(CollectorRegistry(), None)
    Elections(registry, change(nobody)).ready(101.0)
    assert value(registry, "cometmq_failover_seconds", since="lease_taken") == 1.0
    assert value(registry, "cometmq_failover_seconds", since="writer_heard") is None


def test_who_was_started_as_the_writer_took_nothing_over() -> None:
    registry = CollectorRegistry()
    Elections(registry, None).ready(101.0)
    assert value(registry, "cometmq_failover_seconds", since="lease_taken") is None
