"""What a start does not load: libraries that only some programs and commands need."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import cometmq
from cometmq import client

# The start of grpc and protobuf alone takes longer than all of the rest.
HEAVY = ("grpc", "google.protobuf", "kubernetes", "prometheus_client", "pyarrow", "rich.console")


# What only servers and filters need.
OTHERS = (
    "cometmq.config", "cometmq.filters", "cometmq.rpc.calls", "cometmq.rpc.secret",
    "cometmq.v1.broker_pb2_grpc", "importlib.metadata",
)  # fmt: skip


def loaded_by(code: str) -> set[str]:
    """The heavy ones, and what only others need, that a fresh process has loaded after ``code``."""
    report = "import sys; print(*sys.modules, file=sys.stderr)"
    program = f"import contextlib, sys\nwith contextlib.suppress(SystemExit): {code}\n{report}"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    return set(done.stderr.split()) & {*HEAVY, *OTHERS}


@pytest.mark.parametrize(
    "code",
    [
        "import cometmq.client",
        "sys.argv[1:] = ['--help']; import cometmq.admin.__main__ as it; it.main()",
    ],
)
def test_the_package_and_the_help_load_nothing_heavy(code: str) -> None:
    assert loaded_by(code) == set()


def test_a_producer_and_a_command_load_what_they_need_and_no_more() -> None:
    assert loaded_by("from cometmq.client import Producer") == {"grpc", "google.protobuf"}
    command = "sys.argv[1:] = ['topic', '--help']; import cometmq.admin.__main__ as it; it.main()"
    assert loaded_by(command) - set(OTHERS) == {"grpc", "google.protobuf", "rich.console"}


def test_the_version_is_that_of_the_package() -> None:
    project = Path(__file__).resolve().parents[2] / "pyproject.toml"
    assert tomllib.loads(project.read_text())["project"]["version"] == cometmq.__version__


def test_the_package_has_each_of_its_names() -> None:
    assert sorted(client._MODULES) == client.__all__ == dir(client)
    assert all(getattr(client, name).__name__ for name in ("Producer", "Message", "by_hash"))
    for name in client.__all__:
        getattr(client, name)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = client.Nothing  # type: ignore[attr-defined]
