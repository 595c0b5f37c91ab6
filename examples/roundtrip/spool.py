"""How a consumer process hands lines to the job: a file that only grows, read while it is written.

A frame is a header (big-endian) followed by the file's name, the broker group's and the line:

    received_ms  u64   when the listener got the message, milliseconds since 1970
    born_ms      u64   when the producer made it
    stored_ms    u64   when the broker stored it
    queue_offset u64   its place in its queue
    queue_id     u32   the queue
    line         u32   line number
    body_bytes   u32   length of the line
    name_bytes   u16   length of the file's name
    group_bytes  u8    length of the broker group's name
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HEADER = struct.Struct(">QQQQIIIHB")
READ_BYTES = 256 * 1024  # some thousand lines: a piece of work that nobody has to wait for long
READ_BYTES_MAX = 8 * 1024 * 1024  # more than the largest frame: a body is at most 4 MiB


class Arrival(NamedTuple):
    """One line as a consumer got it."""

    name: str
    line_number: int
    body: bytes
    received_ms: int
    born_ms: int
    stored_ms: int
    broker_group: str
    queue_id: int
    queue_offset: int


def pack(arrival: Arrival) -> bytes:
    name, group = arrival.name.encode(), arrival.broker_group.encode()
    head = HEADER.pack(
        arrival.received_ms,
        arrival.born_ms,
        arrival.stored_ms,
        arrival.queue_offset,
        arrival.queue_id,
        arrival.line_number,
        len(arrival.body),
        len(name),
        len(group),
    )
    return head + name + group + arrival.body


def unpack(data: bytes) -> tuple[list[Arrival], int]:
    """The whole frames that ``data`` starts with, and how many bytes they take."""
    arrivals: list[Arrival] = []
    place = 0
    while place + HEADER.size <= len(data):
        received, born, stored, offset, queue, line, *lengths = HEADER.unpack_from(data, place)
        body_bytes, name_bytes, group_bytes = lengths
        name_end = place + HEADER.size + name_bytes
        group_end = name_end + group_bytes
        end = group_end + body_bytes
        if end > len(data):
            break
        name = data[place + HEADER.size : name_end].decode()
        group = data[name_end:group_end].decode()
        body = data[group_end:end]
        arrivals.append(Arrival(name, line, body, received, born, stored, group, queue, offset))
        place = end
    return arrivals, place


class SpoolReader:
    """Reads what has been added since the last time. The file need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = 0

    def read(self) -> Iterator[list[Arrival]]:
        """Whole frames, a few hundred kilobytes at a time, until the file holds no more of them."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            while True:
                file.seek(self._place)
                data = file.read(READ_BYTES)
                arrivals, used = unpack(data)
                if not used and len(data) == READ_BYTES:  # one frame is larger
                    arrivals, used = unpack(data + file.read(READ_BYTES_MAX - READ_BYTES))
                if not used:
                    return
                self._place += used
                yield arrivals
