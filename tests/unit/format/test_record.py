from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.errors import BatchMalformed, InvalidRequest, PropertiesTooLarge, TopicNameInvalid
from cometmq.format import properties, record
from cometmq.format.record import Kind
from tests.unit.format import naive, strategies

pytestmark = pytest.mark.usefixtures("implementation")

V4 = record.host_bytes("10.0.0.1", 12345)
V6 = record.host_bytes("fe80::1", 10911)


def make(body: bytes = b"hello", raw: bytes = b"TAGS\x01TagA\x02", **fields: Any) -> bytes:
    usual: dict[str, Any] = {"born_time_ms": 1, "born_host": V4, "store_host": V4}
    return record.encode(b"orders", 3, body, raw, **usual | fields)


@st.composite
def all_fields(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "flag": draw(strategies.int32),
        "sys_flag": draw(strategies.int32),
        "queue_offset": draw(strategies.int64),
        "log_offset": draw(strategies.int64),
        "born_time_ms": draw(strategies.int64),
        "born_host": draw(strategies.hosts),
        "store_time_ms": draw(strategies.int64),
        "store_host": draw(strategies.hosts),
        "reconsume_times": draw(strategies.int32),
        "prepared_offset": draw(strategies.int64),
    }


@given(
    strategies.topics,
    strategies.int32,
    strategies.bodies,
    st.binary(max_size=200),
    all_fields(),
    st.binary(max_size=20),
)
def test_what_is_encoded_is_what_the_naive_reader_and_decode_read(
    topic: bytes, queue_id: int, body: bytes, raw: bytes, fields: dict[str, Any], rest: bytes
) -> None:
    data = record.encode(topic, queue_id, body, raw, **fields)
    seen = naive.read(rest + data + rest, len(rest))
    ours = record.decode(rest + data + rest, len(rest))
    host_flags = 16 * (len(fields["born_host"]) == 20) + 32 * (len(fields["store_host"]) == 20)
    expected = fields | {
        "queue_id": queue_id,
        "body": body,
        "topic": topic,
        "properties": raw,
        "sys_flag": fields["sys_flag"] & ~48 | host_flags,
        "magic": record.MAGIC_V1,
        "size": len(data),
    }
    assert {name: seen[name] for name in expected} == expected
    theirs = {name: value for name, value in seen.items() if name in record.Record._fields}
    assert ours._asdict() == theirs | {"topic": topic.decode(), "raw_properties": raw}
    assert naive.write(seen) == data
    assert record.record_size(len(body), len(topic), len(raw), ours.sys_flag) == len(data)


@given(st.lists(st.tuples(strategies.bodies, strategies.hosts, strategies.hosts), max_size=6))
def test_records_end_to_end_are_all_found(
    parts: list[tuple[bytes, bytes, bytes]],
) -> None:
    pieces = [make(body, born_host=born, store_host=store) for body, born, store in parts]
    found = record.decode_all(b"".join(pieces))
    assert [(r.body, r.born_host, r.store_host) for r in found] == parts
    assert found == [record.decode(piece) for piece in pieces]


@given(st.binary(max_size=200) | st.binary(max_size=200).map(lambda b: make()[:8] + b), st.data())
def test_garbage_is_refused_or_read_as_the_naive_reader_reads_it(
    data: bytes, draw: st.DataObject
) -> None:
    at = draw.draw(st.integers(0, len(data)))
    try:
        ours = record.decode(data, at)
    except BatchMalformed:
        return
    assert naive.read(data, at)["body"] == ours.body


@given(st.integers(0, 400), st.integers(0, 255))
def test_a_changed_byte_never_leads_outside_the_record(place: int, value: int) -> None:
    data = bytearray(make(b"x" * 200) * 2)
    data[place] = value
    try:
        found = record.decode_all(bytes(data))
    except BatchMalformed:
        return
    assert sum(r.size for r in found) == len(data)


@pytest.mark.parametrize("length", [1, 50, 88, 95, 111])
def test_a_cut_record_is_refused(length: int) -> None:
    assert length < len(make())
    with pytest.raises(BatchMalformed, match="at byte"):
        record.decode(make()[:length])


def test_a_negative_body_length_is_refused_though_the_sizes_add_up() -> None:
    """The length's own last byte, FF, is then read as the topic's length: 255."""
    data = bytearray(88 + 255 + 2)
    data[:8] = len(data).to_bytes(4, "big") + make()[4:8]
    data[84:88] = (-1).to_bytes(4, "big", signed=True)
    with pytest.raises(BatchMalformed, match="lengths"):
        record.decode(bytes(data))


def test_nothing_at_all_is_refused_as_one_record_and_fine_as_none() -> None:
    assert record.decode_all(b"") == []
    with pytest.raises(BatchMalformed):
        record.decode(b"")


def test_helpers_of_a_record() -> None:
    raw = properties.encode({"KEYS": "k1 k2", "TAGS": "TagA", "UNIQ_KEY": "01AB"})
    found = record.decode(make(raw=raw))
    assert (found.tag, found.keys, found.unique_id) == ("TagA", ("k1", "k2"), "01AB")
    assert found.properties is found.properties  # parsed once
    bare = record.decode(make(raw=b""))
    assert (bare.tag, bare.keys, bare.unique_id, bare.properties) == ("", (), "", {})


