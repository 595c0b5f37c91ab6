"""A second reader of a store, written from ``docs/format`` alone, with the standard library alone.

It shares no code with cometmq, so a mistake of the broker's cannot hide in a mistake of its reader.
``Store(directory)`` reads everything once, read-only, and checks whatever the documents promise:
a broken promise is a ``Broken`` that names the place. A store of a broker that has stopped must be
exact to the last byte; one of a broker that crashed is read as its recovery would find it. The
store must not be in use.
"""

from __future__ import annotations

import json
import mmap
import re
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from tests.support.independent_record import (
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
    tag_hash,
)
from tests.support.independent_state import (
    COPY_BEGINS,
    EXPORTS,
    STATE_QUEUE,
    TOPIC_KINDS,
    Json,
    State,
    StateScan,
    changes_of,
    offsets_export,
    parse_rocketmq_json,
    print_rocketmq_json,
    rebuild,
)

MAGIC_BLANK = bytes.fromhex("CBD43194")
UNIT = struct.Struct(">qiq")  # log offset, size, tag hash
FILLER = UNIT.pack(0, INT32_MAX, 0)
CHECKPOINT = struct.Struct(">5q")
CHECKPOINT_BYTES = 4096
FILE_NAME = re.compile(r"[0-9]{20}")
QUEUE_ID = re.compile(r"0|[1-9][0-9]{0,9}")
ZEROS = bytes(1 << 20)


# --- rows of files --------------------------------------------------------------------------------


class Row:
    """The files of a folder as one row of bytes, [start, end); names are first offsets."""

    def __init__(self, folder: Path) -> None:
        self._maps: list[mmap.mmap] = []
        self.folder = folder
        paths = sorted(folder.iterdir())
        for path in paths:
            legal = path.is_file() and FILE_NAME.fullmatch(path.name) is not None
            expect(legal, path, "a name that does not belong here")
        if paths and not paths[-1].stat().st_size:
            paths.pop()  # what a crash left of the making of a file
        self.file_bytes = paths[0].stat().st_size if paths else 0
        self.start = int(paths[0].name) if paths else 0
        self.end = self.start
        for path in paths:
            self._add(path)

    def _add(self, path: Path) -> None:
        expect(path.stat().st_size == self.file_bytes, path, "its length differs from the others'")
        expect(int(path.name) == self.end, path, f"offset {self.end} should follow")
        expect(self.end % self.file_bytes == 0, path, "not a multiple of the files' size")
        with path.open("rb") as file:
            self._maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        self.end += self.file_bytes

    def close(self) -> None:
        for view in self._maps:
            view.close()

    def files(self) -> Iterator[tuple[int, mmap.mmap]]:
        """(offset of the first byte, bytes) of each file."""
        return zip(range(self.start, self.end, self.file_bytes or 1), self._maps, strict=True)

    def read(self, start: int, end: int) -> bytes:
        """The bytes [start, end), less where the row ends."""
        parts = []
        at, end = max(start, self.start), min(end, self.end)
        while at < end:
            number, within = divmod(at - self.start, self.file_bytes)
            parts.append(self._maps[number][within : within + end - at])
            at += len(parts[-1])
        return b"".join(parts)

    def expect_zeros(self, start: int) -> None:
        """Nothing was written from ``start`` on."""
        for at in range(start, self.end, len(ZEROS)):
            chunk = self.read(at, at + len(ZEROS))
            expect(chunk == ZEROS[: len(chunk)], f"{self.folder} behind {at}", "not zeros")


# --- small files ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class CleanMark:
    end: int
    last_offset: int
    last_bytes: int
    last_crc32: int


@dataclass(frozen=True)
class Identity:
    """``cometmq.json``; ``clean`` is None after a crash."""

    store_id: str
    boot_id: str
    clean: CleanMark | None
    recovered: bool


def read_identity(path: Path) -> Identity:
    fields = json.loads(path.read_text(encoding="utf-8"))
    recovered = fields.pop("recovered", False)
    known = {"version", "store_id", "boot_id", "clean"}
    expect(set(fields) == known and fields["version"] == 1, path, f"fields {sorted(fields)}")
    expect(type(recovered) is bool, path, f"recovered is {recovered!r}")
    hexadecimal = re.fullmatch("[0-9a-fA-F]{32}", fields["store_id"])
    expect(hexadecimal is not None, path, f"store id {fields['store_id']}")
    mark = None if fields["clean"] is None else CleanMark(**fields["clean"])
    return Identity(fields["store_id"], fields["boot_id"], mark, recovered)


class Epoch(NamedTuple):
    number: int
    start: int


