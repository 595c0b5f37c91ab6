"""A message as it lies in the commit log: RocketMQ's record version 1. Spec: docs/format/record.md.

The layout is the table ``_FIXED_FIELDS``; every offset is computed from it. Addresses have 4 or 16
bytes, so there are four layouts, marked by two bits of SYSFLAG.
"""

from __future__ import annotations

import struct
from enum import Enum
from functools import cached_property, lru_cache
from ipaddress import ip_address
from typing import Any, Final, NamedTuple
from zlib import crc32

from cometmq.errors import BatchMalformed, InvalidRequest, PropertiesTooLarge, TopicNameInvalid
from cometmq.format import properties as property_codec
from cometmq.format.compression import decompress
from cometmq.model import PROPERTIES_BYTES_MAX, TOPIC_NAME, TOPIC_NAME_LENGTH_MAX
from cometmq.native import accelerator

MAGIC_V1: Final = -626843481  # 0xDAA320A7
MAGIC_BLANK: Final = -875286124  # 0xCBD43194

SYS_FLAG_BORN_HOST_V6: Final = 1 << 4
SYS_FLAG_STORE_HOST_V6: Final = 1 << 5
SYS_FLAG_HOSTS: Final = SYS_FLAG_BORN_HOST_V6 | SYS_FLAG_STORE_HOST_V6

HOST_V4_BYTES: Final = 8  # address and port
HOST_V6_BYTES: Final = 20
BODY_CRC_MASK: Final = 0x7FFFFFFF

# Name, struct code ("" = as long as the layout says) of every field before the body.
_FIXED_FIELDS: Final = (
    ("size", "i"),  # TOTALSIZE: bytes of the whole record, these four included
    ("magic", "i"),  # MAGICCODE
    ("body_crc", "i"),  # CRC-32 of the stored body, top bit cleared; 0 = no body
    ("queue_id", "i"),
    ("flag", "i"),  # the user's; 0 = never set
    ("queue_offset", "q"),  # position in the queue, from 0
    ("log_offset", "q"),  # PHYSICALOFFSET: of this record's first byte, in the whole log
    ("sys_flag", "i"),
    ("born_time_ms", "q"),  # the producer's clock
    ("born_host", ""),  # the producer's address and port
    ("store_time_ms", "q"),  # the broker's clock; never decreases within a log
    ("store_host", ""),  # the broker's address and port
    ("reconsume_times", "i"),  # times the message was sent back; 0 = first delivery
    ("prepared_offset", "q"),  # log offset of the half message of a committed transaction; 0 = none
    (
        "body_bytes",
        "i",
    ),  # the body follows, then topic length (1), topic, properties length (2), properties
)
_TOPIC_LENGTH_BYTES: Final = 1
_PROPERTIES_LENGTH: Final = struct.Struct(
    ">H"
)  # read unsigned, so that a length over 32,767 can be named
_BLANK: Final = struct.Struct(">ii")
_INT: Final = struct.Struct(">i")
_LONG: Final = struct.Struct(">q")
BLANK_BYTES: Final = _BLANK.size  # what has to be left of a log file behind every record
_SIZE_AND_MAGIC: Final = struct.Struct(">ii")


