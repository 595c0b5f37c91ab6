"""Inline messages answer pulls as the queue itself does: against the rule message by message."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cometmq.messaging.inline_messages import InlineMessages

CODES = (0, 1, 0x8000_0001, 0xFFFF_FFFF)  # of the tags that there are

messages = st.lists(
    st.tuples(st.binary(min_size=2, max_size=9), st.sampled_from(CODES)), min_size=1, max_size=32
)
TWO = [(b"aa", 0), (b"bb", 0)]


def inline_messages_of(found: list[tuple[bytes, int]], first: int = 0) -> InlineMessages:
    records = [record for record, _ in found]
    return InlineMessages(
        first, 0, b"".join(records), list(map(len, records)), [code for _, code in found]
    )


def naive_pull(
    found: list[tuple[bytes, int]], count_max: int, bytes_max: int, codes: frozenset[int]
) -> tuple[bytes, int, int]:
    """Records, how many, and how many messages were looked at: one message after the other, until
    one that passes finds no room; without a filter also until there are enough.
    """
    records, count = b"", 0
    for place, (record, code) in enumerate(found):
        if codes and code not in codes:
            continue
        if count == count_max or (count and len(records) + len(record) > bytes_max):
            return records, count, place
        records, count = records + record, count + 1
    return records, count, len(found)


@given(
    found=messages,
    first=st.integers(0, 1 << 40),
    skip=st.integers(0, 31),
    count_max=st.integers(1, 40),
    bytes_max=st.integers(1, 300),
    codes=st.frozensets(st.sampled_from(CODES), max_size=3),
)
@example(found=TWO, first=0, skip=0, count_max=1, bytes_max=9, codes=frozenset())
@example(found=TWO, first=0, skip=0, count_max=9, bytes_max=3, codes=frozenset())
def test_a_pull_of_inline_messages_is_the_loop(
    found: list[tuple[bytes, int]],
    first: int,
    skip: int,
    count_max: int,
    bytes_max: int,
    codes: frozenset[int],
) -> None:
    skip %= len(found)
    records, choice = inline_messages_of(found, first).pull(
        first + skip, count_max, bytes_max, codes
    )
    expected, count, looked_at = naive_pull(found[skip:], count_max, bytes_max, codes)
    assert (records, choice.count) == (expected, count)
    assert choice.next_offset == first + skip + looked_at


def test_what_is_among_them() -> None:
    inline_messages = inline_messages_of([(b"a", 0), (b"b", 0)], first=5)
    assert [offset in inline_messages for offset in (4, 5, 6, 7)] == [False, True, True, False]
    assert inline_messages.end_offset == 7


@pytest.mark.parametrize(
    ("records", "sizes", "codes", "whole"),
    [
        (b"abcde", [2, 3], [0, 0], True),
        (b"abcde", [2, 3], [0], False),
        (b"abcdef", [2, 3], [0, 0], False),
        (b"abcde", [6, -1], [0, 0], False),
        (b"abcde", [4, 1], [0, 0], False),  # the size of a lost message
        (b"", [], [], False),
    ],
)
def test_parts_that_do_not_fit_together(
    records: bytes, sizes: list[int], codes: list[int], whole: bool
) -> None:
    assert InlineMessages(0, 0, records, sizes, codes).whole == whole
