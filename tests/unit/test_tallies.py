"""Plain counts are served as prometheus_client serves its own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from cometmq.tallies import Spreads, Tally, TallyByLabels, histogram

BOUNDS = (0.001, 0.5, 1, 20)

values = st.one_of(st.sampled_from(BOUNDS), st.floats(0.0, 100.0))


def served(registry: CollectorRegistry) -> set[str]:
    lines = generate_latest(registry).decode().splitlines()
    return {line for line in lines if "_created" not in line}


@given(st.lists(values), st.lists(st.tuples(st.sampled_from("ab"), values)))
def test_histograms_are_served_alike(some: list[float], others: list[tuple[str, float]]) -> None:
    ours, theirs = CollectorRegistry(auto_describe=True), CollectorRegistry()
    plain = histogram("one", "One.", BOUNDS, ours)
    split = Spreads("two", "Two.", BOUNDS, ours, "kind", ("a", "b")).by_value
    one = Histogram("one", "One.", buckets=BOUNDS, registry=theirs)
    two = Histogram("two", "Two.", ["kind"], buckets=BOUNDS, registry=theirs)
    for kind in "ab":
        two.labels(kind)
    plain.observe(0.25, 4)  # the first of all, so that both sums are exact
    for _ in range(4):
        one.observe(0.25)
    for value in some:
        plain.observe(value)
        one.observe(value)
    for kind, value in others:
        split[kind].observe(value)
        two.labels(kind).observe(value)
    assert served(ours) == served(theirs)


def test_counters_are_served_alike() -> None:
    ours, theirs = CollectorRegistry(auto_describe=True), CollectorRegistry()
    tally = Tally("one", "One.", ours)
    flow = TallyByLabels("two", "Two.", ["topic", "group"], ours)
    one = Counter("one", "One.", registry=theirs)
    two = Counter("two", "Two.", ["topic", "group"], registry=theirs)
    assert served(ours) == served(theirs)
    for more in (1, 5):
        tally.inc(more)
        one.inc(more)
    flow.counts["t", "g"] = 3
    two.labels("t", "g").inc(3)
    assert served(ours) == served(theirs)
