"""What is put together by hand is what protobuf writes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cometmq.rpc.wire import field, tag, varint
from cometmq.v1 import broker_pb2, hold_pb2, member_pb2

sizes = st.one_of(st.integers(0, 200), st.sampled_from([127, 128, 16_383, 16_384, 70_000]))


@given(st.integers(0, 2**64 - 1))
def test_numbers(number: int) -> None:
    sent = broker_pb2.SendStreamRequest(batch_id=number).SerializeToString()
    assert sent == (b"\x08" + varint(number) if number else b"")


@given(sizes, sizes)
def test_messages_in_messages(size: int, offset: int) -> None:
    pull = broker_pb2.PullResponse(records=bytes(size), max_offset=offset)
    whole = hold_pb2.HoldStreamResponse(response=hold_pb2.HoldResponse(pull=pull))
    response = tag(hold_pb2.HoldStreamResponse.RESPONSE_FIELD_NUMBER)
    inner = field(tag(hold_pb2.HoldResponse.PULL_FIELD_NUMBER), pull.SerializeToString())
    assert field(response, inner) == whole.SerializeToString()


@given(sizes)
def test_parts_lie_end_to_end(size: int) -> None:
    records = tag(member_pb2.InlineMessages.RECORDS_FIELD_NUMBER)
    head = member_pb2.InlineMessages(first_offset=3, sizes=[size]).SerializeToString()
    parts = head, field(records, bytes(size))
    arrival = member_pb2.Arrival.FromString(
        field(tag(member_pb2.Arrival.MESSAGES_FIELD_NUMBER), *parts)
    )
    assert arrival.messages == member_pb2.InlineMessages(
        first_offset=3, sizes=[size], records=bytes(size)
    )
