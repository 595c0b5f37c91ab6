"""SQL92 filters: against an evaluator too simple to be wrong, RocketMQ's own answers, and bombs."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cometmq import native
from cometmq.errors import BatchMalformed, FilterInvalid
from cometmq.filters import sql
from cometmq.format import properties, record
from tests.support import sql_cases, sql_golden

needs_native = pytest.mark.skipif(native.accelerator is None, reason="the C extension is not built")
randoms = st.randoms(use_true_random=False)


def encoded(raw_properties: bytes, body: bytes = b"x", host: bytes = bytes(8)) -> bytes:
    fields = {"born_time_ms": 1, "born_host": host, "store_host": bytes(8)}
    return record.encode(b"T", 0, body, raw_properties, **fields)  # type: ignore[arg-type]


def verdict(expression: str, found: dict[str, str]) -> bool:
    return sql.matches_properties(sql.compile_expression(expression), properties.encode(found))


@settings(max_examples=500)
@given(randoms)
def test_what_matches_is_what_the_tree_says(random: Random) -> None:
    tree = sql_cases.condition(random)
    program = sql.compile_expression(sql_cases.text_of(tree, random))
    messages = [sql_cases.properties(random) for _ in range(5)]
    records = b"".join(encoded(properties.encode(found)) for found in messages)
    assert [*sql.matches(program, records)] == [sql_cases.matches(tree, m) for m in messages]


odd_pairs = st.sampled_from(
    [
        b"a\x015",
        b"a\x01",
        b"a",
        b"\x01x",
        b"",
        b"ab\x015",
        b"a\x01\x016",
        b"a\x015.50",
        b"a\x01\xff",
    ]
    + [b"a\x01" + number.encode() for number in sql_cases.NUMBERS + sql_cases.ODD_NUMBERS]
    + [
        b"a\x01" + b"9" * 64,
        b"a\x01" + b"9" * 65,
        b"a\x01NaN",
        b"a\x011e400",
        b"a\x01 5",
        b"a\x015d",
    ]
    + [b"a\x010x10", b"a\x01.", b"a\x01-", b"a\x01e5", b"a\x015e", b"a\x01--5", b"a\x01tRuE"]
)


@needs_native
@settings(max_examples=500)
@given(randoms, st.lists(st.lists(odd_pairs, max_size=4), min_size=1, max_size=4), st.booleans())
def test_c_and_plain_python_agree(random: Random, found: list[list[bytes]], is_v6: bool) -> None:
    program = sql.compile_expression(sql_cases.text_of(sql_cases.condition(random), random))
    host = bytes(20 if is_v6 else 8)
    records = b"".join(encoded(b"\x02".join(pairs), b"y" * 9, host) for pairs in found)
    plain = sql.matches_plainly(program, records, 0, len(records))
    assert sql.matches(program, records) == plain


def test_rare_numbers_are_computed_in_plain_python_and_the_walk_goes_on() -> None:
    program = sql.compile_expression("a = 0.1234567890123456789 OR a = 5")
    values = ["5", "0.1234567890123456789", "0.1234567890123456780000001", "5"]
    records = b"".join(encoded(properties.encode({"a": value})) for value in values)
    assert [*sql.matches(program, records)] == [1, 1, 1, 1]


def test_numbers_beyond_the_digits_of_a_double_are_compared_as_longs() -> None:
    found = {"a": "9007199254740993", "b": "9007199254740992"}
    assert verdict("a > 9007199254740992 AND a > b AND NOT (a = 9007199254740992)", found)
    assert verdict("a = 9007199254740992.0", found)


@pytest.mark.parametrize(("expression", "wanted"), sql_golden.VERDICTS)
def test_documented_cases(expression: str, wanted: bool) -> None:
    assert verdict(expression, sql_golden.FOUND) is wanted


@pytest.mark.parametrize("expression", sql_golden.REFUSED + sql_golden.REFUSED_HERE_ONLY)
def test_what_is_refused(expression: str) -> None:
    with pytest.raises(FilterInvalid):
        sql.compile_expression(expression)


@pytest.mark.parametrize(
    ("expression", "place"),
    [
        ("a = 5 AND", "character 10: the end"),
        ("a = 5 AND b == 6", "character 14: '= 6'"),
        ("a = 5 OR b > 'x'", "character 12: \"> 'x'\""),
        ("a = 1 OR a BETWEEN 5 AND 1", "character 12: 'BETWEEN 5 AND 1'"),
        ("a = 1 OR ? = 2", "character 10: '? = 2'"),
        ("a = NULL", "character 3: '= NULL'"),
        ("a = '\ud800'", "character 5"),
    ],
)
def test_a_refusal_names_the_place(expression: str, place: str) -> None:
    with pytest.raises(FilterInvalid, match=r"SQL, ") as refused:
        sql.compile_expression(expression)
    assert place in refused.value.message


def nested(depth: int) -> str:
    return "(" * depth + "a = 1" + ")" * depth


def test_limits_hold_to_the_last_one() -> None:
    sql.compile_expression(nested(32))
    sql.compile_expression("NOT " * 32 + "a")
    sql.compile_expression("a = 1".ljust(2_047))
    most = " OR ".join(["a = 1"] * 51)  # three steps for the first, five for each other
    assert len(sql.compile_expression(most).steps) == 253
    for bomb, place in (
        (nested(33), "character 1: "),
        ("- " * 33 + "5 = a", "character 1: "),
        (" OR ".join(["a = 1"] * 52), "character 457: "),
        ("a = 1".ljust(2_048), "character 2048"),
        ("(" * 2_047, "character 2048: "),
        ("a" * 10_000_000, "character 2048"),
    ):
        with pytest.raises(FilterInvalid) as refused:
            sql.compile_expression(bomb)
        assert place in refused.value.message, refused.value.message[:200]


def test_a_filter_has_tags_or_an_expression() -> None:
    assert sql.program_of("", ["t"]) is None
    assert sql.program_of("a = 1", []) is sql.compile_expression("a = 1")
    with pytest.raises(FilterInvalid, match="not both"):
        sql.program_of("a = 1", ["t"])


def test_records_that_are_not_whole_are_refused() -> None:
    program = sql.compile_expression("a = 1")
    good = encoded(b"a\x011")
    for cut in (1, 4, 50, len(good) - 1):
        with pytest.raises(BatchMalformed):
            sql.matches(program, good + good[:cut])


@needs_native
@given(
    st.lists(st.tuples(st.integers(-1, 26), st.integers(-2, 9), st.integers(-2, 9)), max_size=9),
    st.binary(max_size=8),
)
def test_a_forged_program_leads_nowhere(steps: list[tuple[int, int, int]], texts: bytes) -> None:
    assert native.accelerator is not None
    code = b"".join(sql._STEP.pack(*step) for step in steps)
    records = encoded(b"a\x015\x02b\x01x") * 2
    try:
        end, verdicts = native.accelerator.match(records, 0, code, texts)
    except ValueError:
        return
    assert (end, len(verdicts)) in ((len(records), 2), (len(records) // 2, 1), (0, 0))
