"""RocketMQ's JSON, read by a reader that knows only ``docs/format/fastjson.md``, and by ours."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.errors import StoreDamaged
from cometmq.format import fastjson
from tests.support.independent.fastjson import read_fastjson
from tests.support.independent.record import Broken

DOCUMENT = Path(__file__).parents[2] / "docs" / "format" / "fastjson.md"
PIECES = (
    *("{", "}", "[", "]", ":", ",", ",,", " ", "\n", "\t", "/* a */", "// b\n", "'", '"', "\\"),
    *("0", "-7", "01", "1.5", "2e3", "1L", "NaN", "true", "null", "perm", "$a1", "'x\"'", '"é"'),
    *('"a\nb"', '"\\x41\\v\\0"', '"\\q"', "{0:251,1:250}", '{{"queueId":0}:7}', "[1,,2,]"),
)


def texts(data: bytes) -> list[bytes]:
    return [example.encode() for example in re.findall(r"\| `([{\[][^`]*)` \|", data.decode())]


@pytest.mark.parametrize("text", texts(DOCUMENT.read_bytes()))
def test_the_examples_of_the_document(text: bytes) -> None:
    assert read_fastjson(text) == fastjson.loads(text)


def read_or_refuse(text: bytes) -> object:
    try:
        return repr(read_fastjson(text))
    except (Broken, UnicodeDecodeError):
        return "refused"


def ours(text: bytes) -> object:
    try:
        return repr(fastjson.loads(text))
    except StoreDamaged:
        return "refused"


VALUES = st.recursive(
    st.sampled_from(PIECES[15:]),
    lambda inner: st.one_of(
        st.lists(inner).map(lambda some: "[" + ",".join(some) + "]"),
        st.lists(st.tuples(inner, inner)).map(
            lambda some: "{" + ", ".join(f"{key}:{value}" for key, value in some) + ",}"
        ),
    ),
)


@given(VALUES | st.lists(st.sampled_from(PIECES)).map("".join))
def test_both_read_the_same(text: str) -> None:
    assert read_or_refuse(text.encode()) == ours(text.encode())
