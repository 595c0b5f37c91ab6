"""The Makefile tells of itself, and continuous integration runs what it says."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
PROMISED = """run setup proto proto-check fmt lint types arch test test-faults bench clean help"""


def test_every_target_is_in_the_help() -> None:
    phony = set(re.findall(r"^\.PHONY: ([a-z0-9-]+)$", MAKEFILE, re.M))
    helped = set(re.findall(r"^([a-z][a-z0-9-]*):.*##", MAKEFILE, re.M))
    assert phony == helped
    assert set(PROMISED.split()) <= helped


def test_help_is_the_default() -> None:
    make = shutil.which("make")
    if make is None:
        pytest.skip("make is missing")
    shown = subprocess.run([make, "-C", ROOT], capture_output=True, text=True, check=True).stdout
    assert "  test " in shown


def test_one_version_of_buf() -> None:
    script = (ROOT / "scripts/buf_lint.sh").read_text()
    assert re.search(r"^version=\d+\.\d+\.\d+$", script, re.M)


def test_ci_runs_make_test() -> None:
    assert re.search(r"^make test$", (ROOT / ".ci/run").read_text(), re.M)
