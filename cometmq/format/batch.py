"""A batch of records on its way into the log: everything is verified, then stamped. Spec:
docs/format/batch.md.

:func:`stamp` walks the batch once. Each record gets one quick look that a good one passes; a record
that fails it goes to :func:`_examine`, which either names the fault or accepts what the quick look
does not know. So the quick look may be as narrow as speed asks, and the slow one stays readable.

The quick look exists twice, in :func:`_stamp_run` and in the C extension (:mod:`cometmq.native`):
bytes in, bytes out, no other object touched. What it refuses is judged here in both cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from zlib import crc32

from cometmq.errors import (
    BatchMalformed,
    BatchTooLarge,
    BodyChecksumMismatch,
    BodyTooLarge,
    DelayInvalid,
    MessageTypeMismatch,
    PropertiesInvalid,
    PropertiesTooLarge,
    RecordFieldForbidden,
    RequestError,
    TopicNameInvalid,
)
from cometmq.format import properties as property_codec
from cometmq.format import timers
from cometmq.format.compression import SYS_FLAG_COMPRESSED, SYS_FLAG_COMPRESSION_SHIFT
from cometmq.format.queueunit import UNIT
from cometmq.format.record import (
    BODY_CRC_MASK,
    LAYOUTS,
    MAGIC_V1,
    SYS_FLAG_HOSTS,
    Layout,
    layout_of_hosts,
)
from cometmq.format.taghash import tags_code
from cometmq.format.timers import DIGITS_AT, DIGITS_END, TimerForm
from cometmq.model import (
    DELAY_MS_MAX,
    MESSAGE_BODY_BYTES_MAX,
    PROPERTIES_BYTES_MAX,
    TIMER_MS_MAX,
    TOPIC_NAME_LENGTH_MAX,
)
from cometmq.native import accelerator

# What a producer may say in SYSFLAG, by the bits for the lengths of the hosts: compressed or not,
# and how.
_PRODUCER_SYS_FLAGS = {
    host_flags: frozenset(
        host_flags | compressed | compression << SYS_FLAG_COMPRESSION_SHIFT
        for compressed in (0, SYS_FLAG_COMPRESSED)
        for compression in range(4)
    )
    for host_flags in LAYOUTS
}


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What a broker takes in one batch."""

    body_bytes_max: int = MESSAGE_BODY_BYTES_MAX
    properties_bytes_max: int = PROPERTIES_BYTES_MAX
    batch_bytes_max: int = (
        MESSAGE_BODY_BYTES_MAX + 64 * 1024
    )  # one record of the largest body always fits
    batch_count_max: int = 1024
    segments_max: int = 1024
    timer_delay_ms_max: int = 3 * 86_400_000

    def __post_init__(self) -> None:
        assert (
            0 < self.properties_bytes_max <= PROPERTIES_BYTES_MAX
        )  # the length field holds no more
        assert (
            min(self.body_bytes_max, self.batch_bytes_max, self.batch_count_max, self.segments_max)
            > 0
        )
        assert 0 < self.timer_delay_ms_max <= DELAY_MS_MAX


@dataclass(frozen=True, slots=True)
class SegmentClaim:
    """What the sender says of a run of records, and the queue offset that the first of them
    gets."""

    topic: bytes
    queue_id: int
    count: int
    first_queue_offset: int
    # Of a kind with a stored form of its own: what the properties of each record begin with, and
    # how long the messages wait. Their units hold the due time in place of the tag's hash.
    prefix: bytes = b""
    delay_ms: int = 0
    needs_key: bool = False  # each record has to have a sharding key: of a FIFO topic
    # How each record names the time at which it is due; ``prefix`` is that of `timers.prefix`.
    timer: TimerForm = TimerForm.NONE


class Stamped(NamedTuple):
    """A batch as it may be written to the log."""

    buffer: bytearray
    units: list[bytes]  # per segment: its consume-queue units, 20 bytes each, in order


class _Job(NamedTuple):
    """What is the same for all records of a batch."""

    layout: Layout
    log_offset: int
    store_time_ms: int
    now_ms: int
    hosts_and_time: bytes
    sys_flags: frozenset[int]
    limits: BatchLimits


