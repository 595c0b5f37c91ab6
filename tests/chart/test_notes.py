"""What Helm tells after an installation."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.kube.chart import NAMESPACE, ROOT, VALUES_FILES, notes


@pytest.mark.parametrize("values", VALUES_FILES)
def test_every_command_is_complete(values: str) -> None:
    commands = re.findall(r"^ +(kubectl .*)$", notes(values), re.M)
    assert len(commands) >= 6
    assert all(f"--namespace {NAMESPACE} " in command for command in commands)


FUNCTION = re.compile(r"^ *cometmq\(\) \{\n.*?^ *\}\n", re.M | re.S)
KUBECTL = """#!/bin/sh
echo "$@" >>"$0.calls"
case "$*" in
  *" get pods "*) printf "pod/prod-namesrv-0\\npod/prod-namesrv-1\\n" ;;
  *"exec pod/prod-namesrv-0 "*) echo "dial tcp: no route to host" >&2; exit 1 ;;
  *"exec pod/prod-namesrv-1 -- true"*) ;;
  *) cat ;;
esac
"""


@pytest.mark.parametrize("source", ["notes", "page"])
def test_the_command_works_while_a_name_server_is_away(source: str, tmp_path: Path) -> None:
    """The function of the notes, and that of the documentation, with a `kubectl` to which the first
    pod does not answer.
    """
    page = (ROOT / "docs/how-to/install.md").read_text(encoding="utf-8")
    found = FUNCTION.search(notes("defaults") if source == "notes" else page)
    assert found is not None
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(KUBECTL)
    kubectl.chmod(0o755)
    script = f'{found.group()}\ncometmq topic create "a b"'
    done = subprocess.run(
        ["sh", "-c", script],
        input="a body",
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        check=True,
    )
    assert done.stdout == "a body", "standard input reaches the command, and no probe takes it"
    calls = Path(f"{kubectl}.calls").read_text(encoding="utf-8").splitlines()
    assert "app.kubernetes.io/component=namesrv" in calls[0]
    assert calls[-1].endswith("exec --stdin pod/prod-namesrv-1 -- cometmq topic create a b")


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
