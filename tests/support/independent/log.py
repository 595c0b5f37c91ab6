"""One pass over the log, and the queues beside it, as ``docs/format/store-layout.md`` and
``queueunit.md`` have them.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.independent.files import Epoch, Mark, Row, View, entries
from tests.support.independent.index import Keyed, keyed
from tests.support.independent.record import (
    FREE_BYTES,
    INT32_MAX,
    TOPIC,
    Broken,
    Message,
    QueueKey,
    broken,
    decode,
    expect,
    expect_sane,
    has_unit,
    tags_code,
)
from tests.support.independent.state import COPY_BEGINS, STATE_QUEUE, StateScan

MAGIC_BLANK = bytes.fromhex("CBD43194")
UNIT = struct.Struct(">qiq")  # log offset, size, tag hash
FILLER = UNIT.pack(0, INT32_MAX, 0)
LOST_BYTES = 1  # the size of a unit whose message damage took
LOST_TOPIC = "rmq_sys_lost"


@dataclass
class Queue:
    """The units that the log asks for, from queue offset ``first`` on. ``lost``: for those of
    messages that damage took, which log offsets they may have.
    """

    first: int
    units: bytearray = field(default_factory=bytearray)
    lost: dict[int, range] = field(default_factory=dict)
    last: int = 0  # where its last record stands

    @property
    def next(self) -> int:
        return self.first + len(self.units) // UNIT.size

    def add(self, message: Message, code: int) -> None:
        self.units += UNIT.pack(message.log_offset, message.size, code)
        self.last = message.log_offset

    def lose(self, places: range) -> None:
        self.lost[self.next] = places
        self.units += UNIT.pack(0, LOST_BYTES, 0)

    def as_found(self, here: bytes) -> bytes:
        """The units, with the lost ones as they are ``here`` where they may be so."""
        units = bytearray(self.units)
        for number, places in self.lost.items():
            at = (number - self.first) * UNIT.size
            unit = here[at : at + UNIT.size]
            offset, size, code = UNIT.unpack(unit) if len(unit) == UNIT.size else (-1, 0, 0)
            if offset in places and (size, code) == (LOST_BYTES, 0):
                units[at : at + UNIT.size] = unit
        return bytes(units)


class Log:
    """Where the log ends, what each queue must hold, the keys and the state.

    ``exact``: whatever is no record is an error, not the end. ``mark_end``: a log offset at which
    it is to be noted how far the queues have counted.
    """

    def __init__(
        self, row: Row, exact: bool, epochs: Sequence[Epoch], mark_end: int | None = None
    ) -> None:
        self.row = row
        self.queues: dict[QueueKey, Queue] = {}
        self.deleted: Counter[str] = Counter()  # messages of deleted topics, by topic
        self.dropped: set[str] = set()  # topics that were deleted at some place of the log
        self.foreign: set[QueueKey] = set()  # queues that another program wrote to
        self.adoptions: set[int] = set()  # where our epochs behind another program's begin
        self.lost: list[range] = []  # log offsets of what repairs wrote off
        self.last: Message | None = None
        self.times: set[int] = set()  # of all records
        self.end = row.start
        self.ends_because = "no more files"
        self.at_mark: dict[QueueKey, int] | None = None
        self.next_offsets: dict[QueueKey, int] = {}
        self.state = StateScan(self.next_offsets, whole=not row.start)
        self.keys: list[Keyed] = []  # of all records, deleted topics' too
        self._exact = exact
        self._mark_end = mark_end
        self._epochs = [epoch for epoch in epochs if epoch.start >= row.start]
        self._epoch: Epoch | None = None  # the one that begins at the next record
        self._is_foreign = not epochs
        # Nobody can tell whose an epoch is once its first record was removed.
        self._may_be_foreign = any(epoch.start < row.start for epoch in epochs)
        if self._may_be_foreign:
            self.state.forget()
        for start, view in row.files():
            self.end = start
            if not self._file(start, view):
                break
        self._pass(self.end)
        if exact:
            expect(not self._epochs, "epochs", f"{self._epochs} begin behind the log's end")

    def _file(self, start: int, view: View) -> bool:
        """Reads a file's records. False: the log ends in it."""
        at = 0
        while at + FREE_BYTES <= len(view):
            head = view[at : at + FREE_BYTES]
            self._pass(start + at)
            if head[4:] == MAGIC_BLANK:
                left = int.from_bytes(head[:4], "big", signed=True)
                expect(left == len(view) - at, f"end mark at {start + at}", f"{left} left")
                self.end = start + len(view)
                return True
            if not any(head):
                self.ends_because = "nothing written"
                return False
            try:
                message = decode(view, at, start + at)
            except Broken as error:
                if self._exact:
                    raise
                self.ends_because = str(error)
                return False
            self._add(message)
            at += message.size
            self.end = start + at
        broken(f"log offset {start + at}", "no room for an end mark")

    def _add(self, message: Message) -> None:
        expect_sane(message)
        if self.last:
            in_order = message.store_time_ms >= self.last.store_time_ms
            expect(in_order, message.log_offset, "the store time decreases")
        self.last = message
        self.times.add(message.store_time_ms)
        self.keys += keyed(message)
        begins = self._begin(message)
        if message.topic == LOST_TOPIC:
            expect(not has_unit(message), message.log_offset, "not as written off")
            self.lost.append(range(message.log_offset, message.log_offset + message.size))
            self.state.whole = False
        if has_unit(message):
            self._dispatch(message)
        else:
            known = self._is_foreign or self._may_be_foreign
            expect(known or message.topic == LOST_TOPIC, message.log_offset, "no unit")
        if (message.topic, message.queue_id) == STATE_QUEUE:
            for topic in self.state.add(message, begins):
                self.dropped.add(topic)
                for key in {*self.queues, *self.state.counted}:
                    if key[0] == topic:
                        self._forget(key)

    def _begin(self, message: Message) -> int:
        """The epoch of ours that the record begins: it does with a copy of the state; 0 = none.
        Another program's epoch is never the last.
        """
        begun, self._epoch = self._epoch, None
        if begun is None:
            return 0
        copies = message.topic == STATE_QUEUE[0] and message.tag in COPY_BEGINS
        expect(copies or bool(self._epochs), f"epoch {begun.number}", "begins without a copy")
        if copies and (self._is_foreign or self._may_be_foreign):
            self.adoptions.add(begun.start)
        self._may_be_foreign = False
        self._is_foreign = not copies
        if self._is_foreign:
            self.state.forget()
        return begun.number if copies else 0

    def _dispatch(self, message: Message) -> None:
        key = (message.topic, message.queue_id)
        if self._is_foreign:
            self.foreign.add(key)
            if not message.queue_offset:
                self._forget(key)  # it had deleted the topic, and made it again
        else:
            self.state.expect_topic(message)
        queue = self.queues.get(key)
        if queue is None:
            # Queue offsets begin at 0, unless older files are gone.
            whole = self.state.whole or message.topic in self.dropped
            first = self.state.counted.get(key, 0 if whole else message.queue_offset)
            queue = self.queues[key] = Queue(first)
        # What is missing in a queue behind a place that was written off was lost there.
        lost = next((one.start for one in self.lost if one.start > queue.last), None)
        while lost is not None and queue.next < message.queue_offset:
            queue.lose(range(lost, message.log_offset))
        wanted = f"{key}: queue offset {message.queue_offset}, not {queue.next}"
        expect(message.queue_offset == queue.next, message.log_offset, wanted)
        queue.add(message, tags_code(message))
        self.next_offsets[key] = queue.next

    def _forget(self, key: QueueKey) -> None:
        if key in self.queues:
            self.deleted[key[0]] += len(self.queues.pop(key).units) // UNIT.size
        self.next_offsets.pop(key, None)
        self.state.counted.pop(key, None)

    def _pass(self, offset: int) -> None:
        """An epoch begins where the log ended at that time: between two records."""
        if offset == self._mark_end:
            self.at_mark = {**self.state.counted, **self.next_offsets}
        while self._epochs and self._epochs[0].start <= offset:
            self._epoch = self._epochs.pop(0)
            place = f"epoch {self._epoch.number}"
            expect(self._epoch.start == offset, place, "begins inside a record")