def stamp(
    records: bytes,
    segments: Sequence[SegmentClaim],
    *,
    log_offset: int,
    store_time_ms: int,
    now_ms: int | None = None,
    born_host: bytes,
    store_host: bytes,
    limits: BatchLimits,
) -> Stamped:
    """Verifies a batch and fills in what only the broker knows: queue and log offsets, hosts, store
    time.

    ``records`` stays as it is; the result is a private copy of the same length. ``log_offset`` is
    where its first byte will lie. Delays to a time of their own count from ``now_ms``, which may be
    before the store time; None: it is the same. Hosts have 8 or 20 bytes (address and port as
    int32) and decide which IPv6 bits the records must have.

    Raises the catalogue's error with ``segment`` set: BatchMalformed, RecordFieldForbidden,
    BodyTooLarge, BodyChecksumMismatch, PropertiesTooLarge, PropertiesInvalid, PropertyReserved,
    DelayInvalid, TopicNameInvalid; without a segment: BatchTooLarge, BatchMalformed (no segments,
    bytes behind the last one).
    """
    assert log_offset >= 0
    _check_limits(records, segments, limits)
    layout = layout_of_hosts(born_host, store_host)
    job = _Job(
        layout=layout,
        log_offset=log_offset,
        store_time_ms=store_time_ms,
        now_ms=store_time_ms if now_ms is None else now_ms,
        hosts_and_time=born_host + store_time_ms.to_bytes(8, "big") + store_host,
        sys_flags=_PRODUCER_SYS_FLAGS[layout.host_flags],
        limits=limits,
    )
    buffer = bytearray(records)
    units: list[bytes] = []
    at = 0
    for index, claim in enumerate(segments):
        try:
            at, segment_units = _stamp_segment(records, buffer, at, claim, job)
            if claim.needs_key:
                _check_sharding_keys(records, segment_units, claim, job)
        except RequestError as error:
            error.segment = index
            raise
        units.append(segment_units)
    if at != len(records):
        raise BatchMalformed(f"{len(records) - at} bytes lie behind the last segment")
    assert len(buffer) == len(records)
    return Stamped(buffer, units)


def _check_limits(records: bytes, segments: Sequence[SegmentClaim], limits: BatchLimits) -> None:
    if len(records) > limits.batch_bytes_max:
        raise BatchTooLarge(
            f"the batch has {len(records)} bytes, {limits.batch_bytes_max} are allowed"
        )
    if len(segments) > limits.segments_max:
        raise BatchTooLarge(
            f"the batch has {len(segments)} segments, {limits.segments_max} are allowed"
        )
    if not segments:
        raise BatchMalformed("the batch has no segments")
    for index, claim in enumerate(segments):
        assert claim.first_queue_offset >= 0
        if claim.count < 1:
            raise BatchMalformed(f"the segment counts {claim.count} records", segment=index)
        if not 0 < len(claim.topic) <= TOPIC_NAME_LENGTH_MAX:
            raise TopicNameInvalid(f"the topic has {len(claim.topic)} bytes", segment=index)
    count = sum(claim.count for claim in segments)
    if count > limits.batch_count_max:
        raise BatchTooLarge(f"the batch has {count} records, {limits.batch_count_max} are allowed")


def _check_sharding_keys(records: bytes, units: bytes, claim: SegmentClaim, job: _Job) -> None:
    """Raises MessageTypeMismatch unless each record of these units has a sharding key. The records
    were verified: no value is empty, and none has a separator in it.
    """
    body_length = job.layout.reader("body_bytes").unpack_from
    find, begins = records.find, records.startswith
    to_properties = job.layout.head_bytes + 1 + len(claim.topic) + 2 - job.log_offset
    from_start = -job.log_offset
    for number, (place, size, _) in enumerate(UNIT.iter_unpack(units)):
        (body_bytes,) = body_length(records, place + from_start)
        at = place + to_properties + body_bytes
        if find(_LATER_KEY, at, place + from_start + size) < 0 and not begins(_FIRST_KEY, at):
            raise MessageTypeMismatch(
                f"topic {claim.topic.decode()} takes FIFO messages, and message {number} of these "
                "has no sharding key"
            )


_FIRST_KEY = f"{property_codec.SHARDING_KEY}\x01".encode()
_LATER_KEY = b"\x02" + _FIRST_KEY

