"""The C extension beside plain Python, on inputs that no caller would send."""

from __future__ import annotations

import gc
import struct
import sys
from array import array
from collections.abc import Callable
from copy import copy
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cometmq import model, native
from cometmq.client import received
from cometmq.client.sending import encoder
from cometmq.client.sending.stored_form import StoredForm, form_of
from cometmq.clock import SystemClock
from cometmq.errors import CometError
from cometmq.format import (
    batch,
    belonging,
    delayed,
    indexfile,
    indexkeys,
    properties,
    queueunit,
    record,
    scan,
    taghash,
    timers,
)
from cometmq.format.batch import BatchLimits, SegmentClaim
from cometmq.format.timers import TimerForm
from cometmq.messaging import pull
from cometmq.model import Message, QueueRef
from cometmq.native.interface import Accelerator
from cometmq.store.log import units
from cometmq.v1 import broker_pb2
from tests.unit.format import naive, strategies

needs_native = pytest.mark.skipif(native.accelerator is None, reason="the C extension is not built")
LOG_OFFSET = 4096


def accelerator() -> Accelerator:
    assert native.accelerator is not None
    return native.accelerator


def both(compute: Callable[[], Any]) -> tuple[Any, Any]:
    """What ``compute`` gives in plain Python and with the extension, be it an error."""
    results = []
    for chosen in (None, native.accelerator):
        with pytest.MonkeyPatch.context() as patch:
            for module in (batch, belonging, encoder, indexfile, indexkeys, pull, record, scan):
                patch.setattr(module, "accelerator", chosen)
            try:
                results.append(compute())
            except CometError as error:
                results.append((type(error), str(error), getattr(error, "segment", None)))
    return results[0], results[1]


# --- any bytes: the same verdict ----------------------------------------------------------------

odd_names = st.sampled_from(
    ["TAGS", "KEYS", "UNIQ_KEY", "DELAY", "__RMQ.TRANSIENT.a", "é", "", "a"]
)
odd_values = st.text("ab \x01é\U0001f600", max_size=6) | st.just("")
odd_maps = st.lists(st.tuples(odd_names, odd_values), max_size=4).map(
    lambda pairs: "".join(f"{name}\x01{value}\x02" for name, value in pairs).encode()
)
raw_properties = st.one_of(
    strategies.property_maps.map(properties.encode),
    odd_maps,
    odd_maps.map(lambda raw: raw[:-1]),
    st.binary(max_size=24),
)


@st.composite
def logs(draw: st.DrawFn) -> bytes:
    """Records as they might stand end to end in a log at LOG_OFFSET; some damaged."""
    data = b""
    for _ in range(draw(st.integers(0, 6))):
        data += record.encode(
            draw(st.sampled_from([b"orders", b"a", "é".encode(), b"not a topic"])),
            draw(st.sampled_from([3, -1])),
            draw(st.binary(max_size=150)),
            draw(raw_properties),
            born_time_ms=1,
            born_host=bytes(draw(st.sampled_from([8, 20]))),
            store_host=bytes(draw(st.sampled_from([8, 8, 20]))),
            sys_flag=draw(st.sampled_from([0, 0, 1, 0x301, 0x701, 4, 12, -8])),
            queue_offset=draw(st.integers(0, 3)),
            log_offset=LOG_OFFSET + len(data),
            store_time_ms=draw(st.integers(-3, 3)),
        )
    changed = bytearray(data)
    for _ in range(draw(st.sampled_from([0, 0, 1, 2])) if data else 0):
        changed[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(changed)[: draw(st.integers(0, len(data)) | st.just(len(data)))]


chunks = logs() | st.binary(max_size=300)


@needs_native
@given(chunks)
def test_decoding_is_the_same(chunk: bytes) -> None:
    plain, fast = both(lambda: record.decode_all(chunk))
    assert fast == plain
    assert [type(one) for one in fast] == [type(one) for one in plain]


@needs_native
@given(chunks, st.data())
def test_whose_records_they_are_is_the_same(chunk: bytes, data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, len(chunk)), max_size=8))
    units = b"".join(queueunit.pack(LOG_OFFSET + place, 100, 0) for place in sorted(places))
    queue = data.draw(st.tuples(st.sampled_from(["orders", "a", "é"]), st.sampled_from([3, -1])))
    plain, fast = both(lambda: belonging.first_strange(chunk, units, 0, queue))
    assert fast == plain
    wanted = array("q", [number for place in places for number in (queue[1], place % 4)])
    plain, fast = both(lambda: belonging.first_misplaced(chunk, queue[0], wanted))
    assert fast == plain


# What a received message reads from its bytes by itself.
RECEIVED_FIELDS = (
    "size",
    "flag",
    "queue_offset",
    "log_offset",
    "sys_flag",
    "born_time_ms",
    "store_time_ms",
    "reconsume_times",
    "raw_properties",
)


