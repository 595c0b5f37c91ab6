"""One API server for all tests of this folder, and the rights that the chart gives to a group."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from scripts.kube import KubeMissing
from tests.kube.rights import Rights, grant
from tests.support.kube.api_server import KubeServer

_NUMBERS = count(1)
PLAYED: dict[str, int] = {}


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubeServer]:
    try:
        found = KubeServer(tmp_path_factory.mktemp("kube") / "server")
    except KubeMissing as error:
        pytest.skip(str(error))
    with found:
        yield found


@pytest.fixture
def rights(server: KubeServer, tmp_path: Path) -> Rights:
    """A namespace of the test's own, with the chart's objects for its broker group `a`."""
    return grant(server, f"queues-{next(_NUMBERS)}", tmp_path)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and "tests/kube/" in report.nodeid:
        PLAYED[report.outcome] = PLAYED.get(report.outcome, 0) + 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if PLAYED:
        told = ", ".join(f"{number} {outcome}" for outcome, number in sorted(PLAYED.items()))
        terminalreporter.write_line(f"with a real API server: {told}")
