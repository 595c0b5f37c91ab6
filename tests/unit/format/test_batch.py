from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.errors import (
    BatchMalformed,
    BatchTooLarge,
    BodyChecksumMismatch,
    BodyTooLarge,
    CometError,
    PropertiesInvalid,
    PropertiesTooLarge,
    PropertyReserved,
    RecordFieldForbidden,
    StoreDamaged,
    TopicNameInvalid,
)
from cometmq.format import batch, delayed, properties, queueunit, record
from cometmq.format.batch import BatchLimits, SegmentClaim
from cometmq.format.relay import relay, walk, with_properties
from tests.unit.format import naive, strategies

pytestmark = pytest.mark.usefixtures("implementation")

BORN = record.host_bytes("10.0.0.1", 40000)
STORE = record.host_bytes("10.0.0.2", 10911)
GOOD = properties.encode({"KEYS": "k1", "TAGS": "TagA", "UNIQ_KEY": "01AB", "user": "x"})


def make(topic: bytes = b"orders", queue_id: int = 3, raw: bytes = GOOD, **fields: Any) -> bytes:
    body = fields.pop("body", b"hello")
    hosts = {"born_host": bytes(8), "store_host": bytes(8)}
    return record.encode(topic, queue_id, body, raw, **hosts | {"born_time_ms": 5} | fields)


def stamp(data: bytes, *claims: SegmentClaim, limits: BatchLimits | None = None) -> batch.Stamped:
    return batch.stamp(
        data,
        claims,
        log_offset=1000,
        store_time_ms=77,
        born_host=BORN,
        store_host=STORE,
        limits=limits or BatchLimits(),
    )


def claim(count: int = 1, topic: bytes = b"orders", queue_id: int = 3) -> SegmentClaim:
    return SegmentClaim(topic, queue_id, count, 50)


# --- good batches -------------------------------------------------------------------------------


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[bytes]], list[SegmentClaim], bytes, bytes]:
    born_host, store_host = draw(strategies.hosts), draw(strategies.hosts)
    runs, claims = [], []
    for _ in range(draw(st.integers(1, 3))):
        topic, queue_id = draw(strategies.topics), draw(st.integers(0, 1023))
        some = strategies.records(topic, queue_id, (born_host, store_host))
        run = draw(st.lists(some, min_size=1, max_size=2))
        runs.append(run)
        claims.append(SegmentClaim(topic, queue_id, len(run), draw(st.integers(0, 2**40))))
    return runs, claims, born_host, store_host


@given(batches(), st.integers(0, 2**50), st.integers(0, 2**50))
def test_a_good_batch_is_stamped_and_nothing_else_in_it_changes(
    drawn: tuple[list[list[bytes]], list[SegmentClaim], bytes, bytes],
    log_offset: int,
    store_time_ms: int,
) -> None:
    runs, claims, born_host, store_host = drawn
    data = b"".join(piece for run in runs for piece in run)
    stamped = batch.stamp(
        data,
        claims,
        log_offset=log_offset,
        store_time_ms=store_time_ms,
        born_host=born_host,
        store_host=store_host,
        limits=BatchLimits(),
    )
    expected, units, at = [], [], log_offset
    for run, wanted in zip(runs, claims, strict=True):
        run_units = b""
        for queue_offset, piece in enumerate(run, wanted.first_queue_offset):
            patch = {"queue_offset": queue_offset, "log_offset": at, "born_host": born_host}
            patch |= {"store_time_ms": store_time_ms, "store_host": store_host}
            before = naive.read(piece)
            expected.append(naive.write(before | patch))
            tag = dict(naive.pairs(before["properties"]) or []).get("TAGS", "")
            run_units += at.to_bytes(8, "big") + len(piece).to_bytes(4, "big")
            run_units += naive.hash_of(tag).to_bytes(8, "big", signed=True)
            at += len(piece)
        units.append(run_units)
    assert bytes(stamped.buffer) == b"".join(expected)
    assert stamped.units == units


