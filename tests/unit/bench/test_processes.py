"""CPU time and children, on this very process."""

from __future__ import annotations

import argparse
import os

import pytest

from bench.processes import Child, Meter, cpu_seconds, watch_argument, watched


def test_cpu_seconds_agrees_with_the_standard_library() -> None:
    times = os.times()
    assert cpu_seconds(os.getpid()) == pytest.approx(times.user + times.system, abs=0.1)


def test_a_meter_counts_per_message() -> None:
    line = Meter({"other": os.getpid()}).stop(10)
    assert line["messages"] == 10
    assert float(line["rate"]) == pytest.approx(10 / float(line["seconds"]))
    assert {"cpu_us_client", "cpu_us_other"} <= line.keys()


def test_watched_processes() -> None:
    parser = argparse.ArgumentParser()
    watch_argument(parser)
    assert watched(parser.parse_args(["--watch", "a=1", "--watch", "b=2"])) == {"a": 1, "b": 2}


def test_a_child_that_says_nothing_is_an_error() -> None:
    with Child("keyword") as child, pytest.raises(RuntimeError, match="before it had answered"):
        child.read()