# The fields that the quick look reads, by SYSFLAG & SYS_FLAG_HOSTS.
_HEAD_READERS = {
    host_flags: layout.reader(
        "size",
        "magic",
        "body_crc",
        "queue_id",
        "sys_flag",
        "born_time_ms",
        "reconsume_times",
        "prepared_offset",
        "body_bytes",
    ).unpack_from
    for host_flags, layout in LAYOUTS.items()
}

_RESERVED_LIST = b"".join(
    bytes((len(name),)) + name.encode() for name in sorted(property_codec.RESERVED)
)
_RESERVED_PREFIX = property_codec.RESERVED_PREFIX.encode()


def _stamp_segment(
    records: bytes, buffer: bytearray, at: int, claim: SegmentClaim, job: _Job
) -> tuple[int, bytes]:
    """Verifies the ``claim.count`` records from ``at`` on and stamps them in ``buffer``; returns
    their end and their units."""
    quick = _stamp_run if accelerator is None else _stamp_run_natively
    pieces: list[bytes] = []
    done = 0
    while True:
        at, units = quick(records, buffer, at, claim, done, job)
        pieces.append(units)
        done += len(units) // UNIT.size
        if done == claim.count:
            return at, units if len(pieces) == 1 else b"".join(pieces)
        if at > len(records) - job.layout.record_bytes_min:
            raise BatchMalformed(
                f"the batch ends after {done} of {claim.count} records, or inside one"
            )
        tag = _examine(records, at, claim, job)
        if claim.timer:
            code = _examine_time(records, at, claim, job)
            timers_at = _properties_at(records, at, claim, job) + DIGITS_AT
            buffer[timers_at : timers_at + timers.DIGITS] = timers.digits_of(code)
        else:
            code = _due_ms(claim, job) or tags_code(tag)
        at, unit = _stamp_one(records, buffer, at, claim.first_queue_offset + done, code, job)
        pieces.append(unit)
        done += 1


def _due_ms(claim: SegmentClaim, job: _Job) -> int:
    """When the messages of the segment are due; 0: they do not wait."""
    return job.store_time_ms + claim.delay_ms if claim.delay_ms else 0


def _timer_bounds(claim: SegmentClaim, job: _Job) -> tuple[int, int]:
    """What the broker adds to the time that a record names, and the last time that is allowed;
    -1: the records name none.
    """
    if not claim.timer:
        return -1, 0
    last_ms = min(job.now_ms + job.limits.timer_delay_ms_max, TIMER_MS_MAX)
    return (job.now_ms if claim.timer is TimerForm.AFTER else 0), last_ms


def _stamp_run_natively(
    records: bytes, buffer: bytearray, at: int, claim: SegmentClaim, done: int, job: _Job
) -> tuple[int, bytes]:
    assert accelerator is not None
    return accelerator.stamp(
        records,
        buffer,
        at,
        claim.count - done,
        claim.topic,
        claim.queue_id,
        claim.first_queue_offset + done,
        job.log_offset,
        job.hosts_and_time,
        job.layout.host_flags,
        job.limits.body_bytes_max,
        job.limits.properties_bytes_max,
        _RESERVED_LIST,
        _RESERVED_PREFIX,
        claim.prefix,
        _due_ms(claim, job),
        *_timer_bounds(claim, job),
    )