class Layout:
    """The offset of each field, for one pair of host lengths. Four exist: :data:`LAYOUTS`, by
    SYSFLAG & SYS_FLAG_HOSTS."""

    __slots__ = (
        "head",
        "head_bytes",
        "host_flags",
        "offsets",
        "record_bytes_min",
        "stamp",
        "stamp_at",
    )

    def __init__(self, host_flags: int) -> None:
        self.host_flags = host_flags
        self.offsets: dict[str, int] = {}
        codes, at = "", 0
        for name, code in _FIXED_FIELDS:
            self.offsets[name] = at
            code = code or f"{self._host_bytes(name)}s"
            codes += code
            at += struct.calcsize(">" + code)
        self.head = struct.Struct(">" + codes)
        self.head_bytes = self.head.size
        self.record_bytes_min = self.head_bytes + _TOPIC_LENGTH_BYTES + _PROPERTIES_LENGTH.size
        # What the broker writes, in one go: queue offset, log offset, the two fields between them
        # and the hosts (which keep their values), then born host, store time and store host as one
        # string of bytes.
        hosts = self._host_bytes("born_host") + 8 + self._host_bytes("store_host")
        self.stamp = struct.Struct(f">qqiq{hosts}s")
        self.stamp_at = self.offsets["queue_offset"]
        assert self.head_bytes == at
        assert self.stamp_at + self.stamp.size == self.offsets["reconsume_times"]

    def _host_bytes(self, name: str) -> int:
        flag = SYS_FLAG_BORN_HOST_V6 if name == "born_host" else SYS_FLAG_STORE_HOST_V6
        return HOST_V6_BYTES if self.host_flags & flag else HOST_V4_BYTES

    def reader(self, *names: str) -> struct.Struct:
        """A struct that reads only the named fields, in the record's order, and skips the rest."""
        codes = ""
        for name, code in _FIXED_FIELDS:
            code = code or f"{self._host_bytes(name)}s"
            codes += code if name in names else f"{struct.calcsize('>' + code)}x"
        return struct.Struct(">" + codes)

    def fields(self, buffer: bytes, at: int) -> dict[str, Any]:
        """The fixed fields of the record at ``at``, by name: the slow way, for messages and
        tools."""
        return dict(zip(self.offsets, self.head.unpack_from(buffer, at), strict=True))


LAYOUTS: Final = {flags: Layout(flags) for flags in (0, 16, 32, 48)}
_V4: Final = LAYOUTS[0]
_V4_HEAD_BYTES: Final = _V4.head_bytes
_FRAME_V4: Final = _V4.reader("size", "sys_flag", "body_bytes")
_SYS_FLAG: Final = list(_V4.offsets).index("sys_flag")  # index into an unpacked head
_BODY_BYTES: Final = list(_V4.offsets).index("body_bytes")
assert list(_V4.offsets)[:2] == ["size", "magic"]
# SYSFLAG says how long the hosts are, so it must come before them.
assert len({layout.offsets["sys_flag"] for layout in LAYOUTS.values()}) == 1
assert _V4.record_bytes_min == 91


def raw_properties(buffer: bytes, at: int) -> tuple[int, bytes]:
    """Where the whole record at ``at`` ends, and its properties. Hot. Raises BatchMalformed."""
    try:
        size, flags, body_bytes = _FRAME_V4.unpack_from(buffer, at)
        head_bytes = _V4_HEAD_BYTES
        if flags & SYS_FLAG_HOSTS:
            layout = LAYOUTS[flags & SYS_FLAG_HOSTS]
            (body_bytes,) = _INT.unpack_from(buffer, at + layout.offsets["body_bytes"])
            head_bytes = layout.head_bytes
        topic_at = at + head_bytes + body_bytes
        start, end = topic_at + 3 + buffer[topic_at], at + size
    except (struct.error, IndexError):
        raise BatchMalformed(f"at byte {at}: the buffer ends inside a record") from None
    if body_bytes < 0 or not start <= end <= len(buffer):
        raise BatchMalformed(f"at byte {at}: {_complaint(buffer, at)}")
    return end, buffer[start:end]


def first_store_time_ms(records: bytes) -> int:
    """Store time of the first of whole records, which are trusted: they were checked as written."""
    (flags,) = _INT.unpack_from(records, _V4.offsets["sys_flag"])
    at = LAYOUTS[flags & SYS_FLAG_HOSTS].offsets["store_time_ms"]
    found: int = _LONG.unpack_from(records, at)[0]
    return found


def layout_of_hosts(born_host: bytes, store_host: bytes) -> Layout:
    """The layout of records with such hosts. Raises InvalidRequest unless each has 8 or 20
    bytes."""
    flags = 0
    for host, flag in ((born_host, SYS_FLAG_BORN_HOST_V6), (store_host, SYS_FLAG_STORE_HOST_V6)):
        if len(host) == HOST_V6_BYTES:
            flags |= flag
        elif len(host) != HOST_V4_BYTES:
            raise InvalidRequest(
                f"a host has 8 or 20 bytes (address, then port as int32), not {len(host)}"
            )
    return LAYOUTS[flags]


