"""The example of docs/format/indexfile.md, by a reader that knows the page alone."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.independent.index import IndexFile, Keyed, Shape, key_hash

DOCUMENT = Path(__file__).parents[2] / "docs" / "format" / "indexfile.md"


def test_the_example_of_the_document(tmp_path: Path) -> None:
    example = DOCUMENT.read_text(encoding="utf-8").split("```")[1]
    words = re.findall(r"\b[0-9A-F]{8}(?:[0-9A-F]{8})?\b", example)
    path = tmp_path / "20231114221320000"
    path.write_bytes(bytes.fromhex("".join(words)) + bytes(80))
    file = IndexFile(path, Shape(4, 8))
    hashes = [key_hash("A", key) for key in "bcf"]
    places = [(1000, 5000), (1000, 5000), (2000, 7999)]
    file.expect_keys([Keyed(code, *place) for code, place in zip(hashes, places, strict=True)])
    assert key_hash("T", "cuikacpk") == 0
