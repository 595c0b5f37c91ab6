"""Are the files that came back the files that were sent?"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from examples.roundtrip.sources import SourceFile, decode_name


def first_difference(left: bytes, right: bytes) -> int | None:
    """Offset of the first byte that differs or that only one side has; None when there is none."""
    if left == right:
        return None
    shared = min(len(left), len(right))
    return next((place for place in range(shared) if left[place] != right[place]), shared)


def write_back(root: Path, name: str, content: bytes) -> None:
    """Makes the file ``name`` below ``root``, folders included."""
    path = root / decode_name(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def compare(files: Iterable[SourceFile], original_root: Path, copy_root: Path) -> list[str]:
    """One sentence for each file whose copy is missing or differs."""
    complaints = []
    for file in files:
        relative = decode_name(file.name)
        copy = copy_root / relative
        if not copy.is_file():
            complaints.append(f"{relative} did not come back")
            continue
        place = first_difference((original_root / relative).read_bytes(), copy.read_bytes())
        if place is not None:
            complaints.append(f"{relative} differs from byte {place} on")
    return complaints
