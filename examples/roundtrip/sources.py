"""Which files travel, and how a file becomes lines. A file's name on the wire is its percent-
encoded relative path.
"""

from __future__ import annotations

import io
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from urllib.parse import quote_from_bytes, unquote_to_bytes

SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of the plan. ``messages`` is the number of lines; an empty file still travels as one
    message.
    """

    name: str
    line_count: int
    byte_count: int
    producer: int = 0

    @property
    def messages(self) -> int:
        return max(self.line_count, 1)


def standard_library() -> Path:
    """The folder of the running Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def encode_name(path: PurePath) -> str:
    """Relative path → name without blanks and control characters: it may be a message key."""
    return quote_from_bytes(os.fsencode(path.as_posix()), safe="/")


def decode_name(name: str) -> Path:
    """The inverse of :func:`encode_name`. A name that would leave the folder it is joined to is a
    ValueError.
    """
    path = Path(os.fsdecode(unquote_to_bytes(name)))
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"not a relative path: {name!r}")
    return path


def tag_of(name: str) -> str:
    """The suffix without its dot, for consumers that want one kind of file; empty when there is
    none.
    """
    return PurePath(name).suffix.removeprefix(".")


def split(data: bytes) -> list[bytes]:
    """Lines with their line feeds, so that joining them gives ``data`` again. A carriage return is
    part of the line.
    """
    return io.BytesIO(data).readlines()


def is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def text_files(root: Path) -> Iterator[tuple[str, bytes]]:
    """(name, content) of every text file below ``root``, in order of path; unreadable and special
    files are left out.
    """
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - SKIPPED_FOLDERS)
        for file in sorted(files):
            path = Path(folder, file)
            if path.is_file() and os.access(path, os.R_OK) and is_text(data := path.read_bytes()):
                yield encode_name(path.relative_to(root)), data


def plan(root: Path, producer_count: int) -> list[SourceFile]:
    """All text files below ``root``; each goes to the producer with the fewest messages so far."""
    load = [0] * producer_count
    files = []
    for name, data in text_files(root):
        producer = load.index(min(load))
        files.append(SourceFile(name, len(split(data)), len(data), producer))
        load[producer] += files[-1].messages
    return files


def save_plan(files: Sequence[SourceFile], path: Path) -> None:
    path.write_text(json.dumps([asdict(file) for file in files]))


def load_plan(path: Path) -> list[SourceFile]:
    return [SourceFile(**fields) for fields in json.loads(path.read_text())]
