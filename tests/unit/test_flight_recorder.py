"""The flight recorder: the ring, what keeps it, and how it travels."""

from __future__ import annotations

import gc
import logging
import threading
from pathlib import Path

import pytest

from cometmq import flight_recorder
from cometmq.errors import ConfigInvalid
from cometmq.flight_recorder import (
    ENTRIES_DEFAULT,
    ENTRIES_MAX,
    ENTRIES_VARIABLE,
    KEPT_EVERY_NS,
    Entry,
    FlightRecorder,
    Stage,
    entry_count,
    name_thread,
    parse,
)

MS = 1_000_000


class Time:
    def __init__(self) -> None:
        self.ns = KEPT_EVERY_NS

    def __call__(self) -> int:
        return self.ns


@pytest.fixture
def now() -> Time:
    return Time()


@pytest.fixture
def recorder(now: Time) -> FlightRecorder:
    return FlightRecorder(now)


def test_the_ring_has_the_newest_stages(now: Time, recorder: FlightRecorder) -> None:
    for number in range(ENTRIES_DEFAULT + 3):
        begun_ns, now.ns = now.ns, now.ns + 5
        recorder.note(Stage.APPEND, begun_ns, number)
    found = recorder.entries()
    assert [one.number for one in found] == list(range(3, ENTRIES_DEFAULT + 3))
    assert found[-1] == Entry(Stage.APPEND, now.ns - 5, 5, ENTRIES_DEFAULT + 2)


@pytest.mark.parametrize(("limit_ms", "kept"), [(0, 0), (20, 1), (21, 0)])
def test_what_is_longer_than_the_limit_keeps_the_ring(
    now: Time,
    recorder: FlightRecorder,
    caplog: pytest.LogCaptureFixture,
    limit_ms: int,
    kept: int,
) -> None:
    recorder.limit_ms = limit_ms
    recorder.note(Stage.GC_PAUSE, now.ns - 7 * MS, 2)
    with caplog.at_level(logging.WARNING):
        recorder.note_limited(Stage.LOOP_TURN, now.ns - 20 * MS - 1)
    assert len(caplog.records) == kept
    for record in caplog.records:
        assert record.fields["longest"] == "loop_turn 20.0 ms, gc_pause 7.0 ms"  # type: ignore[attr-defined]


def test_a_burst_keeps_the_ring_once(now: Time, recorder: FlightRecorder) -> None:
    recorder.limit_ms = 1
    for number in (1, 2):
        recorder.note_limited(Stage.FLUSH, now.ns - 2 * MS, number)
    _, kept = parse(recorder.as_json())
    assert [one.number for one in kept] == [1]
    now.ns += KEPT_EVERY_NS
    recorder.note_limited(Stage.FLUSH, now.ns - 2 * MS, 3)
    entries, kept = parse(recorder.as_json())
    assert [one.number for one in kept] == [1, 2, 3]
    assert entries == recorder.entries()


def test_only_long_stages_when_these_are_wanted(now: Time, recorder: FlightRecorder) -> None:
    for took_ms in (9, 10, 11):
        recorder.note(Stage.FLUSH, now.ns - took_ms * MS, took_ms)
    recorder.keep("test")
    for some in parse(recorder.as_json(longer_than_ms=10)):
        assert [one.number for one in some] == [10, 11]


@pytest.mark.parametrize(
    "text", ["0", "-1", "1000", "8192.0", "²", str(2 * ENTRIES_MAX), "9" * 400]
)
def test_a_ring_has_a_size_that_is_possible(text: str) -> None:
    with pytest.raises(ConfigInvalid, match="power of two"):
        entry_count({ENTRIES_VARIABLE: text})


def test_a_ring_has_the_size_that_is_wanted() -> None:
    assert [entry_count(e) for e in ({}, {ENTRIES_VARIABLE: "64"})] == [ENTRIES_DEFAULT, 64]


def test_stages_of_a_newer_release_are_left_out() -> None:
    assert parse('{"entries": [["teleport", 1, 2, 3], ["flush", 1, 2, 3]], "kept": []}') == (
        [Entry(Stage.FLUSH, 1, 2, 3)],
        [],
    )


def test_collections_are_noted() -> None:
    recorder = FlightRecorder()
    recorder.watch_collector()
    try:
        gc.collect(1)
    finally:
        gc.callbacks.remove(recorder._collected)
    assert (Stage.GC_PAUSE, 1) in [(one.stage, one.number) for one in recorder.entries()]


def test_a_thread_has_its_name_in_the_kernel() -> None:
    seen: list[str] = []

    def work() -> None:
        name_thread("a-name-that-is-long")
        seen.append(Path("/proc/thread-self/comm").read_text().strip())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == ["a-name-that-is-long"[: flight_recorder.THREAD_NAME_LENGTH_MAX]]
