"""Late messages and what held them up."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

from bench.explain import Sent, Trace, table
from bench.standstills import Standstill, Standstills
from cometmq.flight_recorder import Entry, Stage, queue_end

MS = 1_000_000
SENT = Sent(due_ns=0, sent_ns=MS, queue_id=3, queue_offset=9, log_offset=5_000)


def at(stage: Stage, end_ms: int, number: int, took_ms: int = 1) -> Entry:
    return Entry(stage, (end_ms - took_ms) * MS, took_ms * MS, number)


def trace(flushed_ms: int, *more: Entry, standstills: Sequence[Standstill] = ()) -> Trace:
    """A batch with the message ends at 6,000; others come before and after it."""
    broker = [
        at(Stage.APPEND, 1, 4_900),
        at(Stage.APPEND, 2, 6_000),
        at(Stage.FLUSH, 2, 4_900),
        at(Stage.FLUSH, flushed_ms, 7_000),
        at(Stage.ARRIVAL, flushed_ms + 1, queue_end(2, 10)),
        at(Stage.ARRIVAL, flushed_ms + 2, queue_end(3, 12)),
        *more,
    ]
    pullhold = [at(Stage.HOLD_ANSWERED, flushed_ms + 3, queue_end(3, 12))]
    return Trace({"broker": broker, "pullhold": pullhold}, standstills)


def test_the_longest_step_is_named() -> None:
    found = trace(40).explain(SENT, 45 * MS)
    assert [(step.name, step.duration_ms) for step in found.steps] == [
        ("the producer's schedule", 1),
        ("producer to log", 1),
        ("sync", 38),
        ("sync to arrival", 2),
        ("arrival to answer", 1),
        ("answer to listener", 2),
    ]
    assert found.stage == "sync"


def test_what_else_was_long_then_is_named_beside_it() -> None:
    earlier = at(Stage.GC_PAUSE, 1, 2, took_ms=90)
    growth = at(Stage.FILE_GROWTH, 39, 0, took_ms=30)
    found = trace(40, earlier, growth).explain(SENT, 45 * MS)
    assert found.stage == "sync: file_growth of the broker"


def test_a_machine_that_stood_still_is_named_first() -> None:
    growth = at(Stage.FILE_GROWTH, 39, 0, took_ms=30)
    short, long = Standstill(0, 20 * MS), Standstill(15 * MS, 60 * MS)
    for standstills, stage in (
        ([short], "sync: file_growth of the broker"),  # 18 of 38 ms
        ([short, long], "sync: the machine stood still"),  # 25 ms of it
        ([Standstill(40 * MS, 90 * MS)], "sync: file_growth of the broker"),  # after it
    ):
        found = trace(40, growth, standstills=standstills).explain(SENT, 45 * MS)
        assert found.stage == stage


def test_a_watcher_that_does_not_run_says_so() -> None:
    with Standstills() as standstills:
        time.sleep(0.5)
        os.kill(standstills.pid, signal.SIGSTOP)
        stopped_ns = time.monotonic_ns()
        time.sleep(0.05)
        os.kill(standstills.pid, signal.SIGCONT)
    assert any(
        one.begin_ns - 10 * MS < stopped_ns < one.end_ns - 40 * MS for one in standstills.found
    )


def test_a_message_of_an_overwritten_ring_is_not_explained() -> None:
    late = SENT._replace(due_ns=900 * MS, log_offset=90_000)
    found = trace(40).explain(late, 950 * MS)
    assert (found.late_ms, found.stage) == (50, "not recorded")
    assert table([found, trace(40).explain(SENT, 45 * MS)]).splitlines()[0].strip().startswith("1 ")
