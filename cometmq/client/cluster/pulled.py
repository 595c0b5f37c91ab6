"""A broker's answer to a pull, off the wire: protobuf reads all but the records, of which it would
make two copies.
"""

from __future__ import annotations

from typing import NamedTuple

from cometmq.native.interface import Buffer
from cometmq.v1 import broker_pb2

_VARINT, _LENGTH_DELIMITED = 0, 2  # protobuf's wire types
_LENGTH_BYTES_MAX = 5
_RECORDS_KEY = broker_pb2.PullResponse.RECORDS_FIELD_NUMBER << 3 | _LENGTH_DELIMITED


class Pulled(NamedTuple):
    """``records`` are the response's; what ``response`` has there itself does not matter."""

    response: broker_pb2.PullResponse
    records: Buffer

    @classmethod
    def of(cls, response: broker_pb2.PullResponse) -> Pulled:
        return cls(response, response.records)

    @classmethod
    def from_wire(cls, data: bytes) -> Pulled:
        """``PullResponse.FromString``, and raises what that raises."""
        key_at, start, end = _find_records(data, 0)
        rest = data[:key_at] + data[end:]
        if start == end or _find_records(rest, key_at)[0] < len(rest):  # of two the last one counts
            return cls.of(broker_pb2.PullResponse.FromString(data))
        return cls(broker_pb2.PullResponse.FromString(rest), memoryview(data)[start:end])


def _find_records(data: bytes, at: int) -> tuple[int, int, int]:
    """From ``at`` on: where the field's key is, where its value begins and ends; all the end of the
    data when there is none, or protobuf has to look.
    """
    size = len(data)
    while at < size:
        key_at = at
        key, value_at = _varint(data, at)
        number, at = _varint(data, value_at)
        if key & 7 == _LENGTH_DELIMITED:
            is_plain = value_at - key_at == 1 and at - value_at <= _LENGTH_BYTES_MAX
            if key == _RECORDS_KEY and is_plain and at + number <= size:
                return key_at, at, at + number
            at += number
        elif key & 7 != _VARINT:
            break
    return size, size, size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number there, and what follows it. The rules for numbers are protobuf's to check."""
    number = shift = 0
    while at < len(data):
        number |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            break
        shift += 7
    return number, at
