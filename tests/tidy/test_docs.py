"""The documents are true where a machine can tell: links, module lists, names, paths."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
TEXT = {".cfg", ".json", ".md", ".proto", ".py", ".pyi", ".sh", ".toml", ".txt", ".yaml", ".yml"}
TEXT |= {".c", ".h", ".mjs", ".tpl"}
NOT_OURS = {".git", ".venv", ".tools", "build", "data", "node_modules", ".cometmq"}


def prose(path: Path) -> str:
    """A document without its code blocks."""
    return re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.S | re.M)


def anchors(path: Path) -> set[str]:
    """What `#…` may name in a document, made of its headings as the usual viewers do."""
    headings = re.findall(r"^#+ +(.+)$", prose(path), flags=re.M)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {text.strip().replace(" ", "-") for text in plain}


def wrong(find: Callable[[Path], Iterable[object]]) -> dict[str, list[object]]:
    """By document, what ``find`` finds in it; documents without a finding are left out."""
    found = {path.relative_to(ROOT).as_posix(): list(find(path)) for path in DOCUMENTS}
    return {name: findings for name, findings in found.items() if findings}


def test_links_lead_somewhere() -> None:
    def broken(path: Path) -> Iterable[str]:
        for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
            if re.match(r"[a-z]+:", target):
                continue  # the rest of the world is not ours to check
            file, _, anchor = target.partition("#")
            there = (path.parent / file).resolve() if file else path
            if not there.exists() or (anchor and anchor not in anchors(there)):
                yield target

    assert not wrong(broken)


CELL_WORDS_MAX = 40


def test_no_table_cell_is_a_paragraph() -> None:
    def long(path: Path) -> Iterable[str]:
        rows = re.findall(r"^\|.*\|$", prose(path), flags=re.M)
        cells = [cell for row in rows for cell in re.split(r"(?<!\\)\|", row)]
        return (cell for cell in cells if len(cell.split()) > CELL_WORDS_MAX)

    assert not wrong(long)


def test_paths_in_backticks_exist() -> None:
    """`cometmq/…`, `services/…`, `tests/…` and the like are files of this repository."""
    folders = "bench|cometmq|docs|examples|proto|scripts|services|tests"

    def missing(path: Path) -> Iterable[str]:
        named = set(re.findall(rf"`((?:{folders})/[\w./-]+)`", prose(path)))
        return (found for found in named if not (ROOT / found).exists())

    assert not wrong(missing)


def test_tests_that_are_named_exist() -> None:
    def missing(path: Path) -> Iterable[tuple[str, str]]:
        for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", path.read_text("utf-8")):
            defined = rf"^((async )?def |class )?{name}\b"
            if not (ROOT / file).exists() or not re.search(
                defined, (ROOT / file).read_text("utf-8"), re.M
            ):
                yield file, name

    assert not wrong(missing)


def test_make_targets_in_documents_exist() -> None:
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), flags=re.M))
    assert not wrong(
        lambda path: set(re.findall(r"`make ([a-z0-9-]+)", path.read_text("utf-8"))) - targets
    )


def test_a_decision_has_its_context_its_cost_and_its_gain_on_half_a_page() -> None:
    index = (ROOT / "docs/decisions/index.md").read_text(encoding="utf-8")
    for path in sorted((ROOT / "docs/decisions").glob("0*.md")):
        text = path.read_text(encoding="utf-8")
        titles = re.findall(r"^\*\*(\w+)\.\*\*", text, flags=re.M)
        assert titles == ["Context", "Decision", "Cost", "Gain"], path
        assert 60 <= len(text.split()) <= 150, path
        assert f"]({path.name})" in index


ARCHITECTURE = (
    (ROOT / "docs/ARCHITECTURE.md").read_text() if (ROOT / "docs/ARCHITECTURE.md").exists() else ""
)


def rooms() -> set[str]:
    """Packages of the library and the services, and the library's single modules."""
    packages = {
        p.parent.relative_to(ROOT).as_posix() + "/"
        for top in ("cometmq", "services")
        for p in (ROOT / top).glob("*/**/*.py")
    }
    single = {f"cometmq/{p.name}" for p in (ROOT / "cometmq").glob("*.py")}
    return packages | single - {"cometmq/__init__.py"}


def test_the_map_shows_every_room() -> None:
    assert set(re.findall(r"^\| `((?:cometmq|services)/[\w/.]+)`", ARCHITECTURE, re.M)) == rooms()


def ours() -> list[Path]:
    """Every text file of the repository."""
    return [
        path
        for path in ROOT.rglob("*")
        if path.suffix in TEXT or path.name in {"Makefile", "run"}
        if path.is_file() and not NOT_OURS & set(path.relative_to(ROOT).parts)
        if not any(part.endswith(("_cache", ".egg-info")) for part in path.parts)
    ]


def test_no_file_names_a_machine() -> None:
    """What is true on one machine only has no place here."""
    folders = "|".join(["wo" + "rk", "ro" + "ot", "ho" + "me", "Us" + "ers"])
    pattern = re.compile(rf"(?<![\w.:/~*}}])/(?:{folders})/[\w.]")
    found = {
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in ours()
        for match in pattern.finditer(path.read_text(encoding="utf-8", errors="replace"))
    }
    assert not found


def test_the_licence_is_complete() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert "9. Accepting Warranty or Additional Liability." in text
