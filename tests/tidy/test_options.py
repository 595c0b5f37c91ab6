"""docs/reference/options.md is what the code declares."""

from __future__ import annotations

from scripts import options_page


def test_the_page_is_up_to_date() -> None:
    text = options_page.PAGE.read_text(encoding="utf-8")
    assert text == options_page.updated(text), "run: python -m scripts.options_page"
