from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.client.sending.encoder import RecordEncoder
from cometmq.clock import SystemClock
from cometmq.errors import (
    BodyTooLarge,
    CometError,
    InvalidRequest,
    PropertiesInvalid,
    PropertiesTooLarge,
    PropertyReserved,
)
from cometmq.format.compression import Compression, compress
from cometmq.format.ids import UNIQUE_ID_COUNTER_MAX
from cometmq.format.record import Record, decode, encode
from cometmq.model import Message
from cometmq.v1 import broker_pb2

pytestmark = pytest.mark.usefixtures("implementation")

WORDS = st.text(st.characters(codec="utf-8", categories=["L", "N"]), min_size=1, max_size=8)


def opened(host_bytes: int = 4, body_max_bytes: int = 4096) -> broker_pb2.SendStreamOpened:
    return broker_pb2.SendStreamOpened(
        born_host=bytes(host_bytes), store_host=bytes(host_bytes), body_max_bytes=body_max_bytes
    )


def encoder(**fields: Any) -> RecordEncoder:
    return RecordEncoder(opened(**fields), SystemClock())


def record_of(made: RecordEncoder, message: Message, queue_id: int = 0) -> bytes:
    """As a batch gets it."""
    middle = made.form(message.topic).middle(message)
    record = bytearray()
    made.append_record(record, queue_id, message.body, message.flag, 0, middle, 1234)
    assert len(record) == made.fixed_bytes + len(message.body) + len(middle)
    return bytes(record)


def test_a_compressed_body_stays_so_when_it_is_encoded_again() -> None:
    made = encoder()
    stored, sys_flag = compress(bytes(5000), Compression.ZLIB)
    middle = made.form("T").middle(Message("T", b""))
    record = bytearray()
    made.append_record(record, 0, stored, 0, sys_flag, middle, 1234)
    first = decode(bytes(record))
    made.take(opened(host_bytes=16))
    again = decode(made.again(first, 1))
    assert again.plain_body == bytes(5000)


@given(
    body=st.binary(max_size=100),
    tag=WORDS | st.just(""),
    keys=st.lists(WORDS, max_size=3),
    # Not a name that the queue keeps for itself: Hypothesis finds those in the source.
    properties=st.dictionaries(WORDS.map("x".__add__), WORDS, max_size=3),
    flag=st.integers(-(2**31), 2**31 - 1),
    host_bytes=st.sampled_from([4, 16]),
)
def test_the_record_is_the_one_that_the_format_makes(
    body: bytes,
    tag: str,
    keys: list[str],
    properties: dict[str, str],
    flag: int,
    host_bytes: int,
) -> None:
    message = Message("Topic", body, tag, tuple(keys), properties, flag)
    made = record_of(encoder(host_bytes=host_bytes), message, 5)
    record = decode(made)
    own = {key: value for key, value in record.properties.items() if key in properties}
    assert (record.body, record.tag, record.keys, own) == (body, tag, tuple(keys), properties)
    host = bytes(host_bytes + 4)
    assert made == encode(
        b"Topic",
        5,
        body,
        record.raw_properties,
        born_time_ms=1234,
        born_host=host,
        store_host=host,
        flag=flag,
    )


def test_unique_ids_count_from_zero_within_an_incarnation() -> None:
    made = encoder()
    ids = [decode(record_of(made, Message("T", b""))).unique_id for _ in range(3)]
    assert [unique_id[26:] for unique_id in ids] == ["00000000", "00000001", "00000002"]
    assert {unique_id[:26] for unique_id in ids} == {made.stream}
    assert encoder().stream != made.stream