QUEUE_ID = re.compile(r"0|[1-9][0-9]{0,9}")


def rows_of(folder: Path) -> Iterator[tuple[QueueKey, Row]]:
    for topic in entries(folder):
        legal = topic.is_dir() and TOPIC.fullmatch(topic.name.encode()) is not None
        expect(legal, topic, "a name that does not belong here")
        for queue in entries(topic):
            number = QUEUE_ID.fullmatch(queue.name) is not None and int(queue.name) <= INT32_MAX
            expect(number and queue.is_dir(), queue, "a name that does not belong here")
            yield (topic.name, int(queue.name)), Row(queue)


def counted(row: Row) -> int:
    """The number of the unit that a queue will get next."""
    for at in range(row.start, row.end, UNIT.size):
        if UNIT.unpack(row.read(at, at + UNIT.size))[1] <= 0:
            return at // UNIT.size
    return row.end // UNIT.size


class Queues:
    """All queues that have a folder. ``exact``: each record of the log has its unit, and there is
    no other unit; otherwise units may be missing, or point behind the log's end.
    """

    def __init__(self, folder: Path, log: Log, exact: bool) -> None:
        self._log = log
        self._exact = exact
        self.rows: Mapping[QueueKey, Row] = dict(rows_of(folder))

    def close(self) -> None:
        for row in self.rows.values():
            row.close()

    def expect_counts(self, mark: Mark) -> None:
        """A mark says how many queues there were at its end, and how far they had counted."""
        at_mark = self._log.at_mark or {}
        ends = []
        for key in {*self.rows, *self._log.queues, *at_mark}:
            if key in at_mark:
                ends.append(at_mark[key])
            elif key in self._log.queues:  # its messages in the log came after the mark
                ends.append(self._log.queues[key].first)
            else:
                ends.append(counted(self.rows[key]))
        found = (sum(end > 0 for end in ends), sum(ends))
        expect(mark.counts in (found, (-1, -1)), "mark", f"counts {mark.counts}, found {found}")

    def expect_log(self) -> None:
        for key in {*self._log.queues, *self.rows}:
            row, queue = self.rows.get(key), self._log.queues.get(key)
            if row is None:
                expect(not self._exact, f"queue {key}", "its records have no units")
                continue
            expect(not (row.mended and self._exact), row.folder, "its last file is too short")
            expect(not row.file_bytes % UNIT.size, row.folder, f"files of {row.file_bytes} bytes")
            self._expect_older(row, queue.first * UNIT.size if queue else row.end)
            if queue is None:
                known = self._log.state.counted.get(key, counted(row))
                expect(known == counted(row), row.folder, f"counts to {counted(row)}, not {known}")
            elif self._exact:
                start = queue.first * UNIT.size
                here = row.read(start, start + len(queue.units))
                expect(here == queue.as_found(here), row.folder, "other units than the log's")
                row.expect_zeros(start + len(queue.units))
            elif key[0] not in self._log.dropped:
                self._expect_prefix(row, queue)

    def _expect_older(self, row: Row, end: int) -> None:
        """Before the first message of the log there is filler, or what older log files held."""
        last = -1
        for at in range(row.start, end, UNIT.size):
            raw = row.read(at, at + UNIT.size)
            offset, size, _ = UNIT.unpack(raw)
            if size <= 0:
                break
            gone = raw == FILLER or last < offset < self._log.row.start
            place = f"{row.folder} at {at}"
            expect(gone or not self._exact, place, "points at no record of its own")
            last = offset

    def _expect_prefix(self, row: Row, queue: Queue) -> None:
        """Whatever is there of the units is right."""
        at = queue.first * UNIT.size
        here = row.read(at, at + len(queue.units))
        for wanted in (*UNIT.iter_unpack(queue.as_found(here)), None):
            raw = row.read(at, at + UNIT.size)
            found = UNIT.unpack(raw) if len(raw) == UNIT.size else (0, 0, 0)
            if found != wanted:
                stops = found[1] <= 0 or found[0] >= self._log.end
                expect(stops, f"{row.folder} at {at}", f"{found}, not {wanted}")
                return
            at += UNIT.size
