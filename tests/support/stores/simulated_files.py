"""The store's seam to the file system, over a disk in memory that fails when and how a test says.

Every call is counted. At one of them something goes wrong (:class:`Fault`): it fails with EIO or
ENOSPC (and a part of what it should write was written), or the process dies there, or the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path, PurePath
from typing import TypeVar

from cometmq.errors import DiskFull, StoreFailed
from cometmq.native.interface import SharedOffsets
from cometmq.store.disk import files as disk_files
from cometmq.store.disk.files import Buffer, Entry, File, Mapping, StrPath, Usage
from tests.support.stores.disk_model import PAGE_BYTES, DiskModel, FileNode, FolderNode

Result = TypeVar("Result")

# A full disk is noticed by these. (One that is noticed by a sync is a failure, as EIO is.)
NEED_ROOM = frozenset({"create", "make", "rename", "write", "map"})
VOLUME_BYTES = 1 << 30


class Gone(BaseException):
    """The process does not exist any more; what it calls does not happen."""


class Kind(Enum):
    EIO = "EIO"
    ENOSPC = "ENOSPC"
    DEATH = "the process dies"
    POWER_CUT = "the power goes"


@dataclass
class Fault:
    """What goes wrong at call number ``at``, counted from 1 over all lives of the process. At 0
    nothing does. ``lasting``: at all later calls too.
    """

    kind: Kind = Kind.DEATH
    at: int = 0
    lasting: bool = False
    calls: int = 0
    hits: int = 0  # calls that went wrong
    struck: str = ""  # what the last of them was to do

    def next_call(self, name: str) -> Kind | None:
        """What goes wrong at the call that is being made."""
        self.calls += 1
        is_now = self.calls == self.at or (self.lasting and self.calls > self.at > 0)
        if not is_now or (self.kind is Kind.ENOSPC and name not in NEED_ROOM):
            return None
        self.hits += 1
        self.struck = name
        return self.kind


class SimulatedFiles:
    """A :class:`cometmq.store.disk.files.Files` for the files under ``root``, a real but empty
    folder.

    The disk outlives it: a new life of the process is a new ``SimulatedFiles`` over the same
    :class:`DiskModel`.
    """

    def __init__(
        self,
        root: Path,
        disk: DiskModel,
        *,
        boot: str = "boot-1",
        fault: Fault | None = None,
        volume_bytes: int = VOLUME_BYTES,
    ) -> None:
        self.root = root
        self.volume_bytes = volume_bytes
        self.disk = disk
        self.changes = 0  # calls that change something or bring it to the disk
        self._trail: list[tuple[int, str, StrPath]] = []
        self._boot = boot
        self._fault = fault or Fault()
        self._gone = False

    # --- one call ---------------------------------------------------------------------------------

    def call(self, name: str, path: StrPath, act: Callable[[], Result]) -> Result:
        """``act`` happens, unless this is the call at which something goes wrong."""
        self.must_live()
        kind = self._fault.next_call(name)
        self._trail.append((self._fault.calls, name, path))
        if kind is None:
            return act()
        if kind in (Kind.DEATH, Kind.POWER_CUT):
            self._gone = True
            if self.disk.rng.random() < 0.5:
                act()
            raise Gone
        text = f"cannot {name} {path}: {kind.value}"
        raise DiskFull(text) if kind is Kind.ENOSPC else StoreFailed(text)

    @property
    def trail(self) -> list[str]:
        """What was called, for whoever reads of a failure."""
        return [f"{number} {name} {self._relative(path)}" for number, name, path in self._trail]

    def must_live(self) -> None:
        if self._gone:
            raise Gone

    def change(self, name: str, path: StrPath, act: Callable[[], None]) -> None:
        """A call that changes something, or brings it to the disk."""
        self.changes += 1
        if self.disk.is_shut:
            raise StoreFailed(f"cannot {name} {path}: the file system is shut")
        self.call(name, path, act)

    def _relative(self, path: StrPath) -> PurePath:
        return PurePath(path).relative_to(self.root)

    # --- cometmq.store.disk.files.Files -----------------------------------------------------------

    def open(self, path: StrPath) -> File:
        return SimulatedFile(self, str(path), self._relative(path))

    def create(self, path: StrPath, size: int, *, takes_room: bool = False) -> File:
        def act() -> None:
            if self.disk.find(self._relative(path)) is not None:
                raise StoreFailed(f"{path} exists")
            self.disk.put(self._relative(path), FileNode(size, has_room=takes_room))

        if takes_room and size > self.usage(path).free_bytes:
            raise DiskFull(f"no space left to create {path}")

        self.change("create", path, act)
        return self.open(path)

    def map(self, path: StrPath, size: int) -> Mapping:
        node = self.disk.file(self._relative(path))
        assert len(node.seen) == size, (path, len(node.seen), size)
        if size > node.page_count * PAGE_BYTES + self.usage(path).free_bytes:
            raise DiskFull(f"no space left to map {path}")
        self.change("map", path, lambda: None)
        return SimulatedMapping(self, path, node)

    def usage(self, path: StrPath) -> Usage:
        pages = sum(node.page_count for node in self.disk.files().values())
        return Usage(pages * PAGE_BYTES, self.volume_bytes - pages * PAGE_BYTES)

    def room_for(self, node: FileNode, size: int, offset: int) -> int:
        """How many of ``size`` bytes at ``offset`` the volume takes."""
        if node.has_room:
            return size
        free = self.usage(self.root).free_bytes // PAGE_BYTES
        for page in range(offset // PAGE_BYTES, -(-(offset + size) // PAGE_BYTES)):
            if page not in node.allocated:
                if not free:
                    return max(0, page * PAGE_BYTES - offset)
                free -= 1
        return size

    def read(self, path: StrPath) -> bytes | None:
        def act() -> bytes | None:
            node = self.disk.find(self._relative(path))
            return bytes(node.seen) if isinstance(node, FileNode) else None

        return self.call("read", path, act)

    def entries(self, path: StrPath) -> list[Entry]:
        def act() -> list[Entry]:
            node = self.disk.find(self._relative(path))
            return _entries(node) if isinstance(node, FolderNode) else []

        return self.call("list", path, act)

    def exists(self, path: StrPath) -> bool:
        return self.disk.find(self._relative(path)) is not None

    def make_directories(self, path: StrPath) -> None:
        relative = self._relative(path)
        missing = [p for p in (relative, *relative.parents) if self.disk.find(p) is None]
        for folder in reversed(missing):
            act = partial(self.disk.put, folder, FolderNode())
            self.change("make", self.root / folder, act)

    def rename(self, old: StrPath, new: StrPath) -> None:
        names = self._relative(old), self._relative(new)
        self.change("rename", old, lambda: self.disk.rename(*names))

    def unlink(self, path: StrPath) -> None:
        if self.exists(path):
            self.change("unlink", path, lambda: self.disk.remove(self._relative(path)))

    def remove_tree(self, path: StrPath) -> None:
        node = self.disk.find(self._relative(path))
        if isinstance(node, FolderNode):
            for name in sorted(node.seen):
                self.remove_tree(PurePath(path) / name)
        self.unlink(path)

    def sync(self, path: StrPath, node: FileNode) -> None:
        """Of a file, whether by its name or by its memory."""
        try:
            self.change("sync", path, node.sync)
        except (StoreFailed, DiskFull) as error:
            node.lose(self.disk.rng)
            raise StoreFailed(str(error)) from error

    def sync_directory(self, path: StrPath) -> None:
        node = self.disk.find(self._relative(path))
        if not isinstance(node, FolderNode):
            return
        try:
            self.change("sync folder", path, lambda: self.disk.sync_folder(node))
        except (StoreFailed, DiskFull) as error:
            self.disk.is_shut = True
            raise StoreFailed(str(error)) from error

    def sync_all(self, files: Sequence[File], directories: Sequence[StrPath]) -> None:
        for file in files:
            file.sync()
        for directory in directories:
            self.sync_directory(directory)

    def kind(self, path: StrPath) -> disk_files.Kind | None:
        found = self.disk.find(self._relative(path))
        if found is None:
            return None
        is_folder = isinstance(found, FolderNode)
        return disk_files.Kind.FOLDER if is_folder else disk_files.Kind.FILE

    unreadable_count = 0

    def replace_by(self, spare: StrPath, path: StrPath, content: bytes) -> bool:
        return False

    def is_public(self, path: StrPath) -> bool:
        return False

    def check_allowed(self, path: StrPath) -> None:
        """Everything is."""

    def boot_id(self) -> str:
        return self._boot

    def process_id(self) -> int:
        return 4711


class SimulatedFile:
    """A :class:`cometmq.store.disk.files.File`. Like the real one it is opened at its first use."""

    def __init__(self, files: SimulatedFiles, path: str, relative: PurePath) -> None:
        self.path = path
        self._files = files
        self._relative = relative
        self._node: FileNode | None = None
        self._closed = False

    def _opened(self) -> FileNode:
        if self._node is None:
            found = self._files.disk.find(self._relative)
            if not isinstance(found, FileNode):
                raise StoreFailed(f"cannot open {self.path}: it is not there")
            self._node = found
        return self._node

    def pread(self, size: int, offset: int, *, nowait: bool = False) -> bytes:
        if self._closed:
            return b""
        node = self._opened()
        return self._files.call("read", self.path, lambda: bytes(node.seen[offset : offset + size]))

    def is_unreadable(self, start: int, end: int) -> bool:
        return False

    def pwrite(self, data: Buffer, offset: int) -> None:
        if self._closed:
            raise StoreFailed(f"{self.path} is closed")
        node, content = self._opened(), bytes(data)
        self._files.must_live()
        room = self._files.room_for(node, len(content), offset)
        if room < len(content):
            node.write(content[:room], offset)
            raise DiskFull(f"no space left to write {self.path}")
        try:
            self._files.change("write", self.path, lambda: node.write(content, offset))
        except BaseException:  # a part of it may have been written
            part = self._files.disk.rng.randint(0, len(content))
            node.write(content[:part], offset)
            raise

    def sync(self) -> None:
        if self._closed:
            return
        self._files.sync(self.path, self._opened())

    def sync_while_wanted(self, levels: SharedOffsets, stop: int, write_fd: int) -> bool:
        return False  # so :meth:`sync` is called, every time

    def data_extents(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        if self._closed:
            return
        for page in sorted(self._opened().allocated):
            at, stop = max(page * PAGE_BYTES, start), min((page + 1) * PAGE_BYTES, end)
            if at < stop:
                yield at, stop

    def close(self) -> None:
        self._closed = True


class SimulatedMapping:
    """A :class:`cometmq.store.disk.files.Mapping`: what is written goes to the file by itself."""

    def __init__(self, files: SimulatedFiles, path: StrPath, node: FileNode) -> None:
        self.view = node.map()
        self._files = files
        self._path = path
        self._node = node

    def scatter(self, places: Sequence[int], data: bytes) -> None:
        size = len(data) // len(places)
        for number, place in enumerate(places):
            self.view[place : place + size] = data[number * size : (number + 1) * size]

    def sync(self) -> None:
        self._files.sync(self._path, self._node)

    def close(self) -> None:
        self.view.release()


def _entries(folder: FolderNode) -> list[Entry]:
    return [
        Entry(name, True, 0) if isinstance(node, FolderNode) else Entry(name, False, len(node.seen))
        for name, node in sorted(folder.seen.items())
    ]
