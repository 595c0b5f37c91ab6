"""What Helm tells after an installation."""

from __future__ import annotations

import re

import pytest

from tests.support.kube.chart import NAMESPACE, VALUES_FILES, notes


@pytest.mark.parametrize("values", VALUES_FILES)
def test_every_command_is_complete(values: str) -> None:
    commands = re.findall(r"^ +(kubectl .*)$", notes(values), re.M)
    assert len(commands) >= 6
    assert all(f"--namespace {NAMESPACE} " in command for command in commands)
    (alias,) = re.findall(r"^ +alias cometmq='(.*)'$", notes(values), re.M)
    assert f"{alias.replace(' --stdin', '')} cluster members" in commands


def test_counts_are_spoken_well() -> None:
    assert "1 broker group with 2 members" in notes("defaults")
    assert "3 broker groups with 7 members" in notes("three-groups")


@pytest.mark.parametrize(
    ("values", "missing"),
    [("defaults", 3), ("three-groups", 8), ("local-volumes", 0), ("minimal", 0)],
)
def test_volumes_that_nobody_makes_are_told(values: str, missing: int) -> None:
    told = re.findall(r"ATTENTION: (\d+) claims want volumes", notes(values))
    assert told == ([str(missing)] if missing else [])


def test_groups_without_a_copy_are_told() -> None:
    assert "group a has no slave" in notes("minimal")
    assert "no slave" not in notes("defaults")


def test_what_a_lost_node_costs_is_told() -> None:
    chosen = ("--set", "broker.config.replication_mode=ASYNC")
    assert "group a do not wait for copies" in notes("defaults", *chosen)
    assert "do not wait for copies" not in notes("minimal", *chosen), "there is nobody to copy"
    assert "do not wait for copies" not in notes("defaults")


@pytest.mark.parametrize(("slaves", "told"), [(1, True), (2, False)])
def test_a_floor_that_lets_nobody_be_away_is_told(slaves: int, told: bool) -> None:
    change = f"broker.config.min_in_sync_replicas=2,broker.groups[0].slaves={slaves}"
    said = notes("defaults", "--set", f"broker.groups[0].name=a,{change}")
    assert ("only while all its 2 members are in sync" in said) is told


def test_a_secret_that_templates_would_rotate_is_told() -> None:
    """Whoever names his own need not hear of it."""
    assert "name this one: internalSecret.existingSecret" in notes("defaults")
    assert "prod-internal" in notes("defaults")
    assert "existingSecret" not in notes("everything")
