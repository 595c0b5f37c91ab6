"""Rates of the last minute, compared with sums over a list of everything that happened."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cometmq.client.remote import rates
from cometmq.client.remote.rates import MARK_S, WINDOW_S, Rates

_EVENTS = st.lists(
    st.tuples(st.sampled_from("AB"), st.integers(0, 50), st.integers(0, 9), st.booleans()),
    max_size=60,
)


@given(_EVENTS)
def test_they_are_what_happened_since_the_oldest_mark_of_the_last_minute(
    events: list[tuple[str, int, int, bool]],
) -> None:
    """One event a MARK_S, with a mark before it."""
    made, now_s = Rates(), 100.0
    happened: list[tuple[float, str, int, int, bool]] = []
    for topic, pulled, failed, is_called in events:
        made.mark(now_s)
        tally = made.of(topic)
        tally.pulled += pulled
        tally.failed += failed
        tally.done += pulled - min(pulled, failed)
        tally.calls += 2 * is_called
        tally.busy_ns += 250_000_000 * is_called
        happened.append((now_s, topic, pulled, failed, is_called))
        now_s += MARK_S

    oldest_s = max(100.0, now_s - WINDOW_S)
    assert made.window_s(now_s) == (now_s - oldest_s if events else 0.0)
    told = {one.topic: one for one in made.per_second(now_s)}
    assert told.keys() == {topic for _, topic, *_ in happened}
    for topic, one in told.items():
        recent = [event for event in happened if event[1] == topic and event[0] >= oldest_s]
        span_s = now_s - oldest_s
        assert abs(one.pulled * span_s - sum(event[2] for event in recent)) < 1e-6
        assert abs(one.failed * span_s - sum(event[3] for event in recent)) < 1e-6
        done = sum(max(0, event[2] - event[3]) for event in recent)
        assert abs(one.done * span_s - done) < 1e-6
        assert one.process_ms == (125.0 if any(event[4] for event in recent) else 0.0)


def test_nothing_is_told_before_the_first_mark() -> None:
    made = Rates()
    made.of("T").done += 1
    assert made.per_second(5.0) == []


def test_topics_above_the_limit_are_counted_together() -> None:
    made = Rates()
    made.mark(0.0)
    for n in range(rates.TOPICS_MAX + 5):
        made.of(f"T{n}").done += 1
    told = {one.topic: one.done for one in made.per_second(1.0)}
    assert len(told) == rates.TOPICS_MAX + 1
    assert told[""] == 5.0
    assert told["T0"] == 1.0