def test_the_input_stays_as_it_is() -> None:
    data = make() * 3
    copy = bytes(bytearray(data))
    stamped = stamp(data, claim(3))
    assert data == copy
    assert bytes(stamped.buffer) != data


@given(st.data())
def test_one_changed_byte_is_judged_as_the_rules_say(draw: st.DataObject) -> None:
    hosts = draw.draw(st.tuples(strategies.hosts, strategies.hosts))
    original = draw.draw(strategies.records(b"orders", 3, hosts))
    data = bytearray(original)
    for place in draw.draw(st.lists(st.integers(0, len(data) - 1), min_size=1, max_size=2)):
        data[place] = draw.draw(st.integers(0, 255))
    host_flags = 16 * (len(hosts[0]) == 20) + 32 * (len(hosts[1]) == 20)
    deserved = naive.complaint(bytes(data), b"orders", 3, host_flags, properties.RESERVED)
    assert judge(bytes(data), hosts) == deserved


def judge(data: bytes, hosts: tuple[bytes, bytes]) -> str | None:
    try:
        batch.stamp(
            data,
            [claim()],
            log_offset=0,
            store_time_ms=0,
            born_host=hosts[0],
            store_host=hosts[1],
            limits=BatchLimits(),
        )
    except CometError as error:
        return type(error).__name__
    return None


names = st.sampled_from([*naive.RESERVED_EXAMPLES, "KEYS", "TAGS", "TRACE_ON", "__SHARDINGKEY"])
odd_names = names | names.map(lambda n: n + "X") | names.map(str.lower) | strategies.texts
odd_properties = st.lists(
    st.tuples(odd_names | st.just("__RMQ.TRANSIENT.x"), strategies.texts), max_size=4
).map(lambda found: "".join(f"{n}\x01{v}\x02" for n, v in found).encode())


@given(odd_properties | st.binary(max_size=12) | st.text("KA\x00\x01\x02é").map(str.encode))
def test_properties_are_judged_as_the_rules_say(raw: bytes) -> None:
    data = make(raw=raw)
    deserved = naive.complaint(data, b"orders", 3, 0, properties.RESERVED)
    assert judge(data, (BORN, STORE)) == deserved


@pytest.mark.parametrize("name", [*sorted(properties.RESERVED), "__RMQ.TRANSIENT.x"])
def test_every_reserved_name_is_refused(name: str) -> None:
    with pytest.raises(PropertyReserved, match=name):
        stamp(make(raw=GOOD + f"{name}\x01v\x02".encode()), claim())


ALLOWED = (
    *("KEYS", "TAGS", "UNIQ_KEY", "INSTANCE_ID", "TRACE_ON", "TRACE_CONTEXT", "MSG_REGION", "TTL"),
    *("CORRELATION_ID", "REPLY_TO_CLIENT", "MSG_TYPE", "__SHARDINGKEY", "BORN_TIMESTAMP"),
    *("WAITING", "Delay", "delay", "1ST", "_", "A WAIT"),
)


@pytest.mark.parametrize("name", ALLOWED)
def test_names_that_are_not_reserved_pass(name: str) -> None:
    stamp(make(raw=f"{name}\x01v\x02".encode()), claim())


def test_the_last_of_several_tags_counts() -> None:
    raw = b"TAGS\x01TagB\x02TAGS\x01TagA\x02"
    expected = naive.hash_of("TagA").to_bytes(8, "big")
    assert stamp(make(raw=raw), claim()).units[0][12:] == expected


# --- forged fields ------------------------------------------------------------------------------


def put(name: str, value: int, width: int) -> Callable[[bytes], bytes]:
    """Overwrites one number inside a record."""

    def forge(data: bytes) -> bytes:
        place = naive.read(data)["places"][name]
        return data[:place] + value.to_bytes(width, "big", signed=value < 0) + data[place + width :]

    return forge


