"""What is reported of a single message: a wrong trace is a complaint, and rows are in order."""

from __future__ import annotations

from cometmq.admin.views import TraceEventView
from examples.roundtrip.checker import WriterChange
from examples.roundtrip.timeline import Outcome, clock_text

CHANGE = WriterChange("g1", 1_400, 1_900)


def event(time_ms: int | None, name: str, result: str = "ok") -> TraceEventView:
    return TraceEventView(time_ms, name, "U", result=result)


def recalled() -> Outcome:
    return Outcome("recalled", "T", (("produced", "ok"), ("recalled", "ok")), ("consumed",))


def test_a_trace_with_all_that_is_wanted_is_no_complaint() -> None:
    outcome = recalled()
    outcome.events = [event(1_000, "produced"), event(1_001, "recalled")]
    outcome.expect_events()
    assert not outcome.wrong


def test_missing_and_unwanted_events_are_complaints() -> None:
    outcome = recalled()
    outcome.events = [event(1_000, "produced"), event(1_500, "consumed")]
    outcome.expect_events()
    assert outcome.wrong == ["its trace lacks: recalled ok", "its trace must not have: consumed"]
    assert outcome.block(CHANGE).startswith("✗ recalled")


def test_an_event_that_is_wanted_three_times_is_missed_when_it_came_twice() -> None:
    outcome = Outcome("dead letter", "T", (("consumed", "failed"),) * 3)
    outcome.events = [event(n, "consumed", "failed") for n in (1, 2)]
    assert outcome.missing() == ["consumed failed"]


def test_rows_are_in_the_order_of_time_with_the_kill_between_them() -> None:
    outcome = Outcome("delayed", "T", (), unique_id="U")
    outcome.events = [event(2_000, "consumed"), event(1_000, "produced"), event(None, "passed")]
    outcome.notes = [(1_250, "a note")]
    header, _, _, *rows = outcome.block(CHANGE).splitlines()
    assert header == "✓ delayed: message U"
    assert [" ".join(row.split()) for row in rows] == [
        f"{clock_text(1_000)} produced ok",
        "+0.250 s (a note)",
        "+0.400 s --- the writer of g1 is killed ---",
        "+0.900 s --- g1 has a new writer ---",
        "+1.000 s consumed ok",
    ]