def read_epochs(path: Path) -> list[Epoch]:
    """Oldest first; numbers and starts increase strictly."""
    lines = path.read_bytes().splitlines(keepends=True)
    expect(lines[:1] == [b"cometmq-epochs 1\n"], path, f"begins {lines[:1]}")
    sealed = b"crc32 %08x\n" % zlib.crc32(b"".join(lines[:-1]))
    expect(lines[-1] == sealed, path, f"last line {lines[-1]!r}, not {sealed!r}")
    epochs = []
    for line in lines[1:-1]:
        expect(re.fullmatch(rb"[1-9][0-9]* (0|[1-9][0-9]*)\n", line) is not None, path, repr(line))
        epochs.append(Epoch(*map(int, line.split())))
    expect(bool(epochs), path, "no epoch")
    for older, newer in pairwise(epochs):
        rises = older.number < newer.number and older.start < newer.start
        expect(rises, path, f"{newer} behind {older}")
    return epochs


class Checkpoint(NamedTuple):
    """Store times in ms; 0 = none."""

    log_time_ms: int
    queue_time_ms: int
    index_time_ms: int
    master_flushed_offset: int
    confirm_offset: int


def read_checkpoint(path: Path) -> Checkpoint:
    if not path.exists():
        return Checkpoint(0, 0, 0, 0, 0)
    data = path.read_bytes()
    expect(len(data) == CHECKPOINT_BYTES, path, f"{len(data)} bytes")
    expect(not any(data[CHECKPOINT.size :]), path, "not zeros behind the fields")
    found = Checkpoint(*CHECKPOINT.unpack_from(data))
    expect(min(found) >= 0, path, f"negative: {found}")
    expect(not any(found[2:]), path, f"not 0 yet: {found}")
    return found


# --- the log --------------------------------------------------------------------------------------


@dataclass
class Queue:
    """The units that the log asks for, from queue offset ``first`` on."""

    first: int
    units: bytearray = field(default_factory=bytearray)

    @property
    def next(self) -> int:
        return self.first + len(self.units) // UNIT.size


class Log:
    """One pass over the log, in order: where it ends, what each queue must hold, and the state."""

    def __init__(self, row: Row, exact: bool, epochs: Sequence[Epoch]) -> None:
        self.row = row
        self.queues: dict[QueueKey, Queue] = {}
        self.deleted: Counter[str] = Counter()  # messages of deleted topics, by topic
        self.dropped: set[str] = set()  # topics that were deleted at some place of the log
        self.last: Message | None = None
        self.end = row.start
        self.ends_because = "no more files"
        self._exact = exact
        self._next_offsets: dict[QueueKey, int] = {}
        self.state = StateScan(self._next_offsets)
        self._epochs = [epoch for epoch in epochs if epoch.start >= row.start]
        self._epoch: Epoch | None = None  # the one that begins at the next record
        for start, view in row.files():
            self.end = start
            if not self._file(start, view):
                break
        self._pass(self.end)
        if exact:
            expect(not self._epochs, "epochs", f"{self._epochs} begin behind the log's end")

    def _file(self, start: int, view: mmap.mmap) -> bool:
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

    def _record(self, head: bytes, view: mmap.mmap, at: int, offset: int) -> Message | None:
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
        self._dispatch(message)
        begun, self._epoch = self._epoch, None
        if begun:
            begins = message.topic == STATE_QUEUE[0] and message.tag in COPY_BEGINS
            expect(begins, f"epoch {begun.number}", "does not begin with a copy of the state")
        if (message.topic, message.queue_id) == STATE_QUEUE:
            for topic in self.state.add(message, begun is not None):
                self._drop(topic)

    def _dispatch(self, message: Message) -> None:
        """Queue offsets count on without a gap. They begin at 0, unless older files are gone."""
        self.state.expect_topic(message)
        key = (message.topic, message.queue_id)
        queue = self.queues.get(key)
        if queue is None:
            whole = not self.row.start or message.topic in self.dropped
            queue = self.queues[key] = Queue(0 if whole else message.queue_offset)
        wanted = self._next_offsets.get(key, queue.first)
        if message.queue_offset != wanted:
            broken(message.log_offset, f"{key}: queue offset {message.queue_offset}, not {wanted}")
        self._next_offsets[key] = wanted + 1
        queue.units += UNIT.pack(message.log_offset, message.size, tag_hash(message.tag))

    def _drop(self, topic: str) -> None:
        self.dropped.add(topic)
        for key in [key for key in self.queues if key[0] == topic]:
            self.deleted[topic] += len(self.queues.pop(key).units) // UNIT.size
            self._next_offsets.pop(key, None)

    def _pass(self, offset: int) -> None:
        """An epoch begins where the log ended at that time: between two records."""
        while self._epochs and self._epochs[0].start <= offset:
            self._epoch = self._epochs.pop(0)
            place = f"epoch {self._epoch.number}"
            expect(self._epoch.start == offset, place, "begins inside a record")


