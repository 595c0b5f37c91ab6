"""Which batches are stored already: a producer that got no answer sends the same bytes again.

The SDK numbers the messages of one sender: UNIQ_KEY is a stream (26 hexadecimal digits) and a
counter (8), and the ids of a batch follow each other. The broker keeps, of each stream, which
counters it has stored and where its last batches lie in the log. So it can answer a batch that
comes again with the positions that it has. Pure: time is a parameter.
"""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from cometmq.messaging.intervals import Interval, add_interval, holds_any
from cometmq.model import BATCHES_KNOWN_MAX, SENDER_KNOWN_MS

STREAMS_MAX = 10_000
RUNS_MAX = BATCHES_KNOWN_MAX  # of a stream, the newest
INTERVALS_MAX = 64  # of a stream
IDLE_S_MAX = SENDER_KNOWN_MS / 1000

_NAME = b"UNIQ_KEY\x01"
_STREAM_DIGITS, _COUNTER_DIGITS = 26, 8
_PROPERTY_BYTES = len(_NAME) + _STREAM_DIGITS + _COUNTER_DIGITS + 1
_ID = re.compile(rb"UNIQ_KEY\x01([0-9A-F]{26})([0-9A-F]{8})\x02")


class Ids(NamedTuple):
    """The ids of a batch: ``first`` and those that follow it."""

    stream: bytes
    first: int
    id_count: int

    @property
    def end(self) -> int:
        """The counter behind the last."""
        return self.first + self.id_count


class StoredRun(NamedTuple):
    """Messages of a stream that lie end to end in the log, from ``log_offset`` on."""

    first: int
    id_count: int
    log_offset: int

    @property
    def end(self) -> int:
        """The counter behind the last."""
        return self.first + self.id_count


def id_at_end(records: bytes, end: int) -> tuple[bytes, int] | None:
    """Stream and counter of the record that ends at ``end``; None: its last property is no such
    id.
    """
    found = _ID.fullmatch(records, end - _PROPERTY_BYTES, end) if end >= _PROPERTY_BYTES else None
    return None if found is None else (found[1], int(found[2], 16))


def ids_of(records: bytes, count: int) -> Ids | None:
    """The ids of a batch by its first and last record; None: they do not follow each other, so that
    nobody can know the batch again.
    """
    size = int.from_bytes(records[:4], "big")
    first = id_at_end(records, size) if 0 < size <= len(records) else None
    last = id_at_end(records, len(records))
    if first is None or last is None or first[0] != last[0] or last[1] - first[1] != count - 1:
        return None
    return Ids(first[0], first[1], count)


class Stream:
    """What is stored of one stream. Invariant: intervals rise and neither touch nor overlap."""

    __slots__ = ("intervals", "runs", "used_s")

    def __init__(self) -> None:
        self.intervals: list[Interval] = []
        self.runs: deque[StoredRun] = deque(maxlen=RUNS_MAX)
        self.used_s = 0.0  # 0: not since this process began

    def add(self, run: StoredRun) -> None:
        """These were stored, none of them before."""
        self.runs.append(run)
        self.intervals = add_interval(self.intervals, run.first, run.end, INTERVALS_MAX)

    def validate(self) -> None:
        """Assert the invariant and the bounds."""
        assert len(self.intervals) <= INTERVALS_MAX
        assert all(one.first < one.end for one in self.intervals)
        pairs = zip(self.intervals, self.intervals[1:], strict=False)
        assert all(one.end < after.first for one, after in pairs), self.intervals


class StreamEntry(NamedTuple):
    """A stream as the state log has it: all its intervals, and the newest runs. In a snapshot
    these are all runs, in a change those that came since the change before.
    """

    name: str
    intervals: tuple[Interval, ...]
    runs: tuple[StoredRun, ...]


