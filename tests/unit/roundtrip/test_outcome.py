"""The judge of `make run` refuses a falsified result folder."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from cometmq.admin.views import LogChecksumView
from examples.roundtrip.comparing import compare, write_back
from examples.roundtrip.duplicates import Sightings
from examples.roundtrip.lagging import Count, Lag, QueueLag
from examples.roundtrip.logs import LogCopy
from examples.roundtrip.metrics import Expectation, Movement
from examples.roundtrip.outcome import Outcome, Trip
from examples.roundtrip.placing import Placer
from examples.roundtrip.sources import plan, split
from examples.roundtrip.spool import Arrival, SpoolReader, pack

KILLED_MS = 1_000
FILES = {"empty.py": b"", "pkg/no end.txt": b"one\r\ntwo", "many.py": b"a\nb\nc\n"}


def arrivals(root: Path) -> list[Arrival]:
    """Each line once, all before the writer was killed."""
    lines = [
        (file.name, number, line)
        for file in plan(root, 1)
        for number, line in enumerate(
            split((root / file.name.replace("%20", " ")).read_bytes()) or [b""],
            start=1 if file.line_count else 0,
        )
    ]
    return [
        Arrival(name, number, body, 20, 10, 15, "g1", 0, offset)
        for offset, (name, number, body) in enumerate(lines)
    ]


def judged(root: Path, folder: Path, came: list[Arrival], spark_lag: int = 5) -> Outcome:
    """The outcome of a folder with these arrivals in its spool, and this lag by Spark."""
    folder.mkdir()
    spool = folder / "consumer-0.spool"
    spool.write_bytes(b"".join(map(pack, came)))
    files = plan(root, 1)
    placer, sightings = Placer(files, partial(write_back, folder / "files")), Sightings(files)
    for arrival in (one for piece in SpoolReader(spool).read() for one in piece):
        placer.place(*arrival[:3])
        sightings.note(arrival)
    missing = placer.expected - placer.placed
    explained = sightings.explained("g1", KILLED_MS)
    trip = Trip(3, 5, 18, 6, explained, placer.strays, missing, 1.0, 1.0, 1, 2, 0, 1, 1)
    queue = QueueLag("g1/0", Count(0, 5, 5), Count(0, 5, spark_lag), 1)
    lag = Lag([queue], 5, spark_lag, 1.0, folder / "report.txt")
    logs = [LogCopy(LogChecksumView("g1", n, "writer", 0, 9, "aa", True), "aa") for n in (0, 1)]
    moved = [Movement(Expectation("m", "all", ("g1",), 1), (1,))]
    return Outcome(trip, lag, logs, moved, compare(files, root, folder / "files"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        write_back(tmp_path / "lib", name.replace(" ", "%20"), content)
    return tmp_path / "lib"


def test_a_falsified_result_is_refused(root: Path, tmp_path: Path) -> None:
    came = arrivals(root)
    good = judged(root, tmp_path / "good", came)
    assert good.complaints() == []
    (lost,) = [one for one in came if (one.name, one.line_number) == ("many.py", 2)]
    others = [one for one in came if one != lost]
    wrong = {
        "did not come back": judged(root, tmp_path / "lost", others),
        "came twice": judged(root, tmp_path / "doubled", [*came, lost]),
        "many.py differs": judged(
            root, tmp_path / "changed", [*others, lost._replace(body=b"B\n")]
        ),
        "that nobody sent": judged(
            root, tmp_path / "stray", [*came, lost._replace(line_number=99)]
        ),
        "by Spark": judged(root, tmp_path / "lag", came, spark_lag=4),
        "the logs of g1 differ": replace(
            good, logs=[good.logs[0], replace(good.logs[1], file_sha256="bb")]
        ),
        "uncommitted": replace(good, trip=replace(good.trip, uncommitted=1)),
        "after the hand-over": replace(good, trip=replace(good.trip, hand_over_ms=None)),
        "after the take-over": replace(good, trip=replace(good.trip, take_over_ms=None)),
        "m rose by 0": replace(good, movements=[Movement(good.movements[0].wanted, (0,))]),
    }
    for complaint, outcome in wrong.items():
        assert complaint in " ".join(outcome.complaints()), complaint
        assert not outcome.good