def _stamp_run(
    records: bytes, buffer: bytearray, at: int, claim: SegmentClaim, done: int, job: _Job
) -> tuple[int, bytes]:
    """The quick look, and the stamps: takes the segment's records from ``at`` on, of which ``done``
    were taken before, up to the first that fails the look. Returns the offset of that one, and the
    units of those before it."""
    layout, log_offset, _, _, hosts_and_time, sys_flags, limits = job
    read_head = _HEAD_READERS[layout.host_flags]
    write_stamp, stamp_at, head_bytes = layout.stamp.pack_into, layout.stamp_at, layout.head_bytes
    body_bytes_max, properties_bytes_max = limits.body_bytes_max, limits.properties_bytes_max
    is_ascii, is_text = property_codec.CLEAN.fullmatch, property_codec.clean_text
    has, pack_unit = records.startswith, UNIT.pack
    wanted, topic_field = claim.queue_id, bytes((len(claim.topic),)) + claim.topic
    topic_and_length_bytes = len(topic_field) + 2
    total = len(records)
    last_head_at = total - layout.record_bytes_min
    prefix, due_ms = claim.prefix, _due_ms(claim, job)
    prefix_bytes = len(prefix)
    timer_base_ms, timer_last_ms = _timer_bounds(claim, job)
    behind_digits = prefix[DIGITS_END:]
    if claim.timer:
        prefix = prefix[:DIGITS_AT]
    codes: dict[bytes | None, int] = {None: due_ms}  # of the tags met before
    middles: dict[int, bytes] = {}  # the bytes between body and properties, by their length
    units: list[bytes] = []
    first, stop = claim.first_queue_offset + done, claim.first_queue_offset + claim.count
    for queue_offset in range(first, stop):
        if at > last_head_at:
            break
        size, magic, crc, queue_id, sys_flag, born_time_ms, reconsumed, prepared, body_bytes = (
            read_head(records, at)
        )
        topic_at = at + head_bytes + body_bytes
        properties_at = topic_at + topic_and_length_bytes
        end = at + size
        properties_bytes = end - properties_at
        middle = middles.get(properties_bytes)
        if middle is None:
            if not prefix_bytes <= properties_bytes <= properties_bytes_max:
                break
            length = properties_bytes.to_bytes(2, "big")
            middle = middles[properties_bytes] = topic_field + length + prefix
        if not (
            magic == MAGIC_V1
            and queue_id == wanted
            and sys_flag in sys_flags
            and not reconsumed
            and not prepared
            and 0 <= body_bytes <= body_bytes_max
            and end <= total
            and has(middle, topic_at)
            and crc32(records[at + head_bytes : topic_at]) & BODY_CRC_MASK == crc
            and (
                clean := is_ascii(records, properties_at + prefix_bytes, end)
                or is_text(records, properties_at + prefix_bytes, end)
            )
        ):
            break
        if timer_base_ms >= 0:
            digits = records[properties_at + DIGITS_AT : properties_at + DIGITS_END]
            if not (
                digits.isdigit()
                and (timer_base_ms or digits[:1] != b"0")
                and (due_ms := timer_base_ms + int(digits)) <= timer_last_ms
                and has(behind_digits, properties_at + DIGITS_END)
            ):
                break
            buffer[properties_at + DIGITS_AT : properties_at + DIGITS_END] = b"%013d" % due_ms
            codes.clear()
        tag = clean[1]
        code = codes.get(tag)
        if code is None:
            code = codes[tag] = due_ms or tags_code(tag)
        place = log_offset + at
        write_stamp(
            buffer, at + stamp_at, queue_offset, place, sys_flag, born_time_ms, hosts_and_time
        )
        units.append(pack_unit(place, size, code))
        at = end
    return at, b"".join(units)


def _stamp_one(
    records: bytes, buffer: bytearray, at: int, queue_offset: int, code: int, job: _Job
) -> tuple[int, bytes]:
    """Stamps the record at ``at``, which was examined; returns its end and its unit."""
    head = job.layout.fields(records, at)
    log_offset = job.log_offset + at
    job.layout.stamp.pack_into(
        buffer,
        at + job.layout.stamp_at,
        queue_offset,
        log_offset,
        head["sys_flag"],
        head["born_time_ms"],
        job.hosts_and_time,
    )
    unit = UNIT.pack(log_offset, head["size"], code)
    return at + head["size"], unit


def _examine(records: bytes, at: int, claim: SegmentClaim, job: _Job) -> bytes:
    """All that a record has to fulfil, rule by rule, each with its error. Returns the tag of a
    record that is good.

    The caller has seen that at least the shortest possible record fits behind ``at``.
    """
    head = job.layout.fields(records, at)
    _examine_head(head, len(records) - at, claim, job)
    body, properties = _cut(records, at, head, claim)
    if len(body) > job.limits.body_bytes_max:
        raise BodyTooLarge(
            f"the body has {len(body)} bytes, {job.limits.body_bytes_max} are allowed"
        )
    if len(properties) > job.limits.properties_bytes_max:
        raise PropertiesTooLarge(
            f"the properties have {len(properties)} bytes,"
            f" {job.limits.properties_bytes_max} are allowed"
        )
    if crc32(body) & BODY_CRC_MASK != head["body_crc"]:
        raise BodyChecksumMismatch(
            f"BODYCRC is {head['body_crc']}, the body's is {crc32(body) & BODY_CRC_MASK}"
        )
    found = properties[: len(claim.prefix)]
    if claim.timer:  # the digits are looked at by themselves
        found = found[:DIGITS_AT] + timers.NO_DIGITS + found[DIGITS_END:]
    if found != claim.prefix:
        raise PropertiesInvalid(
            f"the properties begin with {properties[: len(claim.prefix)]!r}, "
            f"the segment's kind wants {claim.prefix!r}"
        )
    return property_codec.verify(properties[len(claim.prefix) :])