@needs_native
@given(chunks)
def test_received_messages_have_the_fields_of_their_records(chunk: bytes) -> None:
    plain, _ = both(lambda: record.decode_all(chunk))
    _, messages = both(lambda: received.decode_received(chunk, QueueRef("T", 0), None))
    if isinstance(plain, tuple):
        assert messages == plain
        return
    assert [message.record for message in messages] == plain
    assert [message.stored_body for message in messages] == [one.body for one in plain]
    for name in RECEIVED_FIELDS:
        assert [getattr(m, name) for m in messages] == [getattr(one, name) for one in plain]


@needs_native
def test_decoded_records_are_whole_objects() -> None:
    chunk = make() * 2
    _, (first, second) = both(lambda: record.decode_all(chunk))
    assert first.properties == {"TAGS": "TagA"}
    assert first.topic is second.topic  # one text for a run of records
    smallest = record.encode(
        b"a", 0, b"", b"", born_time_ms=0, born_host=bytes(8), store_host=bytes(8)
    )
    for whole in (chunk, smallest):
        assert accelerator().decode(whole, 0, len(whole), record.Record)[0] == len(whole)


@needs_native
@given(chunks, st.integers(0, 1000), st.sampled_from([b"", b"\x01a"]))
def test_scanning_is_the_same(chunk: bytes, file_left: int, apart: bytes) -> None:
    plain, fast = both(lambda: walk(chunk, file_left, apart))
    assert fast == plain


def walk(chunk: bytes, file_left: int, apart: bytes) -> tuple[object, ...]:
    """All units by queue, in runs, and how the scan ended; what a run leaves out but ``check``
    takes is taken one by one, as recovery does."""
    at, times = 0, list[tuple[int, int, bool]]()
    units: dict[tuple[str, int], list[tuple[int, bytes]]] = {}
    while True:
        left = file_left - at
        run = scan.scan_run(chunk, at, log_offset=LOG_OFFSET + at, file_left=left, apart=apart)
        assert run.record_count == sum(queue.unit_count for queue in run.queues)
        for queue in run.queues:
            places = range(queue.first_queue_offset, queue.first_queue_offset + queue.unit_count)
            pieces = struct.iter_unpack("20s", queue.units)
            units.setdefault((queue.topic, queue.queue_id), []).extend(
                (place, unit) for place, (unit,) in zip(places, pieces, strict=True)
            )
        if run.record_count:
            times.append((run.first_time_ms, run.last_time_ms, run.times_fall))
        at = run.end
        found = record.check(
            chunk, at, log_offset=LOG_OFFSET + at, bytes_left=max(0, file_left - at)
        )
        if found.record is None:
            return at, found, {queue: sorted(its) for queue, its in units.items()}
        tag = properties.tag_of(found.record.raw_properties)
        plain = not found.record.sys_flag & ~scan.PLAIN_SYS_FLAGS and found.record.topic != "a"
        if plain:  # the extension may leave it out only because of its tag
            assert b"TAGS\x01" in found.record.raw_properties
            assert not tag or not is_utf8(tag) or b"TAGS\x01\x02" in found.record.raw_properties
        key = found.record.topic, found.record.queue_id
        unit = struct.pack(">qiq", LOG_OFFSET + at, found.size, taghash.tags_code(tag))
        units.setdefault(key, []).append((found.record.queue_offset, unit))
        at += found.size


def is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


Forge = Callable[[bytearray, dict[str, int]], None]


def put(name: str, value: bytes, at: int = 0) -> Forge:
    """Overwrites bytes of a field."""

    def forge(data: bytearray, places: dict[str, int]) -> None:
        start = places[name] + at
        data[start : start + len(value)] = value

    return forge


SCAN_FORGERIES = {
    "size": put("size", b"\x00", 3),
    "size huge": put("size", b"\x7f\xff\xff\xff"),
    "magic": put("magic", b"\x00"),
    "body CRC": put("body_crc", b"\x00\x00\x00\x01"),
    "log offset": put("log_offset", b"\x01", 7),
    "transaction": put("sys_flag", b"\x0c", 3),
    "a bit that nobody knows": put("sys_flag", b"\x80"),
    "IPv6 host": put("sys_flag", b"\x10", 3),
    "body length": put("body_bytes", b"\x04", 3),
    "body length negative": put("body_bytes", b"\xff"),
    "body": put("body", b"j"),
    "topic length": put("topic_length", b"\x05"),
    "topic length huge": put("topic_length", b"\xff"),
    "topic": put("topic_length", b"/", 1),
    "topic apart": put("topic_length", b"apart1", 1),
    "properties length": put("properties_length", b"\x00\x0a"),
    "properties length huge": put("properties_length", b"\xff\xff"),
    "properties NUL": put("properties_length", b"\x00", 10),
    "properties not pairs": put("properties_length", b"____", 3),
}


@needs_native
@pytest.mark.parametrize("name", SCAN_FORGERIES)
def test_a_forged_record_ends_a_scan(name: str) -> None:
    first, second, third = stored(0, 5), stored(1, 6), stored(2, 7)
    forged = bytearray(second)
    SCAN_FORGERIES[name](forged, naive.read(second)["places"])
    assert forged != second
    plain, fast = both(lambda: scan_of(first + bytes(forged) + third))
    assert fast == plain
    assert (fast.end, fast.record_count) == (len(first), 1)


