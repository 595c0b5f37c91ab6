from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from cometmq.admin.tables import lay_out

words = st.text("abcÄ汉-.:/0", min_size=1, max_size=12)
texts = st.lists(words, min_size=1, max_size=4).map(" ".join)
rows = st.integers(1, 7).flatmap(
    lambda n: st.lists(st.lists(texts, min_size=n, max_size=n), min_size=2, max_size=5)
)


def laid_out(found: Sequence[Sequence[str]], width: int | None) -> list[str]:
    titles, *others = found
    return lay_out(titles, others, right=[False] * len(titles), width=width)


@given(rows, st.one_of(st.none(), st.integers(0, 120)))
def test_no_word_is_broken_and_nothing_left_out(found: list[list[str]], width: int | None) -> None:
    lines = laid_out(found, width)
    shown = sorted(word for line in lines for word in line.split() if set(word) != {"─"})
    wanted = sorted(word for row in found for text in row for word in text.split())
    if any("─" in line for line in lines):
        assert shown == wanted
        assert width is None or all(cell_len(line) <= width for line in lines)
    else:  # records: every row has its titles
        titles, *others = found
        assert shown == sorted(w for row in others for t in (*titles, *row) for w in t.split())


@given(rows)
def test_without_a_terminal_each_row_is_one_line(found: list[list[str]]) -> None:
    assert len(laid_out(found, None)) == len(found) + 1


def test_a_table_wraps_at_blanks_where_that_is_enough() -> None:
    found = [["name", "when it was"], ["a-long-name", "2026-01-02 03:04"]]
    assert laid_out(found, 23) == [
        "name         when it",
        "             was",
        "───────────────────────",
        "a-long-name  2026-01-02",
        "             03:04",
    ]
    assert laid_out(found, 22) == ["name         a-long-name", "when it was  2026-01-02 03:04"]


@pytest.mark.parametrize("width", [None, 30, 5])
def test_numbers_stand_right(width: int | None) -> None:
    lines = lay_out(["n"], [["1"], ["1,000"]], right=[True], width=width)
    assert re.fullmatch(" {4}1", lines[-2])
    assert lines[-1] == "1,000"