def host_bytes(address: str, port: int) -> bytes:
    """A host field: the address (4 bytes, or 16 for IPv6) and the port as int32. Raises
    InvalidRequest."""
    try:
        return ip_address(address).packed + port.to_bytes(4, "big")
    except (ValueError, OverflowError) as error:
        raise InvalidRequest(f"not an address and a port: {address!r}, {port}: {error}") from None


def host_text(host: bytes) -> str:
    """``10.0.0.1:10911`` or ``[fe80::1]:10911`` for a host field."""
    assert len(host) in (HOST_V4_BYTES, HOST_V6_BYTES)
    address, port = ip_address(host[:-4]), int.from_bytes(host[-4:], "big")
    return f"{address}:{port}" if address.version == 4 else f"[{address}]:{port}"


def record_size(body_len: int, topic_len: int, properties_len: int, sys_flag: int = 0) -> int:
    """Bytes of a record with such parts; SYSFLAG says how long the hosts are."""
    return (
        LAYOUTS[sys_flag & SYS_FLAG_HOSTS].record_bytes_min + body_len + topic_len + properties_len
    )


def body_crc(body: bytes) -> int:
    """The BODYCRC of a stored body: CRC-32 with its top bit cleared, so that it fits Java's
    positive int."""
    return crc32(body) & BODY_CRC_MASK


def blank(size: int) -> bytes:
    """The 8 bytes that close a log file with ``size`` bytes left, these included."""
    assert size >= BLANK_BYTES
    return _BLANK.pack(size, MAGIC_BLANK)


def encode(
    topic: bytes,
    queue_id: int,
    body: bytes,
    properties: bytes,
    *,
    born_time_ms: int,
    born_host: bytes,
    store_host: bytes,
    flag: int = 0,
    sys_flag: int = 0,
    queue_offset: int = 0,
    log_offset: int = 0,
    store_time_ms: int = 0,
    reconsume_times: int = 0,
    prepared_offset: int = 0,
) -> bytes:
    """One record. The IPv6 bits of ``sys_flag`` are set from the lengths of the hosts (8 or 20
    bytes), CRC and sizes are computed.

    A producer gives hosts of the lengths that the broker has given it, and leaves what only the
    broker knows at 0. Raises TopicNameInvalid, PropertiesTooLarge, InvalidRequest (a number that
    its field cannot hold, a host length).
    """
    topic_len, body_len, properties_len = len(topic), len(body), len(properties)
    if not 0 < topic_len <= TOPIC_NAME_LENGTH_MAX:
        raise TopicNameInvalid(f"the topic has {topic_len} bytes")
    if properties_len > PROPERTIES_BYTES_MAX:
        raise PropertiesTooLarge(
            f"the properties have {properties_len} bytes, {PROPERTIES_BYTES_MAX} are allowed"
        )
    layout = (
        _V4
        if len(born_host) == len(store_host) == HOST_V4_BYTES
        else layout_of_hosts(born_host, store_host)
    )
    try:
        head = layout.head.pack(
            layout.record_bytes_min + body_len + topic_len + properties_len,
            MAGIC_V1,
            crc32(body) & BODY_CRC_MASK,
            queue_id,
            flag,
            queue_offset,
            log_offset,
            sys_flag & ~SYS_FLAG_HOSTS | layout.host_flags,
            born_time_ms,
            born_host,
            store_time_ms,
            store_host,
            reconsume_times,
            prepared_offset,
            body_len,
        )
    except struct.error as error:
        raise InvalidRequest(f"a field of the record does not fit: {error}") from None
    return b"".join(
        (head, body, bytes((topic_len,)), topic, properties_len.to_bytes(2, "big"), properties)
    )


