"""The queues beside the log, as ``docs/format/store-layout.md`` and ``queueunit.md`` tell them: a
part of the independent reader (:mod:`tests.support.independent.reader`), with the standard
library alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.support.independent.files import Mark, Row, entries
from tests.support.independent.log import FILLER, UNIT, Log, Queue
from tests.support.independent.record import INT32_MAX, TOPIC, QueueKey, broken, expect

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

    def expect_log(self) -> None:
        for key in {*self._log.queues, *self.rows}:
            self._expect_queue(key)

    def expect_counts(self, mark: Mark) -> None:
        """A mark says how many queues there were at its end, and how far they had counted."""
        at_mark = self._log.at_mark or {}
        ends = [at_mark[key] if key in at_mark else self._before(key) for key in self._keys()]
        found = (sum(end > 0 for end in ends), sum(ends))
        expect(mark.counts in (found, (-1, -1)), "mark", f"counts {mark.counts}, found {found}")

    def _keys(self) -> set[QueueKey]:
        return {*self.rows, *self._log.queues, *(self._log.at_mark or ())}

    def _before(self, key: QueueKey) -> int:
        """How far a queue had counted that got no message in the log before the mark."""
        queue = self._log.queues.get(key)
        return queue.first if queue else counted(self.rows[key])

    def _expect_queue(self, key: QueueKey) -> None:
        row, queue = self.rows.get(key), self._log.queues.get(key)
        if row is None:
            expect(not self._exact, f"queue {key}", "its records have no units")
            return
        expect(not (row.mended and self._exact), row.folder, "its last file is too short")
        expect(not row.file_bytes % UNIT.size, row.folder, f"files of {row.file_bytes} bytes")
        first = queue.first * UNIT.size if queue else row.end
        self._expect_older(row, first)
        if queue is None:
            told = self._log.state.counted.get(key, counted(row))
            expect(told == counted(row), row.folder, f"counts to {counted(row)}, not {told}")
        elif self._exact:
            self._expect_units(row, queue)
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

    def _expect_units(self, row: Row, queue: Queue) -> None:
        first = queue.first * UNIT.size
        here = row.read(first, first + len(queue.units))
        wanted = queue.as_found(here)
        if here != wanted:
            broken(row.folder, f"unit {_first_difference(here, wanted, queue.first)}")
        row.expect_zeros(first + len(queue.units))

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


def _first_difference(here: bytes, wanted: bytes, first: int) -> str:
    """Which unit it is, and how it differs."""
    for at in range(0, len(wanted), UNIT.size):
        found, right = here[at : at + UNIT.size], wanted[at : at + UNIT.size]
        if found != right:
            return f"{first + at // UNIT.size} is {found.hex()}, not {right.hex()}"
    raise AssertionError("they are equal")
