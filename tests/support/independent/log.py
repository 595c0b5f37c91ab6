"""One pass over the log, as ``docs/format/store-layout.md`` tells it: a part of the independent
reader (:mod:`tests.support.independent.reader`), with the standard library alone.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.support.independent.changes import COPY_BEGINS, STATE_QUEUE
from tests.support.independent.files import Epoch, Row, View
from tests.support.independent.index import Keyed, keyed
from tests.support.independent.record import (
    FREE_BYTES,
    INT32_MAX,
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
from tests.support.independent.state import StateScan

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
            message = self._record(head, view, at, start + at)
            if message is None:
                return False
            at += message.size
            self.end = start + at
        broken(f"log offset {start + at}", "no room for an end mark")

    def _record(self, head: bytes, view: View, at: int, offset: int) -> Message | None:
        if not any(head):
            self.ends_because = "nothing written"
            return None
        try:
            message = decode(view, at, offset)
        except Broken as error:
            if self._exact:
                raise
            self.ends_because = str(error)
            return None
        self._take(message)
        return message

    def _take(self, message: Message) -> None:
        expect_sane(message)
        if self.last:
            in_order = message.store_time_ms >= self.last.store_time_ms
            expect(in_order, message.log_offset, "the store time decreases")
        self.last = message
        self.times.add(message.store_time_ms)
        self.keys += keyed(message)
        begins = self._begin(message)
        self._dispatch(message)
        if (message.topic, message.queue_id) == STATE_QUEUE:
            for topic in self.state.add(message, begins):
                self._drop(topic)

    def _begin(self, message: Message) -> int:
        """The epoch of ours that the record begins: it does with a copy of the state; 0 = none.
        Another program's epoch is never the last.
        """
        begun, self._epoch = self._epoch, None
        if begun is None:
            return 0
        copies = message.topic == STATE_QUEUE[0] and message.tag in COPY_BEGINS
        expect(copies or bool(self._epochs), f"epoch {begun.number}", "begins without a copy")
        if copies and self._is_foreign:
            self.adoptions.add(begun.start)
        self._is_foreign = not copies
        if self._is_foreign:
            self.state.forget()
        return begun.number if copies else 0

    def _dispatch(self, message: Message) -> None:
        if message.topic == LOST_TOPIC:
            expect(not has_unit(message), message.log_offset, "not as written off")
            self.lost.append(range(message.log_offset, message.log_offset + message.size))
            self.state.whole = False
        if not has_unit(message):
            expect(message.topic == LOST_TOPIC or self._is_foreign, message.log_offset, "no unit")
            return
        key = (message.topic, message.queue_id)
        if self._is_foreign:
            self.foreign.add(key)
            if not message.queue_offset:
                self._forget(key)  # it had deleted the topic, and made it again
        else:
            self.state.expect_topic(message)
        queue = self.queues.get(key)
        if queue is None:
            queue = self.queues[key] = Queue(self._first_of(message))
        self._lose(queue, message)
        if message.queue_offset != queue.next:
            wanted = f"not {queue.next}"
            broken(message.log_offset, f"{key}: queue offset {message.queue_offset}, {wanted}")
        queue.add(message, tags_code(message))
        self.next_offsets[key] = queue.next

    def _first_of(self, message: Message) -> int:
        """Queue offsets begin at 0, unless older files are gone."""
        key = (message.topic, message.queue_id)
        whole = self.state.whole or message.topic in self.dropped
        return self.state.counted.get(key, 0 if whole else message.queue_offset)

    def _lose(self, queue: Queue, message: Message) -> None:
        """What is missing in a queue behind a place that was written off was lost there."""
        first = next((one.start for one in self.lost if one.start > queue.last), None)
        while first is not None and queue.next < message.queue_offset:
            queue.lose(range(first, message.log_offset))

    def _forget(self, key: QueueKey) -> None:
        if key in self.queues:
            self.deleted[key[0]] += len(self.queues.pop(key).units) // UNIT.size
        self.next_offsets.pop(key, None)
        self.state.counted.pop(key, None)

    def _drop(self, topic: str) -> None:
        self.dropped.add(topic)
        for key in [key for key in {*self.queues, *self.state.counted} if key[0] == topic]:
            self._forget(key)

    def _pass(self, offset: int) -> None:
        """An epoch begins where the log ended at that time: between two records."""
        if offset == self._mark_end:
            self.at_mark = {**self.state.counted, **self.next_offsets}
        while self._epochs and self._epochs[0].start <= offset:
            self._epoch = self._epochs.pop(0)
            place = f"epoch {self._epoch.number}"
            expect(self._epoch.start == offset, place, "begins inside a record")
