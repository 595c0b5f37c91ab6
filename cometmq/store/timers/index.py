"""The timer index: the messages of the timer queue in the order of their times, any number of them.

Entries lie in sorted *runs*: new ones in memory, where runs of like length become one, so that each
entry is sorted a few times. When there are many entries in memory, they become a file; when there
are many files, the smallest become one. So memory is bounded, and no delay is special. All of it
can be made again from the queue; a list of the files says what they were made from.

One thread adds and takes. What writes files is a job, which may run in another thread meanwhile:
:meth:`TimerIndex.next_job`, then :meth:`TimerIndex.finish` with the result of :meth:`Job.run`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from cometmq.errors import CometError, StoreDamaged
from cometmq.store.disk.files import Files
from cometmq.store.timers.catalog import CATALOG, Catalog, Coverage, read_catalog, write_catalog
from cometmq.store.timers.entries import ENTRY, ENTRY_BYTES, count_up_to, first_of, in_order
from cometmq.store.timers.runs import (
    BLOCK_ENTRIES,
    FileRun,
    MemoryRun,
    Run,
    RunFile,
    size_of,
    write_run,
)

MEMORY_ENTRIES_MAX = 256 * 1024  # 4 MiB; while a job runs, and while the disk is full, more
FILES_MAX = 16
MERGED_AT_ONCE = 8  # of the smallest, when there are more files than that
LAST = 2**63 - 1
NOTHING = bytes(ENTRY_BYTES)  # below all entries


@dataclass(frozen=True, slots=True)
class JobDone:
    """The list of files now, and the new one of them; None: there was nothing left to write."""

    catalog: Catalog
    file: RunFile | None


@dataclass(frozen=True, slots=True)
class Job:
    """Entries of memory, or the files ``merged``, are to become the file ``name`` beside ``kept``.
    ``coverage``: what all files have then.
    """

    folder: Path
    files: Files
    name: str
    entries: bytes  # of memory, sorted
    merged: tuple[RunFile, ...]
    kept: tuple[RunFile, ...]
    coverage: Coverage

    def run(self) -> JobDone:
        """Blocking. Raises StoreDamaged, DiskFull, StoreFailed; then the index has not changed."""
        self.files.make_directories(self.folder)
        self.files.unlink(self.folder / self.name)
        written = self._write()
        catalog = Catalog(self.coverage, (*self.kept, *((written,) if written else ())))
        write_catalog(self.folder, self.files, catalog)
        return JobDone(catalog, written)

    def _write(self) -> RunFile | None:
        if self.entries:
            count = len(self.entries) // ENTRY_BYTES
            return write_run(self.folder, self.name, self.files, count, [self.entries])
        runs: list[FileRun] = []
        try:
            for file in self.merged:
                runs.append(FileRun(self.folder, file, self.files, self.coverage.after))
            count = sum(run.left for run in runs)
            if not count:
                return None
            return write_run(self.folder, self.name, self.files, count, _merged(runs))
        finally:
            for run in runs:
                run.close()


def _merged(runs: Sequence[FileRun]) -> Iterator[bytes]:
    """All entries of these runs in order."""
    while left := [run for run in runs if run.left]:
        heads = [run.peek(BLOCK_ENTRIES) for run in left]
        # Behind it the next block of a run may have something.
        limit = min(head[-ENTRY_BYTES:] for head in heads)
        pieces = []
        for run, head in zip(left, heads, strict=True):
            count = count_up_to(head, limit)
            pieces.append(head[: count * ENTRY_BYTES])
            run.take(count)
        yield in_order(b"".join(pieces))


class TimerIndex:
    """``after``: entries up to this one are taken, and none of them is ever added. ``epoch``: of
    the writer; no file ever gets the name of an earlier one, which a power cut may bring back.
    """

    def __init__(self, folder: Path, files: Files, epoch: int) -> None:
        self.after = NOTHING
        self._folder = folder
        self._files = files
        self._epoch = epoch
        self._memory: list[MemoryRun] = []  # the longest first
        self._spilling: list[MemoryRun] = []  # a job makes a file of them
        self._stored: list[FileRun] = []
        self._covered: Coverage | None = None  # what the files have
        self._job: Job | None = None  # that is under way
        self._number = 0  # of the newest file of this epoch

    # --- opening ----------------------------------------------------------------------------------

    def load(
        self,
        after: tuple[int, int],
        low: int,
        read: int,
        knows: Callable[[Coverage], bool],
    ) -> int:
        """Take up the files on the disk; how far into the queue they reach: the units behind are to
        be added. ``after``: the last entry that is delivered; the queue has messages from ``low``
        on and was read up to ``read``. ``knows``: whether the log has what the files were made
        from.

        Files that do not fit are removed, and their entries are to be added again. Blocking.
        """
        self.clear()
        self.after = ENTRY.pack(*after)
        catalog = read_catalog(self._folder, self._files)
        if catalog is not None and self._fits(catalog, low, read) and knows(catalog.coverage):
            with suppress(StoreDamaged):
                for file in catalog.files:
                    self._stored.append(FileRun(self._folder, file, self._files, self.after))
                self._covered = catalog.coverage
                self._remove_all_but([CATALOG, *(file.name for file in catalog.files)])
                return catalog.coverage.end
        self.clear()
        self._remove_all_but([])
        return low

    def _fits(self, catalog: Catalog, low: int, read: int) -> bool:
        covered = catalog.coverage
        sizes = {entry.name: entry.size for entry in self._files.entries(self._folder)}
        return (
            covered.after <= self.after
            and covered.first <= low <= covered.end <= read
            and all(sizes.get(file.name) == size_of(file.entry_count) for file in catalog.files)
        )

    def clear(self) -> None:
        """Forget all entries: they are to be added again. A job that runs is for nothing."""
        for run in self._runs():
            run.close()
        self._memory, self._spilling, self._stored = [], [], []
        self._covered = self._job = None

    def _remove_all_but(self, names: Sequence[str]) -> None:
        for entry in self._files.entries(self._folder):
            if entry.name not in names:
                with suppress(CometError):  # a file too many does no harm
                    self._files.unlink(self._folder / entry.name)

    # --- entries ----------------------------------------------------------------------------------

    def __len__(self) -> int:
        """How many entries were not taken."""
        return sum(run.left for run in self._runs())

    def add(self, entries: bytes) -> None:
        """Entries in any order, all above :attr:`after`."""
        if not entries:
            return
        # A run is at least twice as long as the next one: each entry is sorted a few times.
        while self._memory and self._memory[-1].left <= 2 * len(entries) // ENTRY_BYTES:
            entries = self._memory.pop().rest + entries
        self._memory.append(MemoryRun(in_order(entries)))

    def peek(self, until_ms: int, count: int) -> bytes:
        """The next entries that are due at ``until_ms``, at most so many, in order. StoreDamaged:
        a file is damaged, and all is to be added again.
        """
        limit = ENTRY.pack(until_ms, LAST)
        pieces: list[bytes] = []
        for run in self._runs():
            piece = run.peek(count)
            if piece and piece[:ENTRY_BYTES] <= limit:
                pieces.append(piece)
                seen = len(piece) // ENTRY_BYTES
                if seen < count and run.left > seen:
                    limit = min(limit, piece[-ENTRY_BYTES:])  # the next block has more
        due = pieces[0] if len(pieces) == 1 else in_order(b"".join(pieces))
        return due[: min(count, count_up_to(due, limit)) * ENTRY_BYTES]

    def take(self, due: bytes) -> None:
        """Go on behind ``due``, which :meth:`peek` gave. StoreDamaged."""
        last, left = due[-ENTRY_BYTES:], len(due) // ENTRY_BYTES
        assert last > self.after
        for run in self._runs():
            found = count_up_to(run.peek(left), last)
            run.take(found)
            left -= found
            if not left:
                break
        assert not left, left
        self.after = last
        self._memory = [run for run in self._memory if run.left]

    @property
    def next_due_ms(self) -> int | None:
        """When the next entry is due; None: there is none. StoreDamaged."""
        heads = [head for run in self._runs() if (head := run.peek(1))]
        return first_of(min(heads))[0] if heads else None

    def between(
        self, after: tuple[int, int], last_ms: int, count_max: int
    ) -> list[tuple[int, int]]:
        """(due_ms, queue offset) of the next entries behind ``after`` that are due until then and
        were not taken, in order, at most so many. StoreDamaged.
        """
        low = max(self.after, ENTRY.pack(after[0], max(0, after[1])))
        if after[1] < 0 and after[0] > 0:
            low = max(self.after, ENTRY.pack(after[0] - 1, LAST))
        high = ENTRY.pack(last_ms, LAST)
        found: list[bytes] = []
        for run in self._runs():
            at, end = run.rank(low), run.rank(high)
            end = min(end, at + count_max)
            while at < end:
                piece = run.slice(at, end - at)
                found.append(piece)
                at += len(piece) // ENTRY_BYTES
        entries = in_order(b"".join(found))[: count_max * ENTRY_BYTES]
        return [first_of(entries, at) for at in range(0, len(entries), ENTRY_BYTES)]

    def count_until(self, last_ms: int) -> int:
        """How many entries that were not taken are due until then. StoreDamaged."""
        key = ENTRY.pack(last_ms, LAST)
        return sum(max(0, run.rank(key) - run.rank(self.after)) for run in self._runs())

    def _runs(self) -> Iterator[Run]:
        yield from self._memory
        yield from self._spilling
        yield from self._stored

    # --- files ------------------------------------------------------------------------------------

    def next_job(self, coverage: Callable[[], Coverage | None]) -> Job | None:
        """What should be written to the disk now; None: nothing, or a job is under way.
        ``coverage``: what of the queue all entries together are, behind :attr:`after`; None: that
        cannot be said, and the entries stay in memory.
        """
        if self._job is None:
            files = [run.file for run in self._stored]
            if sum(run.left for run in self._memory) > MEMORY_ENTRIES_MAX:
                if (covered := coverage()) is not None:
                    self._job = self._spill(files, covered)
            elif len(files) > FILES_MAX:
                self._job = self._merge()
            return self._job
        return None

    def _spill(self, files: Sequence[RunFile], coverage: Coverage) -> Job:
        assert not self._spilling
        self._spilling, self._memory = self._memory, []
        entries = in_order(b"".join([run.rest for run in self._spilling]))
        return self._new_job(entries, (), files, coverage)

    def _merge(self) -> Job:
        assert self._covered is not None
        runs = sorted(self._stored, key=lambda run: run.left)
        files = [run.file for run in runs]
        merged, kept = files[:MERGED_AT_ONCE], files[MERGED_AT_ONCE:]
        return self._new_job(b"", merged, kept, replace(self._covered, after=self.after))

    def _new_job(
        self,
        entries: bytes,
        merged: Sequence[RunFile],
        kept: Sequence[RunFile],
        coverage: Coverage,
    ) -> Job:
        self._number += 1
        name = f"{self._epoch:08d}-{self._number:08d}.run"
        return Job(self._folder, self._files, name, entries, tuple(merged), tuple(kept), coverage)

    def finish(self, job: Job, done: JobDone | None) -> None:
        """The job has ended; None: it has failed, and is due again. Blocking for a moment.
        StoreDamaged: as if it had failed.
        """
        if job is not self._job:  # the index was cleared meanwhile
            return
        self._job = None
        spilled, self._spilling = self._spilling, []
        self._memory = [*spilled, *self._memory]
        if done is None:
            return
        if done.file is not None:
            new = FileRun(self._folder, done.file, self._files, self.after)
            self._memory = [run for run in self._memory if run not in spilled]
            self._stored.append(new)
        self._covered = done.catalog.coverage
        for run in self._stored:
            if run.file in job.merged:
                run.close()
                with suppress(CometError):  # the next start removes it
                    self._files.unlink(self._folder / run.file.name)
        self._stored = [run for run in self._stored if run.file not in job.merged]