class _Fields(NamedTuple):
    size: int
    magic: int
    body_crc: int
    queue_id: int
    flag: int
    queue_offset: int
    log_offset: int
    sys_flag: int
    born_time_ms: int
    born_host: bytes  # 8 or 20 bytes: see host_text
    store_time_ms: int
    store_host: bytes
    reconsume_times: int
    prepared_offset: int
    body_bytes: int
    body: bytes  # as stored: compressed when sys_flag bit 0 says so
    topic: str
    raw_properties: bytes


assert _Fields._fields[: len(_FIXED_FIELDS)] == tuple(name for name, _ in _FIXED_FIELDS)


class Record(_Fields):
    """One decoded record, immutable; fields as in docs/format/record.md. A tuple, because its
    creation is the hot path of a consumer (a class with 18 slots takes twice as long); its
    properties are parsed when first asked for."""

    @cached_property
    def plain_body(self) -> bytes:
        """The body as the producer gave it. BodyCompressionInvalid."""
        return decompress(self.body, self.sys_flag)

    @cached_property
    def properties(self) -> dict[str, str]:
        """All pairs, the system's included."""
        return property_codec.decode(self.raw_properties)

    @property
    def tag(self) -> str:
        """Empty = none."""
        return property_codec.tag_of(self.raw_properties).decode("utf-8", "replace")

    @property
    def keys(self) -> tuple[str, ...]:
        """What the message can be found by."""
        return tuple(self.properties.get(property_codec.KEYS, "").split())

    @property
    def unique_id(self) -> str:
        """The producer's id of the message (UNIQ_KEY); empty = none."""
        return self.properties.get(property_codec.UNIQ_KEY, "")


def decode(buffer: bytes, offset: int = 0) -> Record:
    """The record that starts at ``offset``; what follows it does not matter. The body's CRC is not
    looked at.

    Raises BatchMalformed when there is no whole record.
    """
    assert offset >= 0
    if offset >= len(buffer):
        raise BatchMalformed(f"at byte {offset}: the buffer ends before the record")
    return _decode_run(buffer, offset, offset + 1)[0]


def decode_all(buffer: bytes) -> list[Record]:
    """All records of a buffer that holds them end to end, as a pull answers them. Raises
    BatchMalformed."""
    return _decode_run(buffer, 0, len(buffer))


def _decode_run(buffer: bytes, at: int, stop: int) -> list[Record]:
    """The records from ``at`` on, up to the one that reaches or passes ``stop``."""
    if accelerator is None:
        return _decode_run_plainly(buffer, at, stop)
    at, records = accelerator.decode(buffer, at, stop, Record)
    # Plain Python says what is wrong with the one that it stopped at.
    return records if at >= stop else records + _decode_run_plainly(buffer, at, stop)


def _decode_run_plainly(buffer: bytes, at: int, stop: int) -> list[Record]:
    """Hot: one loop, plain indices into the unpacked head (which are 0 for the size and 1 for the
    magic)."""
    records: list[Record] = []
    append, new, read_head_v4, total = (
        records.append,
        tuple.__new__,
        _V4.head.unpack_from,
        len(buffer),
    )
    magic, sys_flag, body_bytes = MAGIC_V1, _SYS_FLAG, _BODY_BYTES
    topics: dict[bytes, str] = {}  # the text of those met before
    while at < stop:
        try:
            head = read_head_v4(buffer, at)
            body_at = at + _V4_HEAD_BYTES
            if head[sys_flag] & SYS_FLAG_HOSTS:
                layout = LAYOUTS[head[sys_flag] & SYS_FLAG_HOSTS]
                head = layout.head.unpack_from(buffer, at)
                body_at = at + layout.head_bytes
            body_end = body_at + head[body_bytes]
            topic_end = body_end + 1 + buffer[body_end]
            properties_at = topic_end + 2
            end = properties_at + (buffer[topic_end] << 8 | buffer[topic_end + 1])
        except (struct.error, IndexError):
            raise BatchMalformed(f"at byte {at}: the buffer ends inside a record") from None
        if head[1] != magic or end - at != head[0] or body_end < body_at or end > total:
            raise BatchMalformed(f"at byte {at}: {_complaint(buffer, at)}")
        topic_bytes = buffer[body_end + 1 : topic_end]
        topic = topics.get(topic_bytes)
        if topic is None:
            topic = topics[topic_bytes] = topic_bytes.decode("utf-8", "replace")
        rest = (buffer[body_at:body_end], topic, buffer[properties_at:end])
        append(new(Record, head + rest))
        at = end
    return records


