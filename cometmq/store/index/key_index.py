"""The files of the key index: which records have a key, by its hash. ``docs/format/indexfile.md``.

Derived from the log, so nothing here is ever the only copy. A file is *sealed* once it is full: all
else is on the disk before its header says so. Then a crash leaves nothing in doubt: sealed files
are whole, and the newest, which is not sealed, is removed and built again.

Threads: one puts keys in and removes files, any number look keys up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

from cometmq.errors import Shortage, StoreDamaged, StoreForeignFile
from cometmq.format import indexfile
from cometmq.format.indexfile import HEADER_BYTES, Header, Keys, Sizes
from cometmq.store import layout
from cometmq.store.disk.files import CHUNK_BYTES, Entry, File, Files, Kind, Mapping


class IndexFile:
    """One file. ``header`` is replaced whole, after the entries that it counts were written.

    ``durable_time_ms``: all its keys are on the disk, the last one of a record of this store time;
    0 while they are not.
    """

    __slots__ = ("_file", "_mapping", "_sizes", "durable_time_ms", "header")

    def __init__(self, file: File, sizes: Sizes, header: Header) -> None:
        self.header = header
        self.durable_time_ms = header.end_time_ms
        self._file = file
        self._sizes = sizes
        self._mapping: Mapping | None = None

    @property
    def path(self) -> str:
        return self._file.path

    @property
    def is_sealed(self) -> bool:
        return not self._sizes.room(self.header)

    def map(self, files: Files) -> None:
        """Make ready for :meth:`put`, unless it is already. Shortage. StoreDamaged: it has a page
        that the disk cannot read, and has to be built again.
        """
        if self._mapping is None:
            # A page that is not in memory would be read in the middle of a write, with the GIL
            # held. Entries are only added at the end: the slots are enough.
            for at in range(0, self._sizes.entries_at, CHUNK_BYTES):
                self._file.pread(min(CHUNK_BYTES, self._sizes.entries_at - at), at)
            tail = self._sizes.entries_at + self.header.next_entry * indexfile.ENTRY_BYTES
            self._file.pread(min(indexfile.ENTRY_BYTES, self._sizes.file_bytes - tail), tail)
            if self._file.is_unreadable(0, self._sizes.file_bytes):
                # Writing there would end the process.
                raise StoreDamaged(f"the disk cannot read all of {self.path}")
            self._mapping = files.map(self.path, self._sizes.file_bytes)

    def put(self, keys: Keys) -> None:
        """Put ``keys`` in, at most as many as there is room for; seals the file with the last."""
        assert self._mapping is not None, self.path
        self.durable_time_ms = 0
        mapping = self._mapping
        header = indexfile.insert(mapping.view, self._sizes, self.header, keys, mapping.scatter)
        is_full = not self._sizes.room(header)
        if is_full:
            mapping.sync()
        mapping.scatter([0], header.encode())
        self.header = header
        if is_full:
            self.sync()
            self._unmap()

    def sync(self) -> None:
        """Bring everything to the disk."""
        if self._mapping is not None:
            self._mapping.sync()
            self.durable_time_ms = self.header.end_time_ms

    def find(self, code: int, first_ms: int, last_ms: int) -> Iterator[int | None]:
        """Log offsets of records with a key of this hash, newest first, and None. See
        :func:`cometmq.format.indexfile.find`.
        """
        return indexfile.find(
            self._read, self._sizes, self.header.begin_time_ms, code, first_ms, last_ms
        )

    def last_hashes(self) -> Iterator[int]:
        """See :func:`cometmq.format.indexfile.last_hashes`."""
        return indexfile.last_hashes(self._read, self._sizes, self.header)

    def close(self) -> None:
        self._unmap()
        self._file.close()

    def _read(self, at: int, size: int) -> bytes:
        return self._file.pread(size, at)  # not through the mapping: a call lets others run

    def _unmap(self) -> None:
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None


class KeyIndex:
    """All files of one store's index, oldest first; the list is replaced whole.

    Invariant: all but the last are sealed.
    """

    def __init__(self, directory: Path, files: Files, sizes: Sizes) -> None:
        self._directory = directory
        self._files = files
        self._sizes = sizes
        self._list: tuple[IndexFile, ...] = ()

    # --- what there is: any thread ----------------------------------------------------------------

    @property
    def file_count(self) -> int:
        return len(self._list)

    @property
    def entry_count(self) -> int:
        return sum(file.header.next_entry - 1 for file in self._list)

    @property
    def last_begin_offset(self) -> int:
        """Log offset of the record whose key is the first of the last file."""
        return self._list[-1].header.begin_offset

    @property
    def end_offset(self) -> int:
        """Log offset of the record whose key was put in last; -1 = none."""
        return self._list[-1].header.end_offset if self._list else -1

    @property
    def durable_time_ms(self) -> int:
        """Keys of records of this store time, and all before them, are on the disk; 0 = none."""
        durable = (file.durable_time_ms for file in reversed(self._list))
        return next((time_ms for time_ms in durable if time_ms), 0)

    def find(self, code: int, first_ms: int, last_ms: int) -> Iterator[int | None]:
        """Log offsets of records with a key of this hash, newest first, of all files, and None for
        each entry that was passed over. Times are known by the second.
        """
        for file in reversed(self._list):
            if file.header.end_time_ms < first_ms:
                return
            if file.header.begin_time_ms <= last_ms:
                yield from file.find(code, first_ms, last_ms)

    def lacking(self, keys: Keys) -> Keys:
        """Those of ``keys`` that are in no file. They are of a part of the log behind a file's last
        record and in front of the next one's first, or begin with the last record itself.

        Of the files only the entries of that record are read: a key may be that of all messages.
        """
        if not keys:
            return keys
        first = keys[0].log_offset
        known = self._known(first)
        return Keys.of(key for key in keys if key.log_offset > first or key.hash not in known)

    def _known(self, log_offset: int) -> set[int]:
        """Hashes of the keys of the record there, if it is the last one of a file: two files may
        have some each.
        """
        at = bisect_left(self._list, log_offset, key=_end_offset)
        ended = takewhile(lambda file: _end_offset(file) == log_offset, self._list[at:])
        return {code for file in ended for code in file.last_hashes()}

    def gaps(self, log_start: int) -> Iterator[tuple[int, int]]:
        """The parts of the log (start, end) from ``log_start`` on in front of a file, and behind
        the file before it. As a rule that is one record, whose last key the file before has.
        """
        end = log_start
        for file in self._list:
            if end < file.header.begin_offset:
                yield end, file.header.begin_offset
            end = max(end, file.header.end_offset)

    # --- opening ----------------------------------------------------------------------------------

    def load(self) -> None:
        """Take up the files that are there; anything but whole files is StoreForeignFile."""
        self._list = tuple(
            self._opened(self._checked(entry))
            for entry in self._entries()
            if not _is_unfinished(entry)
        )

    def settle(self, trusted_time_ms: int | None) -> None:
        """Keep the files up to the first whose header shows that it is not what was written; after
        a crash only what was sealed and does not reach beyond the checkpoint's time, None: the
        store was closed in order.
        """
        kept: list[IndexFile] = []
        for file in self._list:
            if trusted_time_ms is not None and not (
                file.is_sealed and file.header.end_time_ms <= trusted_time_ms
            ):
                break
            if not _goes_on(kept[-1] if kept else None, file):
                break
            kept.append(file)
        self._keep(kept)
        for entry in self._entries():
            if _is_unfinished(entry):
                self._files.unlink(self._directory / entry.name)

    def _entries(self) -> list[Entry]:
        found = self._files.entries(self._directory)
        return [entry for entry in found if not layout.is_ignored(entry.name)]

    def _checked(self, entry: Entry) -> Entry:
        path = self._directory / entry.name
        if not layout.INDEX_NAME.fullmatch(entry.name) or entry.kind is not Kind.FILE:
            raise StoreForeignFile(f"{path} is not a file of a key index: move it out of the store")
        if entry.size != self._sizes.file_bytes:
            raise StoreForeignFile(
                f"{path} has {entry.size} bytes instead of {self._sizes.file_bytes}: set "
                "max_hash_slot_num and max_index_num as they were; or move it out of the store: "
                "the index is built again from the log"
            )
        return entry

    def _opened(self, entry: Entry) -> IndexFile:
        file = self._files.open(self._directory / entry.name)
        return IndexFile(file, self._sizes, indexfile.decode_header(file.pread(HEADER_BYTES, 0)))

    # --- putting in: one thread -------------------------------------------------------------------

    def insert(self, keys: Keys) -> int:
        """Put ``keys`` in, in the order of the log; returns how many, which is fewer than all when
        another file cannot be made or opened now. StoreDamaged: the last file has to be built
        again.
        """
        done = 0
        while done < len(keys):
            try:
                file = self._writable(keys[done].store_time_ms)
            except Shortage:
                break
            part = keys.part(done, self._sizes.room(file.header))
            file.put(part)
            done += len(part)
        return done

    def sync(self) -> None:
        """Bring all keys to the disk."""
        if self._list:
            self._list[-1].sync()

    def _writable(self, store_time_ms: int) -> IndexFile:
        """The last file, or a new one if that is sealed, for a record of this time. Shortage."""
        file = self._list[-1] if self._list else None
        if file is None or file.is_sealed:
            file = self._made(self._name(store_time_ms))
            self._list = (*self._list, file)
        file.map(self._files)
        return file

    def _name(self, store_time_ms: int) -> str:
        # Names are in the order of the files: store times are, a clock that is set back is not.
        name = layout.index_name(store_time_ms)
        last = Path(self._list[-1].path).name if self._list else ""
        return name if name > last else f"{int(last) + 1:0{layout.INDEX_DIGITS}d}"

    def _made(self, name: str) -> IndexFile:
        self._files.make_directories(self._directory)
        path = self._directory / name
        file = IndexFile(self._files.create(path, self._sizes.file_bytes), self._sizes, Header())
        try:
            file.map(self._files)
            self._files.sync_directory(self._directory)
            self._files.sync_directory(self._directory.parent)
        except BaseException:
            file.close()
            self._files.unlink(path)
            raise
        return file

    # --- removing: the same thread, or while none puts in -----------------------------------------

    def trim(self, log_start: int) -> None:
        """Remove the files that speak only of records before ``log_start``; the last one stays."""
        while len(self._list) > 1 and self._list[0].header.end_offset < log_start:
            first, *rest = self._list
            self._list = tuple(rest)
            self._remove(first)

    def truncate(self, log_offset: int) -> None:
        """Remove the files that speak of records at or behind ``log_offset``; what they say of
        others is built again.
        """
        self._keep(list(takewhile(lambda f: f.header.end_offset < log_offset, self._list)))

    def close(self) -> None:
        """Let the files go; nothing is synced."""
        for file in self._list:
            file.close()

    def _keep(self, kept: list[IndexFile]) -> None:
        """Remove all files but the first ones, the newest first: a gap would not be noticed."""
        removed = self._list[len(kept) :]
        assert tuple(kept) == self._list[: len(kept)], "files are removed from the end"
        self._list = tuple(kept)
        for file in reversed(removed):
            self._remove(file)

    def _remove(self, file: IndexFile) -> None:
        file.close()
        self._files.unlink(file.path)
        self._files.sync_directory(self._directory)


def _end_offset(file: IndexFile) -> int:
    return file.header.end_offset


def _goes_on(before: IndexFile | None, file: IndexFile) -> bool:
    """Whether ``file`` has keys, and the file before it, if there is one, is full of older ones."""
    begin, end = file.header.begin_offset, file.header.end_offset
    if file.header.is_empty or begin > end:
        return False
    return before is None or (before.is_sealed and before.header.end_offset <= begin)


def _is_unfinished(entry: Entry) -> bool:
    """A crash came between the file's making and its first sync."""
    return not entry.size and entry.kind is Kind.FILE
