"""Batches that no honest producer sends: every field of a record forged in turn.

Offsets of fields are typed here from docs/format/record.md, not taken from the code under test.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from cometmq.v1 import broker_pb2 as pb
from tests.support.cluster.broker import encoded

TOPIC, QUEUE_ID = "T", 0
BODY = b"the body of a forged record"

# Record version 1 with IPv4 hosts.
SIZE, MAGIC, BODY_CRC, FIELD_QUEUE_ID = 0, 4, 8, 12
SYS_FLAG, RECONSUME_TIMES, PREPARED_OFFSET, BODY_BYTES, BODY_AT = 36, 72, 76, 84, 88
TOPIC_LENGTH = BODY_AT + len(BODY)
PROPERTIES_LENGTH = TOPIC_LENGTH + 1 + len(TOPIC)


@dataclass(frozen=True)
class Forgery:
    """One bad batch, and the catalogue's name of the error that it must get."""

    name: str
    records: bytes
    error: str
    segments: tuple[tuple[str, int, int], ...] = ((TOPIC, QUEUE_ID, 1),)

    @property
    def proto_segments(self) -> Sequence[pb.Segment]:
        return [pb.Segment(topic=t, queue_id=q, count=c) for t, q, c in self.segments]


def good(**fields: object) -> bytes:
    return encoded(TOPIC, QUEUE_ID, BODY, **fields)


def _set(form: str, at: int, value: int, data: bytes | None = None) -> bytes:
    forged = bytearray(good() if data is None else data)
    struct.pack_into(form, forged, at, value)
    return bytes(forged)


def _with_properties(text: bytes) -> bytes:
    return good(properties=text)


def _long_properties() -> bytes:
    # Too long for the encoder, so built by hand; the length field is read unsigned.
    text = b"k\x01" + b"v" * 32_800 + b"\x02"
    plain = good()[:PROPERTIES_LENGTH] + len(text).to_bytes(2, "big") + text
    return _set(">i", SIZE, len(plain), plain)


def _large_body() -> bytes:
    return encoded(TOPIC, QUEUE_ID, b"x" * (4 * 1024 * 1024 + 1))


_SIZE = len(good())
_CRC = zlib.crc32(BODY) & 0x7FFFFFFF

