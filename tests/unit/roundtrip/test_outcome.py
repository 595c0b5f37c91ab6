"""The job's exit status depends on this."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cometmq.admin.views import LogChecksumView
from examples.roundtrip.duplicates import Explained
from examples.roundtrip.lagging import Lag
from examples.roundtrip.logs import LogCopy
from examples.roundtrip.metrics import Expectation, Movement
from examples.roundtrip.outcome import COMPLAINTS_MAX, Outcome, Trip

TRIP = Trip(
    file_count=2,
    line_count=10,
    byte_count=100,
    message_count=10,
    duplicates=Explained(sent_again=2, delivered_again=1),
    strays=0,
    missing=0,
    produce_seconds=2.0,
    consume_seconds=0.0,
    p50_ms=1,
    p99_ms=2,
    uncommitted=0,
    hand_over_ms=1_234,
    take_over_ms=4_567,
)
LAG = Lag((), progress_sum=5, spark_sum=5, spark_s=1.0, report=Path("report.txt"))
WANTED = Expectation("m", "all", ("g1",), 1)
COPIES = [LogCopy(LogChecksumView("g1", n, "writer", 0, 9, "aa", True), "aa") for n in (0, 1)]
GOOD = Outcome(TRIP, LAG, COPIES, movements=[Movement(WANTED, (1,))])


def test_duplicates_are_counted_and_forgiven() -> None:
    assert GOOD.good
    assert ("duplicates", "3") in TRIP.rows()


def test_lag_may_be_left_out() -> None:
    assert replace(GOOD, lag=None).good


@pytest.mark.parametrize(
    "bad",
    [
        replace(GOOD, trip=replace(TRIP, strays=1)),
        replace(GOOD, trip=replace(TRIP, missing=1)),
        replace(GOOD, trip=replace(TRIP, uncommitted=1)),
        replace(GOOD, trip=replace(TRIP, hand_over_ms=None)),
        replace(GOOD, trip=replace(TRIP, take_over_ms=None)),
        replace(GOOD, trip=replace(TRIP, duplicates=Explained(unexplained=1))),
        replace(GOOD, lag=replace(LAG, spark_sum=4)),
        replace(GOOD, logs=[]),
        replace(GOOD, logs=[COPIES[0], replace(COPIES[1], file_sha256="bb")]),
        replace(GOOD, differences=["a differs"]),
        replace(GOOD, movements=[Movement(WANTED, (0,))]),
        replace(GOOD, movements=[Movement(replace(WANTED, still=True), (1,))]),
    ],
)
def test_everything_else_is_not(bad: Outcome) -> None:
    assert not bad.good
    assert len(bad.complaints()) == 1


def test_many_bad_files_do_not_flood_the_screen() -> None:
    bad = replace(GOOD, differences=[f"file {n} differs" for n in range(1000)])
    assert len(bad.complaints()) == COMPLAINTS_MAX + 1
    assert "980 more" in bad.complaints()[-1]


def test_rates_and_the_pause() -> None:
    rows = dict(TRIP.rows())
    assert rows["in"] == "5 messages/s"
    assert rows["out"] == "0 messages/s"
    assert {"1.23 s", "4.57 s"} <= set(rows.values())
