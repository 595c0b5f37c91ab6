"""The sum of what was done to stores, at the end of a run."""

from __future__ import annotations

import pytest

from tests.support import tally


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if tally.TALLY:
        terminalreporter.section("stores and what was done to them")
        for line in tally.lines():
            terminalreporter.write_line(line)
