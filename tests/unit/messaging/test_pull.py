"""What a pull answers, against a loop that goes unit by unit."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.errors import InvalidRequest, NotWriter, StoreDamaged
from cometmq.messaging.pull import (
    Choice,
    PullStatus,
    Span,
    choose,
    clamp,
    decide,
    decide_at_copy,
    units_wanted,
)

pytestmark = pytest.mark.usefixtures("implementation")

FOUND, NO_MATCHED, NOT_FOUND, MOVED = (
    PullStatus.FOUND,
    PullStatus.NO_MATCHED_MESSAGE,
    PullStatus.NOT_FOUND,
    PullStatus.OFFSET_MOVED,
)
PLENTY = 1 << 40

Unit = tuple[int, int, int]


def pack(units: list[Unit]) -> bytes:
    return b"".join(struct.pack(">qiq", *unit) for unit in units)


@pytest.mark.parametrize(
    ("asked", "answered"),
    [
        ((0, 0), (32, 256 * 1024)),
        ((1, 1), (1, 1)),
        ((4096, 4 << 20), (4096, 4 << 20)),
        ((4097, (4 << 20) + 1), (4096, 4 << 20)),
    ],
)
def test_limits_of_a_request(asked: tuple[int, int], answered: tuple[int, int]) -> None:
    assert clamp(*asked) == answered


@pytest.mark.parametrize("asked", [(-1, 0), (0, -1)])
def test_negative_limits_are_refused(asked: tuple[int, int]) -> None:
    with pytest.raises(InvalidRequest):
        clamp(*asked)


@pytest.mark.parametrize(
    ("offset", "bounds", "answer"),
    [
        # A queue that was never written to: minimum, readable and appended maximum are 0.
        (0, (0, 0, 0), (NOT_FOUND, 0)),
        (5, (0, 0, 0), (MOVED, 0)),
        # Ten messages, all readable.
        (0, (0, 10, 10), (FOUND, 0)),
        (9, (0, 10, 10), (FOUND, 9)),
        (10, (0, 10, 10), (NOT_FOUND, 10)),
        (11, (0, 10, 10), (MOVED, 10)),
        # The first four are gone.
        (3, (4, 10, 10), (MOVED, 4)),
        (4, (4, 10, 10), (FOUND, 4)),
        # All are gone.
        (9, (10, 10, 10), (MOVED, 10)),
        (10, (10, 10, 10), (NOT_FOUND, 10)),
        (11, (10, 10, 10), (MOVED, 10)),
        # Three of ten are not readable yet: who stands among them waits and is never moved.
        (7, (0, 7, 10), (NOT_FOUND, 7)),
        (9, (0, 7, 10), (NOT_FOUND, 9)),
        (10, (0, 7, 10), (NOT_FOUND, 10)),
        (11, (0, 7, 10), (MOVED, 7)),
        # Nothing kept is readable yet.
        (2, (3, 0, 10), (MOVED, 3)),
        (11, (3, 0, 10), (MOVED, 3)),
    ],
)
def test_the_status_table(
    offset: int, bounds: tuple[int, int, int], answer: tuple[PullStatus, int]
) -> None:
    assert decide(offset, *bounds) == answer


def test_how_far_a_pull_looks() -> None:
    assert units_wanted(32, None) == 32
    assert units_wanted(32, frozenset()) == 32
    assert units_wanted(32, frozenset({1})) == 800
    assert units_wanted(4096, frozenset({1})) == 4096


def test_neighbours_in_the_log_are_one_span() -> None:
    units = [(0, 10, 0), (10, 20, 0), (50, 5, 0), (55, 5, 0), (90, 2, 0)]
    assert choose(pack(units), 7, 9, PLENTY) == Choice([(0, 30), (50, 10), (90, 2)], 5, 12)


def test_a_dense_queue_is_one_span() -> None:
    units = [(n * 100, 100, 0) for n in range(50)]
    assert choose(pack(units), 0, 32, PLENTY) == Choice([(0, 3200)], 32, 32)


@pytest.mark.parametrize("codes", [None, frozenset({0})])
@pytest.mark.parametrize(("max_bytes", "count"), [(199, 1), (200, 2), (299, 2), (300, 3)])
def test_bytes_may_be_used_up(max_bytes: int, count: int, codes: frozenset[int] | None) -> None:
    units = [(n * 100, 100, 0) for n in range(4)]
    expected = Choice([(0, count * 100)], count, count)
    assert choose(pack(units), 0, 32, max_bytes, codes) == expected


def test_the_first_message_comes_whatever_its_size() -> None:
    units = [(0, 500, 1), (500, 10, 2)]
    assert choose(pack(units), 0, 32, 1) == Choice([(0, 500)], 1, 1)
    assert choose(pack(units), 0, 32, 1, frozenset({2})) == Choice([(500, 10)], 1, 2)


def test_nothing_matches() -> None:
    units = pack([(n * 10, 10, 1) for n in range(1000)])
    choice = choose(units, 100, 32, PLENTY, frozenset({2}))
    assert choice == Choice([], 0, 900)
    assert choice.status is NO_MATCHED


def test_tag_hashes_are_compared_by_their_low_32_bits() -> None:
    units = [(0, 10, -5), (10, 10, -5 & 0xFFFF_FFFF), (20, 10, 5), (30, 10, (7 << 32) | 5)]
    wanted = frozenset({-5 & 0xFFFF_FFFF})
    assert choose(pack(units), 0, 9, PLENTY, wanted) == Choice([(0, 20)], 2, 4)
    assert choose(pack(units), 0, 9, PLENTY, frozenset({5})) == Choice([(20, 20)], 2, 4)


def test_no_units_no_messages() -> None:
    assert choose(b"", 5, 32, PLENTY) == Choice([], 0, 5)
    assert choose(b"", 5, 32, PLENTY, frozenset({1})) == Choice([], 0, 5)


@pytest.mark.parametrize("size", [0, 1, -1, 0x7FFF_FFFF])
@pytest.mark.parametrize("codes", [None, frozenset({0})])
def test_a_unit_without_a_record_is_damage(size: int, codes: frozenset[int] | None) -> None:
    with pytest.raises(StoreDamaged):
        choose(pack([(0, 10, 0), (0, size, 0)]), 0, 32, PLENTY, codes)


def naive(
    units: list[Unit], offset: int, max_count: int, max_bytes: int, codes: frozenset[int]
) -> tuple[list[Span], int]:
    """The messages one by one, and the next offset."""
    chosen: list[Span] = []
    limit = max(800, max_count) if codes else max_count
    for index, (log_offset, size, tag) in enumerate(units[:limit]):
        if codes and tag & 0xFFFF_FFFF not in codes:
            continue
        full = len(chosen) == max_count or sum(s for _, s in chosen) + size > max_bytes
        if chosen and full:
            return chosen, offset + index
        chosen.append((log_offset, size))
    return chosen, offset + len(units[:limit])


@st.composite
def queues(draw: st.DrawFn) -> list[Unit]:
    gaps = draw(st.lists(st.sampled_from([0, 0, 0, 7]), max_size=60))
    units: list[Unit] = []
    end = draw(st.integers(0, 1 << 40))
    for gap in gaps:
        size = draw(st.integers(2, 50))
        units.append((end + gap, size, draw(st.sampled_from([-1, 0, 1, 2]))))
        end += gap + size
    return units


@given(
    queues(),
    st.integers(0, 1 << 50),
    st.integers(1, 70),
    st.integers(1, 1500),
    st.sets(st.sampled_from([0, 1, 2, 0xFFFF_FFFF])),
)
def test_choose_is_the_loop(
    units: list[Unit], offset: int, max_count: int, max_bytes: int, wanted: set[int]
) -> None:
    codes = frozenset(wanted)
    choice = choose(pack(units), offset, max_count, max_bytes, codes)
    messages, next_offset = naive(units, offset, max_count, max_bytes, codes)
    assert (choice.count, choice.next_offset) == (len(messages), next_offset)
    assert choice.status is (FOUND if messages else NO_MATCHED)
    covered = [byte for start, size in choice.spans for byte in range(start, start + size)]
    assert covered == [byte for start, size in messages for byte in range(start, start + size)]
    assert all(a[0] + a[1] < b[0] for a, b in zip(choice.spans, choice.spans[1:], strict=False))


@given(st.lists(st.integers(0, 20), min_size=3, max_size=3), st.integers(0, 25))
def test_a_follower_decides_like_its_writer_within_what_it_has(
    bounds: list[int], offset: int
) -> None:
    low, readable, appended = sorted(bounds)
    if offset < low:
        with pytest.raises(NotWriter):
            decide_at_copy(offset, low, readable, appended)
    elif offset > appended:
        assert decide_at_copy(offset, low, readable, appended) == (NOT_FOUND, offset)
    else:
        expected = decide(offset, low, readable, appended)
        assert decide_at_copy(offset, low, readable, appended) == expected
