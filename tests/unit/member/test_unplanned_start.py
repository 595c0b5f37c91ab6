from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
from prometheus_client import CollectorRegistry

from cometmq.member.role_change import RoleChange
from cometmq.member.unplanned_start import UnplannedStart
from cometmq.store.layout import ABORT
from tests.support.stores.small_stores import WallClock


class Programs:
    """The roles that follow each other in one process, an hour apart."""

    def __init__(self, store_path: Path) -> None:
        self.clock = WallClock()
        self._store_path = store_path
        self._before: RoleChange | None = None

    def next(self, reason: str = "", *, crashed: bool = False) -> float | None:
        """The metric of the next role; ``reason``: why it follows the last."""
        (self._store_path / ABORT).unlink(missing_ok=True)
        if crashed:
            (self._store_path / ABORT).touch()
        self.clock.now_ms += 3_600_000
        registry = CollectorRegistry()
        before = self._before if reason else None
        start = UnplannedStart(registry, before and _replaced(before, reason), self.clock)
        start.look(self._store_path)
        self._before = RoleChange("m", "", unplanned_ms=start.time_ms)
        return registry.get_sample_value("cometmq_unplanned_start_time_seconds")

    @property
    def now_s(self) -> float:
        return self.clock.now_ms / 1000


def _replaced(change: RoleChange, reason: str) -> RoleChange:
    return RoleChange(change.module, reason, unplanned_ms=change.unplanned_ms)


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    return Programs(tmp_path)


def test_planned_starts_leave_no_trace(programs: Programs) -> None:
    assert programs.next() == 0
    for reason in ("first", "handover", "restart", "cut", "reset", "alone", "forced"):
        assert programs.next(reason) == 0
    assert programs.next() == 0, "another process"


def test_a_crash_is_seen_after_the_role_was_taken_back(programs: Programs) -> None:
    """The first program lives for a second: nobody has read its metrics."""
    crash = programs.next(crashed=True)
    assert crash == programs.now_s
    assert programs.next("restart") == crash
    assert programs.next("handover") == crash
    assert programs.next() == 0, "the next process was stopped in order"


@pytest.mark.parametrize(
    "reason", ["deposed", "epoch", "not-holder", "failover", "unclean", "recreated"]
)
def test_a_role_that_nobody_ordered_is_seen(programs: Programs, reason: str) -> None:
    programs.next()
    assert programs.next(reason) == programs.now_s


def test_a_store_that_is_passed_on_open_is_none_that_a_crash_left(tmp_path: Path) -> None:
    (tmp_path / ABORT).touch()
    change = RoleChange("m", "handover", store=mock.Mock())
    start = UnplannedStart(CollectorRegistry(), change, WallClock())
    start.look(tmp_path)
    assert start.time_ms == 0