FORGERIES = [
    Forgery("size zero", _set(">i", SIZE, 0), "BATCH_MALFORMED"),
    Forgery("size negative", _set(">i", SIZE, -1), "BATCH_MALFORMED"),
    Forgery("size one less", _set(">i", SIZE, _SIZE - 1), "BATCH_MALFORMED"),
    Forgery("size one more", _set(">i", SIZE, _SIZE + 1), "BATCH_MALFORMED"),
    Forgery("size huge", _set(">i", SIZE, 2**31 - 1), "BATCH_MALFORMED"),
    Forgery("magic unknown", _set(">i", MAGIC, 0x12345678), "BATCH_MALFORMED"),
    Forgery("magic of version 2", _set(">i", MAGIC, -626843477), "BATCH_MALFORMED"),
    Forgery("magic of a blank", _set(">i", MAGIC, -875286124), "BATCH_MALFORMED"),
    Forgery("body CRC", _set(">i", BODY_CRC, _CRC ^ 1), "BODY_CHECKSUM_MISMATCH"),
    Forgery("body CRC's top bit", _set(">I", BODY_CRC, _CRC | 1 << 31), "BODY_CHECKSUM_MISMATCH"),
    Forgery("body bit flipped", _set(">B", BODY_AT, BODY[0] ^ 1), "BODY_CHECKSUM_MISMATCH"),
    Forgery("queue differs", _set(">i", FIELD_QUEUE_ID, 1), "BATCH_MALFORMED"),
    Forgery("queue negative", _set(">i", FIELD_QUEUE_ID, -1), "BATCH_MALFORMED"),
    *(
        Forgery(f"sysFlag bit {bit}", _set(">I", SYS_FLAG, 1 << bit), "RECORD_FIELD_FORBIDDEN")
        for bit in (1, 2, 3, 6, 7, 11, 12, 31)
    ),
    Forgery("sysFlag compression 4", _set(">i", SYS_FLAG, 4 << 8), "RECORD_FIELD_FORBIDDEN"),
    Forgery("sysFlag born host IPv6", _set(">i", SYS_FLAG, 16), "BATCH_MALFORMED"),
    Forgery("sysFlag store host IPv6", _set(">i", SYS_FLAG, 32), "BATCH_MALFORMED"),
    Forgery("reconsume times", _set(">i", RECONSUME_TIMES, 1), "RECORD_FIELD_FORBIDDEN"),
    Forgery("prepared offset", _set(">q", PREPARED_OFFSET, 1), "RECORD_FIELD_FORBIDDEN"),
    Forgery("body length negative", _set(">i", BODY_BYTES, -1), "BATCH_MALFORMED"),
    Forgery("body length one less", _set(">i", BODY_BYTES, len(BODY) - 1), "BATCH_MALFORMED"),
    Forgery("body length one more", _set(">i", BODY_BYTES, len(BODY) + 1), "BATCH_MALFORMED"),
    Forgery("body length huge", _set(">i", BODY_BYTES, 2**31 - 1), "BATCH_MALFORMED"),
    Forgery("topic length zero", _set(">B", TOPIC_LENGTH, 0), "BATCH_MALFORMED"),
    Forgery("topic length huge", _set(">B", TOPIC_LENGTH, 255), "BATCH_MALFORMED"),
    Forgery("topic differs", _set(">B", TOPIC_LENGTH + 1, ord("U")), "BATCH_MALFORMED"),
    Forgery("properties length", _set(">H", PROPERTIES_LENGTH, 1), "BATCH_MALFORMED"),
    Forgery("properties too long", _long_properties(), "PROPERTIES_TOO_LARGE"),
    Forgery("properties without a value", _with_properties(b"k\x02"), "PROPERTIES_INVALID"),
    Forgery("properties with an empty name", _with_properties(b"\x01v\x02"), "PROPERTIES_INVALID"),
    Forgery("properties not UTF-8", _with_properties(b"k\x01\xff\x02"), "PROPERTIES_INVALID"),
    *(
        Forgery(f"reserved {key}", _with_properties(f"{key}\1v\2".encode()), "PROPERTY_RESERVED")
        for key in ("DELAY", "TIMER_DELAY_MS", "TRAN_MSG", "REAL_TOPIC", "PGROUP", "CLUSTER")
    ),
    Forgery("body too large", _large_body(), "BODY_TOO_LARGE"),
    Forgery("no records", b"", "BATCH_MALFORMED"),
    Forgery("half a record", good()[: _SIZE // 2], "BATCH_MALFORMED"),
    Forgery("a rest behind the record", good() + b"\0", "BATCH_MALFORMED"),
    Forgery("a second record that is not counted", good() * 2, "BATCH_MALFORMED"),
    Forgery("fewer records than counted", good(), "BATCH_MALFORMED", ((TOPIC, QUEUE_ID, 2),)),
    Forgery("count zero", good(), "BATCH_MALFORMED", ((TOPIC, QUEUE_ID, 0),)),
    Forgery("count negative", good(), "BATCH_MALFORMED", ((TOPIC, QUEUE_ID, -1),)),
    Forgery("count huge", good(), "BATCH_TOO_LARGE", ((TOPIC, QUEUE_ID, 2**31 - 1),)),
    Forgery("no segments", good(), "BATCH_MALFORMED", ()),
    Forgery("too many segments", good() * 1025, "BATCH_TOO_LARGE", ((TOPIC, QUEUE_ID, 1),) * 1025),
    Forgery(
        "the second of two is bad",
        good() + _set(">i", BODY_CRC, _CRC ^ 1),
        "BODY_CHECKSUM_MISMATCH",
        ((TOPIC, QUEUE_ID, 2),),
    ),
    Forgery("queue unknown", good(), "QUEUE_NOT_FOUND", ((TOPIC, 99, 1),)),
    Forgery("queue below zero", good(), "QUEUE_NOT_FOUND", ((TOPIC, -1, 1),)),
    Forgery("topic unknown", good(), "TOPIC_NOT_FOUND", (("unknown", 0, 1),)),
    Forgery("topic a path", good(), "TOPIC_NAME_INVALID", (("../x", 0, 1),)),
    Forgery("topic with a newline", good(), "TOPIC_NAME_INVALID", (("T\n", 0, 1),)),
    Forgery("topic of 128 characters", good(), "TOPIC_NAME_INVALID", (("a" * 128, 0, 1),)),
    Forgery("topic empty", good(), "TOPIC_NAME_INVALID", (("", 0, 1),)),
    Forgery("topic not ASCII", good(), "TOPIC_NAME_INVALID", (("Tü", 0, 1),)),
    Forgery("topic of the system", good(), "NO_PERMISSION", (("rmq_sys_cometmq_state", 0, 1),)),
]  # fmt: skip
