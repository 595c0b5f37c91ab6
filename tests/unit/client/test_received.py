from __future__ import annotations

import copy
import gc
import importlib.util
import pickle
import sys
import zlib
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cometmq import native
from cometmq.client import received
from cometmq.client.received import ReceivedMessage
from cometmq.client.sending.encoder import encode_application_properties
from cometmq.errors import BodyCompressionInvalid
from cometmq.format.properties import FIELD_NAMES, RESERVED, STORED_FRAMING, tag_of, verify
from cometmq.format.record import decode, encode
from cometmq.model import Message, QueueRef

QUEUE = QueueRef("T", 3, "g1")
PROPERTIES = b"UNIQ_KEY\x01ID\x02KEYS\x01k1 k2\x02TAGS\x01A\x02p\x01v\x02__SHARDINGKEY\x01s\x02"


def plain() -> Any:
    """``received`` as it is without the extension."""
    spec = importlib.util.find_spec("cometmq.client.received")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "accelerator", None)
        spec.loader.exec_module(module)
    return module


PLAIN = plain()


@pytest.fixture(params=[received, PLAIN], ids=["native", "plain"])
def kind(request: pytest.FixtureRequest) -> type[ReceivedMessage]:
    found: type[ReceivedMessage] = request.param.ReceivedMessage
    return found


def stored(body: bytes = b"body", properties: bytes = PROPERTIES, **fields: Any) -> bytes:
    hosts = {"born_host": bytes(8), "store_host": bytes(8)}
    return encode(b"T", 3, body, properties, **{"born_time_ms": 5, **hosts, **fields})


@pytest.mark.parametrize("hosts", [(8, 8), (20, 8), (8, 20), (20, 20)])
def test_a_message_reads_its_record(kind: type[ReceivedMessage], hosts: tuple[int, int]) -> None:
    raw = stored(
        born_host=bytes(hosts[0]),
        store_host=bytes(hosts[1]),
        flag=2,
        queue_offset=7,
        log_offset=800,
        store_time_ms=6,
        reconsume_times=4,
    )
    message = kind(raw, QUEUE)
    assert (message.topic, message.queue, message.attempt) == ("T", QUEUE, 1)
    assert (message.body, message.stored_body, message.tag) == (b"body", b"body", "A")
    assert (message.keys, message.unique_id, message.properties["p"]) == (("k1", "k2"), "ID", "v")
    assert (message.sharding_key, message.raw_properties) == ("s", PROPERTIES)
    assert (message.message_id, message.log_offset) == ("g1/800", 800)
    assert (message.queue_offset, message.flag, message.reconsume_times) == (7, 2, 4)
    assert (message.born_time_ms, message.store_time_ms) == (5, 6)
    assert (message.raw, message.size, message.record) == (raw, len(raw), decode(raw))
    assert repr(message).startswith("ReceivedMessage('g1/800'")


PIECES = [b"TAGS\x01", b"TAGS", b"\x01", b"\x02", b"A", "é".encode(), b"\xff", b"x\x01y\x02"]


@given(st.lists(st.sampled_from(PIECES), max_size=12).map(b"".join))
def test_the_tag_is_the_same(properties: bytes) -> None:
    raw = stored(properties=properties)
    tag = PLAIN.ReceivedMessage(raw, QUEUE).tag
    assert ReceivedMessage(raw, QUEUE).tag == tag == tag_of(properties).decode("utf-8", "replace")


@pytest.mark.parametrize("raw", [b"", stored()[:-1], stored() + b"x", stored() * 2])
def test_a_message_is_one_record(kind: type[ReceivedMessage], raw: bytes) -> None:
    with pytest.raises(ValueError, match="not one whole record"):
        kind(raw, QUEUE)


def test_a_message_that_comes_again_has_its_first_topic(kind: type[ReceivedMessage]) -> None:
    raw = stored(properties=b"RETRY_TOPIC\x01ns%T\x02")
    queue = QueueRef("%RETRY%g", 0, "g1")
    assert kind(raw, queue).topic == "ns%T"
    assert kind(raw, queue, lambda name: name.removeprefix("ns%")).topic == "T"


