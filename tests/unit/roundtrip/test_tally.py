"""Counts of arrivals against sorting all of them."""

from __future__ import annotations

from itertools import pairwise
from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from examples.roundtrip.spool import Arrival
from examples.roundtrip.tally import Tally


def arrival(received_ms: int, born_ms: int, stored_ms: int = 0, group: str = "g1") -> Arrival:
    return Arrival("a", 1, b"", received_ms, born_ms, stored_ms, group, 0, 0)


@given(st.lists(st.integers(0, 50), min_size=1), st.sampled_from([0.5, 0.99, 1.0]))
def test_latencies_as_if_all_were_kept(latencies: list[int], fraction: float) -> None:
    tally = Tally()
    tally.add(arrival(1000 + latency, 1000) for latency in latencies)
    expected = sorted(latencies)[ceil(fraction * len(latencies)) - 1]
    assert tally.latency_ms(fraction) == expected


@given(st.lists(st.lists(st.integers(1, 10_000), min_size=1), min_size=1))
def test_the_span_is_that_of_all_consumers(consumers: list[list[int]]) -> None:
    tally = Tally()
    for received in consumers:
        tally.add(arrival(ms, 0) for ms in received)
    everything = [ms for received in consumers for ms in received]
    assert tally.seconds == (max(everything) - min(everything)) / 1000
    assert tally.count == len(everything)


def test_a_clock_set_back_is_no_negative_latency() -> None:
    tally = Tally()
    tally.add([arrival(10, 12)])
    assert tally.latency_ms(1.0) == 0


def test_nothing_came() -> None:
    tally = Tally()
    tally.add([])
    assert (tally.latency_ms(0.5), tally.seconds, tally.count) == (0, 0.0, 0)


def test_what_waits_on_purpose_is_not_late() -> None:
    tally = Tally()
    tally.add([arrival(10, 5)])
    tally.latencies_count = False
    tally.add([arrival(9999, 5)])
    assert (tally.latency_ms(1.0), tally.count, tally.last_ms) == (5, 2, 9999)


def stored_at(*times_ms: int) -> Tally:
    tally = Tally()
    tally.add(arrival(1, 1, stored_ms) for stored_ms in times_ms)
    tally.add([arrival(1, 1, 15, "g2")])  # other groups go on meanwhile
    return tally


def longest_gap(times_ms: list[int], from_ms: int, to_ms: int) -> int | None:
    """The same by looking at every pair."""
    times = sorted(set(times_ms))
    if not times or times[0] > from_ms or times[-1] <= to_ms:
        return None
    pairs = [(a, b) for a, b in pairwise(times) if b > from_ms and a <= to_ms]
    return max(b - a for a, b in pairs)


@given(st.lists(st.integers(0, 40)), st.tuples(st.integers(0, 40), st.integers(0, 40)).map(sorted))
def test_the_pause_is_the_longest_gap_that_touches_the_hand_over(
    times_ms: list[int], span: list[int]
) -> None:
    from_ms, to_ms = span
    tally = stored_at(*times_ms)
    assert tally.pause_ms("g1", from_ms, to_ms) == longest_gap(times_ms, from_ms, to_ms)


def test_what_a_group_has_stored_since() -> None:
    assert stored_at(1, 9).stored_after("g1", 8)
    assert not stored_at(1, 9).stored_after("g1", 9)
    assert not stored_at(1, 9).stored_after("g3", 0)


def test_a_pause_that_never_ends_is_none() -> None:
    assert stored_at(1, 2, 3).pause_ms("g1", 4, 5) is None
    assert stored_at(1, 2, 9).pause_ms("g1", 4, 5) == 7