# --- the store ------------------------------------------------------------------------------------


class Store:
    """A data folder, read and verified as a whole. Errors: Broken."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._rows: dict[QueueKey, Row] = {}
        self._log_row = Row(directory / "commitlog")
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def _read(self) -> None:
        self.identity = read_identity(self.directory / "cometmq.json")
        self.clean = self.identity.clean is not None
        self.epochs = read_epochs(self.directory / "cometmq.epochs")
        self.checkpoint = read_checkpoint(self.directory / "checkpoint")
        self._expect_owner()
        self.log = Log(self._log_row, self.clean, self.epochs)
        self.log.state.expect_agreement()
        self.state = rebuild(self.log.state.records)
        self._expect_log()
        self._open_queues()
        for key in {*self.log.queues, *self._rows}:
            self._expect_queue(key)
        self._expect_state()
        self._read_config()

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
        for row in (self._log_row, *self._rows.values()):
            row.close()

    # --- what is in it ---

    def queues(self) -> list[QueueKey]:
        """Queues that hold messages, the system's own too."""
        return sorted(self.log.queues)

    def bounds(self, topic: str, queue_id: int) -> tuple[int, int]:
        """The queue offset of the first message, and one more than that of the last."""
        queue = self.log.queues[topic, queue_id]
        return queue.first, queue.next

    def messages(self, topic: str, queue_id: int) -> Iterator[Message]:
        """All messages of a queue, in order."""
        row = self._log_row
        views = dict(row.files())
        for offset, _, _ in UNIT.iter_unpack(self.log.queues[topic, queue_id].units):
            within = offset % row.file_bytes
            yield decode(views[offset - within], within, offset)

    # --- what it must keep to ---

    def _expect_owner(self) -> None:
        """The table of L4; the text of ``lock`` and ``abort``."""
        abort = self.directory / "abort"
        if abort.exists():
            text = abort.read_text()
            expect(text.strip().isdigit(), abort, f"{text!r} is no process number")
        else:
            expect(self.clean, abort, "absent after a crash: another program was here")
        lock = (self.directory / "lock").read_text()
        expect(lock == "lock", self.directory / "lock", f"{lock!r}")

    def _expect_log(self) -> None:
        log, last = self.log, self.log.last
        expect(self.epochs[0].start <= log.row.start, "epochs", "the log begins before them")
        if last:
            known = max(self.checkpoint.log_time_ms, self.checkpoint.queue_time_ms)
            expect(known <= last.store_time_ms, "checkpoint", f"{known} is not reached by the log")
        mark = self.identity.clean
        if mark is None:
            return
        expect(mark.end == log.end, "clean mark", f"end {mark.end}, the log ends at {log.end}")
        raw = log.row.read(last.log_offset, last.log_offset + last.size) if last else b""
        found = CleanMark(log.end, last.log_offset if last else 0, len(raw), zlib.crc32(raw))
        expect(mark == found, "clean mark", f"{mark}, found {found}")
        log.row.expect_zeros(log.end)

    def _open_queues(self) -> None:
        folder = self.directory / "consumequeue"
        for topic in sorted(folder.iterdir()) if folder.exists() else ():
            legal = topic.is_dir() and TOPIC.fullmatch(topic.name.encode()) is not None
            expect(legal, topic, "a name that does not belong here")
            for queue in sorted(topic.iterdir()):
                number = QUEUE_ID.fullmatch(queue.name) is not None and int(queue.name) <= INT32_MAX
                expect(number and queue.is_dir(), queue, "a name that does not belong here")
                self._rows[topic.name, int(queue.name)] = Row(queue)

    def _expect_queue(self, key: QueueKey) -> None:
        """Each record of the log has its unit and no other unit exists."""
        row, queue = self._rows.get(key), self.log.queues.get(key)
        if row is None:
            expect(not self.clean, f"queue {key}", "its records have no units")
            return
        expect(not row.file_bytes % UNIT.size, row.folder, f"files of {row.file_bytes} bytes")
        first = queue.first * UNIT.size if queue else row.end
        self._expect_older(row, first)
        if queue is None:
            return
        here = row.read(first, first + len(queue.units))
        if self.clean:
            if here != queue.units:
                broken(row.folder, f"unit {_first_difference(here, queue.units, queue.first)}")
            row.expect_zeros(first + len(queue.units))
        elif key[0] not in self.log.dropped:
            self._expect_prefix(row, queue)

    def _expect_older(self, row: Row, end: int) -> None:
        """Before the first message of the log there is filler, or what older log files held."""
        last = -1
        for at in range(row.start, end, UNIT.size):
            raw = row.read(at, at + UNIT.size)
            offset, size, _ = UNIT.unpack(raw)
            if size <= 0:
                break
            gone = raw == FILLER or last < offset < self._log_row.start
            place = f"{row.folder} at {at}"
            expect(gone or not self.clean, place, "points at no record of its own")
            last = offset

    def _expect_prefix(self, row: Row, queue: Queue) -> None:
        """After a crash units may be missing, or point behind the log's end."""
        at = queue.first * UNIT.size
        for wanted in (*UNIT.iter_unpack(queue.units), None):
            raw = row.read(at, at + UNIT.size)
            found = UNIT.unpack(raw) if len(raw) == UNIT.size else (0, 0, 0)
            if found != wanted:
                stops = found[1] <= 0 or found[0] >= self.log.end
                expect(stops, f"{row.folder} at {at}", f"{found}, not {wanted}")
                return
            at += UNIT.size

    def _expect_state(self) -> None:
        if self.state is None:
            return
        for topic, queue_id in self.log.queues:
            known = self.state.topics.get(topic)
            exists = known is not None and queue_id < len(known.histories)
            place = (topic, queue_id)
            expect(exists or place == STATE_QUEUE, place, "not in the state")
        for name, settings in self.state.topics.items():
            for queue_id, history in enumerate(settings.histories):
                self._expect_reached(name, queue_id, history[-1][1], "its generation's start")
        for group, name, queue_id in self.state.offsets:
            resumed = self.state.resumes_at((group, name, queue_id))
            self._expect_reached(name, queue_id, resumed, f"the offset of {group}")

    def _expect_reached(self, topic: str, queue_id: int, offset: int, what: str) -> None:
        queue = self.log.queues.get((topic, queue_id))
        if queue is None and self._log_row.start:
            return  # all of its messages went with older log files
        reached = offset <= (queue.next if queue else 0)
        expect(reached, f"queue {topic}/{queue_id}", f"{what} is {offset}, behind its end")

    def _read_config(self) -> None:
        self.config: dict[str, Json] = {}
        for name, (table, export) in EXPORTS.items():
            path = self.directory / "config" / name
            if path.exists():
                self.config[name] = self._export(path, table, export)

    def _export(self, path: Path, table: str, export: Callable[[State], Json]) -> Json:
        """A file shows the state at its position, in the form that RocketMQ gives it."""
        text = path.read_text(encoding="utf-8")
        parsed = parse_rocketmq_json(text)
        expect(print_rocketmq_json(parsed) == text, path, "another form than RocketMQ's")
        expect(set(parsed) == {"cometmq", "dataVersion", table}, path, f"has {sorted(parsed)}")
        made, version = parsed["cometmq"], parsed["dataVersion"]
        expect(set(made) == {"epoch", "position"}, path, f"cometmq {made}")
        expect(set(version) == {"counter", "stateVersion", "timestamp"}, path, f"{version}")
        expect(version["stateVersion"] == 0, path, f"state version {version['stateVersion']}")
        if self.clean or made["position"] <= self.log.end:
            self._expect_export(path, parsed, table, export)
        return parsed

    def _expect_export(
        self, path: Path, parsed: Json, table: str, export: Callable[[State], Json]
    ) -> None:
        epoch, position = parsed["cometmq"]["epoch"], parsed["cometmq"]["position"]
        expect(position <= self.log.end, path, f"position {position} is behind the log's end")
        starts = {one.number: one.start for one in self.epochs}
        expect(epoch in starts, path, f"epoch {epoch} is not known")
        shown, begun = self._state_at(position), self._state_at(starts[epoch])
        if shown is None or begun is None:
            return
        same = parsed[table] == export(shown)
        expect(same or (export is offsets_export and not self.clean), path, "not its state")
        for record in self.log.state.records:
            if starts[epoch] <= record.log_offset < position and record.tag == "CHANGE":
                kinds = [change["k"] for change in changes_of(record)]
                begun.topic_changes += sum(kind in TOPIC_KINDS for kind in kinds)
        counter = parsed["dataVersion"]["counter"]
        expect(counter == begun.topic_changes, path, f"counter {counter} of {begun.topic_changes}")

    def _state_at(self, position: int) -> State | None:
        """The state that the records before a log offset give."""
        return rebuild([one for one in self.log.state.records if one.log_offset < position])


def _first_difference(here: bytes, wanted: bytearray, first: int) -> str:
    """Which unit it is, and how it differs."""
    for at in range(0, len(wanted), UNIT.size):
        found, right = here[at : at + UNIT.size], wanted[at : at + UNIT.size]
        if found != right:
            return f"{first + at // UNIT.size} is {found.hex()}, not {right.hex()}"
    raise AssertionError("they are equal")
