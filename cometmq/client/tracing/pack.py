"""Trace records packed for the trace topic: many in the body of one message, whose keys are the ids
and keys of the messages that they are about. Pure. The extension makes the records of a whole batch
in one call; what needs a look it leaves to the plain Python here.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from cometmq.client.received import ReceivedMessage
from cometmq.client.tracing.sampling import Sampling, is_wanted
from cometmq.format import trace
from cometmq.format.compression import compress_records
from cometmq.format.ids import offset_id
from cometmq.format.properties import KEYS, SHARDING_KEY, TAGS, UNIQ_KEY
from cometmq.format.record import decode
from cometmq.format.trace import INT_MAX, TraceRecord, text_field
from cometmq.native import accelerator
from cometmq.native.interface import TracePack

BODY_BYTES_MAX = 128_000  # of one message of records, as RocketMQ's
COMPRESS_ABOVE_BYTES = 4_096  # as RocketMQ's
KEYS_BYTES_MAX = 16_384  # of all keys of one message
KEY_BYTES_MAX = 1_024  # a longer one is no key of the trace
WHOLE_COUNT = 32  # messages that are sent together where there are many records

_NO_KEY = str.maketrans("\x00\x01\x02", "   ")  # what no property has


class SentForm(NamedTuple):
    """The parts that records of messages to one queue have in common, as they are written.
    ``kind``: their type; -1: it depends on the sharding key. ``id_host``: the broker's host as ids
    have it; empty: nothing is stored. ``log_offset``: of the batch.
    """

    head: bytes
    id_stream: bytes
    first_counter: int
    store_host: bytes
    cost_ms: bytes
    kind: int
    id_host: bytes
    log_offset: int
    end: bytes

    def encode(self, index: int, start: int, body_bytes: int, named: dict[str, str]) -> bytes:
        """The record of a message, which begins at a byte of the batch."""
        kind = self.kind
        if kind < 0:
            kind = trace.ORDER if named.get(SHARDING_KEY) else trace.NORMAL
        stored_at = ""
        if self.id_host:
            stored_at = offset_id(self.id_host, self.log_offset + start)
        fields = (
            self.message_id(index).encode(),
            text_field(named.get(TAGS, "")).encode("utf-8", "replace"),
            text_field(named.get(KEYS, "")).encode("utf-8", "replace"),
            self.store_host,
            b"%d" % body_bytes,
            self.cost_ms,
            b"%d" % kind,
            text_field(stored_at).encode(),
            self.end,
        )
        return self.head + b"\x01".join(fields)

    def message_id(self, index: int) -> str:
        """Of the message at this place of the segment."""
        return f"{self.id_stream.decode()}{self.first_counter + index:08X}"


class CallForm(NamedTuple):
    """The parts that records of one listener call have in common. ``middle``: between id and
    keys; empty: the number of deliveries before.
    """

    head: bytes
    middle: bytes
    tail: bytes


def sent_form(
    time_ms: int,
    group: str,
    topic: str,
    store_host: str,
    cost_ms: int,
    id_stream: str,
    first_counter: int,
    *,
    kind: int,
    id_host: bytes,
    log_offset: int,
) -> SentForm:
    """Of :class:`cometmq.format.trace.Pub`. An empty ``id_host``: the send has failed."""
    head = f"Pub\x01{time_ms}\x01{trace.REGION}\x01{text_field(group)}\x01{text_field(topic)}\x01"
    return SentForm(
        head.encode(),
        id_stream.encode(),
        first_counter,
        text_field(store_host).encode(),
        b"%d" % min(cost_ms, INT_MAX),
        kind,
        id_host,
        log_offset,
        b"true\x02" if id_host else b"false\x02",
    )


def before_form(time_ms: int, group: str, request_id: str) -> CallForm:
    """Of :class:`cometmq.format.trace.SubBefore`."""
    head = f"SubBefore\x01{time_ms}\x01{trace.REGION}\x01{text_field(group)}\x01{request_id}\x01"
    return CallForm(head.encode(), b"", b"\x02")


def after_form(request_id: str, cost_ms: int, code: int, time_ms: int, group: str) -> CallForm:
    """Of :class:`cometmq.format.trace.SubAfter`."""
    cost_ms = max(0, min(cost_ms, INT_MAX))
    middle = f"{cost_ms}\x01{'true' if code == trace.SUCCESS else 'false'}"
    tail = f"\x01{code}\x01{time_ms}\x01{text_field(group)}\x02"
    return CallForm(f"SubAfter\x01{request_id}\x01".encode(), middle.encode(), tail.encode())


class PlainPack:
    """As :class:`cometmq.native.interface.TracePack`, for records that are made already."""

    def __init__(self, body_bytes_max: int, keys_bytes_max: int, room: int) -> None:
        self._body_bytes_max = body_bytes_max
        self._keys_bytes_max = keys_bytes_max
        self.room = room
        self.dropped = 0
        self.is_full = False
        self._begin()

    def _begin(self) -> None:
        self.count = 0
        self._body = bytearray()
        self._keys: dict[bytes, None] = {}
        self._keys_bytes = 0  # each with the blank behind it

    def put(self, text: bytes, words: bytes) -> bool:
        """Takes a record. False: the pack is full."""
        self.is_full = False
        if self.room <= 0:
            self.dropped += 1
            return True
        new = [word for word in words.split() if word not in self._keys]
        size = len(self._body) + len(text)
        keys_bytes = self._keys_bytes + sum([len(word) + 1 for word in new])
        if self.count and (size > self._body_bytes_max or keys_bytes > self._keys_bytes_max):
            self.is_full = True
            return False
        for word in new:
            if word not in self._keys and self._keys_bytes + len(word) < self._keys_bytes_max:
                self._keys[word] = None
                self._keys_bytes += len(word) + 1
        self._body += text
        self.count += 1
        self.room -= 1
        return True

    def take(self) -> tuple[bytes, bytes]:
        """The records, and the keys with blanks between them; then it is empty."""
        taken = bytes(self._body), b" ".join(self._keys)
        self._begin()
        return taken


class Packed(NamedTuple):
    """One message of records."""

    body: bytes  # a ZlibBody above COMPRESS_ABOVE_BYTES
    keys: str  # with blanks between them
    record_count: int


class Packer:
    """Records that wait to be sent, at most ``room``; more are dropped, and counted. Nothing is
    traced of ``topic``, the trace topic itself.
    """

    def __init__(
        self,
        topic: str,
        sampling: Sampling,
        room: int,
        body_bytes_max: int = BODY_BYTES_MAX,
        keys_bytes_max: int = KEYS_BYTES_MAX,
    ) -> None:
        self._topic = topic
        self._sampling = sampling
        self._room = room
        limits = body_bytes_max, keys_bytes_max, room
        self._native: TracePack | None = None
        if accelerator is not None:
            self._native = accelerator.TracePack(*limits)
        self._pack: TracePack | PlainPack = self._native or PlainPack(*limits)
        self._whole: deque[Packed] = deque()

    def __len__(self) -> int:
        """Records that wait."""
        return sum(packed.record_count for packed in self._whole) + self._pack.count

    @property
    def is_pressing(self) -> bool:
        """Whether there is enough for a batch, or no room for much more."""
        return len(self._whole) >= WHOLE_COUNT or self._pack.room <= self._room // 2

    def next(self) -> Packed | None:
        """The next message, also an incomplete one; None: no record waits."""
        if not self._whole and self._pack.count:
            self._close()
        if not self._whole:
            return None
        packed = self._whole.popleft()
        self._pack.room += packed.record_count
        return packed

    def take_dropped(self) -> int:
        """Records that were dropped since the last call."""
        dropped, self._pack.dropped = self._pack.dropped, 0
        return dropped

    def put(self, record: TraceRecord, message_id: str, keys: str) -> None:
        """Takes one record."""
        self._put(trace.encode(record).encode("utf-8", "replace"), message_id, keys)

    def put_sent(
        self,
        records: bytes,
        starts: array[int],
        first: int,
        count: int,
        sampled: range,
        form: SentForm,
        *,
        is_marked: bool,
    ) -> None:
        """Takes the records of a segment's messages, the first one at ``starts[first]``: of those
        in ``sampled``, and of those that are marked, which there are only if ``is_marked``.
        """
        native, at = self._native, 0
        if native is None:
            for index in range(count) if is_marked else sampled:
                self._look_at_sent(records, starts[first + index], index, index in sampled, form)
            return
        step = sampled.step if sampled else 0
        while at < count:
            at = native.put_sent(
                *(records, starts, first, at, count, sampled.start, step, is_marked, form)
            )
            if native.is_full:
                self._close()
            elif at < count:
                self._look_at_sent(records, starts[first + at], at, at in sampled, form)
                at += 1

    def choose(self, messages: Sequence[ReceivedMessage]) -> list[ReceivedMessage]:
        """Which of them are traced: a sample, and those that are marked."""
        found: list[ReceivedMessage] = []
        native, period, at, count = self._native, self._sampling.period, 0, len(messages)
        while at < count:
            if native is not None:
                at = native.choose(messages, at, period, self._topic, found)
            if at < count:
                if self._wants(messages[at]):
                    found.append(messages[at])
                at += 1
        return found

    def put_calls(self, messages: Sequence[ReceivedMessage], form: CallForm) -> None:
        """Takes the records of received messages."""
        native, at, count = self._native, 0, len(messages)
        while at < count:
            if native is not None:
                at = native.put_calls(messages, at, form)
            if native is not None and native.is_full:
                self._close()
            elif at < count:
                self._look_at_call(messages[at], form)
                at += 1

    def _look_at_sent(
        self, records: bytes, start: int, index: int, is_sampled: bool, form: SentForm
    ) -> None:
        record = decode(records, start)
        named = record.properties
        if is_wanted(named.get(trace.TRACE_ON, ""), is_sampled):
            text = form.encode(index, start, record.body_bytes, named)
            self._put(text, form.message_id(index), named.get(KEYS, ""))

    def _wants(self, message: ReceivedMessage) -> bool:
        if message.queue.topic == self._topic:
            return False
        named = message.properties
        is_sampled = self._sampling.chooses(named.get(UNIQ_KEY, ""))
        return is_wanted(named.get(trace.TRACE_ON, ""), is_sampled)

    def _look_at_call(self, message: ReceivedMessage, form: CallForm) -> None:
        named = message.properties
        message_id, keys = named.get(UNIQ_KEY, "") or message.message_id, named.get(KEYS, "")
        tries = message.reconsume_times + message.attempt - 1
        fields = (
            text_field(message_id).encode("utf-8", "replace"),
            form.middle or b"%d" % max(0, min(tries, INT_MAX)),
            text_field(keys).encode("utf-8", "replace"),
        )
        self._put(form.head + b"\x01".join(fields) + form.tail, message_id, keys)

    def _put(self, text: bytes, message_id: str, keys: str) -> None:
        words = _words(message_id, keys)
        if not self._pack.put(text, words):
            self._close()
            self._pack.put(text, words)

    def _close(self) -> None:
        count = self._pack.count
        body, keys = self._pack.take()
        if len(body) > COMPRESS_ABOVE_BYTES:
            body = compress_records(body)
        self._whole.append(Packed(body, keys.decode("utf-8", "replace"), count))


def _words(message_id: str, keys: str) -> bytes:
    """By what the record is found."""
    words = f"{message_id} {keys}".translate(_NO_KEY).split()
    encoded = [word.encode("utf-8", "replace") for word in words]
    return b" ".join([word for word in encoded if len(word) <= KEY_BYTES_MAX])
