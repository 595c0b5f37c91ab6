"""What is printed where the output is no terminal."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from examples.roundtrip import screen
from examples.roundtrip.lagging import beside
from tests.unit.roundtrip.test_lagging import row, view
from tests.unit.roundtrip.test_outcome import COPIES, GOOD, LAG


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=110)


def text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_plain_lines_come_when_something_has_changed(
    console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screen, "PLAIN_LINE_S", 0)
    with screen.Bars(console, 1_000) as bars:
        for stored, placed in [(0, 0), (7, 5), (7, 5), (9, 9)]:
            bars.update(stored, placed)
    assert text(console).splitlines() == [
        "  stored 7, placed 5 of 1,000 messages",
        "  stored 9, placed 9 of 1,000 messages",
    ]


def test_a_good_outcome(console: Console) -> None:
    lag = replace(LAG, queues=beside([view(0, 3, 10)], [row(0, 3, 10)]))
    screen.show(console, replace(GOOD, lag=lag))
    shown = text(console)
    assert "✓ all 2 files came back" in shown
    assert "NO" not in shown
    assert "the same" in shown


def test_a_bad_outcome_shows_where(console: Console) -> None:
    lag = replace(LAG, queues=beside([view(0, 3, 10)], []), spark_sum=None)
    logs = [COPIES[0], replace(COPIES[1], file_sha256="bb")]
    screen.show(console, replace(GOOD, lag=lag, logs=logs))
    shown = text(console)
    assert "✓" not in shown
    assert "ANOTHER" in shown
    assert "✗ the logs of g1 differ" in shown
    assert "NO" in shown
