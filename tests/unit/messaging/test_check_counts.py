"""Counts of checks against a dictionary."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cometmq.messaging.check_counts import PAGE_BITS, CheckCounts

PAGE = 1 << PAGE_BITS
OFFSETS = st.sampled_from([0, 1, PAGE - 1, PAGE, PAGE + 1, 5 * PAGE])
STEPS = st.lists(st.tuples(st.sampled_from(["count", "put", "forget"]), st.lists(OFFSETS)))


@given(STEPS)
def test_counts_are_those_of_a_dictionary(steps: list[tuple[str, list[int]]]) -> None:
    counts, model = CheckCounts(), dict[int, int]()
    for step, offsets in steps:
        match step:
            case "count":
                counts.count(offsets)
                for offset in offsets:
                    model[offset] = model.get(offset, 0) + 1
            case "put":
                for offset in offsets:
                    counts.put(offset, 7)
                    model[offset] = 7
            case _:
                assert counts.forget(offsets) == any(offset in model for offset in offsets)
                for offset in offsets:
                    model.pop(offset, None)
        assert counts.offsets() == model.keys()
        assert bool(counts) == bool(model), "empty pages go"
        looked = [0, 1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 5 * PAGE]
        assert counts.counts_of(looked) == [model.get(offset, 0) for offset in looked]
        assert list(map(counts.count_of, looked)) == counts.counts_of(looked)
