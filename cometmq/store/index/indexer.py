"""From the log to the key index: follows the log in small steps, without slowing appends.

Threads: :meth:`Indexer.step` in one thread of the member; ``status`` and lookups in any.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from cometmq.errors import MessageNotFound, Shortage, StoreDamaged, StoreForeignFile
from cometmq.format.indexfile import Keys, Sizes
from cometmq.format.indexkeys import keys_of_chunk
from cometmq.format.record import BLANK_BYTES
from cometmq.native import accelerator
from cometmq.store.disk.files import Files
from cometmq.store.index.key_index import KeyIndex
from cometmq.store.log.commitlog import Chunk, CommitLog
from cometmq.store.log.scan import first_damage

logger = logging.getLogger(__name__)

# Less than a millisecond, also of plain Python and small records: a thread that waits for the GIL
# does not wait longer.
STEP_BYTES = 32 * 1024 if accelerator is None else 128 * 1024
# What a clean close still takes, half a second; more is left to the next start.
CLOSE_STEPS_MAX = 512


class IndexStatus(NamedTuple):
    """How far the index is."""

    position: int  # the keys of all records before it are in the index
    file_count: int
    entry_count: int
    stalled: str  # why it does not grow; empty = it does


class Indexer:
    """Keeps the index of ``log`` in ``directory``. Made, then :meth:`load` and :meth:`settle`.

    Only what is on the disk is indexed: after a power cut no entry may point behind the log. With
    ``enabled`` false nothing is added.
    """

    def __init__(
        self, log: CommitLog, directory: Path, files: Files, sizes: Sizes, *, enabled: bool
    ) -> None:
        self.enabled = enabled
        self._log = log
        self._index = KeyIndex(directory, files, sizes)
        self._position = 0
        # Some of the keys at the position may be in the index already.
        self._doubtful = False
        self._stalled = ""
        # Parts of the log between what neighbouring files speak of, which are still to be looked
        # into: a record with a key there was in a file that is gone.
        self._gaps: deque[tuple[int, int]] = deque()
        self._stepping = threading.Lock()
        self._closed = False

    # --- any thread -------------------------------------------------------------------------------

    @property
    def status(self) -> IndexStatus:
        index = self._index
        return IndexStatus(self._position, index.file_count, index.entry_count, self._stalled)

    @property
    def durable_time_ms(self) -> int:
        """For the checkpoint: see :attr:`KeyIndex.durable_time_ms`."""
        return self._index.durable_time_ms

    def find(self, code: int, first_ms: int, last_ms: int) -> Iterator[int | None]:
        """See :meth:`KeyIndex.find`."""
        return self._index.find(code, first_ms, last_ms)

    # --- opening ----------------------------------------------------------------------------------

    def load(self) -> None:
        """Look at the files; changes nothing. StoreForeignFile."""
        self._index.load()

    def settle(self, known_time_ms: int, *, crashed: bool) -> None:
        """Keep of the files what is whole (see :meth:`KeyIndex.settle`) and belongs to the log,
        which has been recovered; continue there. The checkpoint says that the keys of records up
        to ``known_time_ms`` were on the disk.
        """
        before = self._index.file_count
        self._index.settle(known_time_ms if crashed else None)
        self.truncate(self._log.end[0])
        if self._index.durable_time_ms < known_time_ms:
            logger.warning(
                "index files are missing or damaged: what is left ends at store time %d, and %d "
                "was on the disk; they are built again from %d on",
                self._index.durable_time_ms,
                known_time_ms,
                self._position,
            )
        if self._index.file_count < before:
            logger.info(
                "removed %d of %d index files; they are built again from %d on",
                before - self._index.file_count,
                before,
                self._position,
            )

    # --- following the log: one thread ------------------------------------------------------------

    def step(self) -> bool:
        """Index the next piece of what is on the disk; False when there is nothing to do for now.

        A shortage and a damaged log are no errors here: ``status`` shows them, and the next step
        tries again. StoreFailed.
        """
        with self._stepping:
            try:
                return not self._closed and self._step()
            except Shortage as error:
                self._stall(error.message)
                return False

    def _step(self) -> bool:
        start = self._log.start
        self._index.trim(start)
        self._position = start = max(start, self._position)
        left = self._log.flushed[0] - start
        if self.enabled and self._gaps:
            self._check_gap(self._gaps.popleft())
            return True
        if not self.enabled or left <= 0:
            return False
        try:
            chunk = self._read(start, min(STEP_BYTES, left))
        except MessageNotFound:  # retention took the file away this moment
            return True
        except (StoreDamaged, StoreForeignFile) as error:
            self._stall(error.message)
            return False
        assert chunk is not None, (start, left)
        try:
            if len(chunk.data) > BLANK_BYTES and not self._insert(keys_of_chunk(chunk.data)):
                return False
        except StoreDamaged as error:
            logger.error("%s: it is built again from the log", error.message)
            self.truncate(self._index.last_begin_offset)
            return True
        self._position = chunk.next_offset
        self._stalled = ""
        return True

    def _read(self, start: int, bytes_max: int) -> Chunk | None:
        """As :meth:`CommitLog.read_chunk`; what has been on the disk is verified again: to find the
        keys of a record its framing is trusted.
        """
        chunk = self._log.read_chunk(start, bytes_max, nowait=False)
        if chunk is not None and len(chunk.data) > BLANK_BYTES and start < self._log.trusted_from:
            file_bytes = self._log.segments.file_bytes
            damaged = first_damage(chunk.data, start, file_bytes - start % file_bytes)
            if damaged == start:
                raise StoreDamaged(f"the record at {damaged} of the log is damaged")
            if damaged is not None:
                return Chunk(chunk.data[: damaged - start], damaged)
        return chunk

    def _check_gap(self, gap: tuple[int, int]) -> None:
        start, stop = max(gap[0], self._log.start), gap[1]
        if start >= stop:
            return
        try:
            self._check_range(start, stop)
        except Shortage:
            self._gaps.appendleft((start, stop))
            raise

    def _check_range(self, start: int, stop: int) -> None:
        # It is gone, or cannot be read.
        with suppress(MessageNotFound, StoreDamaged, StoreForeignFile):
            chunk = self._read(start, min(STEP_BYTES, stop - start))
            assert chunk is not None, (start, stop)
            if len(chunk.data) > BLANK_BYTES and self._index.lacking(keys_of_chunk(chunk.data)):
                logger.warning(
                    "index files are missing between %d and %d of the log: all from there on are "
                    "built again",
                    start,
                    stop,
                )
                self.truncate(stop)
            else:
                self._gaps.appendleft((chunk.next_offset, stop))

    def _insert(self, keys: Keys) -> bool:
        if self._doubtful:
            keys = self._index.lacking(keys)
        done = self._index.insert(keys)
        self._doubtful = done < len(keys)
        if self._doubtful:
            self._stall("no room on the disk for another index file, or none can be opened")
            self._position = keys[done].log_offset
        return not self._doubtful

    def _stall(self, reason: str) -> None:
        if reason != self._stalled:
            logger.error("the key index has stopped at %d: %s", self._position, reason)
        self._stalled = reason

    # --- while no thread steps --------------------------------------------------------------------

    def truncate(self, log_offset: int) -> None:
        """The log ends at ``log_offset`` now: forget what was behind it."""
        self._index.truncate(log_offset)
        self._position = max(self._log.start, self._index.end_offset)
        self._gaps = deque(self._index.gaps(self._log.start))
        self._doubtful = True  # a record's keys may lie in two files, one of which is gone

    def finish(self) -> None:
        """Before a clean close: index the rest of the log, within bounds, and bring all of it to
        the disk. Gaps that are left are there at the next start, too.
        """
        for _ in range(CLOSE_STEPS_MAX):
            if not self.step():
                break
        self._index.sync()

    def close(self) -> None:
        """Let the files go, writing nothing. Any thread; a step that is under way is waited for."""
        with self._stepping:
            self._closed = True
            self._index.close()
