"""A hand-over's pause is read off the messages that came back."""

from __future__ import annotations

from cometmq.admin.views import HandoverView
from examples.roundtrip.handover import HandOver
from examples.roundtrip.spool import Arrival
from examples.roundtrip.tally import Tally

CHANGE = HandOver(HandoverView("g1", 0, 1, 12_345, 7), asked_ms=1_000, answered_ms=3_500)


def test_the_pause_of_its_own_group() -> None:
    tally = Tally()
    times = [("g1", 900), ("g1", 1_100), ("g2", 2_000), ("g1", 3_400), ("g1", 3_600)]
    tally.add(Arrival("a", 1, b"", 1, 1, stored_ms, group, 0, 0) for group, stored_ms in times)
    assert CHANGE.pause_ms(tally) == 2_300


def test_nothing_afterwards() -> None:
    assert CHANGE.pause_ms(Tally()) is None


def test_one_line_tells_it() -> None:
    text = "member 0 handed over to member 1 at 12,345 bytes of log; epoch 7 after 2.5 s"
    assert CHANGE.text == text
