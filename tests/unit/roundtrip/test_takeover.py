"""A take-over's pause is read off the messages that came back."""

from __future__ import annotations

from examples.roundtrip.spool import Arrival
from examples.roundtrip.takeover import Failover
from examples.roundtrip.tally import Tally

LOSS = Failover("g1", 1, 0, epoch=3, lease_s=3.0, killed_ms=1_000, seen_ms=5_500)


def test_the_pause_of_its_own_group() -> None:
    tally = Tally()
    times = [("g1", 900), ("g1", 980), ("g2", 2_000), ("g1", 5_480), ("g1", 5_600)]
    tally.add(Arrival("a", 1, b"", 1, 1, stored_ms, group, 0, 0) for group, stored_ms in times)
    assert LOSS.pause_ms(tally) == 4_500


def test_nothing_afterwards() -> None:
    assert LOSS.pause_ms(Tally()) is None


def test_one_line_tells_it() -> None:
    assert LOSS.text == (
        "member 1, the writer, was killed; member 0 took over: epoch 3 after 4.5 s, "
        "3 s of lease included"
    )
