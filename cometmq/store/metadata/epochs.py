"""``cometmq.epochs``: which incarnation of the writer wrote which part of the log.
``docs/format/epochs.md``.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from cometmq.errors import StoreDamaged
from cometmq.store import layout
from cometmq.store.disk.files import Files, replace

HEADER = "cometmq-epochs 1"


@dataclass(frozen=True, slots=True, order=True)
class Epoch:
    """The bytes of the log from ``start`` (to the next epoch's) were written by incarnation
    ``number``.
    """

    number: int
    start: int


def encode(epochs: Sequence[Epoch]) -> bytes:
    _check(epochs)
    lines = [HEADER, *(f"{epoch.number} {epoch.start}" for epoch in epochs)]
    text = "".join(line + "\n" for line in lines).encode("ascii")
    return text + f"crc32 {zlib.crc32(text):08x}\n".encode("ascii")


def decode(content: bytes, path: Path) -> list[Epoch]:
    """The epochs of a file's ``content``; :class:`StoreDamaged` unless it is exactly as it was
    written.
    """
    text, mark, checksum = content.rpartition(b"crc32 ")
    if not mark or checksum != f"{zlib.crc32(text):08x}\n".encode("ascii"):
        raise StoreDamaged(
            f"{path} does not end with its checksum. It says which writer's number each part of "
            "the log has. Put it back from a copy; or, with a number above every epoch that the "
            "group ever had (cometmq broker status): "
            + layout.repair_command(path.parent, "--epoch NUMBER")
        )
    header, *lines = text.decode("ascii").splitlines()
    if header != HEADER:
        raise StoreDamaged(f"{path} is of another version: {header!r}")
    epochs = [Epoch(*map(int, line.split(" "))) for line in lines]
    _check(epochs)
    return epochs


def trim(epochs: Sequence[Epoch], start: int, end: int) -> list[Epoch]:
    """The epochs that still own a byte of a log from ``start`` to ``end``."""
    ends = [*(epoch.start for epoch in epochs[1:]), end]
    owned = zip(epochs, ends, strict=False)  # without epochs there is no end to any
    return [epoch for epoch, its_end in owned if epoch.start < end and its_end > start]


def next_number(epochs: Sequence[Epoch], floor: int) -> int:
    """One more than every epoch that was ever opened here (hand in the list *before* trimming) and
    than ``floor``.
    """
    return max([floor, *(epoch.number for epoch in epochs)]) + 1


def load(files: Files, path: Path, *, must_exist: bool = False) -> list[Epoch]:
    """The epochs at ``path``; none when there is no such file, or StoreDamaged."""
    content = files.read(path)
    if content is None and must_exist:
        raise StoreDamaged(
            f"{path} is missing although the store has a log. Put it back from a copy; or, with a "
            "number above every epoch that the group ever had (cometmq broker status): "
            + layout.repair_command(path.parent, "--epoch NUMBER")
        )
    return [] if content is None else decode(content, path)


def save(files: Files, path: Path, epochs: Sequence[Epoch]) -> None:
    replace(files, path, encode(epochs), spare=path.with_name(layout.SPARE))


def _check(epochs: Sequence[Epoch]) -> None:
    for epoch in epochs:
        assert epoch.number > 0, epoch
        assert epoch.start >= 0, epoch
    for before, after in pairwise(epochs):
        assert before.number < after.number, (before, after)
        assert before.start < after.start, (before, after)
