"""What a disk holds after the power went: files page by page, names entry by entry.

A file has what processes see (the page cache) and what is on the disk. A page that was written and
not synced may be on the disk or not, or some of its 512-byte sectors are: each page for itself, in
any order. The same goes for names: what was made, renamed or removed, and whose folder was not
synced since, has happened or not, each operation for itself; only the operations on one name keep
their order, and a rename happens wholly or not at all.

A sync that fails has lost what it should have saved: the pages count as clean from then on, as
Linux has it, so the next sync succeeds and saves nothing of them. After a failed sync of names, of
which the journal is made, the file system shuts itself.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePath

PAGE_BYTES = 4096
SECTOR_BYTES = 512


class FileNode:
    """A file without its name. ``seen`` is what processes read, ``kept`` what is on the disk.
    ``has_room``: the room for all of it is taken, whether it was written or not.
    """

    __slots__ = ("_mapped", "allocated", "dirty", "has_room", "kept", "seen")

    def __init__(self, size: int = 0, *, has_room: bool = False) -> None:
        self.seen = bytearray(size)
        self.has_room = has_room
        self.kept = bytearray()  # a new file's length is not on the disk either
        self.allocated: set[int] = set()  # pages that are no holes
        self.dirty: set[int] = set()  # pages that a sync would write
        # While the file is mapped: what it held when somebody last looked for written pages.
        self._mapped: bytearray | None = None

    def write(self, data: bytes, offset: int) -> None:
        end = offset + len(data)
        if end > len(self.seen):
            self.seen.extend(bytes(end - len(self.seen)))
        self.seen[offset:end] = data
        if data:
            pages = range(offset // PAGE_BYTES, (end - 1) // PAGE_BYTES + 1)
            self.allocated.update(pages)
            self.dirty.update(pages)

    @property
    def page_count(self) -> int:
        """Of the disk, that it takes."""
        return len(_pages(self.seen)) if self.has_room else len(self.allocated)

    def map(self) -> memoryview:
        """All of the file as memory; its room is taken."""
        self.allocated.update(_pages(self.seen))
        self._mapped = bytearray(self.seen)
        return memoryview(self.seen)

    def _look_for_written_pages(self) -> None:
        for page in _pages(self._mapped or b""):
            place = slice(page * PAGE_BYTES, (page + 1) * PAGE_BYTES)
            if self._mapped is not None and self._mapped[place] != self.seen[place]:
                self._mapped[place] = self.seen[place]
                self.dirty.add(page)

    def sync(self) -> None:
        """All that was written is on the disk."""
        self._look_for_written_pages()
        self._keep_length()
        for page in self.dirty:
            self._keep(page * PAGE_BYTES, PAGE_BYTES)
        self.dirty.clear()

    def lose(self, rng: random.Random) -> None:
        """A sync that failed: some pages were saved, none will ever be by another sync."""
        self._write_back(rng, 0.5)
        self.dirty.clear()

    def cut(self, rng: random.Random) -> None:
        """The power went: only what is on the disk is left."""
        self._write_back(rng, rng.choice([0.0, 0.5, 0.5, 1.0]))
        self.dirty.clear()
        self.has_room = self.has_room and len(self.kept) == len(self.seen)
        self.seen = bytearray(self.kept)
        self._mapped = None
        self.allocated = {
            page
            for page in _pages(self.kept)
            if any(self.kept[page * PAGE_BYTES : (page + 1) * PAGE_BYTES])
        }

    def write_back(self, rng: random.Random) -> None:
        """The kernel saves some pages by itself, whole ones."""
        self._look_for_written_pages()
        for page in [page for page in sorted(self.dirty) if rng.random() < 0.5]:
            self._keep_length()
            self._keep(page * PAGE_BYTES, PAGE_BYTES)
            self.dirty.discard(page)

    def _write_back(self, rng: random.Random, share: float) -> None:
        self._look_for_written_pages()
        if rng.random() < 0.75:
            self._keep_length()
        for page in sorted(self.dirty):
            torn = rng.random() < 0.25
            size = SECTOR_BYTES if torn else PAGE_BYTES
            for at in range(page * PAGE_BYTES, (page + 1) * PAGE_BYTES, size):
                if rng.random() < share:
                    self._keep(at, size)

    def _keep_length(self) -> None:
        self.kept.extend(bytes(len(self.seen) - len(self.kept)))

    def _keep(self, at: int, size: int) -> None:
        """What lies beyond a length that was not kept is lost."""
        end = min(at + size, len(self.kept))
        self.kept[at:end] = self.seen[at:end]


def _pages(content: bytes | bytearray) -> range:
    return range((len(content) + PAGE_BYTES - 1) // PAGE_BYTES)


@dataclass(eq=False, slots=True)
class FolderNode:
    """Names as processes see them, and as they are on the disk."""

    seen: dict[str, Node] = field(default_factory=dict)
    kept: dict[str, Node] = field(default_factory=dict)


Node = FileNode | FolderNode
Name = tuple[FolderNode, str]


class DiskModel:
    """A tree of files. Paths are relative to its root; errors are those of the operating system."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.root = FolderNode()
        self.is_shut = False  # until the next cut nothing can be changed
        # what happened to names since their folders were synced, oldest first
        self._pending: list[list[tuple[Name, Node | None]]] = []

    # --- names ------------------------------------------------------------------------------------

    def find(self, path: PurePath) -> Node | None:
        node: Node | None = self.root
        for part in path.parts:
            node = node.seen.get(part) if isinstance(node, FolderNode) else None
        return node

    def folder(self, path: PurePath) -> FolderNode:
        node = self.find(path)
        if not isinstance(node, FolderNode):
            raise FileNotFoundError(path)
        return node

    def file(self, path: PurePath) -> FileNode:
        node = self.find(path)
        if not isinstance(node, FileNode):
            raise FileNotFoundError(path)
        return node

    def put(self, path: PurePath, node: Node) -> None:
        """Give a new node its name."""
        self._happen([((self.folder(path.parent), path.name), node)])

    def remove(self, path: PurePath) -> None:
        folder = self.folder(path.parent)
        if path.name not in folder.seen:
            raise FileNotFoundError(path)
        self._happen([((folder, path.name), None)])

    def rename(self, old: PurePath, new: PurePath) -> None:
        node = self.find(old)
        if node is None:
            raise FileNotFoundError(old)
        source, target = self.folder(old.parent), self.folder(new.parent)
        self._happen([((source, old.name), None), ((target, new.name), node)])

    def sync_folder(self, folder: FolderNode) -> None:
        """The names in ``folder`` are on the disk, and so is all that they follow from."""
        wanted: set[tuple[int, str]] = set()
        needed = []
        for step in reversed(self._pending):
            names = {(id(owner), name) for (owner, name), _ in step}
            if wanted & names or any(owner is folder for (owner, _), _ in step):
                wanted |= names
                needed.append(step)
        for step in reversed(needed):
            _keep_names(step)
        self._pending = [step for step in self._pending if step not in needed]

    def _happen(self, step: list[tuple[Name, Node | None]]) -> None:
        for (owner, name), node in step:
            if node is None:
                del owner.seen[name]
            else:
                owner.seen[name] = node
        self._pending.append(step)

    # --- the power --------------------------------------------------------------------------------

    def cut(self) -> None:
        """Only what is on the disk is left, and any part of what was on its way."""
        share = self.rng.choice([0.0, 0.5, 0.5, 1.0])
        stuck: set[tuple[int, str]] = set()  # names one of whose operations has not happened
        for step in self._pending:
            names = {(id(owner), name) for (owner, name), _ in step}
            if not stuck & names and self.rng.random() < share:
                _keep_names(step)
            else:
                stuck |= names
        self._pending.clear()
        self.is_shut = False
        for folder in self._folders(self.root):
            folder.seen = dict(folder.kept)
            for node in folder.seen.values():
                if isinstance(node, FileNode):
                    node.cut(self.rng)

    def write_back(self) -> None:
        """A moment passes in which the kernel saves some pages by itself."""
        for node in self.files().values():
            node.write_back(self.rng)

    def files(self) -> dict[PurePath, FileNode]:
        """All files by path, as processes see them."""
        return dict(_files(self.root, PurePath()))

    def _folders(self, folder: FolderNode) -> Iterator[FolderNode]:
        """``folder`` and those in it, as they are on the disk, each before what it holds."""
        yield folder
        for node in folder.kept.values():
            if isinstance(node, FolderNode):
                yield from self._folders(node)


def _keep_names(step: list[tuple[Name, Node | None]]) -> None:
    for (owner, name), node in step:
        if node is None:
            owner.kept.pop(name, None)
        else:
            owner.kept[name] = node


def _files(folder: FolderNode, at: PurePath) -> Iterator[tuple[PurePath, FileNode]]:
    for name, node in sorted(folder.seen.items()):
        if isinstance(node, FileNode):
            yield at / name, node
        else:
            yield from _files(node, at / name)
