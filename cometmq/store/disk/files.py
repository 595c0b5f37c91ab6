"""The seam to the file system: everything that the store does to a disk goes through
:class:`Files`.

Only this module (and ``dirlock.py``) imports :mod:`os`, so a test can hand in files that lose what
was not synced. Reads and writes are calls, which let other threads run; only what is written here
and there in small pieces is mapped (:meth:`Files.map`). Its room is taken first, because a full
disk under a mapping is SIGBUS, and it is synced by its descriptor, because ``mmap.flush`` holds the
GIL for a whole msync.

A page that the disk cannot read is damage, as a page of zeros is: what can be read of a file is
read, the rest reads as zeros, and :meth:`File.is_unreadable` tells the two apart.

Errors: a full disk is :class:`~cometmq.errors.DiskFull`, no descriptor to open a file with is
:class:`~cometmq.errors.DescriptorsExhausted`, everything else that the kernel refuses is
:class:`~cometmq.errors.StoreFailed`; a read that would have to wait for the disk is
:class:`BlockingIOError` when asked for with ``nowait``.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import resource
import shutil
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from enum import Enum
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

from cometmq.errors import (
    DescriptorsExhausted,
    DiskFull,
    Shortage,
    StoreError,
    StoreFailed,
    StoreForbidden,
)
from cometmq.native.interface import SharedOffsets

logger = logging.getLogger(__name__)

Buffer: TypeAlias = bytes | bytearray | memoryview
StrPath: TypeAlias = str | os.PathLike[str]
Opened = TypeVar("Opened")

# the most that one call reads or writes while zeros are looked for
CHUNK_BYTES = 1024 * 1024
SCRATCH_BYTES = 512 * 1024
PIECES_MAX = 1024  # that one read takes: IOV_MAX of Linux
ZEROS = bytes(CHUNK_BYTES)
SYNCS_AT_ONCE = 8
BOOT_ID_PATH = "/proc/sys/kernel/random/boot_id"
NO_NOWAIT = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})
PAGE_BYTES = 4096  # that a disk, or the page cache, has or has not
# the disk cannot read a page; a server of NFS does not know the file that was opened any more
# A store holds messages and keys: nobody but its user reads it, whatever the umask is.
FILE_MODE, FOLDER_MODE = 0o600, 0o700
UNREADABLE = frozenset({errno.EIO, errno.ESTALE})
NO_DESCRIPTOR = frozenset({errno.EMFILE, errno.ENFILE})  # the process's limit, the machine's
# what must not be left half done waits so long for a descriptor
PATIENCE_S, PAUSE_S = 30.0, 0.05


class Kind(Enum):
    """What a path is; the values are how messages name it."""

    FILE = "file"
    FOLDER = "folder"
    LINK = "symbolic link"  # one that leads nowhere, where links are followed
    SPECIAL = "pipe, socket or device"


class Entry(NamedTuple):
    """An entry of a directory; ``size`` is 0 for directories."""

    name: str
    is_directory: bool
    size: int
    is_link: bool = False  # a symbolic one, whatever it points to; size is the link's own
    is_special: bool = False  # a pipe, a socket or a device

    @property
    def kind(self) -> Kind:
        """What it is by itself."""
        if self.is_link:
            return Kind.LINK
        if self.is_special:
            return Kind.SPECIAL
        return Kind.FOLDER if self.is_directory else Kind.FILE


class Usage(NamedTuple):
    """How full the volume of a folder is, as ``df`` counts it."""

    used_bytes: int
    free_bytes: int  # that this process may still write; what is reserved for root is in neither


class File(Protocol):
    """A file by name; its descriptor comes and goes behind the scenes. Any thread may call any
    method.

    After :meth:`close` reads are empty and syncs do nothing: a reader or the flush thread may still
    hold a file whose topic was deleted a moment ago.
    """

    path: str

    def pread(self, size: int, offset: int, *, nowait: bool = False) -> bytes:
        """Up to ``size`` bytes at ``offset``, fewer only at the end of the file. ``nowait``: only
        from memory.
        """

    def is_unreadable(self, start: int, end: int) -> bool:
        """Whether reads found a page between ``start`` and ``end`` that the disk cannot read, and
        nothing was written there since.
        """

    def pwrite(self, data: Buffer, offset: int) -> None:
        """Write all of ``data``. After an error any part of it may have been written."""

    def sync(self) -> None:
        """Return when the written bytes and the file's size are on the disk."""

    def sync_while_wanted(self, offsets: SharedOffsets, stop: int, write_fd: int) -> bool:
        """Sync as :meth:`~cometmq.native.interface.SharedOffsets.sync` does. False when nothing was
        done, because no caller waits, or because it is not possible; :meth:`sync` always is.
        """

    def data_extents(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """The (start, end) ranges between ``start`` and ``end`` that are not holes, in order."""

    def close(self) -> None:
        """Let the descriptor go when its last user is done."""


class Mapping(Protocol):
    """A whole file as memory. One thread writes; readers of the file see it at once."""

    view: memoryview

    def scatter(self, places: Sequence[int], data: bytes) -> None:
        """Write ``data``, cut into equal pieces, to ``places`` in their order. Other threads run
        meanwhile: a page that is written to may have to wait for the disk, and a write to the view
        would hold the GIL then.
        """

    def sync(self) -> None:
        """Return when what was written is on the disk."""

    def close(self) -> None:
        """Let memory and descriptor go; the view cannot be used any more. Again does nothing."""


class Files(Protocol):
    """A file system. ``unreadable_count``: pages that the disk could not read, each time that it
    was asked for one.
    """

    unreadable_count: int

    def open(self, path: StrPath) -> File:
        """A file that exists already."""

    def create(self, path: StrPath, size: int, *, takes_room: bool = False) -> File:
        """A new file of ``size`` bytes that all read as zeros. They are a hole, or with
        ``takes_room`` their room on the disk is taken, all of it or none, and nothing is written.
        """

    def map(self, path: StrPath, size: int) -> Mapping:
        """An existing file of ``size`` bytes as memory; its room on the disk is taken before, all
        of it, so that no write can fail for want of it.
        """

    def read(self, path: StrPath) -> bytes | None:
        """All of a small file; None when there is none."""

    def entries(self, path: StrPath) -> list[Entry]:
        """What a directory holds, sorted by name; empty when there is no such directory."""

    def exists(self, path: StrPath) -> bool:
        """True when something is at ``path``."""

    def kind(self, path: StrPath) -> Kind | None:
        """What ``path`` leads to; None: nothing is there."""

    def check_allowed(self, path: StrPath) -> None:
        """StoreForbidden unless this process may read what is at ``path``, and write it if files
        are written at all.
        """

    def make_directories(self, path: StrPath) -> None:
        """Make a directory and those above it; nothing happens when it exists."""

    def is_public(self, path: StrPath) -> bool:
        """Whether every user of the machine may look into the directory."""

    def rename(self, old: StrPath, new: StrPath) -> None:
        """Give ``old`` the name ``new``, in one step, replacing a file of that name."""

    def replace_by(self, spare: StrPath, path: StrPath, content: bytes) -> bool:
        """Let ``path`` hold ``content`` in one step, in the room of the file ``spare``; the old
        file at ``path``, if there is one, takes its name. False, and nothing done, without a spare
        that has the room. Needs no block of the volume.
        """

    def unlink(self, path: StrPath) -> None:
        """Remove a file; nothing happens when there is none."""

    def remove_tree(self, path: StrPath) -> None:
        """Remove a directory with all that it holds; nothing happens when there is none."""

    def sync_directory(self, path: StrPath) -> None:
        """Return when the names in a directory are on the disk; nothing happens when it is gone."""

    def sync_all(self, files: Sequence[File], directories: Sequence[StrPath]) -> None:
        """All of them, as :meth:`File.sync` and :meth:`sync_directory` do one; in any order."""

    def usage(self, path: StrPath) -> Usage:
        """How full the volume is that ``path``, an existing folder, lies on."""

    def boot_id(self) -> str:
        """A text that changes when the machine restarts, and with it the page cache is lost; empty
        when unknown.
        """

    def process_id(self) -> int:
        """The number of this process."""


@contextmanager
def _catalogue(action: str, path: StrPath) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise store_error(error, action, path) from error


def store_error(error: OSError, action: str, path: StrPath) -> StoreError | Shortage:
    """The catalogue's error for what the kernel said."""
    if error.errno in NO_DESCRIPTOR:
        return DescriptorsExhausted(f"cannot {action} {os.fspath(path)}: {error.strerror}")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(f"no space left to {action} {os.fspath(path)}")
    return StoreFailed(f"cannot {action} {os.fspath(path)}: {error.strerror or error}")


@contextmanager
def permissions() -> Iterator[None]:
    """StoreForbidden instead of StoreFailed for what this user may not do."""
    try:
        yield
    except StoreFailed as error:
        if not isinstance(error.__cause__, PermissionError):
            raise
        path = error.__cause__.filename
        raise StoreForbidden(
            f"{error.message}: {whose(path)}" if path else error.message
        ) from error


def make_folders(path: StrPath) -> None:
    """Make a folder and those above it, for this user alone. OSError."""
    missing = [Path(path)]
    while not missing[-1].exists() and missing[-1] != missing[-1].parent:
        missing.append(missing[-1].parent)
    for folder in reversed(missing):
        with suppress(FileExistsError):
            folder.mkdir(FOLDER_MODE)
            folder.chmod(FOLDER_MODE)
    if not os.path.isdir(path):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), os.fspath(path))


