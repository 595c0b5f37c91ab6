"""What the soak concludes from what it looked at."""

from __future__ import annotations

from collections import Counter

from bench.soak import Stalls, Usage, row
from bench.standstills import Standstill
from cometmq.flight_recorder import Entry, Stage

MS = 1_000_000


def turn(begin_ms: int, took_ms: int, stage: Stage = Stage.LOOP_TURN) -> Entry:
    return Entry(stage, begin_ms * MS, took_ms * MS, 0)


def test_a_long_turn_has_the_cause_that_took_most_of_it() -> None:
    stalls = Stalls()
    for _ in range(2):  # a ring is looked at more than once while it has an entry
        stalls.note([turn(0, 50), turn(100, 60), turn(200, 60), turn(300, 60), turn(400, 60)])
        stalls.note([turn(110, 31, Stage.GC_PAUSE), turn(310, 29, Stage.FILE_GROWTH)])
        stalls.note([turn(205, 20, Stage.GC_PAUSE), turn(230, 20, Stage.GC_PAUSE)])
    found = stalls.explained([Standstill(395 * MS, 440 * MS)])
    assert found == {"gc_pause": 2, "unexplained": 1, "the machine stood still": 1}


def test_memory_is_flat_within_a_twentieth() -> None:
    for last, verdict in ((105, " flat"), (106, "not flat"), (94, "not flat")):
        usage = Usage([100, 100, 100, 500, last, last], [7] * 6, [3] * 6)
        assert verdict in row("broker", usage, Counter())
