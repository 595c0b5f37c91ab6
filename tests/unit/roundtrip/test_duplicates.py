"""Why a line came twice: what a killed writer explains, and what it does not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.roundtrip.duplicates import Explained, Sightings
from examples.roundtrip.sources import SourceFile
from examples.roundtrip.spool import Arrival

FILES = [SourceFile("a", 3, 6), SourceFile("empty", 0, 0)]
KILLED_MS = 100


def arrival(
    *,
    line: int = 1,
    received_ms: int = 120,
    stored_ms: int = 90,
    group: str = "g1",
    offset: int = 7,
    name: str = "a",
) -> Arrival:
    return Arrival(name, line, b"x\n", received_ms, 1, stored_ms, group, 2, offset)


def why(*arrivals: Arrival) -> Explained:
    sightings = Sightings(FILES)
    for one in arrivals:
        sightings.note(one)
    return sightings.explained("g1", KILLED_MS)


def test_every_line_once_is_no_duplicate() -> None:
    lines = [arrival(line=n, offset=0) for n in (1, 2, 3)]
    found = why(*lines, arrival(name="empty", line=0, offset=0))
    assert found == Explained()
    assert found.sentences() == []


@pytest.mark.parametrize("other", ["g1", "g2"])
def test_stored_on_both_sides_of_the_kill_it_was_sent_again(other: str) -> None:
    again = arrival(stored_ms=130, offset=9, group=other)
    for order in ((arrival(), again), (again, arrival())):
        assert why(*order) == Explained(sent_again=1)
    assert "twice in the log" in Explained(sent_again=1).sentences()[0]


def test_the_same_place_after_the_kill_was_delivered_again() -> None:
    assert why(arrival(received_ms=95), arrival()) == Explained(delivered_again=1)
    assert "commit" in Explained(delivered_again=1).sentences()[0]


@pytest.mark.parametrize(
    "pair",
    [
        (arrival(stored_ms=80), arrival(stored_ms=90, offset=8)),  # both before the kill
        (arrival(stored_ms=110), arrival(stored_ms=120, offset=8)),  # both after it
        (arrival(received_ms=95), arrival(received_ms=96)),  # delivered twice before it
        (arrival(group="g2"), arrival(group="g2")),  # of a group that lost nothing
        (arrival(group="g2"), arrival(group="g2", stored_ms=130, offset=8)),
    ],
)
def test_everything_else_is_unexplained(pair: tuple[Arrival, Arrival]) -> None:
    found = why(*pair)
    assert found == Explained(unexplained=1)
    assert found.count == 1


def test_lines_that_nobody_sent_are_another_matter() -> None:
    stray = [arrival(name="b"), arrival(line=4)]
    assert why(*stray, *stray) == Explained()


PLACES = st.tuples(
    st.sampled_from(["g1", "g2", "g3"]), st.integers(0, 2**16 - 1), st.integers(0, 9)
)


@given(st.lists(PLACES, min_size=1))
def test_a_place_is_one_number(places: list[tuple[str, int, int]]) -> None:
    sightings = Sightings(FILES)
    numbers = {place: sightings.place_of(Arrival("a", 1, b"", 1, 1, 1, *place)) for place in places}
    assert len(set(numbers.values())) == len(set(places))
    assert all(sightings.group_of(number) == place[0] for place, number in numbers.items())
