from __future__ import annotations

from typing import Any

import pytest

from spark.lag import report

ROW: dict[str, Any] = {
    "group": "G", "topic": "T", "topic_kind": "normal", "status": "WARN", "queue_count": 3,
    "unknown_count": 0, "lag_sum": 1234, "lag_known_sum": 1234, "lag_max": 1000,
    "lag_max_queue": "T/g1/2", "lag_ms_max": 65_000, "lag_velocity": 2.5, "drain_eta_s": None,
    "lost_known_sum": 0, "worst_queue": "T/g1/0", "reason": "2 wait, no commit for 60 s",
}  # fmt: skip


@pytest.mark.parametrize(
    ("milliseconds", "shown"),
    [
        (None, "–"), (0, "0 ms"), (999, "999 ms"), (1_000, "1.0 s"), (59_900, "59.9 s"),
        (65_000, "1 m 05 s"), (3_599_000, "59 m 59 s"), (7_500_000, "2 h 05 m"),
        (86_399_000, "23 h 59 m"), (90_000_000, "1 d 01 h"), (59_960, "60.0 s"),
    ],
)  # fmt: skip
def test_durations(milliseconds: float | None, shown: str) -> None:
    assert report.duration(milliseconds) == shown


def test_an_unknown_lag_never_looks_like_a_number() -> None:
    assert report.lag(ROW) == "1,234"
    poisoned = {**ROW, "lag_sum": None, "unknown_count": 2}
    assert report.lag(poisoned) == "1,234 + 2 unknown"
    assert report.lag({**poisoned, "lag_known_sum": None}) == "unknown"


def test_what_is_null_is_a_dash() -> None:
    assert [report.count(None), report.rate(None), report.eta(None)] == ["–"] * 3
    assert [report.count(0), report.rate(-0.25), report.eta(0.0)] == ["0", "-0.2/s", "0 ms"]


def test_a_table_is_as_wide_as_its_content() -> None:
    columns = (("name", lambda row: row["group"]), ("n", lambda row: str(row["queue_count"])))
    lines = report.table(columns, [{"group": "a-long-name", "queue_count": 7}]).splitlines()
    assert lines == ["name         n", "───────────  ─", "a-long-name  7"]


def test_the_report_says_what_is_missing() -> None:
    summary = {
        "snapshot_id": "s1", "snapshot_count": 2, "completeness": 0.5, "expected": ["g1", "g2"],
        "missing": {"g2": "PEER_UNAVAILABLE: silent"}, "status_counts": {"WARN": 1, "OK": 2},
        "left_out": {"a/b": "it is cut"},
        "rows": {"groups": 201, "topics": 1, "depths": 0}, "path": "results/run=r",
        "groups": [ROW], "topics": [ROW], "depths": [],
    }  # fmt: skip
    text = report.text(summary)
    assert "50% of 2 broker groups" in text
    assert "missing: g2: PEER_UNAVAILABLE: silent" in text
    assert "left out: a/b: it is cut" in text
    assert "WARN 1, OK 2" in text
    assert "… and 200 more in results/run=r/groups" in text
    assert "T/g1/0: 2 wait, no commit" in text  # the reason's queue, not the one with the most lag
