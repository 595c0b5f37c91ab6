"""Many records at a time, against :func:`cometmq.format.record.check`, one after the other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.format import properties, queueunit, record, scan, taghash
from cometmq.format.scan import Run, scan_run, topic_list

V4, V6 = record.host_bytes("10.0.0.1", 1), record.host_bytes("fe80::1", 2)
START = 4096
Scanner = Callable[..., Run]


def plain(chunk: bytes, at: int, *, log_offset: int, file_left: int, apart: bytes = b"") -> Run:
    return scan._scan_run(chunk, at, log_offset, file_left, apart)


SCANNERS = pytest.mark.parametrize("scanner", [scan_run, plain], ids=["used", "plain"])


def laid_out(drawn: list[tuple[str, int, bytes, str, int, bool]]) -> bytes:
    """Records end to end from :data:`START` on; queue offsets count on, or begin anew."""
    chunk, following = b"", dict[tuple[str, int], int]()
    for topic, queue_id, body, tag, time_ms, anew in drawn:
        offset = 0 if anew else following.get((topic, queue_id), 7)
        following[topic, queue_id] = offset + 1
        chunk += record.encode(
            topic.encode(),
            queue_id,
            body,
            properties.encode({"TAGS": tag}) if tag else b"",
            born_time_ms=1,
            born_host=V6 if len(body) % 3 == 0 else V4,
            store_host=V6 if len(body) % 5 == 0 else V4,
            queue_offset=offset,
            log_offset=START + len(chunk),
            store_time_ms=time_ms,
        )
    return chunk


RECORDS = st.lists(
    st.tuples(
        st.sampled_from(["A", "B", "%RETRY%g"]),
        st.integers(0, 2),
        st.binary(max_size=20),
        st.sampled_from(["", "x", "Schlüssel"]),
        st.integers(0, 3),
        st.booleans(),
    ),
    max_size=12,
).map(laid_out)


def naive(chunk: bytes, file_left: int) -> tuple[int, list[tuple[str, int, int, bytes]]]:
    """Where the good records end, and (topic, queue, queue offset, unit) of each."""
    at, found = 0, list[tuple[str, int, int, bytes]]()
    while True:
        place = START + at
        here = record.check(chunk, at, log_offset=place, bytes_left=file_left - at)
        if here.record is None:
            return at, found
        tag = properties.tag_of(here.record.raw_properties)
        unit = queueunit.pack(place, here.size, taghash.tags_code(tag))
        found.append((here.record.topic, here.record.queue_id, here.record.queue_offset, unit))
        at += here.size


@SCANNERS
@given(chunk=RECORDS, flip=st.integers(0), cut=st.integers(0, 300), file_more=st.integers(0, 40))
def test_a_run_is_what_a_loop_finds(
    scanner: Scanner, chunk: bytes, flip: int, cut: int, file_more: int
) -> None:
    """Whole, cut short, with a bit flipped, in a file that ends too early."""
    file_left = len(chunk) + file_more
    if chunk and flip % 3 == 0:
        at = flip // 3 % len(chunk)
        chunk = chunk[:at] + bytes([chunk[at] ^ 1 << flip % 8]) + chunk[at + 1 :]
    chunk = chunk[: max(0, len(chunk) - cut)] if cut < 150 else chunk
    run = scanner(chunk, 0, log_offset=START, file_left=file_left)
    end, expected = naive(chunk, file_left)
    # Rare forms are left to the loop: SYSFLAG bits, text that is not UTF-8.
    assert run.end <= end
    assert run.end == end or flip % 3 == 0
    expected = expected[: run.record_count]
    assert sum(queue.unit_count for queue in run.queues) == run.record_count == len(expected)
    units = {}
    for topic, queue_id, first, of_queue in run.queues:
        for index in range(len(of_queue) // 20):
            unit = of_queue[20 * index : 20 * index + 20]
            units[unit] = (topic, queue_id, first + index, unit)
    assert [units[unit] for _, _, _, unit in expected] == expected


@SCANNERS
def test_times_are_told(scanner: Scanner) -> None:
    def times(*given: int) -> tuple[int, int, bool]:
        chunk = laid_out([("A", 0, b"x", "", time_ms, False) for time_ms in given])
        run = scanner(chunk, 0, log_offset=START, file_left=len(chunk) + 8)
        return run.first_time_ms, run.last_time_ms, run.times_fall

    assert times(1, 1, 3) == (1, 3, False)
    assert times(2, 1, 3) == (2, 3, True)
    assert times() == (0, 0, False)


@SCANNERS
def test_some_topics_and_odd_records_are_left_to_the_caller(scanner: Scanner) -> None:
    chunk = laid_out([(topic, 0, b"x", "", 1, False) for topic in "ABA"])
    size = len(chunk) // 3
    run = scanner(chunk, 0, log_offset=START, file_left=9999, apart=topic_list(["B", "CC"]))
    assert (run.end, run.record_count, run.last_bytes) == (size, 1, size)
    rest = scanner(chunk, 2 * size, log_offset=START + 2 * size, file_left=999)
    assert (rest.end, rest.record_count) == (3 * size, 1)
    prepared = bytearray(chunk)
    prepared[size + 39] |= 4
    assert scanner(bytes(prepared), 0, log_offset=START, file_left=9999).end == size


@SCANNERS
def test_a_record_leaves_room_for_the_end_mark(scanner: Scanner) -> None:
    chunk = laid_out([("A", 0, b"x", "", 1, False)])
    for left in range(9):
        run = scanner(chunk, 0, log_offset=START, file_left=len(chunk) + left)
        assert bool(run.record_count) == (left >= 8)
