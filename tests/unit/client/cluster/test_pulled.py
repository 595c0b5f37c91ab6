from __future__ import annotations

from collections.abc import Callable

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from cometmq.client.cluster.pulled import Pulled
from cometmq.v1 import broker_pb2, common_pb2

positions = st.builds(
    common_pb2.Position, generation=st.integers(0, 9), offset=st.integers(0, 2**62)
)
responses = st.builds(
    broker_pb2.PullResponse,
    status=st.integers(0, 4),
    records=st.binary(max_size=300),
    messages=st.lists(st.builds(broker_pb2.StoredMessage, body=st.binary(max_size=9)), max_size=2),
    count=st.integers(0, 9),
    next_position=positions,
    min_offset=st.integers(-1, 2**62),
    suggested_member_id=st.none() | st.integers(0, 9),
)
two_in_a_row = st.tuples(responses, responses).map(lambda pair: _bytes(pair[0]) + _bytes(pair[1]))


def _bytes(response: broker_pb2.PullResponse) -> bytes:
    return response.SerializeToString()


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    data = bytearray(_bytes(draw(responses)))
    if data:
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data[: draw(st.integers(0, len(data)))])


def _read(parse: Callable[[], Pulled]) -> tuple[bytes, bytes] | None:
    """The response without its records, and the records; None: refused."""
    try:
        pulled = parse()
    except DecodeError:
        return None
    pulled.response.ClearField("records")
    return pulled.response.SerializeToString(deterministic=True), bytes(pulled.records)


@given(responses.map(_bytes) | two_in_a_row | damaged() | st.binary(max_size=30))
@example(b"\x12\x05abc")  # ends inside of the records
@example(b"\x12\x85")  # ends inside of their length
@example(b"\x12\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x00")  # a number of eleven bytes
@example(b"\x12\x01a\x12\x00")  # the last one counts, and it is empty
def test_an_answer_is_read_as_protobuf_reads_it(data: bytes) -> None:
    plain = _read(lambda: Pulled.of(broker_pb2.PullResponse.FromString(data)))
    assert _read(lambda: Pulled.from_wire(data)) == plain


def test_the_records_are_not_copied() -> None:
    data = _bytes(broker_pb2.PullResponse(count=1, records=bytes(1000)))
    records = Pulled.from_wire(data).records
    assert isinstance(records, memoryview)
    assert records.obj is data
    assert records == bytes(1000)


def test_what_is_no_answer_is_refused() -> None:
    with pytest.raises(DecodeError):
        Pulled.from_wire(b"\x12\x85")