@pytest.mark.parametrize(("host", "text"), [(V4, "10.0.0.1:12345"), (V6, "[fe80::1]:10911")])
def test_hosts_as_text(host: bytes, text: str) -> None:
    assert record.host_text(host) == text


@pytest.mark.parametrize(
    ("address", "port"), [("example.org", 1), ("10.0.0.1", -1), ("10.0.0.1", 2**32)]
)
def test_what_is_no_address_is_refused(address: str, port: int) -> None:
    with pytest.raises(InvalidRequest):
        record.host_bytes(address, port)


@pytest.mark.parametrize(
    ("topic", "fields", "error"),
    [
        (b"", {}, TopicNameInvalid),
        (b"t" * 128, {}, TopicNameInvalid),
        (b"t", {"properties": b"p" * 32768}, PropertiesTooLarge),
        (b"t", {"flag": 2**31}, InvalidRequest),
        (b"t", {"queue_id": 2**31}, InvalidRequest),
        (b"t", {"born_host": b"four"}, InvalidRequest),
    ],
)
def test_what_does_not_fit_is_refused(
    topic: bytes, fields: dict[str, Any], error: type[Exception]
) -> None:
    usual: dict[str, Any] = {
        "queue_id": 0,
        "body": b"",
        "properties": b"",
        "born_time_ms": 0,
        "born_host": V4,
        "store_host": V4,
    }
    with pytest.raises(error):
        record.encode(topic, **usual | fields)


# --- check: what recovery sees ------------------------------------------------------------------


def kind(data: bytes, *, log_offset: int = 0, bytes_left: int = 1000) -> Kind:
    return record.check(data, 0, log_offset=log_offset, bytes_left=bytes_left).kind


@given(st.integers(0, 2**40), st.integers(0, 30), strategies.bodies, strategies.property_maps)
def test_a_good_record_is_found(
    log_offset: int, before: int, body: bytes, pairs: dict[str, str]
) -> None:
    data = make(body, properties.encode(pairs), log_offset=log_offset)
    found = record.check(
        bytes(before) + data, before, log_offset=log_offset, bytes_left=len(data) + 8
    )
    assert found == (Kind.RECORD, len(data), record.decode(data), "")


def test_marks_and_ends() -> None:
    assert record.check(record.blank(500), 0, log_offset=9, bytes_left=500)[:2] == (Kind.BLANK, 500)
    assert kind(record.blank(500), bytes_left=501) is Kind.BAD
    assert kind(bytes(100)) is Kind.END
    assert kind(make(), bytes_left=7) is Kind.BAD
    assert kind(b"\x00\x00\x00\x01" + bytes(200)) is Kind.BAD


def test_a_record_that_leaves_no_room_for_the_end_mark_is_bad() -> None:
    assert kind(make(), bytes_left=len(make()) + 8) is Kind.RECORD
    assert kind(make(), bytes_left=len(make()) + 7) is Kind.BAD


def test_a_buffer_that_ends_too_early_asks_for_more() -> None:
    data = make()
    assert record.check(data[:5], 0, log_offset=0, bytes_left=1000)[:2] == (Kind.MORE, 8)
    assert record.check(data[:-1], 0, log_offset=0, bytes_left=1000)[:2] == (Kind.MORE, len(data))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (make(log_offset=1), "PHYSICALOFFSET 1"),
        (make(b"hello").replace(b"hello", b"hallo"), "BODYCRC"),
        (make().replace(b"\x06orders", b"\x06ord/rs"), "topic"),
        (make(raw=b"TAGS\x01TagA\x02KEYS\x01" + bytes(9)), "framed"),
        (make(raw=b"TAGS"), "framed"),
        (make().replace(b"\xda\xa3\x20\xa7", b"\xda\xa3\x20\xab"), "magic daa320ab"),
    ],
)
def test_a_bad_record_is_bad_for_its_reason(data: bytes, reason: str) -> None:
    found = record.check(data, 0, log_offset=0, bytes_left=1000)
    assert (found.kind, found.size, found.record) == (Kind.BAD, 0, None)
    assert reason in found.reason


def test_properties_that_rocketmq_lets_pass_do_not_end_the_log() -> None:
    assert kind(make(raw=b"a\x01\x02b\x01x\x01y\x02\x02\x01v")) is Kind.RECORD


@given(st.integers(1, 400))
def test_a_record_whose_end_was_never_written_is_bad(missing: int) -> None:
    """A torn write: the file holds zeros from somewhere inside the record on."""
    data = make(b"b" * 200, properties.encode({"KEYS": "k" * 40, "TAGS": "TagA", "user": "v" * 60}))
    missing = min(missing, len(data) - 8)
    torn = data[:-missing] + bytes(missing)
    assert kind(torn) is Kind.BAD


@given(st.binary(max_size=300), st.integers(0, 2**40), st.integers(0, 2**30))
def test_check_never_raises(data: bytes, log_offset: int, bytes_left: int) -> None:
    record.check(data, len(data) // 2, log_offset=log_offset, bytes_left=bytes_left)
    head = make()[:8] + data
    record.check(head, 0, log_offset=log_offset, bytes_left=bytes_left)
