"""A hook of mkdocs: the page changelog.md of the site has the text of CHANGELOG.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:
    if page.file.src_uri != "changelog.md":
        return markdown
    return (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").replace("](docs/", "](")
