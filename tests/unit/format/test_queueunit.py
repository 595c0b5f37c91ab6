from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.format import queueunit

unit = st.tuples(
    st.integers(0, 2**63 - 1), st.integers(1, 2**31 - 1), st.integers(-(2**31), 2**31 - 1)
)


@given(st.lists(unit, max_size=5))
def test_units_are_three_big_endian_numbers(units: list[tuple[int, int, int]]) -> None:
    data = b"".join(queueunit.pack(*one) for one in units)
    assert list(queueunit.iterate(data)) == units
    assert list(queueunit.log_offsets(data)) == [log_offset for log_offset, _, _ in units]
    for index, (log_offset, size, code) in enumerate(units):
        piece = data[20 * index : 20 * index + 20]
        assert piece[:8] == log_offset.to_bytes(8, "big")
        assert piece[8:12] == size.to_bytes(4, "big")
        assert piece[12:] == code.to_bytes(8, "big", signed=True)
        assert queueunit.unit_at(data, index) == (log_offset, size, code)


def test_a_negative_hash_is_sign_extended() -> None:
    assert queueunit.pack(0, 1, -2)[12:].hex() == "fffffffffffffffe"


def test_neither_unwritten_units_nor_prefill_stand_for_messages() -> None:
    assert queueunit.PREFILL.hex() == "00000000000000007fffffff0000000000000000"
    assert not queueunit.is_message(*queueunit.unit_at(queueunit.PREFILL, 0)[:2])
    assert not queueunit.is_message(*queueunit.unit_at(bytes(20), 0)[:2])
    assert not queueunit.is_message(-1, 100)
    assert queueunit.is_message(0, 100)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2**63 - 1) | st.sampled_from([0, 1, 2**40, 2**56]),
            st.integers(1, 0x7FFFFFFF) | st.sampled_from([1, 91, 256, 2**24]),
            st.integers(-(2**63), 2**63 - 1) | st.just(0),
        ),
        max_size=9,
        unique_by=lambda unit: unit[0],
    ).map(sorted)
)
def test_no_units_look_like_a_hole(found: list[tuple[int, int, int]]) -> None:
    units = b"".join(queueunit.UNIT.pack(*unit) for unit in found)
    assert queueunit.before_hole(units) == units
    assert queueunit.before_hole(queueunit.PREFILL * 3 + units) == queueunit.PREFILL * 3 + units


@pytest.mark.parametrize("count", [40, 47, 60])
@pytest.mark.parametrize("start", range(40, 80))
def test_nothing_that_zeros_may_have_touched_is_before_a_hole(start: int, count: int) -> None:
    units = b"".join(queueunit.pack(5_000 + 300 * at, 300, -1 - at) for at in range(10))
    wiped = units[:start] + bytes(count) + units[start + count :]
    sound = queueunit.before_hole(wiped)
    assert sound == units[: start // 20 * 20]
    rest = wiped[len(sound) :]
    assert queueunit.before_hole(rest[20:]) == b"", "nor is there anything right behind its start"
