from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.format.taghash import java_hash, tags_code
from tests.unit.format import naive


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", 0),
        ("a", 97),
        ("TagA", 2598919),  # as RocketMQ wrote them
        ("TagB", 2598920),
        ("Aa", 2112),  # the two collide
        ("BB", 2112),
        ("polygenelubricants", -(2**31)),
        ("é", 233),
        ("\U0001f600", 31 * 0xD83D + 0xDE00),  # two UTF-16 units, not one, not four bytes
    ],
)
def test_known_hashes(text: str, code: int) -> None:
    assert java_hash(text) == code
    assert tags_code(text.encode()) == code


@given(st.text(max_size=400))
def test_the_hash_is_the_polynomial_of_its_definition(text: str) -> None:
    assert tags_code(text.encode()) == naive.hash_of(text)


def test_bytes_that_are_not_text_have_a_hash_too() -> None:
    assert tags_code(b"\xff") == java_hash("\ufffd")
