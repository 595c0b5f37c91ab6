"""The rings of flight recorders as they are taken beside late messages."""

from __future__ import annotations

import pytest

from bench import latency
from bench.latency import Rings
from cometmq.flight_recorder import Entry, FlightRecorder, Stage


async def test_a_look_that_is_asked_for_during_another_is_made_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder = FlightRecorder()
    monkeypatch.setattr(latency, "recorder", recorder)
    monkeypatch.setattr(latency, "TRACE_PAUSE_S", 0.0)
    real, rings = recorder.entries, Rings("consumer", {})

    def entries(since_ns: int = 0) -> list[Entry]:
        found = real(since_ns)
        if not rings.found["consumer"]:  # a message comes late while the ring is being read
            recorder.note(Stage.APPEND, recorder.now_ns(), 2)
            rings.look()
        return found

    monkeypatch.setattr(recorder, "entries", entries)
    recorder.note(Stage.APPEND, recorder.now_ns(), 1)
    rings.look()
    await rings.complete()
    assert sorted(entry.number for entry in rings.found["consumer"]) == [1, 2]