def whole(**fields: Any) -> Callable[[bytes], bytes]:
    """Another record in the place of the good one."""
    return lambda data: make(**fields)


SIZE = len(make())
FORGERIES: dict[str, tuple[Callable[[bytes], bytes], type[CometError]]] = {
    "size one more": (put("size", SIZE + 1, 4), BatchMalformed),
    "size one less": (put("size", SIZE - 1, 4), BatchMalformed),
    "size over the next record": (put("size", 2 * SIZE, 4), BatchMalformed),
    "size zero": (put("size", 0, 4), BatchMalformed),
    "size negative": (put("size", -1, 4), BatchMalformed),
    "size huge": (put("size", 2**31 - 1, 4), BatchMalformed),
    "magic of version 2": (put("magic", 0xDAA320AB, 4), BatchMalformed),
    "magic of the end mark": (put("magic", 0xCBD43194, 4), BatchMalformed),
    "magic zero": (put("magic", 0, 4), BatchMalformed),
    "body CRC": (put("body_crc", 1, 4), BodyChecksumMismatch),
    "body CRC with its top bit": (
        put("body_crc", zlib.crc32(b"hello") | 0x80000000, 4),
        BodyChecksumMismatch,
    ),
    "queue id": (put("queue_id", 4, 4), BatchMalformed),
    "queue id negative": (put("queue_id", -3, 4), BatchMalformed),
    "sysFlag multi tags": (put("sys_flag", 2, 4), RecordFieldForbidden),
    "sysFlag prepared": (put("sys_flag", 4, 4), RecordFieldForbidden),
    "sysFlag commit": (put("sys_flag", 8, 4), RecordFieldForbidden),
    "sysFlag rollback": (put("sys_flag", 12, 4), RecordFieldForbidden),
    "sysFlag born host IPv6": (put("sys_flag", 16, 4), BatchMalformed),
    "sysFlag store host IPv6": (put("sys_flag", 32, 4), BatchMalformed),
    "sysFlag need unwrap": (put("sys_flag", 64, 4), RecordFieldForbidden),
    "sysFlag inner batch": (put("sys_flag", 128, 4), RecordFieldForbidden),
    "sysFlag no such compression": (put("sys_flag", 0x401, 4), RecordFieldForbidden),
    "sysFlag high bit": (put("sys_flag", -(2**31), 4), RecordFieldForbidden),
    "reconsume times": (put("reconsume_times", 1, 4), RecordFieldForbidden),
    "prepared offset": (put("prepared_offset", 1, 8), RecordFieldForbidden),
    "body length one more": (put("body_bytes", 6, 4), BatchMalformed),
    "body length negative": (put("body_bytes", -1, 4), BatchMalformed),
    "body length huge": (put("body_bytes", 2**31 - 1, 4), BatchMalformed),
    "body byte": (lambda data: data.replace(b"hello", b"hallo"), BodyChecksumMismatch),
    "topic length one more": (put("topic_length", 7, 1), BatchMalformed),
    "topic length zero": (put("topic_length", 0, 1), BatchMalformed),
    "topic length negative": (put("topic_length", 255, 1), BatchMalformed),
    "topic another": (whole(topic=b"Orders"), BatchMalformed),
    "topic longer": (whole(topic=b"orders2"), BatchMalformed),
    "topic shorter": (whole(topic=b"order"), BatchMalformed),
    "properties length one more": (put("properties_length", len(GOOD) + 1, 2), BatchMalformed),
    "properties length one less": (put("properties_length", len(GOOD) - 1, 2), BatchMalformed),
    "properties length negative": (put("properties_length", 0xFFFF, 2), BatchMalformed),
    "properties not pairs": (whole(raw=b"TAGS"), PropertiesInvalid),
    "properties empty name": (whole(raw=b"\x01v\x02"), PropertiesInvalid),
    "properties empty value": (whole(raw=b"a\x01\x02"), PropertiesInvalid),
    "properties second separator": (whole(raw=b"a\x01b\x01c\x02"), PropertiesInvalid),
    "properties NUL": (whole(raw=b"a\x01b\x00\x02"), PropertiesInvalid),
    "properties not UTF-8": (whole(raw=b"a\x01\xff\x02"), PropertiesInvalid),
    "properties reserved": (whole(raw=GOOD + b"DELAY\x013\x02"), PropertyReserved),
    "properties reserved, 4.x form": (whole(raw=GOOD + b"DELAY\x013"), PropertyReserved),
    "properties reserved behind letters": (
        whole(raw="é\x01é\x02TRAN_MSG\x01true\x02".encode()),
        PropertyReserved,
    ),
}


