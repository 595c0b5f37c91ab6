from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.errors import FilterInvalid
from cometmq.filters import tags
from cometmq.format.taghash import tags_code

characters = st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="|")
names = st.text(characters, min_size=1).filter(lambda t: len(t.encode()) <= tags.TAG_BYTES_MAX)
tag_sets = st.frozensets(names.map(str.strip).filter(lambda t: t not in ("", "*")), max_size=5)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("*", set()),
        ("", set()),
        (" * ", set()),
        ("TagA", {"TagA"}),
        ("TagA || TagB", {"TagA", "TagB"}),
        ("TagA||TagB ||TagA", {"TagA", "TagB"}),
        ("TagA || ", {"TagA"}),
        ("two words||é", {"two words", "é"}),
        ("a*", {"a*"}),
    ],
)
def test_expressions(expression: str, expected: set[str]) -> None:
    assert tags.parse(expression) == expected


plain_sets = st.frozensets(st.text("abcÄß-_.:/ *0", min_size=1).map(str.strip), max_size=5)


@given(plain_sets.filter(lambda names: not {"", "*"} & names))
def test_a_joined_expression_names_its_tags(wanted: frozenset[str]) -> None:
    assert tags.parse(" || ".join(wanted)) == wanted


@pytest.mark.parametrize(
    "expression",
    [
        *(
            "amount > 5",
            "amount>=5",
            "a = 'b'",
            "a IS NOT NULL",
            "a in (1, 2)",
            "a and b",
            "a AND b",
        ),
        *("a BETWEEN 1 AND 2", "a,b", "a; b", "a && b", "(a)", "x || amount > 5"),
    ],
)
def test_what_was_meant_otherwise_is_refused_in_words(expression: str) -> None:
    with pytest.raises(FilterInvalid, match=r"like 'a \|\| b'; SQL92 is given as sql="):
        tags.parse(expression)


@pytest.mark.parametrize("tag", ["in", "or", "android", "in-stock", "and_more", "two words"])
def test_words_that_only_look_alike_are_tags(tag: str) -> None:
    assert tags.parse(tag) == {tag}


@pytest.mark.parametrize(
    "expression",
    ["||", "|| ||", "a|b", "a|||b", "* || a", "a\nb", "a\x7f", "é" * 129, "\ud800"],
)
def test_what_is_no_expression_is_refused(expression: str) -> None:
    with pytest.raises(FilterInvalid):
        tags.parse(expression)


def test_limits() -> None:
    assert len(tags.check(f"t{i}" for i in range(256))) == 256
    assert tags.check(["é" * 128]) == {"é" * 128}
    for bad in ([f"t{i}" for i in range(257)], ["é" * 128 + "a"], [""]):
        with pytest.raises(FilterInvalid):
            tags.check(bad)


@given(tag_sets, st.text(max_size=5))
def test_hashes_let_every_wanted_message_pass(wanted: frozenset[str], other: str) -> None:
    codes = tags.codes(wanted)
    assert all(0 <= code < 2**32 for code in codes)
    for tag in wanted | {other}:
        if tags.matches(tag, wanted):
            assert not codes or tags_code(tag.encode()) & 0xFFFFFFFF in codes


def test_strangers_with_the_same_hash_pass_by_hash_only() -> None:
    wanted = tags.parse("Aa")
    assert tags_code(b"BB") in tags.codes(wanted)
    assert not tags.matches("BB", wanted)
    assert tags_code(b"BC") not in tags.codes(wanted)


def test_no_tags_mean_every_message() -> None:
    assert tags.codes(frozenset()) == frozenset()
    assert tags.matches("", frozenset())
    assert not tags.matches("", frozenset({"a"}))
