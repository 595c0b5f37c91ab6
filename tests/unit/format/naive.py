"""A second reader and writer of the formats, as simple as can be: the model that tests compare
with.

Shares no code with ``cometmq.format``; a byte is taken after the other, as docs/format says.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

RESERVED_EXAMPLES = ("WAIT", "DELAY", "TRAN_MSG", "REAL_TOPIC", "1ST_POP_TIME", "__BORNHOST")

NUMBERS = {
    "size": 4,
    "magic": 4,
    "body_crc": 4,
    "queue_id": 4,
    "flag": 4,
    "queue_offset": 8,
    "log_offset": 8,
    "sys_flag": 4,
    "born_time_ms": 8,
    "born_host": 0,
    "store_time_ms": 8,
    "store_host": 0,
    "reconsume_times": 4,
    "prepared_offset": 8,
    "body_bytes": 4,
}


@dataclass
class Cursor:
    data: bytes
    at: int = 0

    def take(self, count: int) -> bytes:
        if count < 0 or self.at + count > len(self.data):
            raise ValueError("too short")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, count: int, *, signed: bool = True) -> int:
        return int.from_bytes(self.take(count), "big", signed=signed)


def read(data: bytes, at: int = 0) -> dict[str, Any]:
    """All fields of the record at ``at``, and under ``places`` where each one starts."""
    cursor = Cursor(data, at)
    record: dict[str, Any] = {}
    places: dict[str, int] = {}
    for name, width in NUMBERS.items():
        places[name] = cursor.at
        if name == "born_host":
            record[name] = cursor.take(20 if record["sys_flag"] & 16 else 8)
        elif name == "store_host":
            record[name] = cursor.take(20 if record["sys_flag"] & 32 else 8)
        else:
            record[name] = cursor.number(width)
    places["body"] = cursor.at
    record["body"] = cursor.take(record["body_bytes"])
    places["topic_length"] = cursor.at
    record["topic"] = cursor.take(cursor.number(1, signed=False))
    places["properties_length"] = cursor.at
    record["properties"] = cursor.take(cursor.number(2, signed=False))
    if cursor.at - at != record["size"]:
        raise ValueError("sizes")
    return record | {"places": places, "end": cursor.at}


def write(record: dict[str, Any]) -> bytes:
    """The bytes of a record with these fields; the sizes and the CRC are as given, not as they
    should be."""
    parts = []
    for name, width in NUMBERS.items():
        value = record[name]
        parts.append(value if width == 0 else value.to_bytes(width, "big", signed=True))
    parts += [record["body"], bytes([len(record["topic"])]), record["topic"]]
    parts += [len(record["properties"]).to_bytes(2, "big"), record["properties"]]
    return b"".join(parts)


def pairs(properties: bytes) -> list[tuple[str, str]] | None:
    """The pairs in order, or None when a producer may not send such properties."""
    if not properties:
        return []
    found = []
    for pair in properties.removesuffix(b"\x02").split(b"\x02"):
        parts = pair.split(b"\x01")
        if len(parts) != 2 or not all(parts) or b"\x00" in pair:
            return None
        try:
            found.append((parts[0].decode(), parts[1].decode()))
        except UnicodeDecodeError:
            return None
    return found


def hash_of(tag: str) -> int:
    """Java's String.hashCode, from its definition: the sum of c[i] * 31^(n-1-i), modulo 2^32."""
    raw = tag.encode("utf-16-be")
    units = [int.from_bytes(raw[i : i + 2], "big") for i in range(0, len(raw), 2)]
    total: int = sum(unit * pow(31, len(units) - 1 - i) for i, unit in enumerate(units)) % 2**32
    return total - 2**32 if total >= 2**31 else total


def complaint(
    data: bytes, topic: bytes, queue_id: int, hosts: int, reserved: frozenset[str]
) -> str | None:
    """Name of the error that the one record in ``data`` deserves; None = it must be taken."""
    if data[4:8] != b"\xda\xa3\x20\xa7" or len(data) < 91:
        return "BatchMalformed"
    if int.from_bytes(data[12:16], "big", signed=True) != queue_id:
        return "BatchMalformed"
    sys_flag = int.from_bytes(data[36:40], "big", signed=True)
    if sys_flag & 48 != hosts or int.from_bytes(data[:4], "big", signed=True) != len(data):
        return "BatchMalformed"
    if sys_flag not in {hosts | c | kind << 8 for c in (0, 1) for kind in (0, 1, 2, 3)}:
        return "RecordFieldForbidden"
    return _complaint_behind_sys_flag(data, topic, hosts, reserved)


def _complaint_behind_sys_flag(
    data: bytes, topic: bytes, hosts: int, reserved: frozenset[str]
) -> str | None:
    forbidden_at = 72 + (12 if hosts & 16 else 0) + (12 if hosts & 32 else 0)
    if any(data[forbidden_at : forbidden_at + 12]):
        return "RecordFieldForbidden"
    try:
        record = read(data)
    except ValueError:
        return "BatchMalformed"
    if record["topic"] != topic:
        return "BatchMalformed"
    if len(record["properties"]) > 32767:
        return "PropertiesTooLarge"
    if zlib.crc32(record["body"]) & 0x7FFFFFFF != record["body_crc"]:
        return "BodyChecksumMismatch"
    found = pairs(record["properties"])
    if found is None:
        return "PropertiesInvalid"
    names = {name for name, _ in found}
    bad = names & reserved or any(name.startswith("__RMQ.TRANSIENT.") for name in names)
    return "PropertyReserved" if bad else None