@pytest.mark.parametrize("name", FORGERIES)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_forged_field_is_refused_with_its_segment(name: str, place: int) -> None:
    forge, error = FORGERIES[name]
    pieces = [make(), make(), make()]
    pieces[place] = forge(pieces[place])
    assert pieces[place] != make()
    with pytest.raises(error) as caught:
        stamp(b"".join(pieces), claim(), claim(), claim())
    assert caught.value.segment == place


def test_properties_over_the_limit_of_the_length_field() -> None:
    """A producer that takes the length for unsigned: 40,000 bytes of properties, all sizes
    right."""
    raw = b"a\x01" + b"v" * 39_997 + b"\x02"
    fields = naive.read(make()) | {"properties": raw}
    fields["size"] += len(raw) - len(GOOD)
    with pytest.raises(PropertiesTooLarge, match="40000") as caught:
        stamp(make() + naive.write(fields), claim(), claim())
    assert caught.value.segment == 1


def test_limits_of_body_and_properties() -> None:
    limits = BatchLimits(body_bytes_max=5, properties_bytes_max=len(GOOD))
    stamp(make(), claim(), limits=limits)
    with pytest.raises(BodyTooLarge):
        stamp(make(body=b"123456"), claim(), limits=limits)
    with pytest.raises(PropertiesTooLarge):
        stamp(make(raw=GOOD + b"a\x01b\x02"), claim(), limits=limits)


def test_a_body_of_exactly_the_largest_size_passes() -> None:
    body = bytes(BatchLimits().body_bytes_max)
    stamp(make(body=body), claim())
    with pytest.raises(BodyTooLarge):
        stamp(make(body=body + b"x"), claim())


@pytest.mark.parametrize(
    ("data", "claims", "error", "segment"),
    [
        (make(), (), BatchMalformed, None),
        (b"", (claim(),), BatchMalformed, 0),
        (make() * 2, (claim(),), BatchMalformed, None),
        (make() + b"rest", (claim(),), BatchMalformed, None),
        (make(), (claim(), claim()), BatchMalformed, 1),
        (make()[:-1], (claim(),), BatchMalformed, 0),
        (make()[: -len("user\x01x\x02")], (claim(),), BatchMalformed, 0),  # what is left is framed
        (make() + make()[:90], (claim(2),), BatchMalformed, 0),
        (make(), (claim(), claim(0)), BatchMalformed, 1),
        (make(), (claim(-1),), BatchMalformed, 0),
        (make(), (claim(topic=b""),), TopicNameInvalid, 0),
        (make(), (claim(), claim(topic=b"t" * 128)), TopicNameInvalid, 1),
        (make(), (claim(queue_id=2),), BatchMalformed, 0),
    ],
)
def test_segments_that_do_not_describe_the_records(
    data: bytes, claims: tuple[SegmentClaim, ...], error: type[CometError], segment: int | None
) -> None:
    with pytest.raises(error) as caught:
        stamp(data, *claims)
    assert caught.value.segment == segment