def test_a_counter_that_would_wrap_begins_a_new_incarnation() -> None:
    made = encoder()
    record_of(made, Message("T", b"", "A"))
    before = made.stream
    made.counter = UNIQUE_ID_COUNTER_MAX - 10
    made.begin_batch(10)
    assert made.stream == before
    made.begin_batch(11)
    record = decode(record_of(made, Message("T", b"", "A")))
    assert made.stream != before
    assert record.unique_id == made.stream + "00000000"


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (Message("T", b"", "a|b"), PropertiesInvalid),
        (Message("T", b"", "a\nb"), PropertiesInvalid),
        (Message("T", b"", " a"), PropertiesInvalid),
        (Message("T", b"", "x" * 257), PropertiesInvalid),
        (Message("T", b"", properties={"a": ""}), PropertiesInvalid),
        (Message("T", b"", properties={"a": "\x01"}), PropertiesInvalid),
        (Message("T", b"", properties={"a": "\ud800"}), PropertiesInvalid),
        (Message("T", b"", properties={"TAGS": "x"}), PropertyReserved),
        (Message("T", b"", properties={"UNIQ_KEY": "x"}), PropertyReserved),
        (Message("T", b"", properties={"DELAY": "3"}), PropertyReserved),
        (Message("T", b"", properties={"__RMQ.TRANSIENT.x": "3"}), PropertyReserved),
        (Message("T", b"", properties={"a": "x" * 32_767}), PropertiesTooLarge),
        (Message("T", b"", properties={"a": "x" * 32_721}), PropertiesTooLarge),
    ],
)
def test_bad_properties_are_refused(message: Message, error: type[CometError]) -> None:
    made = encoder()
    with pytest.raises(error):
        record_of(made, message)
    assert made.counter == 0


@pytest.mark.parametrize("key", ["", " ", "a b", "a\tb", "a\n", "a\u00a0b", "a\u2003b", "\x1c"])
def test_a_key_with_a_blank_is_refused_by_the_message_and_when_it_was_changed(key: str) -> None:
    with pytest.raises(PropertiesInvalid, match="no blanks") as refused:
        Message("T", b"", keys=("good", key))
    assert "several keys" in str(refused.value), "advice that fits"
    message = Message("T", b"", keys=("good",))
    message.keys = (key,)
    with pytest.raises(PropertiesInvalid, match="no blanks"):
        record_of(encoder(), message)


def test_properties_may_fill_their_field_to_the_last_byte() -> None:
    record = decode(record_of(encoder(), Message("T", b"", properties={"a": "x" * 32_720})))
    assert len(record.raw_properties) == 32_767


def changed(**fields: Any) -> Message:
    """A message that was right when it was made."""
    message = Message("T", b"")
    for name, value in fields.items():
        setattr(message, name, value)
    return message


@pytest.mark.parametrize(
    "message", [changed(keys="o-42"), changed(properties={"n": 5}), changed(tag=5)]
)
def test_what_was_changed_into_nonsense_is_refused(message: Message) -> None:
    with pytest.raises(InvalidRequest):
        encoder().form("T").middle(message)


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (Message("T", bytes(4097)), BodyTooLarge),
        (changed(body=bytearray(1)), InvalidRequest),
        (changed(flag=2**31), InvalidRequest),
    ],
)
def test_bad_bodies_and_flags_are_refused(message: Message, error: type[CometError]) -> None:
    with pytest.raises(error):
        encoder().refuse(message)


def test_a_record_for_another_lane_keeps_its_identity() -> None:
    message = Message("T", b"body", "A", ("k",), {"p": "v"}, 3)
    old = decode(record_of(encoder(), message))
    new = decode(encoder().again(old, 9))
    assert new.unique_id == old.unique_id
    assert facts(new) == facts(old)
    assert new.queue_id == 9


def test_a_record_for_other_host_lengths_keeps_its_identity() -> None:
    made = encoder()
    old = decode(record_of(made, Message("T", b"body", "A"), 4))
    assert not made.take(opened(4))
    assert made.take(opened(16))
    new = decode(made.again(old, 4))
    assert (new.unique_id, new.sys_flag, facts(new)) == (old.unique_id, 48, facts(old))


def facts(record: Record) -> tuple[object, ...]:
    pairs = {name: value for name, value in record.properties.items() if name != "UNIQ_KEY"}
    return record.body, record.topic, record.flag, record.born_time_ms, pairs