@needs_native
@pytest.mark.parametrize(("length", "taken"), [(127, 1), (128, 0)])
def test_names_of_topics_have_their_limit_in_a_scan(length: int, taken: int) -> None:
    fields = naive.read(stored(0, 5))
    size = fields["size"] - len(fields["topic"]) + length
    log = naive.write(fields | {"topic": b"a" * length, "size": size})
    plain, fast = both(lambda: scan_of(log))
    assert fast == plain
    assert fast.record_count == taken


@needs_native
@pytest.mark.parametrize(
    ("times", "fall"),
    [((5, 5, 6), False), ((5, 4, 6), True), ((-1, 0, 1), False), ((0, -1, 0), True)],
)
def test_a_scan_notices_times_that_fall(times: tuple[int, ...], fall: bool) -> None:
    log = b"".join(stored(index, time_ms) for index, time_ms in enumerate(times))
    plain, fast = both(lambda: scan_of(log))
    assert fast == plain
    assert (fast.times_fall, fast.first_time_ms, fast.last_time_ms) == (fall, times[0], times[-1])


@needs_native
@pytest.mark.parametrize(("spare", "taken"), [(8, 3), (7, 2)])
def test_a_scan_leaves_room_for_the_mark_that_ends_a_file(spare: int, taken: int) -> None:
    log = stored(0, 5) + stored(1, 5) + stored(2, 5)
    plain, fast = both(lambda: scan_of(log, len(log) + spare))
    assert fast == plain
    assert fast.record_count == taken


def test_queues_of_a_scan_go_on_and_begin_again() -> None:
    pairs = [(0, 3), (1, 3), (0, 4), (2, 3), (0, 3), (1, 4), (2, 4)]  # queue offset, queue
    log = b""
    for index, (queue_offset, queue_id) in enumerate(pairs):
        log += stored(index, 5, queue_id=queue_id, queue_offset=queue_offset)
    for run in both(lambda: scan_of(log)):
        found = [(q.queue_id, q.first_queue_offset, q.unit_count) for q in run.queues]
        assert found == [(3, 0, 3), (4, 0, 3), (3, 0, 1)]


def stored(
    index: int,
    time_ms: int,
    *,
    topic: bytes = b"orders",
    queue_id: int = 3,
    queue_offset: int | None = None,
) -> bytes:
    """The record with this number in a log of records that are equally long."""
    size = record.record_size(5, len(topic), 11)
    return record.encode(
        topic,
        queue_id,
        b"hello",
        b"TAGS\x01TagAB\x02",
        born_time_ms=1,
        born_host=bytes(8),
        store_host=bytes(8),
        queue_offset=index if queue_offset is None else queue_offset,
        log_offset=LOG_OFFSET + index * size,
        store_time_ms=time_ms,
    )


def scan_of(log: bytes, file_left: int = 4096) -> scan.Run:
    apart = scan.topic_list(["apart1"])
    return scan.scan_run(log, 0, log_offset=LOG_OFFSET, file_left=file_left, apart=apart)


@needs_native
@given(logs())
def test_index_keys_are_the_same(chunk: bytes) -> None:
    whole = record.decode_all(chunk[: accelerator().decode(chunk, 0, len(chunk), record.Record)[0]])
    framed = chunk[: sum(one.size for one in whole)]
    plain, fast = both(lambda: indexkeys.keys_of_chunk(framed).packed)
    assert fast == plain


@st.composite
def sent(draw: st.DrawFn) -> tuple[bytes, int]:
    """A batch of one queue, and how many records it has; some damaged."""
    run = draw(st.lists(strategies.records(b"orders", 3, (bytes(8), bytes(8))), max_size=4))
    run += [make(raw=raw) for raw in draw(st.lists(raw_properties, max_size=3))]
    data = bytearray(b"".join(run))
    for _ in range(draw(st.sampled_from([0, 0, 1, 2])) if data else 0):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data), max(1, len(run) + draw(st.sampled_from([0, 0, 0, 1, -1])))


def make(raw: bytes = b"TAGS\x01TagA\x02", body: bytes = b"hello") -> bytes:
    return record.encode(
        b"orders", 3, body, raw, born_time_ms=5, born_host=bytes(8), store_host=bytes(8)
    )


@needs_native
@given(
    sent(),
    st.sampled_from([BatchLimits(), BatchLimits(body_bytes_max=40)]),
    st.sampled_from([b"", b"", b"TAGS\x01", b"TAGS\x01TagA\x02", b"DELAY\x013\x02"]),
    st.sampled_from([0, 5000]),
)
def test_stamping_is_the_same(
    drawn: tuple[bytes, int], limits: BatchLimits, prefix: bytes, delay_ms: int
) -> None:
    data, count = drawn
    plain, fast = both(
        lambda: batch.stamp(
            data,
            [SegmentClaim(b"orders", 3, count, 50, prefix, delay_ms)],
            log_offset=LOG_OFFSET,
            store_time_ms=77,
            born_host=record.host_bytes("10.0.0.1", 40000),
            store_host=record.host_bytes("10.0.0.2", 10911),
            limits=limits,
        )
    )
    assert fast == plain


