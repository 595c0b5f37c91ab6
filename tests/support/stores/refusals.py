"""A start that is refused changes nothing: not a byte of the folder."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from cometmq.errors import CometError, StateTooNew, StoreDamaged, StoreForeignFile
from cometmq.store.recovery.opening import OpenedStore

REFUSALS = (StoreDamaged, StoreForeignFile, StateTooNew)


def fingerprint(root: Path) -> dict[str, str]:
    """What stands in a folder: the hash of every file by its path, folders too."""
    return {
        str(path.relative_to(root)): (
            hashlib.sha1(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        )
        for path in sorted(root.rglob("*"))
    }


@pytest.fixture
def refusals_change_nothing(monkeypatch: pytest.MonkeyPatch) -> list[CometError]:
    """Every start of the test that is refused is compared with what was there before it; the
    refusals.
    """
    refused: list[CometError] = []
    before: dict[OpenedStore, dict[str, str]] = {}
    init, start, release = OpenedStore.__init__, OpenedStore.open, OpenedStore.release

    def noting_init(self: OpenedStore, root: Path, *args: Any, **kwargs: Any) -> None:
        found = fingerprint(root)
        init(self, root, *args, **kwargs)
        before[self] = found

    def noting_open(self: OpenedStore, *args: Any, **kwargs: Any) -> None:
        try:
            start(self, *args, **kwargs)
        except REFUSALS as error:
            refused.append(error)
            refusing.add(self)
            raise

    def comparing_release(self: OpenedStore) -> None:
        release(self)
        if self in refusing:
            refusing.remove(self)
            assert fingerprint(self.paths.root) == before[self], refused[-1]

    refusing: set[OpenedStore] = set()
    monkeypatch.setattr(OpenedStore, "__init__", noting_init)
    monkeypatch.setattr(OpenedStore, "open", noting_open)
    monkeypatch.setattr(OpenedStore, "release", comparing_release)
    return refused
