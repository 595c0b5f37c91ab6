"""New records made from stored ones: how the broker itself appends delayed, retried and dead
messages. Spec: docs/format/record.md.

A relayed record has the body, the hosts of its producer and most properties of its source. Its
PREPARED TRANSACTION OFFSET holds the log offset of the source, so the log has what was done with
each message. RocketMQ does so for committed transactions, and reads the field nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol
from zlib import crc32

from cometmq.errors import PropertiesTooLarge, StoreDamaged
from cometmq.format.compression import SYS_FLAG_COMPRESSED, SYS_FLAG_COMPRESSION_SHIFT
from cometmq.format.properties import tag_of
from cometmq.format.record import (
    BODY_CRC_MASK,
    LAYOUTS,
    MAGIC_V1,
    SYS_FLAG_HOSTS,
    Record,
    layout_of_hosts,
)
from cometmq.format.taghash import tags_code
from cometmq.model import PROPERTIES_BYTES_MAX

# What stays of SYSFLAG: compression, and bit 1 (several tags). Not transactions, hosts, batches.
_KEPT_SYS_FLAGS = SYS_FLAG_COMPRESSED | 1 << 1 | 7 << SYS_FLAG_COMPRESSION_SHIFT


class OwnRecord(Protocol):
    """A record that the broker itself appends."""

    @property
    def topic(self) -> str: ...

    @property
    def queue_id(self) -> int: ...

    @property
    def size_bytes(self) -> int: ...

    def tags_code(self, store_time_ms: int) -> int:
        """What the record's unit holds in place of an offset and a size."""
        ...

    def encode(
        self, queue_offset: int, log_offset: int, store_time_ms: int, store_host: bytes
    ) -> bytes:
        """The record as it is written at ``log_offset``."""
        ...


class Relayed(NamedTuple):
    """One record to be appended: what it is made from, and what is different."""

    source: Record
    topic: str
    queue_id: int
    properties: bytes
    reconsume_times: int
    delay_ms: int  # of a record for the schedule topic; else 0
    size_bytes: int
    transaction_flags: int = 0  # of SYSFLAG: that a half message is committed
    due_ms: int = 0  # of a record for the timer topic; else 0

    def wait_ms(self, now_ms: int) -> int:
        """How long the record waits until it is due; 0: it does not wait."""
        return max(0, self.due_ms - now_ms) or self.delay_ms

    def tags_code(self, store_time_ms: int) -> int:
        """What the record's unit holds: the due time of a delayed message, else the tag's hash."""
        if self.due_ms:
            return self.due_ms
        if self.delay_ms:
            return store_time_ms + self.delay_ms
        return tags_code(tag_of(self.properties))

    def encode(
        self, queue_offset: int, log_offset: int, store_time_ms: int, store_host: bytes
    ) -> bytes:
        """The record as it is written at ``log_offset``."""
        source = self.source
        layout = layout_of_hosts(source.born_host, store_host)
        head = layout.head.pack(
            self.size_bytes,
            MAGIC_V1,
            source.body_crc,
            self.queue_id,
            source.flag,
            queue_offset,
            log_offset,
            source.sys_flag & _KEPT_SYS_FLAGS | layout.host_flags | self.transaction_flags,
            source.born_time_ms,
            source.born_host,
            store_time_ms,
            store_host,
            self.reconsume_times,
            source.log_offset,
            len(source.body),
        )
        topic, properties = self.topic.encode(), self.properties
        length = len(properties).to_bytes(2, "big")
        return b"".join((head, source.body, bytes((len(topic),)), topic, length, properties))


def relay(
    source: Record,
    topic: str,
    queue_id: int,
    store_host: bytes,
    *,
    properties: bytes | None = None,
    reconsume_times: int | None = None,
    delay_ms: int = 0,
    transaction_flags: int = 0,
    due_ms: int = 0,
) -> Relayed:
    """The record that is to be made from ``source``; None: as the source has it.

    Raises StoreDamaged when the body does not fit its CRC any more, PropertiesTooLarge.
    """
    if crc32(source.body) & BODY_CRC_MASK != source.body_crc:
        raise StoreDamaged(f"the body of the record at {source.log_offset} does not fit its CRC")
    properties = source.raw_properties if properties is None else properties
    if len(properties) > PROPERTIES_BYTES_MAX:
        raise PropertiesTooLarge(
            f"with what the broker adds the properties have {len(properties)} bytes, "
            f"{PROPERTIES_BYTES_MAX} are allowed"
        )
    layout = layout_of_hosts(source.born_host, store_host)
    size_bytes = layout.record_bytes_min + len(source.body) + len(topic) + len(properties)
    times = source.reconsume_times if reconsume_times is None else reconsume_times
    return Relayed(
        source, topic, queue_id, properties, times, delay_ms, size_bytes, transaction_flags, due_ms
    )


def with_properties(properties: bytes, put_first: bytes, without: frozenset[bytes]) -> bytes:
    """``properties`` behind ``put_first``, and without the pairs that have one of these names. The
    last pair stays the last: it is the producer's UNIQ_KEY.
    """
    pairs = [
        pair + b"\x02"
        for pair in properties.split(b"\x02")
        if pair and pair.partition(b"\x01")[0] not in without
    ]
    return put_first + b"".join(pairs)


def walk(chunk: bytes) -> Iterator[tuple[int, int, bool]]:
    """(place, end, whether it is relayed) of each record in ``chunk``, which holds whole good
    records end to end, or the end mark of a file.
    """
    at, last_at = 0, len(chunk) - LAYOUTS[0].record_bytes_min
    while at <= last_at:  # an end mark is shorter
        size, magic, sys_flag = _SIZE_MAGIC_FLAG.unpack_from(chunk, at)
        assert magic == MAGIC_V1, (at, magic)
        (source,) = _PREPARED_OFFSETS[sys_flag & SYS_FLAG_HOSTS].unpack_from(chunk, at)
        yield at, at + size, source != 0
        at += size


_SIZE_MAGIC_FLAG = LAYOUTS[0].reader("size", "magic", "sys_flag")
_PREPARED_OFFSETS = {
    host_flags: layout.reader("prepared_offset") for host_flags, layout in LAYOUTS.items()
}
