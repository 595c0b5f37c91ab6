"""What a machine has for memory, and what that makes of the rule."""

from __future__ import annotations

from pathlib import Path

import pytest

from cometmq.member.read import replica_selector
from cometmq.member.read.replica_selector import ReplicaSelector, machine_memory_bytes
from cometmq.messaging.groups import GroupSettings
from cometmq.messaging.replica_selection import ReadReplica


@pytest.fixture(autouse=True)
def _memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_selector, "machine_memory_bytes", lambda: 1000)


def adviser(*, enabled: bool = True, percent: float = 40.0) -> ReplicaSelector:
    return ReplicaSelector(enabled, percent, lambda: [ReadReplica(1, 0)])


def test_far_behind_is_two_fifths_of_the_memory() -> None:
    advises = adviser()
    assert advises.member({}, "G", 400) is None
    assert advises.member({}, "G", 401) == 1


def test_the_part_of_the_memory_is_an_option() -> None:
    assert adviser(percent=0.5).member({}, "G", 6) == 1
    assert adviser(percent=0.5).member({}, "G", 5) is None


def test_a_groups_settings_count() -> None:
    groups = {"stays": GroupSettings("stays", broker_id_when_slow=0)}
    assert adviser().member(groups, "stays", 401) is None
    assert adviser().member(groups, "other", 401) == 1


def test_nobody_is_sent_away_unless_it_is_wanted() -> None:
    assert adviser(enabled=False).member({}, "G", 401) is None


def test_a_container_has_what_its_limit_allows(tmp_path: Path) -> None:
    limit, none = tmp_path / "memory.max", tmp_path / "other"
    limit.write_text("4096\n")
    none.write_text("max\n")
    everything = machine_memory_bytes([])
    assert everything > 4096
    assert machine_memory_bytes([none, tmp_path / "missing"]) == everything
    assert machine_memory_bytes([none, limit]) == 4096