timer_times = st.sampled_from([0, 1, 999, 10**12 - 1, 10**12, 10**12 + 5, 10**13 - 1])


@st.composite
def timer_properties(draw: st.DrawFn) -> bytes:
    """As they should be, and nearly so."""
    raw = timers.with_time(timers.prefix("orders", 2), draw(timer_times))
    raw += draw(
        st.sampled_from([b"", b"a\x01b\x02", b"TAGS\x01A\x02", b"TIMER_DELIVER_MS\x019\x02"])
    )
    if draw(st.booleans()):
        changed = bytearray(raw)
        changed[draw(st.integers(0, len(raw) - 1))] = draw(st.sampled_from([0, 2, 57, 58, 90]))
        raw = bytes(changed)
    return raw[: draw(st.sampled_from([len(raw), len(raw), 30, 20]))]


@needs_native
@given(
    st.lists(timer_properties(), min_size=1, max_size=4),
    st.sampled_from([TimerForm.AT, TimerForm.AFTER]),
)
def test_stamping_times_is_the_same(raws: list[bytes], form: TimerForm) -> None:
    topic, hosts = timers.TIMER_TOPIC.encode(), {"born_host": bytes(8), "store_host": bytes(8)}
    fields: dict[str, Any] = {"born_time_ms": 5, **hosts}
    data = b"".join(record.encode(topic, 0, b"x", raw, **fields) for raw in raws)
    claim = SegmentClaim(topic, 0, len(raws), 50, timers.prefix("orders", 2), timer=form)
    plain, fast = both(
        lambda: batch.stamp(
            data,
            [claim],
            log_offset=LOG_OFFSET,
            store_time_ms=10**12 + 3,
            now_ms=10**12 - 7,
            limits=BatchLimits(),
            **hosts,
        )
    )
    assert fast == plain
    if isinstance(plain, batch.Stamped):
        found = record.decode_all(bytes(plain.buffer))
        dues = [timers.due_ms(one.raw_properties) for one in found]
        assert dues == [unit[2] for unit in queueunit.iterate(plain.units[0])]


@needs_native
@given(st.lists(timer_properties(), min_size=1, max_size=4), st.sampled_from([0, 0, 1]))
def test_scanning_times_is_the_same(raws: list[bytes], queue_id: int) -> None:
    data = b""
    for raw in raws:
        data += record.encode(
            timers.TIMER_TOPIC.encode(),
            queue_id,
            b"x",
            raw,
            born_time_ms=5,
            born_host=bytes(8),
            store_host=bytes(8),
            log_offset=LOG_OFFSET + len(data),
        )
    left = len(data) + record.BLANK_BYTES
    plain, fast = both(lambda: scan.scan_run(data, 0, log_offset=LOG_OFFSET, file_left=left))
    assert fast == plain
    found = {one.log_offset: one for one in record.decode_all(data[: plain.end])}
    codes = {at: code for queue in plain.queues for at, _, code in queueunit.iterate(queue.units)}
    assert codes == {at: units.tags_code(one) for at, one in found.items()}


@needs_native
@given(st.binary(max_size=200), st.integers(0, 250), st.integers(0, 4))
def test_a_run_is_never_longer_than_its_buffer(data: bytes, at: int, count: int) -> None:
    arguments = (b"t", 0, 0, 0, bytes(24), 0, 100, 100, b"\xffx", b"__", b"", 0, -1, 0)
    if at > len(data):
        with pytest.raises(ValueError, match="do not belong together"):
            accelerator().stamp(data, bytearray(data), at, count, *arguments)
        return
    end, units = accelerator().stamp(data, bytearray(data), at, count, *arguments)
    assert at <= end <= len(data)
    assert len(units) <= 20 * count


unit_sizes = st.sampled_from([91, 91, 200, 3000, 0, 1, 0x7FFFFFFF, -5])
unit_places = st.integers(0, 4000) | st.sampled_from([0, 91, 182, -1, 2**63 - 1])


@needs_native
@given(
    st.lists(st.tuples(unit_places, unit_sizes, st.integers(-3, 3)), max_size=12),
    st.integers(1, 6),
    st.integers(1, 5000),
    st.frozensets(st.integers(0, 3) | st.just(2**32 - 1), max_size=3) | st.none(),
)
@example([(0, 91, 0), (4000, 91, 0), (182, 91, 0)], 3, 5000, None)  # places that do not rise
def test_choosing_is_the_same(
    found: list[tuple[int, int, int]], count: int, size: int, codes: frozenset[int] | None
) -> None:
    units = b"".join(struct.pack(">qiq", *unit) for unit in found)
    plain, fast = both(lambda: pull.choose(units, 7, count, size, codes))
    assert fast == plain