def _complaint(buffer: bytes, at: int) -> str:
    """Why no record of version 1 is framed there."""
    size, magic = _SIZE_AND_MAGIC.unpack_from(buffer, at)
    if magic != MAGIC_V1:
        return f"magic {magic & 0xFFFFFFFF:08x} is not that of a version 1 record"
    if not _V4.record_bytes_min <= size <= len(buffer) - at:
        return f"TOTALSIZE {size} does not fit: {len(buffer) - at} bytes are left"
    return f"the lengths of body, topic and properties do not add up to TOTALSIZE {size}"


class Kind(Enum):
    """What :func:`check` found at a place of a log file."""

    RECORD = "record"  # whole and good
    BLANK = "blank"  # the end of the file's records
    END = "end"  # zeros: nothing was written here
    MORE = "more"  # the buffer ends too early to know
    BAD = "bad"  # something else: the log ends here


class Found(NamedTuple):
    """What was found; ``size`` = bytes of the record or the blank rest, bytes needed for MORE,
    else 0."""

    kind: Kind
    size: int = 0
    record: Record | None = None  # for RECORD
    reason: str = ""  # for BAD


_END: Final = Found(Kind.END)
_is_framed: Final = property_codec.STORED_FRAMING.fullmatch


@lru_cache(maxsize=1024)  # a log repeats its topics
def _is_topic(name: str) -> bool:
    return TOPIC_NAME.fullmatch(name) is not None


def check(buffer: bytes, offset: int, *, log_offset: int, bytes_left: int) -> Found:
    """Classifies the bytes at ``offset`` of a piece of a log file, for recovery.

    ``log_offset`` is that place's position in the whole log, ``bytes_left`` counts from there to
    the end of the *file*; the buffer may end before. A good record has a whole chain of sizes, its
    own log offset, a body that fits its CRC, a legal topic name and framed properties. Never
    raises.
    """
    assert 0 <= offset <= len(buffer)
    available = len(buffer) - offset
    if bytes_left < BLANK_BYTES:
        return _bad(f"{bytes_left} bytes are left, not even enough for the end mark")
    if available < BLANK_BYTES:
        return Found(Kind.MORE, BLANK_BYTES)
    size, magic = _SIZE_AND_MAGIC.unpack_from(buffer, offset)
    if magic == MAGIC_V1:
        if not _V4.record_bytes_min <= size <= bytes_left - BLANK_BYTES:
            return _bad(f"TOTALSIZE {size} with {bytes_left} bytes left")
        return (
            _check_record(buffer, offset, log_offset)
            if size <= available
            else Found(Kind.MORE, size)
        )
    if magic == MAGIC_BLANK:
        return (
            Found(Kind.BLANK, size)
            if size == bytes_left
            else _bad(f"end mark of {size} with {bytes_left} bytes left")
        )
    return _END if size == magic == 0 else _bad(f"magic {magic & 0xFFFFFFFF:08x}")


def _bad(reason: str) -> Found:
    return Found(Kind.BAD, reason=reason)


def _check_record(buffer: bytes, offset: int, log_offset: int) -> Found:
    try:
        record = decode(buffer, offset)
    except BatchMalformed as error:
        return _bad(error.message)
    if record.log_offset != log_offset:
        return _bad(f"PHYSICALOFFSET {record.log_offset} at log offset {log_offset}")
    if crc32(record.body) & BODY_CRC_MASK != record.body_crc:
        return _bad("the body does not fit BODYCRC")
    if not _is_topic(record.topic):
        return _bad(f"topic {record.topic!r}")
    if not _is_framed(record.raw_properties):
        return _bad("the properties are not framed")
    return Found(Kind.RECORD, record.size, record)