def whose(path: StrPath) -> str:
    """Who may do what with ``path``, or with the folder that it would be in."""
    known = Path(path)
    with suppress(OSError):
        while not os.path.lexists(known):
            known = known.parent
        owner = known.lstat()
        return (
            f"{known} belongs to user {owner.st_uid} of group {owner.st_gid}, mode "
            f"{stat.filemode(owner.st_mode)}; this process is of user {os.geteuid()} and group "
            f"{os.getegid()}"
        )
    return f"user {os.geteuid()} of group {os.getegid()} may not look at it"


class OsFile:
    """A :class:`File` of the operating system. ``_fd`` is -1 while it is not open; the pool's lock
    guards all fields.
    """

    __slots__ = ("_closed", "_fd", "_pool", "_recent", "_unreadable", "_users", "path")

    def __init__(self, pool: OsFiles, path: str) -> None:
        self.path = path
        self._pool = pool
        self._fd = -1
        self._users = 0  # calls in flight: while there is one the descriptor stays
        self._recent = False  # used since the pool last looked for descriptors to close
        self._closed = False
        self._unreadable: frozenset[int] = frozenset()  # numbers of pages

    def pread(self, size: int, offset: int, *, nowait: bool = False) -> bytes:
        assert min(size, offset) >= 0, (size, offset)
        fd = self._acquire()
        if fd < 0:
            return b""
        try:
            if nowait:
                return self._pool.pread_nowait(fd, size, offset)
            return os.pread(fd, size, offset)
        except BlockingIOError:
            raise
        except OSError as error:
            if error.errno not in UNREADABLE:
                raise store_error(error, "read", self.path) from error
            if nowait:
                raise BlockingIOError(errno.EAGAIN, "the disk cannot read it at once") from error
            found, lost = self._pool.read_what_can_be(self.path, size, offset)
            self._unreadable |= lost
            return found
        finally:
            self._release()

    def is_unreadable(self, start: int, end: int) -> bool:
        first, last = start // PAGE_BYTES, -(-end // PAGE_BYTES)
        return any(first <= page < last for page in self._unreadable)

    def pwrite(self, data: Buffer, offset: int) -> None:
        assert offset >= 0, offset
        fd = self._acquire()
        if fd < 0:
            raise StoreFailed(f"{self.path} is closed")
        try:
            written = os.pwrite(fd, data, offset)
            while written < len(data):
                written += os.pwrite(fd, memoryview(data)[written:], offset + written)
            if self._unreadable:
                self._unreadable -= pages_of(offset, offset + written)
        except OSError as error:
            raise store_error(error, "write", self.path) from error
        finally:
            self._release()

    def sync(self) -> None:
        fd = self._acquire()
        if fd < 0:
            return
        try:
            _fdatasync(fd, self.path)
        finally:
            self._release()

    def sync_while_wanted(self, offsets: SharedOffsets, stop: int, write_fd: int) -> bool:
        fd = self._acquire()
        if fd < 0:
            return False
        try:
            return offsets.sync(fd, stop, write_fd) > 0
        except OSError as error:
            raise _sync_error(error, self.path) from error
        finally:
            self._release()

    def data_extents(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        assert 0 <= start <= end, (start, end)
        fd = self._acquire()
        try:
            while fd >= 0 and start < end:
                data, hole = _next_extent(fd, start, self.path)
                if data >= end:
                    return
                yield data, min(hole, end)
                start = hole
        finally:
            if fd >= 0:
                self._release()

    def close(self) -> None:
        with self._pool.lock:
            self._closed = True
            if not self._users:
                self._pool.let_go(self)

    def _acquire(self) -> int:
        with self._pool.lock:
            if self._closed:
                return -1
            if self._fd < 0:
                self._fd = self._pool.descriptor_for(self)
            self._users += 1
            self._recent = True
            return self._fd

    def _release(self) -> None:
        with self._pool.lock:
            assert self._users > 0, self.path
            self._users -= 1
            if self._closed and not self._users:
                self._pool.let_go(self)


def _next_extent(fd: int, start: int, path: str) -> tuple[int, int]:
    try:
        data = os.lseek(fd, start, os.SEEK_DATA)
        return data, os.lseek(fd, data, os.SEEK_HOLE)
    except OSError as error:
        if error.errno == errno.ENXIO:  # only a hole is left
            end = os.fstat(fd).st_size
            return max(end, start + 1), max(end, start + 1)
        raise store_error(error, "look into", path) from error


def pages_of(start: int, end: int) -> frozenset[int]:
    """The numbers of the pages that the bytes from ``start`` to ``end`` lie in."""
    return frozenset(range(start // PAGE_BYTES, -(-end // PAGE_BYTES)))


class OsMapping:
    """A :class:`Mapping` of the operating system."""

    __slots__ = ("_fd", "_memory", "_path", "_source", "view")

    def __init__(self, fd: int, path: str, size: int) -> None:
        self._memory = mmap.mmap(fd, size)
        self._source = os.memfd_create("scatter", os.MFD_CLOEXEC)
        self._fd = fd
        self._path = path
        self.view = memoryview(self._memory)

    def scatter(self, places: Sequence[int], data: bytes) -> None:
        # A read is what the kernel can put into many places by one call, so that is how it is done.
        size, rest = divmod(len(data), len(places))
        assert size > 0, (self._path, len(data), len(places))
        assert rest == 0, (self._path, len(data), len(places))
        with _catalogue("write", self._path):
            os.pwrite(self._source, data, 0)
            for first in range(0, len(places), PIECES_MAX):
                pieces = [self.view[at : at + size] for at in places[first : first + PIECES_MAX]]
                copied = os.preadv(self._source, pieces, first * size)
                assert copied == len(pieces) * size, (self._path, copied)

    def sync(self) -> None:
        # As good as msync for what was written through the mapping; other threads run meanwhile.
        _fdatasync(self._fd, self._path)

    def close(self) -> None:
        if self._fd >= 0:
            self.view.release()
            self._memory.close()
            os.close(self._source)
            os.close(self._fd)
            self._fd = -1


def _fdatasync(fd: int, path: str) -> None:
    try:
        os.fdatasync(fd)
    except OSError as error:
        raise _sync_error(error, path) from error


def _sync_error(error: OSError, path: str) -> StoreFailed:
    # ENOSPC at a sync means that written bytes are lost, so it is a failure and not a full disk.
    return StoreFailed(f"cannot sync {path}: {error.strerror}")


class OsFiles:
    """The operating system's files, of which at most ``open_files_max`` are open at a time; without
    ``writable`` they can only be read.

    The cap is soft: files in use are never closed. It is lowered to half of what the process may
    open. A file that is closed by the cap may hold bytes that are not synced. If Linux (4.16 and
    later) cannot write them, the next descriptor that syncs the file gets the error.

    When connections have taken all that the process may open, unused files are closed one by one,
    until there is a descriptor for what is needed now.
    """

    def __init__(self, open_files_max: int = 4096, *, writable: bool = True) -> None:
        assert open_files_max > 0, open_files_max
        self._flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.open_files_max = max(16, min(open_files_max, allowed // 2))
        self.lock = threading.RLock()
        # in the order of opening; a second chance moves a file to the end
        self._open: OrderedDict[OsFile, None] = OrderedDict()
        self._nowait = hasattr(os, "RWF_NOWAIT")
        self.unreadable_count = 0
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._scratch_lock = threading.Lock()

    def open(self, path: StrPath) -> File:
        return OsFile(self, os.fspath(path))

    def create(self, path: StrPath, size: int, *, takes_room: bool = False) -> File:
        with _catalogue("create", path):
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            fd = self._spared(lambda: os.open(path, flags, FILE_MODE))
            try:
                os.fchmod(fd, FILE_MODE)
                os.ftruncate(fd, size)
                if takes_room:
                    _reserve(fd, size)
            except OSError:
                os.unlink(path)
                raise
            finally:
                os.close(fd)
        return self.open(path)

    def map(self, path: StrPath, size: int) -> Mapping:
        with _catalogue("map", path):
            return self._spared(lambda: _mapped(path, size))

    def read(self, path: StrPath) -> bytes | None:
        with _catalogue("read", path):
            try:
                fd = self._spared(lambda: os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            except FileNotFoundError:
                return None
            size = os.fstat(fd).st_size
            try:
                found = b""
                while piece := os.pread(fd, max(size, PAGE_BYTES), len(found)):
                    found += piece
                return found
            except OSError as error:
                if error.errno not in UNREADABLE:
                    raise
                return self.read_what_can_be(os.fspath(path), size, 0)[0]
            finally:
                os.close(fd)

    def entries(self, path: StrPath) -> list[Entry]:
        found = []
        with (
            _catalogue("list", path),
            suppress(FileNotFoundError),
            self._waited_for(lambda: os.scandir(path)) as names,
        ):
            for name in names:
                with suppress(FileNotFoundError):  # removed this moment: it alone is not there
                    is_directory, is_link = name.is_dir(follow_symlinks=False), name.is_symlink()
                    is_special = not (is_directory or is_link or name.is_file())
                    size = 0 if is_directory else name.stat(follow_symlinks=False).st_size
                    found.append(Entry(name.name, is_directory, size, is_link, is_special))
        return sorted(found)

    def exists(self, path: StrPath) -> bool:
        return os.path.lexists(path)

    def kind(self, path: StrPath) -> Kind | None:
        with _catalogue("look at", path):
            try:
                mode = os.stat(path).st_mode
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ELOOP):
                    raise
                return Kind.LINK if os.path.lexists(path) else None
        if stat.S_ISDIR(mode):
            return Kind.FOLDER
        return Kind.FILE if stat.S_ISREG(mode) else Kind.SPECIAL

    def check_allowed(self, path: StrPath) -> None:
        wanted = os.R_OK | (os.X_OK if os.path.isdir(path) else 0)
        wanted |= os.W_OK if self._flags & os.O_RDWR else 0
        if not os.access(path, wanted, effective_ids=True) and os.path.exists(path):
            raise StoreForbidden(f"{os.fspath(path)} cannot be used: {whose(path)}")

    def make_directories(self, path: StrPath) -> None:
        with _catalogue("make", path):
            make_folders(path)

    def is_public(self, path: StrPath) -> bool:
        with suppress(OSError):
            return bool(os.stat(path).st_mode & (stat.S_IROTH | stat.S_IXOTH))
        return False

    def rename(self, old: StrPath, new: StrPath) -> None:
        with _catalogue("rename", old):
            os.replace(old, new)

    def replace_by(self, spare: StrPath, path: StrPath, content: bytes) -> bool:
        new = f"{os.fspath(path)}.new"
        with _catalogue("replace", path):
            try:
                fd = self._spared(lambda: os.open(spare, os.O_RDWR | os.O_CLOEXEC))
            except FileNotFoundError:
                return False
            try:
                if os.fstat(fd).st_blocks * 512 < len(content):
                    return False
                os.pwrite(fd, content, 0)
                os.ftruncate(fd, len(content))
                os.fsync(fd)
            finally:
                os.close(fd)
            os.replace(spare, new)
            with suppress(FileNotFoundError):
                os.link(path, spare)
            os.replace(new, path)
        return True

    def unlink(self, path: StrPath) -> None:
        with _catalogue("remove", path), suppress(FileNotFoundError):
            os.unlink(path)

    def remove_tree(self, path: StrPath) -> None:
        with _catalogue("remove", path), suppress(FileNotFoundError):
            self._spared(lambda: shutil.rmtree(path))

    def sync_directory(self, path: StrPath) -> None:
        try:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
            fd = self._waited_for(lambda: os.open(path, flags))
        except FileNotFoundError:
            return
        except OSError as error:
            raise StoreFailed(f"cannot sync {os.fspath(path)}: {error.strerror}") from error
        try:
            os.fsync(fd)
        except OSError as error:
            raise StoreFailed(f"cannot sync {os.fspath(path)}: {error.strerror}") from error
        finally:
            os.close(fd)

    def sync_all(self, files: Sequence[File], directories: Sequence[StrPath]) -> None:
        acts = [file.sync for file in files]
        acts += [partial(self.sync_directory, directory) for directory in directories]
        if len(acts) <= SYNCS_AT_ONCE:
            for act in acts:
                act()
            return
        # What one waits for, a commit of the file system's journal, does for others as well.
        with ThreadPoolExecutor(SYNCS_AT_ONCE, "sync") as pool:
            for done in [pool.submit(act) for act in acts]:
                done.result()

    def usage(self, path: StrPath) -> Usage:
        with _catalogue("ask about the volume of", path):
            found = os.statvfs(path)
        used = found.f_blocks - found.f_bfree
        return Usage(used * found.f_frsize, found.f_bavail * found.f_frsize)

    def boot_id(self) -> str:
        known = self.read(BOOT_ID_PATH)
        return known.decode("ascii").strip() if known else ""

    def process_id(self) -> int:
        return os.getpid()

    # --- for OsFile -------------------------------------------------------------------------------

    def read_what_can_be(self, path: str, size: int, offset: int) -> tuple[bytes, frozenset[int]]:
        """The bytes of a file of which the disk cannot read all, with zeros for those, and the
        numbers of the pages that cannot be read. The file is opened again: to a server of NFS the
        one that was opened may be none any more.
        """
        found, lost, reason = bytearray(), list[int](), ""
        with _catalogue("read", path):
            fd = self._spared(lambda: os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            try:
                end = min(offset + size, os.fstat(fd).st_size)
                while (at := offset + len(found)) < end:
                    wanted = min(end, at - at % PAGE_BYTES + PAGE_BYTES) - at
                    try:
                        found += os.pread(fd, wanted, at).ljust(wanted, b"\0")
                    except OSError as error:
                        if error.errno not in UNREADABLE:
                            raise
                        reason = error.strerror or str(error)
                        found += bytes(wanted)
                        lost.append(at // PAGE_BYTES)
            finally:
                os.close(fd)
        if lost:
            first = lost[0] * PAGE_BYTES
            logger.error(
                "%s: the disk cannot read %d pages from %d on (%s): what they hold counts as "
                "damaged",
                *(path, len(lost), first, reason),
            )
            with self.lock:
                self.unreadable_count += len(lost)
        return bytes(found), frozenset(lost)

    def pread_nowait(self, fd: int, size: int, offset: int) -> bytes:
        """The bytes if all of them are in memory, else :class:`BlockingIOError`."""
        if not self._nowait:
            return os.pread(fd, size, offset)
        try:
            return self._preadv_nowait(fd, size, offset)
        except OSError as error:
            if error.errno not in NO_NOWAIT:
                raise
            self._nowait = False  # tmpfs is memory and does not know the flag
            return os.pread(fd, size, offset)

    def _preadv_nowait(self, fd: int, size: int, offset: int) -> bytes:
        # A buffer that is kept saves clearing a new one; a second reader at the same moment pays
        # for its own.
        if size <= SCRATCH_BYTES and self._scratch_lock.acquire(blocking=False):
            try:
                return _filled(fd, self._scratch[:size], offset)
            finally:
                self._scratch_lock.release()
        return _filled(fd, memoryview(bytearray(size)), offset)

    def descriptor_for(self, file: OsFile) -> int:
        """Open ``file``, after making room. The lock is held."""
        while len(self._open) >= self.open_files_max and self._close_one():
            pass
        with _catalogue("open", file.path):
            fd = self._spared(lambda: os.open(file.path, self._flags))
        self._open[file] = None
        return fd

    def _waited_for(self, act: Callable[[], Opened]) -> Opened:
        """As :meth:`_spared`, for what must not be left half done: as long as a disk may take."""
        pause = threading.Event()
        for _ in range(int(PATIENCE_S / PAUSE_S)):
            try:
                return self._spared(act)
            except OSError as error:
                if error.errno not in NO_DESCRIPTOR:
                    raise
            pause.wait(PAUSE_S)
        return self._spared(act)

    def _spared(self, act: Callable[[], Opened]) -> Opened:
        """What ``act`` opens, with descriptors that idle files let go if there are no others."""
        while True:
            try:
                return act()
            except OSError as error:
                with self.lock:
                    if error.errno not in NO_DESCRIPTOR or not self._close_one():
                        raise

    def let_go(self, file: OsFile) -> None:
        """Close the descriptor of a file without users. The lock is held."""
        assert not file._users, file.path
        if file._fd >= 0:
            del self._open[file]
            os.close(file._fd)
            file._fd = -1

    def _close_one(self) -> bool:
        for _ in range(2 * len(self._open)):  # the first lap takes the second chances away
            file = next(iter(self._open))
            if not file._users and not file._recent:
                self.let_go(file)
                return True
            file._recent = False
            self._open.move_to_end(file)
        return False  # all in use: the cap is soft


def _mapped(path: StrPath, size: int) -> OsMapping:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        _reserve(fd, size)
        return OsMapping(fd, os.fspath(path), size)
    except BaseException:
        os.close(fd)
        raise


def _reserve(fd: int, size: int) -> None:
    """Take the room for ``size`` bytes on the disk, or none of it: what fallocate takes before it
    fails would be missing to others for a moment.
    """
    now = os.fstat(fd)
    assert now.st_size == size, (now.st_size, size)
    volume = os.fstatvfs(fd)
    if size - now.st_blocks * 512 > volume.f_bavail * volume.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.posix_fallocate(fd, 0, size)


def _filled(fd: int, room: memoryview, offset: int) -> bytes:
    count = os.preadv(fd, [room], offset, os.RWF_NOWAIT)
    if count < len(room):
        raise BlockingIOError(errno.EAGAIN, "not in memory")
    return bytes(room)


def clear(file: File, start: int, end: int) -> int:
    """Turn every byte from ``start`` to ``end`` into zero, writing only where it is not; returns
    the bytes written.
    """
    written = 0
    for at, stop in file.data_extents(start, end):
        for chunk in range(at, stop, CHUNK_BYTES):
            size = min(CHUNK_BYTES, stop - chunk)
            is_zero = file.pread(size, chunk) == ZEROS[:size]
            if not is_zero or file.is_unreadable(chunk, chunk + size):
                file.pwrite(ZEROS[:size], chunk)
                written += size
    return written


def replace(files: Files, path: StrPath, content: bytes, *, spare: StrPath | None = None) -> None:
    """Let ``path`` hold ``content``, on the disk at return; after a crash it holds the old or the
    new, never a mixture. On a full disk by the room of ``spare``.
    """
    new = os.fspath(path) + ".new"
    files.unlink(new)
    try:
        _write_new(files, new, content)
        files.rename(new, path)
    except DiskFull:
        files.unlink(new)
        if spare is None or not files.replace_by(spare, path, content):
            raise
    files.sync_directory(os.path.dirname(new))


def _write_new(files: Files, path: str, content: bytes) -> None:
    file = files.create(path, 0)
    try:
        file.pwrite(content, 0)
        file.sync()
    finally:
        file.close()
