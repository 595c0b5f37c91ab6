"""What Helm tells after an installation."""

from __future__ import annotations

import re

import pytest

from tests.support.chart import CHART, HELMS, NAMESPACE, RELEASE, VALUES, VALUES_FILES, run_helm


def notes(values: str) -> str:
    """The notes for a file of values. Helm 3 would want a cluster for them."""
    place = ["--namespace", NAMESPACE, "--values", str(VALUES / f"{values}.yaml")]
    done = run_helm(HELMS[-1], "install", RELEASE, CHART, *place, "--dry-run=client")
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("NOTES:\n")[2]


@pytest.mark.parametrize("values", VALUES_FILES)
def test_every_command_is_complete(values: str) -> None:
    commands = re.findall(r"^ +(kubectl .*)$", notes(values), re.M)
    assert len(commands) >= 6
    assert all(f"--namespace {NAMESPACE} " in command for command in commands)


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
