"""Files become lines and lines become files again."""

from __future__ import annotations

from pathlib import Path, PurePath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.roundtrip import sources
from examples.roundtrip.sources import SourceFile

TEXTS = st.lists(
    st.sampled_from([b"a", b"\n", b"\r", b"\r\n", b"\x0b", b"\x1c", "é\u2028".encode()])
)


@given(TEXTS.map(b"".join))
def test_lines_joined_are_the_file(data: bytes) -> None:
    assert b"".join(sources.split(data)) == data


@given(TEXTS.map(b"".join))
def test_a_line_feed_ends_a_line_and_nothing_else_does(data: bytes) -> None:
    lines = sources.split(data)
    assert all(line.find(b"\n") == len(line) - 1 for line in lines[:-1])
    assert len(lines) == data.count(b"\n") + (bool(data) and not data.endswith(b"\n"))


@given(st.text(st.characters(exclude_characters="\0/", exclude_categories=["Cs"]), min_size=1))
def test_a_name_survives_the_wire(text: str) -> None:
    path = PurePath("folder", text) if text not in {".", ".."} else PurePath("folder")
    name = sources.encode_name(path)
    assert name.isascii()
    assert name.isprintable()
    assert " " not in name
    assert sources.decode_name(name) == Path(path)


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/../../x", "a/%2E%2E/x", "", "%2Fetc"])
def test_a_name_that_leaves_the_folder_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not a relative path"):
        sources.decode_name(name)


@pytest.mark.parametrize(
    ("name", "tag"),
    [("a/b.py", "py"), ("x.tar.gz", "gz"), ("Makefile", ""), (".hidden", ""), ("a.d/b", "")],
)
def test_the_tag_is_the_suffix(name: str, tag: str) -> None:
    assert sources.tag_of(name) == tag


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A small tree with everything that has to be left out or is easily got wrong."""
    contents = {
        "empty.py": b"",
        "no end.txt": b"one\ntwo",
        "pkg/dos.bat": b"one\r\ntwo\r\n",
        "pkg/image.gif": b"GIF89a\xff\xfe",
        "site-packages/theirs.py": b"x\n",
        "pkg/__pycache__/a.pyc": b"x\n",
    }
    for name, data in contents.items():
        path = tmp_path / "lib" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (tmp_path / "lib" / "gone").symlink_to("nowhere")
    return tmp_path / "lib"


def test_the_plan_holds_every_text_file_in_order(library: Path) -> None:
    assert sources.plan(library, 1) == [
        SourceFile("empty.py", 0, 0),
        SourceFile("no%20end.txt", 2, 7),
        SourceFile("pkg/dos.bat", 2, 10),
    ]


def test_an_empty_file_travels_as_one_message(library: Path) -> None:
    assert [file.messages for file in sources.plan(library, 1)] == [1, 2, 2]


def test_producers_get_equal_shares(library: Path) -> None:
    assert [file.producer for file in sources.plan(library, 2)] == [0, 1, 0]


def test_a_plan_survives_its_file(library: Path, tmp_path: Path) -> None:
    files = sources.plan(library, 2)
    sources.save_plan(files, tmp_path / "plan.json")
    assert sources.load_plan(tmp_path / "plan.json") == files


def test_the_standard_library_is_found() -> None:
    assert (sources.standard_library() / "os.py").is_file()
