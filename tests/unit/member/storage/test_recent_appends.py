"""What was just appended is found as it was appended, or not at all."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cometmq.format import queueunit
from cometmq.member.storage.recent_appends import QUEUES_MAX, RecentAppends, Run
from cometmq.messaging.inline_messages import BYTES_MAX, COUNT_MAX
from cometmq.messaging.pull import sizes_and_codes

A, B = ("A", 0), ("B", 0)

sizes = st.one_of(st.integers(1, 40), st.just(BYTES_MAX // 2), st.just(BYTES_MAX + 1))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.sampled_from([A, B]), st.lists(sizes, min_size=1)),
        st.tuples(st.just("take"), st.sampled_from([A, B]), st.tuples(*[st.integers(0, 40)] * 2)),
        st.tuples(st.just("drop"), st.sampled_from([A, B]), st.none()),
    )
)


def run_of(first: int, bodies: list[bytes]) -> Run:
    units = b"".join(queueunit.pack(0, len(body), at) for at, body in enumerate(bodies, first))
    return Run(first, units, b"".join(bodies))


@given(steps)
def test_a_run_has_what_was_appended(some: list[tuple[str, tuple[str, int], object]]) -> None:
    recent = RecentAppends()
    queues: dict[tuple[str, int], list[bytes]] = {A: [], B: []}
    for what, key, how in some:
        queue = queues[key]
        if what == "append":
            assert isinstance(how, list)
            bodies = [bytes([len(queue) % 251]) * size for size in how]
            recent.add(key, run_of(len(queue), bodies))
            queue += bodies
        elif what == "drop":
            recent.forget_topic(key[0])
            queue.clear()
        else:
            assert isinstance(how, tuple)
            first, end = sorted(how)
            found = recent.take(key, first, end) if first < end else None
            if found is not None:
                assert found == run_of(first, queue[first:end])._replace(units=found.units)
                assert sizes_and_codes(found.units)[0] == [len(one) for one in queue[first:end]]
                assert found.is_small


def test_the_newest_small_batch_is_found_once() -> None:
    recent = RecentAppends()
    recent.add(A, run_of(0, [b"x"]))
    recent.add(A, run_of(1, [b"y", b"z"]))
    found = recent.take(A, 0, 2)
    assert found is not None
    assert found.records == b"xy"
    assert recent.take(A, 1, 2) is None
    rest = recent.take(A, 2, 3)
    assert rest is not None
    assert rest.records == b"z"
    assert recent.take(A, 2, 3) is None


def test_little_is_kept() -> None:
    recent = RecentAppends()
    recent.add(A, run_of(0, [b"x"] * (COUNT_MAX + 1)))
    assert recent.take(A, 0, 1) is None
    recent.add(A, run_of(33, [b"x"] * COUNT_MAX))
    recent.add(A, run_of(65, [b"y"]))  # with it, they would be too many
    assert recent.take(A, 33, 34) is None
    assert recent.take(A, 65, 66) is not None
    for number in range(3 * QUEUES_MAX):
        recent.add(("C", number), run_of(0, [b"x"]))
        kept = [n for n in range(number + 1) if ("C", n) in recent._runs]
        assert 0 < len(kept) <= QUEUES_MAX