@needs_native
@given(
    st.binary(max_size=300),
    st.binary(max_size=40),
    strategies.int32,
    st.integers(0, 2**32 - 1),
    strategies.int64,
    st.sampled_from([0, 16, 32, 48]),
    st.sampled_from([0, 1, 257, 513, 769]),
)
def test_encoding_is_the_same(
    body: bytes,
    middle: bytes,
    flag: int,
    counter: int,
    born_time_ms: int,
    host_flags: int,
    compression: int,
) -> None:
    sys_flag = host_flags | compression
    layout = record.LAYOUTS[host_flags]
    born, store = 20 if host_flags & 16 else 8, 20 if host_flags & 32 else 8
    size = layout.head_bytes + len(body) + len(middle) + 9
    head = layout.head.pack(
        *(size, record.MAGIC_V1, record.body_crc(body), 3, flag, 0, 0, sys_flag, born_time_ms),
        *(bytes(born), 0, bytes(store), 0, 0, len(body)),
    )
    buffer = bytearray(b"before")
    accelerator().encode(buffer, 3, flag, sys_flag, born_time_ms, body, middle, counter)
    assert buffer == b"before" + head + body + middle + b"%08X\x02" % counter


@needs_native
@pytest.mark.parametrize(
    ("place", "value"),
    [(0, 2**31), (0, -(2**31) - 1), (1, 2**31), (2, 2), (6, -1), (6, 2**32)],
)
def test_a_number_that_does_not_fit_is_refused(place: int, value: int) -> None:
    arguments: list[Any] = [0, 0, 0, 0, b"", b"", 0]
    arguments[place] = value
    buffer = bytearray(b"before")
    with pytest.raises(ValueError, match="does not fit"):
        accelerator().encode(buffer, *arguments)
    assert buffer == b"before"