def test_a_compressed_body_is_read_as_it_was_sent(kind: type[ReceivedMessage]) -> None:
    message = kind(stored(zlib.compress(b"text"), sys_flag=1), QUEUE)
    assert message.body == b"text"
    assert message.body is message.body
    assert message.stored_body == message.record.body == zlib.compress(b"text")


def test_a_body_that_cannot_be_decompressed_is_refused(kind: type[ReceivedMessage]) -> None:
    message = kind(stored(b"not zlib", sys_flag=1), QUEUE)
    for _ in range(2):
        with pytest.raises(BodyCompressionInvalid):
            _ = message.body
    assert message.stored_body == b"not zlib"


@given(
    pairs=st.dictionaries(
        st.sampled_from([*sorted(RESERVED | FIELD_NAMES), "CORRELATION_ID", "REPLY_TO_CLIENT", "p"])
        | st.text(max_size=5),
        st.text(max_size=5),
        max_size=8,
    )
)
def test_properties_of_the_application_can_be_sent_on(pairs: dict[str, str]) -> None:
    """Whatever a record has: also what RocketMQ takes from its producers."""
    text = "".join(f"{name}\x01{value}\x02" for name, value in pairs.items()).encode()
    assume(STORED_FRAMING.fullmatch(text))
    for module in (received, PLAIN):
        message = module.ReceivedMessage(stored(properties=text), QUEUE)
        sent = Message("U", message.body, properties=message.user_properties)
        verify(encode_application_properties(sent))
        assert message.user_properties.items() <= message.properties.items()


def test_properties_of_the_application_are_all_that_it_set(kind: type[ReceivedMessage]) -> None:
    assert kind(stored(), QUEUE).user_properties == {"p": "v"}
    request = b"CORRELATION_ID\x01c\x02REPLY_TO_CLIENT\x01r\x02TTL\x019\x02p\x01v\x02"
    assert kind(stored(properties=request), QUEUE).user_properties == {"p": "v"}
    alone = b"TTL\x019\x02MSG_TYPE\x01m\x02"
    assert kind(stored(properties=alone), QUEUE).user_properties == {"TTL": "9", "MSG_TYPE": "m"}


def test_properties_are_parsed_once(kind: type[ReceivedMessage]) -> None:
    message = kind(stored(), QUEUE)
    assert message.properties is message.properties


def test_messages_are_equal_only_to_themselves(kind: type[ReceivedMessage]) -> None:
    one, other = kind(stored(), QUEUE), kind(stored(), QUEUE)
    assert len({one, other}) == 2
    assert one == one


def test_only_the_attempt_can_be_set(kind: type[ReceivedMessage]) -> None:
    message: Any = kind(stored(), QUEUE)
    message.attempt = 3
    assert message.attempt == 3
    for name in ("body", "queue_offset", "record", "note"):
        with pytest.raises(AttributeError):
            setattr(message, name, 1)


def test_messages_can_be_copied_and_sent_to_other_processes() -> None:
    message = ReceivedMessage(stored(), QUEUE)
    message.attempt = 2
    for twin in (copy.copy(message), copy.deepcopy(message), pickle.loads(pickle.dumps(message))):
        assert (twin.raw, twin.queue, twin.attempt) == (message.raw, QUEUE, 2)


def test_a_kept_message_keeps_nothing_else_of_its_pull() -> None:
    buffer = b"".join(stored(bytes(1000), queue_offset=n) for n in range(1000))
    references = sys.getrefcount(buffer)
    kept = received.decode_received(buffer, QUEUE, None)[500]
    assert sys.getrefcount(buffer) == references
    assert sys.getsizeof(kept) + sys.getsizeof(kept.body) < 1500


@pytest.mark.skipif(native.accelerator is None, reason="the C extension is not built")
def test_the_garbage_collector_does_not_track_messages() -> None:
    assert not gc.is_tracked(ReceivedMessage(stored(), QUEUE))
