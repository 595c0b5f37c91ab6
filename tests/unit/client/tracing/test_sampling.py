from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cometmq.client.tracing.sampling import Sampling

STREAM = st.text("0123456789ABCDEF", min_size=26, max_size=26)


@given(
    period=st.integers(0, 50),
    stream=STREAM,
    first=st.integers(0, 2**32 - 400),
    count=st.integers(0, 300),
)
def test_producers_and_consumers_choose_the_same_messages(
    period: int, stream: str, first: int, count: int
) -> None:
    sampling = Sampling(period)
    chosen = set(sampling.indexes(stream, first, count))
    assert chosen == {
        index for index in range(count) if sampling.chooses(f"{stream}{first + index:08X}")
    }
    if period:
        assert count // period <= len(chosen) <= -(-count // period)
    else:
        assert not chosen


@given(st.text(max_size=40))
def test_ids_of_others_are_chosen_by_all_of_their_text(unique_id: str) -> None:
    assert Sampling(1).chooses(unique_id)
    assert not Sampling(0).chooses(unique_id)
    assert Sampling(7).chooses(unique_id) == Sampling(7).chooses(unique_id)


def test_a_share_of_foreign_ids_is_chosen() -> None:
    sampling = Sampling(10)
    chosen = sum(sampling.chooses(f"AC11000100002A9F00000000{n:08X}") for n in range(5_000))
    assert 350 < chosen < 650