@pytest.fixture(scope="module")
def plain_message() -> type[Message]:
    """The class where the extension was not built."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "accelerator", None)
        spec = spec_from_file_location("plain_model", model.__file__)
        assert spec is not None
        assert spec.loader is not None
        patch.setitem(sys.modules, "plain_model", module := module_from_spec(spec))
        spec.loader.exec_module(module)
    vars(module)["QueueRef"] = QueueRef  # the one that the messages have
    made: type[Message] = module.Message
    return made


FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "topic": st.sampled_from(["T", b"T", None]),
    "body": st.sampled_from([b"x", "x", bytearray(1)]),
    "tag": st.sampled_from(["", "A", None, 0]),
    "keys": st.sampled_from([(), ("k",), ["k"], [], "", "k", None, (1,)]),
    "properties": st.sampled_from([None, {}, {"a": "b"}, {"a": 1}, [], "x"]),
    "flag": st.sampled_from([0, 7, False, True, 2**31, None, 0.0, "x"]),
    "queue": st.sampled_from([None, QueueRef("T", 1), 5]),
    "delay_level": st.sampled_from([0, 1, 64, 65, -1, True, False, None, 2**70]),
    "sharding_key": st.sampled_from(["", "k", None, 5]),
    "wait_store": st.sampled_from([True, False, 1, None]),
    "deliver_at_ms": st.sampled_from([0, 2 * 10**12, 5, False, None]),
    "delay_ms": st.sampled_from([0, 5, -1, True, None]),
}


@needs_native
@given(st.data())
def test_making_a_message_is_the_same(plain_message: type[Message], data: st.DataObject) -> None:
    usual = {"topic": "T", "body": b"x"}
    odd = data.draw(st.sets(st.sampled_from(list(FIELDS)), max_size=3))
    given_fields = usual | {name: data.draw(FIELDS[name]) for name in FIELDS if name in odd}
    positional = data.draw(st.integers(0, len(given_fields)))
    names = list(given_fields)[:positional]
    if names != list(FIELDS)[:positional]:
        names = []
    arguments = [given_fields.pop(name) for name in names]

    def made(kind: type[Message]) -> object:
        try:
            message = kind(*arguments, **given_fields)
        except (CometError, TypeError) as error:
            return type(error), str(error)
        again = kind(*arguments, **given_fields)
        assert message == again == copy(message)
        return repr(message), {name: getattr(message, name) for name in FIELDS}

    assert made(Message) == made(plain_message)


@needs_native
def test_the_collector_does_not_track_messages() -> None:
    assert not gc.is_tracked(Message("T", b""))


def changed(**fields: object) -> Message:
    """A message that was right when it was made."""
    message = Message("T", b"")
    for name, value in fields.items():
        setattr(message, name, value)
    return message


class Text(str):
    """Equal to its text, and no plain one."""


class Other(Message):
    """Not a plain message."""


texts = st.text(st.characters(codec="utf-8", categories=["L", "N"]), min_size=1, max_size=5)
plain_messages = st.builds(
    Message,
    st.just("T"),
    st.binary(max_size=200),
    st.sampled_from(["", "A", "é"]),
    st.lists(texts, max_size=2).map(tuple),
    st.dictionaries(texts.map("x".__add__), texts, max_size=2),
    st.sampled_from([0, 0, 7, -1, 2**31 - 1, -(2**31)]),
)
odd_messages: list[Any] = [
    *(Message("U", b""), Message("T", bytes(300)), Message("T", b"", "new"), Other("T", b"")),
    *(changed(keys=("a b",)), changed(keys=("",))),
    *(changed(keys=("a\u00a0b",)), changed(keys=("a\u3000",))),
    *(Message("T", b"", keys=("a\x02",)), Message("T", b"", keys=("\ud800",))),
    *(Message("T", b"", properties={"A": "b"}), Message("T", b"", properties={"1": "b"})),
    *(Message("T", b"", properties={"TAGS": "b"}), Message("T", b"", properties={"WAIT": "b"})),
    *(Message("T", b"", properties={"a": ""}), Message("T", b"", properties={"": "a"})),
    *(Message("T", b"", properties={"TRACE_ON": "true"}),),
    *(Message("T", bytes(240), properties={"TRACE_ON": "x" * 500}),),
    *(Message("T", b"", properties={"a\x00": "b"}), Message("T", b"", properties={"a": "\x01"})),
    *(Message("T", b"", properties={"1ST_POP_TIME": "b"}),),
    *(Message("T", b"", properties={"a": "x" * size}) for size in (32_720, 32_721, 70_000)),
    *(Message("T", b"", delay_level=1), Message("T", b"", "a|b")),
    *(Message("T", b"", delay_ms=5), Message("T", b"", deliver_at_ms=2 * 10**12)),
    *(changed(delay_ms=False), changed(deliver_at_ms=None)),
    *(changed(keys=("k", 5)), changed(properties={"k": 5}), changed(flag=2**31)),
    *(Message("T", b"", queue=QueueRef("T", 0)), Message("T", b"", wait_store=False)),
    *(Message("T", b"", sharding_key="k"), None, b"T", Message(Text("T"), b"")),
    *(changed(topic=["T"]), changed(tag=[]), changed(tag=None), changed(body="text")),
    *(changed(body=bytearray(1)), changed(keys=[]), changed(properties=None), changed(flag=False)),
    *(changed(delay_level=False), changed(wait_store=1), changed(sharding_key=None)),
]


@needs_native
@given(
    st.lists(st.one_of(plain_messages, plain_messages, st.sampled_from(odd_messages)), max_size=12),
    st.integers(0, 14),
    st.integers(0, 12),
    st.integers(0, 3000) | st.just(2**20),
    st.sampled_from([4, 16]),
    st.booleans(),
)
def test_encoding_many_is_the_same(
    messages: list[Any], at: int, count_max: int, bytes_max: int, host_bytes: int, is_keyed: bool
) -> None:
    opened = broker_pb2.SendStreamOpened(
        born_host=bytes(host_bytes), store_host=bytes(4), body_max_bytes=4096
    )
    made = encoder.RecordEncoder(opened, SystemClock())
    form = made.form("T")
    for tag in ("", "A", "é"):
        form.middle(Message("T", b"", tag))
    limits = {"bytes_max": bytes_max, "body_bytes_max": 250, "born_time_ms": 1234}
    for message in messages if is_keyed else []:
        if message.__class__ is Message and message.topic == "T" and message.sharding_key == "":
            message.sharding_key = "ä"

    def run() -> tuple[bytes, list[int], bool, int]:
        buffer, made.counter = bytearray(b"before"), 0xFFFF
        starts, is_marked = made.extend(
            buffer, messages, at, count_max, form, 3, is_keyed=is_keyed, **limits
        )
        return bytes(buffer), list(starts), is_marked, made.counter

    plain, fast = both(run)
    assert fast == plain
    records, starts, is_marked, counter = fast
    assert is_marked is (b"TRACE_ON\x01" in records)
    assert counter == 0xFFFF + len(starts)
    made.counter = 0xFFFF
    alone = bytearray(b"before")
    for message in messages[at : at + len(starts)]:
        middle = form.middle(message)
        made.append_record(alone, 3, message.body, message.flag, 0, middle, 1234)
    assert records == alone


@needs_native
def test_delayed_messages_are_encoded_together() -> None:
    made = encoder.RecordEncoder(
        broker_pb2.SendStreamOpened(born_host=bytes(4), store_host=bytes(4), body_max_bytes=4096),
        SystemClock(),
    )
    form = made.form_with_prefix(QueueRef("T", 3, "g"), StoredForm(delay_level=5, wait_store=False))
    form.middle(Message("T", b""))
    kinds: list[dict[str, Any]] = [{}, {"properties": {"a": "b"}}, {"keys": ("k", "l")}]
    messages = [Message("T", b"x", delay_level=5, wait_store=False, **fields) for fields in kinds]
    messages += [Message("T", b"x", delay_level=5), Message("T", b"x", wait_store=False)]

    def run(at: int) -> tuple[bytes, int]:
        buffer, made.counter = bytearray(), 0
        limits = {"bytes_max": 4096, "body_bytes_max": 250, "born_time_ms": 1234}
        starts, _ = made.extend(buffer, messages, at, 9, form, 4, is_keyed=False, **limits)
        return bytes(buffer), len(starts)

    plain, fast = both(lambda: [run(at) for at in (0, 3, 4)])
    assert fast == plain
    assert [count for _, count in fast] == [3, 0, 0]
    records = record.decode_all(fast[0][0])
    assert [one.properties.get("KEYS") for one in records] == [None, None, "k l"]
    assert all(one.raw_properties.startswith(form.prefix) for one in records)


TIMES = st.sampled_from([10**12, 10**12 - 1, 2 * 10**12, 10**13 - 1, 10**13, 2**64])
DELAYS = st.sampled_from([1, 700, 40 * 86_400_000, 40 * 86_400_000 + 1, -1, 2**31, 2**64])
named_times = st.one_of(
    st.tuples(TIMES, st.just(0)),
    st.tuples(st.just(0), DELAYS),
    st.tuples(st.sampled_from([0, 2 * 10**12, None, True]), st.sampled_from([0, 5, None, True])),
)


@needs_native
@given(
    st.sampled_from([TimerForm.AT, TimerForm.AFTER]),
    st.booleans(),
    st.lists(st.tuples(plain_messages, named_times), min_size=1, max_size=6),
)
def test_messages_with_a_time_of_their_own_are_encoded_together(
    timer: TimerForm, wait_store: bool, drawn: list[tuple[Message, tuple[Any, Any]]]
) -> None:
    made = encoder.RecordEncoder(
        broker_pb2.SendStreamOpened(born_host=bytes(4), store_host=bytes(4), body_max_bytes=4096),
        SystemClock(),
    )
    stored = StoredForm(timer=timer, wait_store=wait_store)
    form = made.form_with_prefix(QueueRef("T", 3, "g"), stored)
    for tag in ("", "A", "é"):
        form.middle(Message("T", b"", tag))
    messages = [message for message, _ in drawn]
    for message, (at_ms, after_ms) in drawn:
        message.deliver_at_ms, message.delay_ms = at_ms, after_ms
        message.wait_store = wait_store
    usual = Message("T", b"x", wait_store=wait_store)
    usual.deliver_at_ms, usual.delay_ms = (2 * 10**12, 0) if timer is TimerForm.AT else (0, 5)
    messages.insert(0, usual)

    def run() -> tuple[bytes, int]:
        buffer, made.counter = bytearray(), 0
        limits = {"bytes_max": 4096, "body_bytes_max": 250, "born_time_ms": 1234}
        starts, _ = made.extend(buffer, messages, 0, 9, form, 0, is_keyed=False, **limits)
        return bytes(buffer), len(starts)

    plain, fast = both(run)
    assert fast == plain
    data, count = fast
    assert count >= 1
    for one, message in zip(record.decode_all(data), messages, strict=False):
        assert delayed.target_of(one.raw_properties) == ("T", 3)
        assert timers.due_ms(one.raw_properties) == message.deliver_at_ms + message.delay_ms
        assert form_of(message) == stored
        message.check()


@needs_native
@pytest.mark.parametrize(
    ("place", "value"),
    [(2, -1), (3, -1), (3, 1025), (6, -1), (6, 2**32), (7, 2**20), (9, 1), (11, -1), (11, 2**32)],
)
def test_a_run_with_a_number_out_of_range_is_refused(place: int, value: int) -> None:
    buffer = bytearray()
    form = ("T", {"": b"\x01T\x00\x00"}, 0, 0, True, b"", 0)
    arguments: list[Any] = [buffer, [Message("T", b"")], 0, 1, form, False]
    arguments += [4096, 100, 0, 0, 0, 0]
    arguments[place] = value
    with pytest.raises(ValueError, match="out of range"):
        accelerator().encode_run(*arguments)
    assert not buffer


@needs_native
@pytest.mark.parametrize(
    ("middle", "prefix_bytes"),
    [(b"", 0), (b"\x01", 0), (b"\x01T\x00", 0), (b"\x01T\x00\x00", 1), (b"\xff" * 9, 0)],
)
def test_a_middle_that_is_too_short_is_not_read(middle: bytes, prefix_bytes: int) -> None:
    buffer = bytearray()
    form = ("T", {"": middle}, prefix_bytes, 0, True, b"", 0)
    arguments: list[Any] = [buffer, [Message("T", b"")], 0, 1, form, False, 4096, 100, 0, 0, 0, 0]
    assert accelerator().encode_run(*arguments) == (b"", False)
    arguments[4] = (*form[:2], -1, *form[3:])
    with pytest.raises(ValueError, match="out of range"):
        accelerator().encode_run(*arguments)
    assert not buffer


# --- what the quick look takes ------------------------------------------------------------------


@needs_native
@pytest.mark.parametrize(
    ("raw", "tag"),
    [
        (b"", ""),
        ("TAGS\x01é\U0001f600\x02".encode(), "é\U0001f600"),
        ("TAGS\x01x\x02ünicode\x01naïve\x02".encode(), "x"),
        (b"TAGS\x01x", "x"),
        (b"TAGS\x01x\x02TAGS\x01yy\x02", "yy"),
    ],
)
def test_a_record_that_is_as_it_should_be_needs_no_plain_python(raw: bytes, tag: str) -> None:
    data = make(raw)
    arguments = (
        b"orders",
        3,
        9,
        LOG_OFFSET,
        bytes(24),
        0,
        100,
        100,
        b"\x05DELAY",
        b"__RMQ",
        b"",
        0,
        -1,
        0,
    )
    end, unit = accelerator().stamp(data, bytearray(data), 0, 1, *arguments)
    assert end == len(data)
    assert unit == struct.pack(">qiq", LOG_OFFSET, len(data), naive.hash_of(tag))


@needs_native
@pytest.mark.parametrize(
    "raw",
    [
        *(b"DELAY\x013\x02", b"__RMQ.x\x01v\x02", b"a\x01\xed\xa0\x80\x02", b"a\x01\xc0\xaf\x02"),
        *(b"a\x01\xf4\x90\x80\x80\x02", b"a\x01\xe9", b"a", b"\x01v\x02", b"a\x01\x02"),
        *(b"a\x01v\x00\x02", b"a\x01v\x01\x02", b"a\x01v\x02\x02", b"a\x01\x80\x02"),
        *(b"a\x01\xe0\x80\xaf\x02", b"a\x01\xf0\x80\x80\xaf\x02", b"a\x01\xe2\x82\x02"),
    ],
)
def test_the_quick_look_stops_at_what_may_be_wrong(raw: bytes) -> None:
    data = make() + make(raw)
    arguments = (
        b"orders",
        3,
        9,
        LOG_OFFSET,
        bytes(24),
        0,
        100,
        100,
        b"\x05DELAY",
        b"__RMQ",
        b"",
        0,
        -1,
        0,
    )
    stamped = bytearray(data)
    end, units = accelerator().stamp(data, stamped, 0, 2, *arguments)
    assert (end, len(units)) == (len(make()), 20)
    assert stamped[end:] == data[end:]


# --- the key index ------------------------------------------------------------------------------

slots = st.sampled_from([0, 1, 2, 3, 39, 40, -1, -(2**31), 2**31 - 1])
keys = st.lists(
    st.builds(
        indexfile.Key, st.integers(0, 2**31 - 1), strategies.int64, st.integers(-(2**40), 2**62)
    ),
    min_size=1,
    max_size=12,
)


@needs_native
@given(st.lists(keys, min_size=1, max_size=3), st.lists(slots, min_size=5, max_size=5))
def test_index_files_are_the_same(runs: list[list[indexfile.Key]], before: list[int]) -> None:
    sizes = indexfile.Sizes(hash_slots=5, entries=40)

    def insert() -> tuple[object, bytes]:
        file, header = bytearray(sizes.file_bytes), indexfile.Header()
        struct.pack_into(">5i", file, indexfile.HEADER_BYTES, *before)
        for run in runs:
            header = indexfile.insert(memoryview(file), sizes, header, indexfile.Keys.of(run))
        return header, bytes(file)

    plain, fast = both(insert)
    assert fast == plain


@needs_native
@pytest.mark.parametrize(
    ("file_bytes", "key_bytes", "slots", "entries", "number"),
    [
        (40 + 20 + 200, 20, 5, 10, 0),
        (40 + 20 + 200, 20, 5, 10, 10),
        (40 + 20 + 199, 20, 5, 10, 1),
        (40 + 20 + 200, 19, 5, 10, 1),
        (40 + 20 + 200, 20, 0, 10, 1),
        (40 + 20 + 200, 200, 5, 10, 1),
        (40 + 20 + 200, 20, 2**31, 10, 1),
    ],
)
def test_keys_that_do_not_fit_are_refused(
    file_bytes: int, key_bytes: int, slots: int, entries: int, number: int
) -> None:
    file = bytearray(file_bytes)
    with pytest.raises(ValueError, match="do not fit"):
        accelerator().index_put(file, bytes(key_bytes), slots, entries, number, 0)
    assert not any(file)


@needs_native
def test_places_outside_are_refused() -> None:
    fast = accelerator()
    for at in (-1, 2):
        with pytest.raises(ValueError, match="outside"):
            fast.scan(b"x", at, 0, 1, b"", delayed.delays_ms())
        with pytest.raises(ValueError, match="outside"):
            fast.decode(b"x", at, 1, record.Record)
        with pytest.raises(ValueError, match="outside"):
            fast.index_keys(b"x", at)
    with pytest.raises(ValueError, match="outside"):
        fast.decode(b"x", 0, 2, record.Record)
    with pytest.raises(TypeError, match="tuples"):
        fast.decode(b"x", 0, 1, dict)  # type: ignore[type-var]
    with pytest.raises(TypeError, match="8 arguments"):
        fast.encode(bytearray())  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="not whole"):
        fast.choose(bytes(19), 1, 1, array("I"))
    with pytest.raises(ValueError, match="not whole"):
        fast.of_queue(b"", bytes(19), 0, b"", 0)
