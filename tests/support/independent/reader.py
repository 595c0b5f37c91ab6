"""A second reader of a store, written from ``docs/format`` alone, with the standard library alone.

It shares no code with cometmq, so a mistake of the broker's cannot hide in a mistake of its reader.
``Store`` reads everything once, read-only, and checks whatever the documents promise:
a broken promise is a ``Broken`` that names the place. A store of a broker that has stopped must be
exact to the last byte; one of a broker that crashed is read as its recovery would find it. The
store must not be in use.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from tests.support.independent.files import (
    Mark,
    Row,
    expect_tree,
    read_checkpoint,
    read_epochs,
    read_heads,
    read_identity,
)
from tests.support.independent.index import KeyIndex, Shape
from tests.support.independent.log import LOST_BYTES, UNIT, Log, Queues
from tests.support.independent.record import Message, QueueKey, decode, expect
from tests.support.independent.state import STATE_QUEUE, rebuild
from tests.support.independent.tables import Tables


class Store:
    """A data folder, read and verified as a whole. Errors: Broken."""

    def __init__(self, directory: Path, index_shape: Shape) -> None:
        self.directory = directory
        self._log_row = Row(directory / "commitlog")
        self._queues: Queues | None = None
        try:
            self._read(index_shape)
        except BaseException:
            self.close()
            raise

    def _read(self, index_shape: Shape) -> None:
        self.identity = read_identity(self.directory / "cometmq.json")
        self.clean = self.identity.clean is not None
        self.epochs = read_epochs(self.directory / "cometmq.epochs")
        self.checkpoint = read_checkpoint(self.directory / "checkpoint")
        expect_tree(self.directory, self._log_row.file_bytes)
        abort, lock = self.directory / "abort", self.directory / "lock"
        if abort.exists():
            is_text = re.fullmatch(r"((failed )?[0-9]+)?", abort.read_text()) is not None
            expect(is_text, abort, "text")
        else:
            expect(self.clean, abort, "absent after a crash: another program was here")
        expect(lock.read_text() == "lock", lock, "another text")
        saved = self.checkpoint.mark
        self.log = Log(self._log_row, self.clean, self.epochs, saved.end if saved else None)
        self.log.state.expect_agreement()
        self.state = rebuild(self.log.state.records)
        self.index = KeyIndex(self.directory / "index", index_shape, self.clean)
        self.index.expect_log(self.log.keys, self.log.row.start)
        self._expect_log()
        self._expect_heads()
        self._expect_checkpoint()
        self._queues = Queues(self.directory / "consumequeue", self.log, self.clean)
        self._queues.expect_log()
        if saved and self.log.at_mark is not None:
            self._queues.expect_counts(saved)
        self._expect_state()
        tables = Tables(self.directory / "config", self.log, self.epochs, self.clean)
        self.config = tables.files

    def _expect_heads(self) -> None:
        path = self.directory / "cometmq.heads"
        for head in read_heads(path):
            if not self.log.row.start <= head.start < self.log.end:
                continue  # retention, or a cut, has been there since
            epochs = [epoch.number for epoch in self.epochs if epoch.start <= head.start]
            if epochs[-1:] != [head.epoch]:
                continue
            first = self.log.row.read(head.start, head.start + 80)
            flags = int.from_bytes(first[36:40], "big")
            stored = 68 if flags & 0x10 else 56
            found = (
                int.from_bytes(first[:4], "big"),
                int.from_bytes(first[8:12], "big"),
                int.from_bytes(first[40:48], "big", signed=True),
                int.from_bytes(first[stored : stored + 8], "big", signed=True),
            )
            expect(found == head[2:], path, f"{head}, the log has {found}")

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._log_row.close()
        if self._queues:
            self._queues.close()

    # --- what is in it ---

    def queues(self) -> list[QueueKey]:
        """Queues that hold messages, the system's own too."""
        return sorted(self.log.queues)

    def bounds(self, topic: str, queue_id: int) -> tuple[int, int]:
        """The queue offset of the first message, and one more than that of the last."""
        queue = self.log.queues[topic, queue_id]
        return queue.first, queue.next

    def messages(self, topic: str, queue_id: int) -> Iterator[Message]:
        """All messages of a queue that are left, in order."""
        for offset, size, _ in UNIT.iter_unpack(self.log.queues[topic, queue_id].units):
            if size != LOST_BYTES:
                yield decode(*self._log_row.at(offset), offset)

    # --- what it must keep to ---

    def _expect_mark(self, mark: Mark) -> None:
        """Its record is there."""
        raw = self._log_row.read(mark.last_offset, mark.last_offset + mark.last_bytes)
        expect(zlib.crc32(raw) == mark.last_crc32, "mark", f"{mark}: another record is there")

    def _expect_log(self) -> None:
        log, mark = self.log, self.identity.clean
        known = self.epochs[0].start <= log.row.start if self.epochs else not log.end
        expect(known, "epochs", "the log begins before them")
        told = self.state is not None or not log.row.start
        expect(told, "state", "no complete copy is left of it")
        expect((self.identity.foreign or 0) <= log.end, "foreign", "is behind the log's end")
        if mark is None:
            return
        expect(not log.row.mended, log.row.folder, "its last file is too short")
        expect(mark.end == log.end, "clean mark", f"end {mark.end}, the log ends at {log.end}")
        last = log.last
        here = (last.log_offset, last.size) if last else (0, 0)
        expect((mark.last_offset, mark.last_bytes) == here, "clean mark", f"{mark}, not {here}")
        self._expect_mark(mark)
        log.row.expect_zeros(log.end)

    def _expect_checkpoint(self) -> None:
        """Times are those of records; a mark is the end of a record, and knows it."""
        said, log = self.checkpoint, self.log
        expect(said.durable_offset <= log.end, "checkpoint", f"{said} is behind {log.end}")
        times = (said.log_time_ms, said.queue_time_ms)
        newest = log.last.store_time_ms if log.last else 0
        oldest = min(log.times, default=0)
        for time_ms in times:
            known = not time_ms or time_ms in log.times or time_ms < oldest
            expect(known, "checkpoint", f"no record has the time {time_ms}")
        # The index's time vouches for what is sealed, and after a clean stop for all.
        expect(said.index_time_ms <= newest, "checkpoint", f"index time {said}")
        if self.clean:
            expect(times == (newest, newest), "checkpoint", f"{times}, not {newest}")
            indexed = self.index.files[-1].end_ms if self.index.files else 0
            expect(said.index_time_ms == indexed, "checkpoint", f"index time {said}")
        beyond = said.reach is not None and said.reach < log.end
        expect(not beyond, "checkpoint", f"reaches to {said.reach}, the log to {log.end}")
        if mark := said.mark:
            expect(mark.end <= said.durable_offset, "checkpoint", f"{said}: marks more")
        if mark and mark.last_offset >= log.row.start:
            expect(log.at_mark is not None, "checkpoint", f"marks {mark.end}, inside a record")
            self._expect_mark(mark)

    def _expect_state(self) -> None:
        if self.state is None:
            return
        for key in {*self.log.queues} - self.log.foreign - {STATE_QUEUE}:
            known = self.state.topics.get(key[0])
            expect(known is not None and key[1] < len(known.histories), key, "not in the state")
        starts = [
            ((name, queue_id), history[-1][1])
            for name, topic in self.state.topics.items()
            for queue_id, history in enumerate(topic.histories)
        ]
        commits = [(key[1:], self.state.resumes_at(key)) for key in self.state.offsets]
        for key, offset in starts + commits:  # neither is ahead of its queue
            queue = self.log.queues.get(key)
            reached = queue.next if queue else self.log.state.counted.get(key, 0)
            expect(offset <= reached, f"queue {key}", f"{offset} is behind its end {reached}")
