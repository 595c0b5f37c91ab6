from __future__ import annotations

import pytest

from cometmq.errors import FilterInvalid, InvalidRequest
from cometmq.format import properties, record
from cometmq.member.read.reader import PullAnswer
from cometmq.member.rpc import convert
from cometmq.messaging.groups import Member, Membership
from cometmq.messaging.pull import PullStatus
from cometmq.model import FlushMode, Position, Subscription, TopicConfig
from cometmq.v1 import broker_pb2 as pb
from cometmq.v1 import common_pb2 as common

DEFAULT = TopicConfig("", 8, 4, permission=6, flush_mode=FlushMode.SYNC)
V4, V6 = record.host_bytes("10.0.0.1", 7), record.host_bytes("fe80::1", 8)


def stored(**changes: object) -> record.Record:
    fields = {
        "born_time_ms": 1,
        "born_host": V4,
        "store_host": V4,
        "queue_offset": 3,
        "log_offset": 99,
        "store_time_ms": 2,
        **changes,
    }
    pairs = {"TAGS": "x", "KEYS": "a b", "UNIQ_KEY": "id", "colour": "blue"}
    data = record.encode(b"T", 1, b"body", properties.encode(pairs), **fields)  # type: ignore[arg-type]
    return record.decode(data)


def test_a_topic_takes_the_default_for_what_is_not_said() -> None:
    got = convert.topic(common.TopicConfig(name="T"), DEFAULT)
    assert got == TopicConfig("T", 8, 4, 6, FlushMode.SYNC)
    said = common.TopicConfig(
        name="T",
        read_queue_count=1,
        write_queue_count=2,
        permission=4,
        flush_mode=common.FLUSH_MODE_ASYNC,
    )
    assert convert.topic(said, DEFAULT) == TopicConfig("T", 1, 2, 4, FlushMode.ASYNC)


@pytest.mark.parametrize("mode", [FlushMode.ASYNC, FlushMode.SYNC])
def test_a_topic_there_and_back(mode: FlushMode) -> None:
    config = TopicConfig("T", 3, 2, 2, mode)
    assert convert.topic(convert.topic_proto(config), DEFAULT) == config


def test_a_flush_mode_of_a_newer_release_is_refused() -> None:
    proto = common.TopicConfig(name="T")
    proto.flush_mode = 9  # type: ignore[assignment]
    with pytest.raises(InvalidRequest):
        convert.topic(proto, DEFAULT)


def test_every_pull_status_has_its_number_on_the_wire() -> None:
    wire = {name.removeprefix("PULL_STATUS_"): n for name, n in pb.PullStatus.items() if n}
    assert wire == {status.name: status.value for status in PullStatus}


def test_a_message_field_by_field() -> None:
    proto = convert.message_proto(stored(flag=5), "g1")
    assert (proto.message_id, proto.queue.topic, proto.queue.queue_id) == ("g1/99", "T", 1)
    assert (proto.queue_offset, proto.log_offset, proto.body) == (3, 99, b"body")
    assert (proto.tag, list(proto.keys), proto.unique_id) == ("x", ["a", "b"], "id")
    assert dict(proto.properties) == {"colour": "blue"}  # the others have fields of their own
    assert (proto.flag, proto.born_time_ms, proto.store_time_ms) == (5, 1, 2)
    assert (proto.born_host, proto.store_host) == ("10.0.0.1:7", "10.0.0.1:7")


def test_a_message_from_ipv6() -> None:
    assert convert.message_proto(stored(born_host=V6), "g1").born_host == "[fe80::1]:8"


@pytest.mark.parametrize("form", pb.MessageForm.values())
def test_a_pull_answer_has_one_form(form: pb.MessageForm.ValueType) -> None:
    data = record.encode(b"T", 0, b"x", b"", born_time_ms=1, born_host=V4, store_host=V4)
    answer = PullAnswer(PullStatus.FOUND, data * 2, 2, Position(3, 4), 1, 9)
    proto = convert.pull_proto(answer, "g1", form)
    as_messages = form == pb.MESSAGE_FORM_MESSAGES
    assert len(proto.messages) == (2 if as_messages else 0)
    assert proto.records == (b"" if as_messages else data * 2)
    assert (proto.status, proto.count, proto.min_offset, proto.max_offset) == (1, 2, 1, 9)
    assert convert.position(proto.next_position) == Position(3, 4)


def test_subscriptions_and_members() -> None:
    proto = pb.Subscription(topic="T", filter=common.Filter(tags=["b", "a"]))
    subscription = convert.subscription(proto)
    assert subscription == Subscription("T", frozenset({"a", "b"}))
    [member] = convert.members_proto(Membership(7, (Member("c", 1, (subscription,)),)))
    assert (member.client_id, list(member.subscriptions[0].filter.tags)) == ("c", ["a", "b"])
    with pytest.raises(FilterInvalid):
        convert.subscription(pb.Subscription(topic="T", filter=common.Filter(tags=["a|b"])))
