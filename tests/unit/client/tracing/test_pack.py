"""Packed trace records: what the extension makes, plain Python makes, and both are what the codec
writes for the same messages.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq import native
from cometmq.client.received import ReceivedMessage
from cometmq.client.tracing import pack
from cometmq.client.tracing.pack import Packed, Packer, after_form, before_form, sent_form
from cometmq.client.tracing.sampling import Sampling, is_wanted
from cometmq.format import trace
from cometmq.format.compression import ZlibBody, compress_records
from cometmq.format.ids import offset_id
from cometmq.format.properties import KEYS, SHARDING_KEY, TAGS, UNIQ_KEY
from cometmq.format.properties import decode as decode_properties
from cometmq.format.record import decode, encode
from cometmq.format.trace import TRACE_TOPIC, Pub, SubAfter, SubBefore, TraceRecord
from cometmq.model import QueueRef

STREAM = "0123456789ABCDEF0123456789"
HOST = bytes((10, 0, 0, 1, 0, 0, 0x2A, 0x9F))
ROOM = 1_000

hostile = st.one_of(
    st.sampled_from(
        [
            *(
                "",
                "k1",
                "k1 k2",
                " k1  k1 ",
                "ключ",
                "a\u3000b",
                "a\u00a0b",
                "a\u2003b",
                "a\u1680b",
            ),
            *("a\x01b", "a\x00b", "\x7f", "a\tb", "a\x1cb", "Pub\x011", "x" * 1_025, "y" * 5_000),
            *("é" * 700, "\U0001f600", "あ", " ".join(f"{n}" for n in range(300))),
        ]
    ),
    st.text(max_size=12),
)
marks = st.sampled_from(["true", "false", "maybe", ""])
names = st.sampled_from([KEYS, TAGS, trace.TRACE_ON, SHARDING_KEY, UNIQ_KEY, "KEYSX", "a", ""])
ids = st.one_of(
    st.integers(0, 2**32 - 1).map(lambda n: f"{STREAM}{n:08X}"),
    st.integers(0, 2**32 - 1).map(lambda n: f"{STREAM}{n:08x}"),
    st.sampled_from(["", f"{STREAM}+0000001", f"{STREAM}0x00000A", "a b", "x" * 1_025, "ид", "7"]),
)
odd_pairs = st.lists(st.tuples(names, hostile | marks), max_size=4)
usual_pairs = st.lists(
    st.one_of(
        st.tuples(st.just(KEYS), hostile),
        st.tuples(st.just(TAGS), hostile),
        st.tuples(st.just(trace.TRACE_ON), marks),
    ),
    max_size=3,
    unique_by=lambda pair: pair[0],
)


def raw(pairs: Sequence[tuple[str, str]], tail: bytes = b"") -> bytes:
    return "".join(f"{n}\x01{v}\x02" for n, v in pairs).encode("utf-8", "replace") + tail


messages = st.tuples((usual_pairs | odd_pairs).map(raw), st.binary(max_size=20))
invalid = st.tuples(
    st.sampled_from([b"KEYS\x01\xff\x02", b"KEYS\x01a", b"TAGS\x01\xc3", b"\x02"]), st.just(b"")
)


def record_of(properties: bytes, body: bytes) -> bytes:
    return encode(
        b"T", 3, body, properties, born_time_ms=5, born_host=bytes(8), store_host=bytes(8)
    )


def packed(packer: Packer) -> list[Packed]:
    """With plain bodies."""
    found = []
    while (one := packer.next()) is not None:
        if isinstance(one.body, ZlibBody):
            one = one._replace(body=zlib.decompress(one.body))
            assert len(one.body) > pack.COMPRESS_ABOVE_BYTES
        assert len(one.body) <= pack.BODY_BYTES_MAX
        found.append(one)
    assert not len(packer)
    return found


def both(
    fill: Callable[[Packer], Any], period: int, room: int, **limits: int
) -> list[tuple[list[Packed], int, Any]]:
    """What a packer has afterwards, in plain Python and with the extension."""
    results = []
    for chosen in {None, native.accelerator}:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pack, "accelerator", chosen)
            packer = Packer(TRACE_TOPIC, Sampling(period), room, **limits)
            answer = fill(packer)
            results.append((packed(packer), packer.take_dropped(), answer))
    return results


def check_keys(found: list[Packed], keys_max: int) -> None:
    """Each message is found by what its records are about, as far as its keys have room."""
    for one in found:
        words = one.keys.split(" ") if one.keys else []
        assert len(set(words)) == len(words)
        assert all(word.strip() == word and word for word in words)
        assert len(one.keys.encode()) < keys_max


@given(
    sent=st.lists(messages | invalid, min_size=1, max_size=12),
    period=st.integers(0, 4),
    counter=st.integers(0, 2**32 - 20),
    body_max=st.sampled_from([300, 2_000, pack.BODY_BYTES_MAX]),
    keys_max=st.sampled_from([50, 600, pack.KEYS_BYTES_MAX]),
    room=st.sampled_from([0, 3, ROOM]),
    kind=st.sampled_from([-1, trace.HALF, trace.DELAY]),
    is_stored=st.booleans(),
    may_be_marked=st.booleans(),
)
def test_records_of_what_was_sent(
    sent: list[tuple[bytes, bytes]],
    period: int,
    counter: int,
    body_max: int,
    keys_max: int,
    room: int,
    kind: int,
    is_stored: bool,
    may_be_marked: bool,
) -> None:
    tail = [f"UNIQ_KEY\x01{STREAM}{counter + n:08X}\x02".encode() for n in range(len(sent))]
    parts = [record_of(p + end, body) for (p, body), end in zip(sent, tail, strict=True)]
    records, starts = b"".join(parts), array("I", [0, *accumulate(map(len, parts[:-1]))])
    sampled = Sampling(period).indexes(STREAM, counter, len(sent))
    is_marked = may_be_marked or b"TRACE_ON" in records
    form = sent_form(
        *(7, "P", "T", "b:1", 3, STREAM, counter),
        kind=kind,
        id_host=HOST if is_stored else b"",
        log_offset=4096,
    )

    def fill(packer: Packer) -> None:
        packer.put_sent(records, starts, 0, len(sent), sampled, form, is_marked=is_marked)

    results = both(fill, period=period, room=room, body_bytes_max=body_max, keys_bytes_max=keys_max)
    assert results[0] == results[-1]
    found, dropped, _ = results[0]
    expected: list[TraceRecord] = []
    for index, part in enumerate(parts):
        record = decode(part)
        named = record.properties
        if is_wanted(named.get(trace.TRACE_ON, ""), index in sampled):
            stored_at = offset_id(HOST, 4096 + starts[index]) if is_stored else ""
            order = trace.ORDER if named.get(SHARDING_KEY) else trace.NORMAL
            expected.append(
                Pub(
                    7,
                    "P",
                    "T",
                    f"{STREAM}{counter + index:08X}",
                    named.get(TAGS, ""),
                    named.get(KEYS, ""),
                    "b:1",
                    record.body_bytes,
                    3,
                    order if kind < 0 else kind,
                    stored_at,
                    is_stored,
                )
            )
    assert dropped == max(0, len(expected) - room)
    text = "".join(map(trace.encode, expected[:room]))
    assert b"".join(one.body for one in found) == text.encode("utf-8", "replace")
    assert sum(one.record_count for one in found) == min(room, len(expected))
    check_keys(found, keys_max)
    if keys_max == pack.KEYS_BYTES_MAX and found:
        assert expected[0].message_id in found[0].keys.split()


received_pairs = st.tuples(ids, usual_pairs | odd_pairs).map(
    lambda made: raw([*made[1], *([(UNIQ_KEY, made[0])] if made[0] else [])])
)


@given(
    got=st.lists(st.tuples(received_pairs, st.sampled_from(["T", TRACE_TOPIC])), max_size=8),
    period=st.integers(0, 3),
    room=st.sampled_from([0, 2, ROOM]),
    attempt=st.integers(0, 3),
    is_before=st.booleans(),
)
def test_records_of_what_was_received(
    got: list[tuple[bytes, str]], period: int, room: int, attempt: int, is_before: bool
) -> None:
    queues = {topic: QueueRef(topic, 0, "g") for topic in ("T", TRACE_TOPIC)}
    received = [ReceivedMessage(record_of(p, b"."), queues[topic]) for p, topic in got]
    for message in received:
        message.attempt = attempt
    form = before_form(5, "G", "R1") if is_before else after_form("R1", 9, trace.FAILED, 8, "G")

    def fill(packer: Packer) -> list[ReceivedMessage]:
        chosen = packer.choose(received)
        packer.put_calls(chosen, form)
        return chosen

    results = both(fill, period=period, room=room)
    assert results[0] == results[-1]
    found, dropped, chosen = results[0]
    expected: list[TraceRecord] = []
    wanted: list[ReceivedMessage] = []
    for message in received:
        named = decode_properties(message.raw_properties)
        unique_id, keys = named.get(UNIQ_KEY, ""), named.get(KEYS, "")
        is_sampled = Sampling(period).chooses(unique_id)
        if message.queue.topic == TRACE_TOPIC or not is_wanted(
            named.get(trace.TRACE_ON, ""), is_sampled
        ):
            continue
        wanted.append(message)
        name = unique_id or message.message_id
        if is_before:
            expected.append(SubBefore(5, "G", "R1", name, attempt - 1, keys))
        else:
            expected.append(SubAfter("R1", name, 9, False, keys, trace.FAILED, 8, "G"))
    assert chosen == wanted
    assert dropped == max(0, len(expected) - room)
    text = "".join(map(trace.encode, expected[:room]))
    assert b"".join(one.body for one in found) == text.encode("utf-8", "replace")


@pytest.mark.usefixtures("implementation")
def test_many_records_make_few_messages_and_each_is_found_by_its_keys() -> None:
    count = 3_000
    packer = Packer(TRACE_TOPIC, Sampling(1), count)
    parts = [
        record_of(raw([(KEYS, f"order-{n} all"), (UNIQ_KEY, f"{STREAM}{n:08X}")]), bytes(100))
        for n in range(count)
    ]
    starts = array("I", [0, *accumulate(map(len, parts[:-1]))])
    form = sent_form(
        *(1_700_000_000_000, "P", "T", "broker:10911", 3, STREAM, 0),
        kind=-1,
        id_host=HOST,
        log_offset=0,
    )
    packer.put_sent(b"".join(parts), starts, 0, count, range(count), form, is_marked=False)
    assert packer.is_pressing
    found = packed(packer)
    assert len(found) <= count // 300
    assert len(compress_records(found[0].body)) < len(found[0].body) // 6
    number = 0
    for one in found:
        words = set(one.keys.split(" "))
        for record in trace.decode(one.body.decode()):
            assert record.message_id == f"{STREAM}{number:08X}"
            assert {record.message_id, f"order-{number}", "all"} <= words
            number += 1
    assert number == count


def test_a_pack_of_the_extension_refuses_what_is_out_of_range() -> None:
    if native.accelerator is None:
        pytest.skip("the C extension is not built")
    kind = native.accelerator.TracePack
    for limits in ((-1, 10, 1), (10, -1, 1), (10, 16_385, 1)):
        with pytest.raises(ValueError, match="out of range"):
            kind(*limits)
    one = kind(100, 100, 10)
    form = sent_form(1, "P", "T", "h", 1, STREAM, 0, kind=-1, id_host=b"", log_offset=0)
    starts = array("I", [0, 2**32 - 1])
    for first, at, count, step in (
        (-1, 0, 1, 1),
        (0, -1, 1, 1),
        (0, 0, 3, 1),
        (2, 0, 1, 1),
        (0, 0, 1, -1),
    ):
        with pytest.raises(ValueError, match="out of range"):
            one.put_sent(b"", starts, first, at, count, 0, step, True, form)
    assert one.put_sent(b"\x00" * 200, starts, 0, 0, 2, 0, 1, True, form) == 0, "no record there"
    assert one.put_sent(b"", starts, 1, 0, 1, 0, 1, True, form) == 0
    assert one.put_sent(b"", starts, 1, 0, 1, 0, 0, False, form) == 1, "none is looked at"
    with pytest.raises(ValueError, match="digit"):
        one.put_sent(b"", starts, 0, 0, 0, 0, 1, True, form._replace(kind=10))
    assert one.put_calls([object()], 0, (b"", b"", b"")) == 0
    assert one.choose([object()], 0, 1, "T", []) == 0
    with pytest.raises(TypeError):
        one.put_calls(7, 0, (b"", b"", b""))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        one.choose(7, 0, 1, "T", [])  # type: ignore[arg-type]
    assert one.take() == (b"", b"")


@pytest.mark.usefixtures("implementation")
def test_a_listener_may_delete_the_queue_of_a_message_that_comes_again() -> None:
    queue = QueueRef("T", 0, "g")
    whole, hurt = (ReceivedMessage(record_of(b"UNIQ_KEY\x017\x02", b"."), queue) for _ in range(2))
    del hurt.queue
    packer = Packer(TRACE_TOPIC, Sampling(1), ROOM)
    for messages in ([hurt], [whole, hurt]):
        with pytest.raises(AttributeError):
            packer.choose(messages)