def test_limits_of_the_batch() -> None:
    exact = BatchLimits(batch_bytes_max=2 * SIZE, batch_count_max=2, segments_max=2)
    stamp(make() * 2, claim(), claim(), limits=exact)
    for limits in (
        BatchLimits(batch_bytes_max=2 * SIZE - 1),
        BatchLimits(batch_count_max=1),
        BatchLimits(segments_max=1),
    ):
        with pytest.raises(BatchTooLarge):
            stamp(make() * 2, claim(), claim(), limits=limits)


# --- kinds with a stored form of their own ------------------------------------------------------

PREFIX = delayed.prefix(3, "orders", 7)
SCHEDULED = SegmentClaim(b"SCHEDULE_TOPIC_XXXX", 2, 2, 50, PREFIX, 10_000)


def scheduled(raw: bytes = GOOD, prefix: bytes = PREFIX) -> bytes:
    return make(b"SCHEDULE_TOPIC_XXXX", 2, prefix + raw)


def test_units_of_delayed_records_hold_the_due_time() -> None:
    data = scheduled() + scheduled(b"")
    stamped = stamp(data, SCHEDULED)
    dues = [due for _, _, due in queueunit.iterate(stamped.units[0])]
    assert dues == [77 + 10_000] * 2


@pytest.mark.parametrize(
    "other",
    [
        b"",
        PREFIX[:-1],
        delayed.prefix(4, "orders", 7),
        delayed.prefix(3, "order", 7),
        delayed.prefix(3, "orders", 8),
        b"a\x01b\x02" + PREFIX,
    ],
)
def test_the_stored_form_is_the_one_that_the_segment_demands(other: bytes) -> None:
    data = scheduled() + scheduled(prefix=other)
    with pytest.raises((PropertiesInvalid, PropertyReserved)) as found:
        stamp(data, SCHEDULED)
    assert found.value.segment == 0


def test_behind_the_prefix_no_reserved_name_stands() -> None:
    with pytest.raises(PropertyReserved):
        stamp(scheduled() + scheduled(b"REAL_TOPIC\x01other\x02"), SCHEDULED)


def test_what_a_relay_makes_names_its_source_and_keeps_the_rest() -> None:
    source = record.decode(
        make(raw=PREFIX + GOOD, log_offset=4321, flag=9, sys_flag=1 | 2 << 8, reconsume_times=2)
    )
    made = relay(source, "orders", 7, STORE + bytes(12), reconsume_times=3)
    data = made.encode(11, 5000, 77, STORE + bytes(12))
    found = record.decode(data)
    assert (found.topic, found.queue_id, found.queue_offset) == ("orders", 7, 11)
    assert (found.log_offset, found.prepared_offset) == (5000, 4321)
    assert (found.reconsume_times, found.flag, found.store_time_ms) == (3, 9, 77)
    assert (found.body, found.raw_properties) == (source.body, source.raw_properties)
    assert (found.born_host, found.born_time_ms) == (source.born_host, source.born_time_ms)
    assert found.sys_flag == source.sys_flag | record.SYS_FLAG_STORE_HOST_V6
    assert record.check(data, 0, log_offset=5000, bytes_left=9999).kind is record.Kind.RECORD
    assert made.size_bytes == len(data)
    plain = make()
    one, two = len(plain), len(plain) + len(data)
    assert list(walk(plain + data + plain)) == [
        (0, one, False),
        (one, two, True),
        (two, two + one, False),
    ]


def test_a_body_that_has_changed_is_not_relayed() -> None:
    source = record.decode(make())._replace(body=b"jello")
    with pytest.raises(StoreDamaged):
        relay(source, "orders", 7, STORE)


def test_properties_are_replaced_and_the_last_stays_the_last() -> None:
    raw = PREFIX + b"user\x01x\x02UNIQ_KEY\x0101AB"
    names = frozenset((b"DELAY", b"REAL_TOPIC", b"REAL_QID"))
    assert with_properties(raw, b"A\x01b\x02", names) == (
        b"A\x01b\x02user\x01x\x02UNIQ_KEY\x0101AB\x02"
    )
