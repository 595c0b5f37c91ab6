from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from cometmq.errors import StoreForeignFile
from cometmq.format import record
from cometmq.store.disk.files import OsFiles
from cometmq.store.disk.segments import Segments
from cometmq.store.layout import offset_name
from cometmq.store.log import scan
from cometmq.store.log.scan import LogScan, find_good, first_damage, found_at
from tests.support.stores.small_stores import LOG_FILE_BYTES, append, open_store

COUNT = 40


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Segments:
    """Three files of messages, every tenth of topic S; read in pieces that cut records."""
    monkeypatch.setattr(scan, "CHUNK_BYTES", 2500)
    store = open_store(tmp_path)
    for number in range(COUNT):
        append(store, ("S" if number % 10 == 9 else "A", 0, [b"%d" % number + bytes(1000)]))
    store.close()
    segments = Segments(tmp_path / "commitlog", LOG_FILE_BYTES)
    assert segments.load(OsFiles())
    return segments


def starts(log: Segments) -> list[int]:
    """Where records stand, by a loop over :func:`found_at`."""
    found, at = [], 0
    while (segment := log.find(at)) is not None:
        here = found_at(segment, at)
        if here.kind is record.Kind.BLANK:
            at = segment.end
            continue
        if here.record is None:
            break
        found.append(at)
        at += here.size
    return found


def overwrite(log: Segments, at: int, data: bytes) -> None:
    segment = log.find(at)
    assert segment is not None
    segment.pwrite(at, data)


def test_a_scan_covers_the_log_without_a_gap(log: Segments) -> None:
    scan = LogScan(log, 0)
    stretches = list(scan)
    assert sum(stretch.run.record_count for stretch in stretches) == COUNT == len(starts(log))
    for before, after in pairwise(stretches):
        assert before.end == after.start or after.start % LOG_FILE_BYTES == 0
    assert (scan.end, scan.reason) == (stretches[-1].end, "nothing is written there")
    assert stretches[-1].last_offset == starts(log)[-1]


def test_a_topic_that_is_asked_for_comes_alone_with_its_bytes(log: Segments) -> None:
    scan = LogScan(log, 0, {"S"})
    alone = [stretch for stretch in scan if stretch.topic]
    assert [stretch.topic for stretch in alone] == ["S"] * 4
    numbers = [int(record.decode(stretch.apart).body.rstrip(b"\0")) for stretch in alone]
    assert numbers == [9, 19, 29, 39]


def test_a_scan_ends_where_something_else_stands_and_goes_on_when_told(log: Segments) -> None:
    places = starts(log)
    overwrite(log, places[5] + 200, b"!")
    scan = LogScan(log, 0)
    assert sum(stretch.run.record_count for stretch in scan) == 5
    assert (scan.end, scan.reason, scan.kind) == (
        places[5],
        "the body does not fit BODYCRC",
        record.Kind.BAD,
    )
    scan.end = places[6]
    assert sum(stretch.run.record_count for stretch in scan) == COUNT - 6


@pytest.mark.parametrize("at", [0, 4, 28, 200])
@pytest.mark.parametrize("number", [3, 5])
def test_the_next_good_record_is_found(log: Segments, number: int, at: int) -> None:
    places = starts(log)
    overwrite(log, places[number] + at, b"\xff\xff\xff\xff")
    assert find_good(log, places[number], log.end) == places[number + 1]
    assert find_good(log, places[number], places[number + 1]) is None, "no further than told"


@pytest.mark.parametrize("cut", range(10))
def test_the_next_good_record_may_lie_across_two_pieces(
    log: Segments, monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    """``cut`` bytes of it in the first of them."""
    places = starts(log)
    overwrite(log, places[3], b"\xff\xff\xff\xff")
    monkeypatch.setattr(scan, "CHUNK_BYTES", places[4] + cut - (places[3] + 1))
    assert find_good(log, places[3], log.end) == places[4]


def test_a_later_file_will_do_and_an_end_mark_will_not(log: Segments) -> None:
    places = starts(log)
    last = max(place for place in places if place < LOG_FILE_BYTES)
    segment = log.find(last)
    assert segment is not None
    mark = last + found_at(segment, last).size
    assert found_at(segment, mark).kind is record.Kind.BLANK
    overwrite(log, last, b"\0" * 300)
    assert find_good(log, last, log.end) == LOG_FILE_BYTES
    assert find_good(log, places[-1], log.end) is None


def test_damage_within_bytes_is_found(log: Segments) -> None:
    places = starts(log)
    data = log.pread(places[2], places[5] - places[2])
    left = LOG_FILE_BYTES - places[2]
    assert first_damage(data, places[2], left) is None
    at = places[3] - places[2] + 150
    damaged = data[:at] + b"!" + data[at + 1 :]
    assert first_damage(damaged, places[2], left) == places[3]
    assert first_damage(data[:-1], places[2], left) == places[4], "not whole is not good"


def test_a_record_of_version_2_is_refused(log: Segments) -> None:
    places = starts(log)
    overwrite(log, places[4] + 4, bytes.fromhex("daa320ab"))
    with pytest.raises(StoreForeignFile, match=f"version 2 at {places[4]}"):
        list(LogScan(log, 0))


def test_a_log_may_end_with_its_last_file(tmp_path: Path) -> None:
    (tmp_path / offset_name(0)).write_bytes(record.blank(100) + bytes(92))
    segments = Segments(tmp_path, 100)
    segments.load(OsFiles())
    scan = LogScan(segments, 0)
    assert list(scan) == []
    assert (scan.end, scan.reason) == (100, "the log has no file for what comes next")