class StreamTable:
    """All streams, the least recently used first, and which of them the state log does not know as
    they are.
    """

    def __init__(self) -> None:
        self._streams: OrderedDict[bytes, Stream] = OrderedDict()
        self._unwritten: dict[bytes, int] = {}  # how many runs the state log does not know
        self._gone: list[bytes] = []  # left since the last change

    def __len__(self) -> int:
        return len(self._streams)

    def find(self, ids: Ids) -> StoredRun | None:
        """The run that holds the batch's first message, while it is known; None: the batch is new.

        Raises LookupError: some of it is stored, and it is not known any more where.
        """
        stream = self._streams.get(ids.stream)
        if stream is None or not stream.intervals or ids.first >= stream.intervals[-1].end:
            return None
        for run in reversed(stream.runs):
            if run.first <= ids.first < run.end:
                return run
        if holds_any(stream.intervals, ids.first, ids.end):
            raise LookupError(ids)
        return None

    def add(self, ids: Ids, log_offset: int, now_s: float) -> bool:
        """A batch that is new was stored at ``log_offset``. Whether another stream had to leave for
        it: what that one sends again is stored again.
        """
        stream, is_full = self._streams.get(ids.stream), False
        if stream is None:
            stream = self._streams[ids.stream] = Stream()
            is_full = len(self._streams) > STREAMS_MAX
            if is_full:
                self._drop(next(iter(self._streams)))
        else:
            self._streams.move_to_end(ids.stream)
        stream.used_s = now_s
        stream.add(StoredRun(ids.first, ids.id_count, log_offset))
        self._unwritten[ids.stream] = self._unwritten.get(ids.stream, 0) + 1
        return is_full

    def expire(self, now_s: float) -> None:
        """Forget streams that were idle for 15 minutes."""
        for name, stream in list(self._streams.items()):
            if stream.used_s and now_s - stream.used_s < IDLE_S_MAX:
                return  # those behind were used later
            if stream.used_s:
                self._drop(name)
            else:
                stream.used_s = now_s

    def _drop(self, name: bytes) -> None:
        del self._streams[name]
        self._unwritten.pop(name, None)
        self._gone.append(name)

    # --- state ---

    @property
    def has_unwritten(self) -> bool:
        """Whether the state log does not know everything."""
        return bool(self._unwritten or self._gone)

    def unwritten(self) -> tuple[list[StreamEntry], list[str]]:
        """Streams that have changed since they were written, with their new runs, and those that
        have gone. Call :meth:`written` with what of them is in the log.
        """
        changed = [
            _entry(name, self._streams[name], run_count)
            for name, run_count in sorted(self._unwritten.items())
        ]
        return changed, [name.decode() for name in self._gone]

    def written(self, entries: Iterable[StreamEntry], gone: Sequence[str]) -> None:
        """The state log has these of what :meth:`unwritten` gave."""
        del self._gone[: len(gone)]
        for entry in entries:
            del self._unwritten[entry.name.encode()]

    def __iter__(self) -> Iterator[StreamEntry]:
        """All streams, the least recently used first."""
        return (_entry(*item) for item in self._streams.items())

    def restore(self, entries: Iterable[StreamEntry], gone: Iterable[str]) -> None:
        """Takes streams as the state log has them."""
        for name in gone:
            self._streams.pop(name.encode(), None)
        for entry in entries:
            stream = self._streams.setdefault(entry.name.encode(), Stream())
            stream.intervals = list(entry.intervals)
            known_to = stream.runs[-1].log_offset if stream.runs else -1
            # Runs of a stream rise in the log. A change may repeat what a snapshot has.
            stream.runs.extend(run for run in entry.runs if run.log_offset > known_to)
            self._streams.move_to_end(entry.name.encode())
        while len(self._streams) > STREAMS_MAX:
            self._streams.popitem(last=False)

    def observe(self, ids: Ids, log_offset: int) -> None:
        """Takes a run that the log's end holds, which the state may know or not. Ids that were
        stored before are those of a sender that lied about its ids: the newest run counts.
        """
        stream = self._streams.get(ids.stream)
        known_to = stream.runs[-1].log_offset if stream is not None and stream.runs else -1
        is_new = stream is None or not holds_any(stream.intervals, ids.first, ids.end)
        if is_new or log_offset > known_to:
            self.add(ids, log_offset, 0.0)

    def validate(self) -> None:
        """Assert the invariants; for tests."""
        assert len(self._streams) <= STREAMS_MAX
        assert self._unwritten.keys() <= self._streams.keys()
        for stream in self._streams.values():
            stream.validate()


def _entry(name: bytes, stream: Stream, run_count: int = RUNS_MAX) -> StreamEntry:
    runs = tuple(stream.runs)[-run_count:]
    return StreamEntry(name.decode(), tuple(stream.intervals), runs)
