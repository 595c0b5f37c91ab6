from __future__ import annotations

import pytest

from cometmq.errors import OffsetNotAvailable
from cometmq.member.read import queue_ends

QUEUES = ("T", 0), ("T", 1)


class Shown:
    """Of each queue so much is readable, and appended."""

    def __init__(self) -> None:
        self.ends = {QUEUES[0]: (5, 7), QUEUES[1]: (3, 3)}
        self.is_writer = True
        self.sealed = False

    def bounds(self, key: tuple[str, int]) -> tuple[int, int, int]:
        return 0, *self.ends[key]

    def may_acknowledge(self) -> bool:
        return self.is_writer


def test_an_end_is_certain_when_all_is_shown_that_was_there_at_the_question() -> None:
    shown = Shown()
    ends = queue_ends.appended_ends(shown, QUEUES)
    assert not queue_ends.are_shown(shown, ends)
    assert set(queue_ends.uncertain(shown, ends)) == {QUEUES[0]}
    shown.ends[QUEUES[0]] = (7, 9)  # what came since need not be shown
    assert queue_ends.are_shown(shown, ends)
    assert not queue_ends.uncertain(shown, ends)


@pytest.mark.parametrize("doubt", [{"is_writer": False}, {"sealed": True}])
def test_a_writer_in_doubt_knows_no_end(doubt: dict[str, bool]) -> None:
    """Its lease may be over, or handed over by a write that got no answer."""
    shown = Shown()
    ends = queue_ends.appended_ends(shown, QUEUES)
    vars(shown).update(doubt)
    found = queue_ends.uncertain(shown, ends)
    assert set(found) == set(QUEUES)
    assert all(isinstance(error, OffsetNotAvailable) for error in found.values())
