"""The benchmark of appends appends, and divides what belongs together."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import append


def test_a_measurement_counts_what_was_appended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(append, "FILE_MIB", 1)
    monkeypatch.setattr(append, "BATCH_BYTES_MIN", 128 * 1024)
    line = append.measure(tmp_path, 128)
    assert float(line["appended"]) > 0
    assert float(line["bare"]) > 0


def test_batches_fill_a_file_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    content = [(bytes(100), ("a", 0, 1)), (bytes(50), ("a", 0, 1))]
    monkeypatch.setattr(append, "FILE_MIB", 1)
    rounds = append.rounds_that_fit(content)
    assert 100 + rounds * 150 + 8 <= 1024 * 1024 < 100 + (rounds + 1) * 150 + 8


def test_ratios_are_taken_run_by_run() -> None:
    lines = [
        {"appended": 50, "bare": 100},
        {"appended": 90, "bare": 100},
        {"appended": 8, "bare": 10},
    ]
    row = append.row(128, "plain", [dict(line) for line in lines])
    assert (row.ratio.median, row.ratio.lowest, row.ratio.highest) == (0.8, 0.5, 0.9)
    assert "| 128 B" in append.table([row])
    assert "80.0%" in append.table([row])
