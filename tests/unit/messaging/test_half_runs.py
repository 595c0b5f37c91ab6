"""Columns of halves say of each what a tuple would say."""

from __future__ import annotations

from array import array
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from cometmq.messaging.half_runs import EndedHalf, EndedRun, HalfRun


def run_of(first: int, sizes: list[int]) -> HalfRun:
    *places, end = accumulate(sizes, initial=1_000)
    return HalfRun(first, array("q", places), end, "P")


@given(st.integers(0, 50), st.lists(st.integers(1, 9), min_size=1, max_size=20), st.data())
def test_pieces_hold_so_many_bytes_or_are_one_half(
    first: int, sizes: list[int], data: st.DataObject
) -> None:
    run = run_of(first, sizes)
    begin = data.draw(st.integers(0, len(sizes) - 1))
    end = data.draw(st.integers(begin + 1, len(sizes)))
    bytes_max = data.draw(st.integers(1, 30))
    size_of = dict(zip(range(run.first, run.end), sizes, strict=True))
    offsets = range(first + begin, first + end)
    pieces = list(run.pieces(offsets, bytes_max))
    assert [offset for piece in pieces for offset in piece] == list(offsets)
    for piece, after in zip(pieces, [*pieces[1:], range(0)], strict=True):
        size = sum(size_of[offset] for offset in piece)
        assert size <= bytes_max or len(piece) == 1
        assert run.end_of(piece[-1]) - run.at(piece[0])[0] == size
        assert not after or size + size_of[after[0]] > bytes_max, "more would fit"
    assert [run.at(offset)[1] for offset in offsets] == sizes[begin:end]


def test_ended_runs_know_each_half() -> None:
    places, made = array("q", [5, 7, 9]), array("q", [50, 70, 90])
    committed = EndedRun(3, places, "P", "T", 1, 40, made)
    assert list(committed.offsets) == [3, 4, 5]
    assert committed.at(4) == EndedHalf(7, "P", "T", 1, 41, 70)
    assert committed.at(4).is_committed
    rolled_back = EndedRun(3, places, "P")
    assert rolled_back.at(5) == EndedHalf(9, "P")
    assert not rolled_back.at(5).is_committed
