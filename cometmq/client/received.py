"""A received message: its record, the queue that it came from, its deliveries.

A consumer has thousands of them in work at a time. The extension's type keeps a message as bytes,
in one object that the garbage collector does not track: else it would look at each of them again
and again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from cometmq.errors import BatchMalformed
from cometmq.format import properties as property_codec
from cometmq.format.compression import SYS_FLAG_COMPRESSED, decompress
from cometmq.format.record import Record, decode, decode_all
from cometmq.model import QueueRef
from cometmq.native import untracked
from cometmq.native.interface import Buffer

ShownName = Callable[[str], str]  # of a topic: its name without the namespace


@untracked
class ReceivedMessage:
    """A message as an application reads it: fields are read from its record when they are looked
    at. It holds its own copy of the record and nothing else of a pull. Equal only to itself.

    ``attempt`` counts this process's deliveries to the listener, from 1; ``reconsume_times`` how
    often the group sent the message back before. ``raw`` is the record as it lies in the log.
    """

    __slots__ = ("_body", "_properties", "_record", "_shown_name", "attempt", "queue", "raw")

    def __init__(self, raw: bytes, queue: QueueRef, shown_name: ShownName | None = None) -> None:
        """ValueError unless ``raw`` is one whole record."""
        try:
            records = decode_all(raw)
        except BatchMalformed:
            records = []
        if len(records) != 1:
            raise ValueError("not one whole record")
        self._fill(records[0], raw, queue, shown_name)

    def _fill(
        self, record: Record, raw: bytes, queue: QueueRef, shown_name: ShownName | None
    ) -> None:
        self._record = record
        self._body: bytes | None = None  # decompressed; None: nobody has looked yet
        self._properties: dict[str, str] | None = None  # None: nobody has looked yet
        self._shown_name = shown_name  # None: there is no namespace
        self.raw = raw
        self.queue = queue
        self.attempt = 1

    @classmethod
    def _decode_run(
        cls, buffer: Buffer, queue: QueueRef, shown_name: ShownName | None, /
    ) -> tuple[int, list[Self]]:
        """The records that the buffer holds end to end, and where they end. The extension stops at
        what is no whole record; plain Python raises BatchMalformed.
        """
        whole, at, found = bytes(buffer), 0, []
        for record in decode_all(whole):
            one = cls.__new__(cls)
            one._fill(record, whole[at : at + record.size], queue, shown_name)
            found.append(one)
            at += record.size
        return at, found

    @property
    def topic(self) -> str:
        """The topic that it was sent to, also when it comes from the group's retry topic."""
        topic = self.queue.topic
        if not topic.startswith("%"):
            return topic
        sent_to = self.properties.get(property_codec.RETRY_TOPIC, topic)
        return sent_to if self._shown_name is None else self._shown_name(sent_to)

    @property
    def body(self) -> bytes:
        """The payload as it was sent; ``memoryview(message.body)`` copies nothing. Raises
        BodyCompressionInvalid when its producer's compression cannot be undone.
        """
        if not self._record.sys_flag & SYS_FLAG_COMPRESSED:
            return self._record.body
        if self._body is None:
            self._body = self._decompressed()
        return self._body

    def _decompressed(self) -> bytes:
        return decompress(self.stored_body, self.sys_flag)

    @property
    def stored_body(self) -> bytes:
        """The payload as it was stored, maybe compressed."""
        return self._record.body

    @property
    def tag(self) -> str:
        """Empty = none."""
        return self._plain_tag()

    def _plain_tag(self) -> str:
        return property_codec.tag_of(self.raw_properties).decode("utf-8", "replace")

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys by which the message can be found."""
        return tuple(self.properties.get(property_codec.KEYS, "").split())

    @property
    def sharding_key(self) -> str:
        """Empty = none."""
        return self.properties.get(property_codec.SHARDING_KEY, "")

    @property
    def properties(self) -> dict[str, str]:
        """All properties, the system's included; a copy is not made."""
        if self._properties is None:
            self._properties = property_codec.decode(self.raw_properties)
        return self._properties

    @property
    def user_properties(self) -> dict[str, str]:
        """Those that an application set, and ``Message(properties=…)`` takes: without the system's,
        tag, keys and sharding key, which have fields of their own, and without what made it a
        request. A new dict at each look.
        """
        return property_codec.of_application(self.properties)

    @property
    def raw_properties(self) -> bytes:
        """All properties, as they are stored."""
        return self._record.raw_properties

    @property
    def flag(self) -> int:
        """The application's own number; 0 = never set."""
        return self._record.flag

    @property
    def sys_flag(self) -> int:
        """RocketMQ's bits: how the body is compressed, and others."""
        return self._record.sys_flag

    @property
    def message_id(self) -> str:
        """``<broker group>/<log offset>``."""
        return f"{self.queue.broker_group}/{self.log_offset}"

    @property
    def unique_id(self) -> str:
        """The producer's UNIQ_KEY; the same for every copy of a message that was stored twice.
        Empty = none.
        """
        return self.properties.get(property_codec.UNIQ_KEY, "")

    @property
    def size(self) -> int:
        """Bytes of its record."""
        return self._record.size

    @property
    def queue_offset(self) -> int:
        """Its place in the queue."""
        return self._record.queue_offset

    @property
    def log_offset(self) -> int:
        """Its place in the broker group's log, in bytes."""
        return self._record.log_offset

    @property
    def reconsume_times(self) -> int:
        """How often the group sent it back; 0 = it comes for the first time."""
        return self._record.reconsume_times

    @property
    def born_time_ms(self) -> int:
        """When the producer made it, by the producer's clock; milliseconds since 1970-01-01 UTC."""
        return self._record.born_time_ms

    @property
    def store_time_ms(self) -> int:
        """When the broker stored it, by the broker's clock; milliseconds since 1970-01-01 UTC."""
        return self._record.store_time_ms

    @property
    def record(self) -> Record:
        """All fields as they are stored; decoded at each look."""
        return decode(self.raw)

    def __repr__(self) -> str:
        return (
            f"ReceivedMessage({self.message_id!r}, {self.queue}, queue_offset={self.queue_offset})"
        )

    def __reduce__(self) -> tuple[object, ...]:
        state = None, {"attempt": self.attempt}
        return ReceivedMessage, (self.raw, self.queue, self._shown_name), state


def decode_received(
    buffer: Buffer, queue: QueueRef, shown_name: ShownName | None
) -> list[ReceivedMessage]:
    """The messages of a buffer that holds their records end to end, as a pull answers them. Raises
    BatchMalformed.
    """
    at, found = ReceivedMessage._decode_run(buffer, queue, shown_name)
    if at < len(buffer):
        decode(bytes(buffer), at)  # plain Python says what is wrong there
        raise AssertionError(f"a whole record at byte {at} was refused")
    return found
