"""Many records at a time, against :func:`cometmq.format.record.check`, one after the other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.format import delayed, properties, queueunit, record, scan, taghash
from cometmq.format.scan import Run, scan_run, topic_list
from cometmq.store.log import units

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


OURS = delayed.prefix(3, "A", 0)
TAGGED = properties.encode({"TAGS": "x"})
DELAYED = {
    "our form": (OURS + TAGGED, True),
    "the last level": (delayed.prefix(18, "A", 0), True),
    "a level above the last": (delayed.prefix(64, "A", 0), True),
    "no level": (TAGGED, False),
    "level 0": (delayed.prefix(0, "A", 0), False),
    "a level of three digits": (delayed.prefix(100, "A", 0), False),
    "a level that is none": (OURS.replace(b"3", b"x"), False),
    "RocketMQ's form": (b"REAL_TOPIC\x01A\x02REAL_QID\x010\x02DELAY\x013\x02", False),
    "two levels": (OURS + b"DELAY\x015\x02", False),
    "nothing but a level": (b"DELAY\x013\x02", False),
}


@SCANNERS
@pytest.mark.parametrize("form", DELAYED)
@pytest.mark.parametrize("time_ms", [1_700_000_000_000, 2**63 - 10_000, -5])
def test_a_delayed_message_has_its_due_time_in_its_unit(
    scanner: Scanner, form: str, time_ms: int
) -> None:
    """What has another form than ours is left to its reader."""
    raw, is_ours = DELAYED[form]
    topic = delayed.SCHEDULE_TOPIC.encode()
    hosts = {"born_host": V4, "store_host": V4}
    chunk = record.encode(
        *(topic, 2, b"body", raw),
        **hosts,  # type: ignore[arg-type]
        born_time_ms=1,
        log_offset=START,
        store_time_ms=time_ms,
    )
    run = scanner(chunk, 0, log_offset=START, file_left=len(chunk) + 100)
    found = record.decode(chunk)
    is_far = time_ms > 1 << 62
    assert run.record_count == (is_ours and not is_far)
    if run.record_count:
        assert run == units.run_of(found, len(chunk))


@SCANNERS
def test_delayed_messages_follow_the_list_of_levels(
    scanner: Scanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delayed._Process, "levels_s", (7, 9))
    topic, hosts = delayed.SCHEDULE_TOPIC.encode(), {"born_host": V4, "store_host": V4}
    for level, wait_ms in ((1, 7_000), (2, 9_000), (3, 9_000)):
        raw = delayed.prefix(level, "A", 0)
        chunk = record.encode(topic, 2, b"", raw, born_time_ms=1, log_offset=START, **hosts)  # type: ignore[arg-type]
        [queue] = scanner(chunk, 0, log_offset=START, file_left=len(chunk) + 100).queues
        assert queueunit.unit_at(queue.units, 0) == (START, len(chunk), wait_ms)
