"""Recall of messages that wait for a time of their own: the handle that names one, and the record
that says that it was recalled. Spec: docs/format/recall.md.
"""

from __future__ import annotations

import base64
from typing import NamedTuple

from cometmq.errors import RecallHandleInvalid
from cometmq.format import delayed, properties, record, timers
from cometmq.format.delayed import REAL_QID, REAL_TOPIC
from cometmq.format.record import Record, layout_of_hosts
from cometmq.format.timers import TIMER_DEL_UNIQKEY, TIMER_OUT_MS, TIMER_QUEUE_ID, TIMER_TOPIC

VERSION = "v1"
HANDLE_CHARACTERS_MAX = 48 * 1024  # a unique id may have nearly all bytes of the properties
NUMBER_MAX = 2**62  # so that sums of two fit an int64
PURPOSE = b"recall"  # of the MAC
TOMBSTONE_BODY = b"0"  # RocketMQ's


def names_of(topic: str, unique_id: str) -> frozenset[str]:
    """How tombstones name a message: RocketMQ 5.5, and others of 5.x."""
    return frozenset((unique_id, f"{topic}+{unique_id}"))


class RecallRun(NamedTuple):
    """Messages of one segment, which lie beside each other in the timer queue from offset ``first``
    on. What a handle's MAC is made of.
    """

    broker_group: str
    topic: str
    generation: int
    first: int
    message_count: int

    def signed(self) -> bytes:
        """The bytes that the MAC signs."""
        return " ".join(map(str, self)).encode()


class Handle(NamedTuple):
    """One message of a run, by its place in it."""

    run: RecallRun
    place: int
    due_ms: int
    unique_id: str
    mac: bytes

    @property
    def offset(self) -> int:
        """Where it lies in the timer queue."""
        return self.run.first + self.place

    def encode(self) -> str:
        """RocketMQ's ``v1 topic broker time id``, and ours behind it, in base64url."""
        run = self.run
        place = f"{run.first}:{run.message_count}:{self.place}"
        parts = (VERSION, run.topic, run.broker_group, str(self.due_ms), self.unique_id)
        text = " ".join((*parts, place, str(run.generation), self.mac.hex()))
        return base64.urlsafe_b64encode(text.encode()).decode()


def decode(handle: object) -> Handle:
    """Raises RecallHandleInvalid for what no broker of ours has given."""
    try:
        if not isinstance(handle, str) or len(handle) > HANDLE_CHARACTERS_MAX:
            raise ValueError("it is no text, or too long")
        text = base64.b64decode(handle.encode(), altchars=b"-_", validate=True).decode()
        version, topic, broker_group, due, rest = text.split(" ", 4)
        unique_id, places, generation, mac = rest.rsplit(" ", 3)  # an id may have blanks
        first, count, place = map(_number, places.split(":"))
        if version != VERSION or not place < count:
            raise ValueError("a field has no such value")
        run = RecallRun(broker_group, topic, _number(generation), first, count)
        return Handle(run, place, _number(due), unique_id, bytes.fromhex(mac))
    except ValueError:
        raise RecallHandleInvalid(f"{handle!r:.80} is no handle of ours") from None


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 20:
        raise ValueError(f"{text[:30]!r} is no number")
    if (number := int(text)) > NUMBER_MAX:
        raise ValueError(f"{number} is too large")
    return number


class Tombstone(NamedTuple):
    """The record that says that ``source`` was recalled. RocketMQ's: it lies in the timer queue for
    the same time, and names the message by topic and unique id. Ours also names it as any relayed
    record does, by its log offset.
    """

    source: Record
    due_ms: int
    properties: bytes
    store_host: bytes
    topic: str = TIMER_TOPIC
    queue_id: int = TIMER_QUEUE_ID

    @classmethod
    def of(cls, source: Record, store_host: bytes) -> Tombstone:
        """``source`` names a time, a topic and a unique id. Raises PropertiesTooLarge: of an id of
        16,000 bytes or so.
        """
        due_ms = timers.due_ms(source.raw_properties)
        target = delayed.target_of(source.raw_properties)
        assert due_ms is not None
        assert target is not None
        topic, queue_id = target
        out_ms = source.properties.get(TIMER_OUT_MS, str(due_ms))
        pairs = {
            # RocketMQ looks for the message among those of the same second.
            TIMER_OUT_MS: out_ms.rjust(timers.DIGITS, "0"),
            REAL_TOPIC: topic,
            REAL_QID: str(queue_id),
            timers.TIMER_DELIVER_MS: str(due_ms),
            TIMER_DEL_UNIQKEY: source.unique_id or f"{topic}+",
        }
        if source.unique_id:
            pairs[properties.UNIQ_KEY] = source.unique_id
        return cls(source, due_ms, properties.encode(pairs), store_host)

    @property
    def size_bytes(self) -> int:
        layout = layout_of_hosts(self.store_host, self.store_host)
        names = len(self.topic) + len(self.properties)
        return layout.record_bytes_min + len(TOMBSTONE_BODY) + names

    def tags_code(self, store_time_ms: int) -> int:
        """What the record's unit holds."""
        return self.due_ms

    def encode(
        self, queue_offset: int, log_offset: int, store_time_ms: int, store_host: bytes
    ) -> bytes:
        """The record as it is written at ``log_offset``."""
        return record.encode(
            self.topic.encode(),
            self.queue_id,
            TOMBSTONE_BODY,
            self.properties,
            born_time_ms=store_time_ms,
            born_host=store_host,
            store_host=store_host,
            queue_offset=queue_offset,
            log_offset=log_offset,
            store_time_ms=store_time_ms,
            prepared_offset=self.source.log_offset,
        )