def _examine_time(records: bytes, at: int, claim: SegmentClaim, job: _Job) -> int:
    """When a record is due, which was examined otherwise. DelayInvalid."""
    start = _properties_at(records, at, claim, job)
    digits = records[start + DIGITS_AT : start + DIGITS_END]
    if not digits.isdigit() or (claim.timer is TimerForm.AT and digits.startswith(b"0")):
        raise DelayInvalid(f"{digits!r} is no time: 13 digits, of ms from 2001 on, or of a delay")
    base_ms, last_ms = _timer_bounds(claim, job)
    due_ms = base_ms + int(digits)
    if due_ms > last_ms:
        raise DelayInvalid(
            f"the message is for {due_ms - job.now_ms} ms from now, "
            f"{job.limits.timer_delay_ms_max} are allowed (timer_max_delay_sec)"
        )
    return due_ms


def _properties_at(records: bytes, at: int, claim: SegmentClaim, job: _Job) -> int:
    """Where the properties begin of a record that was examined."""
    body_bytes: int = job.layout.fields(records, at)["body_bytes"]
    return at + job.layout.head_bytes + body_bytes + 1 + len(claim.topic) + 2


def _examine_head(head: dict[str, Any], available: int, claim: SegmentClaim, job: _Job) -> None:
    if head["magic"] != MAGIC_V1:
        raise BatchMalformed(
            f"MAGICCODE is {head['magic'] & 0xFFFFFFFF:08x}: not a version 1 record"
        )
    if not job.layout.record_bytes_min <= head["size"] <= available:
        raise BatchMalformed(
            f"TOTALSIZE is {head['size']}, {available} bytes are left of the batch"
        )
    if head["queue_id"] != claim.queue_id:
        raise BatchMalformed(f"QUEUEID is {head['queue_id']}, the segment says {claim.queue_id}")
    if head["sys_flag"] & SYS_FLAG_HOSTS != job.layout.host_flags:
        raise BatchMalformed(
            "the IPv6 bits of SYSFLAG differ from the hosts that the stream has given"
        )
    if head["sys_flag"] not in job.sys_flags:
        raise RecordFieldForbidden(
            f"SYSFLAG {head['sys_flag']} has bits that only the broker sets, or no compression type"
        )
    if head["reconsume_times"]:
        raise RecordFieldForbidden(f"RECONSUMETIMES is {head['reconsume_times']}")
    if head["prepared_offset"]:
        raise RecordFieldForbidden(f"PREPARED TRANSACTION OFFSET is {head['prepared_offset']}")


def _cut(records: bytes, at: int, head: dict[str, Any], claim: SegmentClaim) -> tuple[bytes, bytes]:
    """Body and properties, once it is sure that the lengths inside the record add up to its
    size."""
    end = at + head["size"]
    body_at = at + LAYOUTS[head["sys_flag"] & SYS_FLAG_HOSTS].head_bytes
    topic_at = body_at + head["body_bytes"]
    topic_field = bytes((len(claim.topic),)) + claim.topic
    properties_at = topic_at + len(topic_field) + 2
    if head["body_bytes"] < 0 or topic_at >= end:
        raise BatchMalformed(
            f"body length {head['body_bytes']} in a record of {head['size']} bytes"
        )
    if properties_at > end or not records.startswith(topic_field, topic_at):
        raise BatchMalformed("the record's topic is not the segment's")
    properties_bytes = int.from_bytes(records[properties_at - 2 : properties_at], "big")
    if properties_at + properties_bytes != end:
        raise BatchMalformed(
            f"properties length {properties_bytes}, but {end - properties_at} bytes are left"
        )
    return records[body_at:topic_at], records[properties_at:end]
