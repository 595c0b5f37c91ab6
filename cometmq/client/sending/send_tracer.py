"""Trace records of what a producer sends: made when a batch is answered, of its bytes, so that
sending costs nothing more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from cometmq.client.options import TraceOptions
from cometmq.client.sending.batch import Batch, Segment
from cometmq.client.tracing.dispatcher import TraceDispatcher
from cometmq.client.tracing.sampling import Sampling, is_wanted
from cometmq.clock import SystemClock
from cometmq.format import trace
from cometmq.format.ids import offset_id
from cometmq.format.properties import KEYS, sharding_key_of, tag_of
from cometmq.format.record import decode
from cometmq.format.trace import PubForm

PRODUCER_GROUP = "DEFAULT_PRODUCER"  # RocketMQ's name of a group that nobody named

_MARK = f"{trace.TRACE_ON}\x01".encode()
_KEYS = f"{KEYS}\x01".encode()


class _Answer(NamedTuple):
    """To a batch. ``log_offset`` None: nothing is stored."""

    began_ms: int
    cost_ms: int
    store_host: str
    log_offset: int | None


class SendTracer:
    """Records of what a producer sends, made of answered batches."""

    def __init__(
        self, dispatcher: TraceDispatcher, options: TraceOptions, timeout_s: float
    ) -> None:
        self._dispatcher = dispatcher
        self._sampling = Sampling(options.trace_sampling)
        self._timeout_s = timeout_s
        self._clock = SystemClock()

    def decided(self, batch: Batch, store_host: str, log_offset: int | None) -> None:
        """The batch has its answer; ``log_offset`` None: none of it is stored, as far as is
        known.
        """
        began_s = batch.deadline_s - self._timeout_s
        cost_ms = max(0, math.ceil((self._clock.monotonic_s() - began_s) * 1000))
        began_ms = self._clock.wall_ms() - cost_ms
        answer = _Answer(began_ms, cost_ms, store_host, log_offset)
        first = 0
        for segment in batch.segments:
            if segment.queue.topic != self._dispatcher.topic:
                chosen = self._chosen(batch, segment, first)
                self._put(batch, segment, first, chosen, answer)
            first += segment.count

    def ended(
        self, group: str, topic: str, message_id: str, state: str, *, from_check: bool = False
    ) -> None:
        """A producer has ended a transaction, or has answered a check; ``state`` in RocketMQ's
        words.
        """
        if self._sampling.chooses(message_id):
            now_ms = self._clock.wall_ms()
            record = trace.EndTransaction(
                *(now_ms, group, topic, message_id, "", "", "", trace.COMMIT, message_id, state),
                from_check,
            )
            self._dispatcher.put(record, message_id, "")

    def recalled(self, topic: str, message_id: str, *, is_recalled: bool) -> None:
        """A message was taken back, or it was too late."""
        if self._sampling.chooses(message_id):
            now_ms = self._clock.wall_ms()
            record = trace.Recall(now_ms, PRODUCER_GROUP, topic, message_id, is_recalled)
            self._dispatcher.put(record, message_id, "")

    def _chosen(self, batch: Batch, segment: Segment, first: int) -> Iterator[int]:
        """Places in the segment."""
        sampled = self._sampling.indexes(segment.id_stream, segment.first_counter, segment.count)
        if _MARK not in batch.records:
            yield from sampled
            return
        for index in range(segment.count):
            record = decode(batch.records, batch.starts[first + index])
            if is_wanted(record.properties.get(trace.TRACE_ON, ""), index in sampled):
                yield index

    def _form(self, segment: Segment, answer: _Answer) -> PubForm:
        """What the records of a segment have in common."""
        return PubForm(
            trace.Pub(
                *(answer.began_ms, PRODUCER_GROUP, segment.queue.topic, "", "", ""),
                *(answer.store_host, 0, answer.cost_ms, trace.NORMAL, ""),
                answer.log_offset is not None,
            )
        )

    def _put(
        self, batch: Batch, segment: Segment, place: int, indexes: Iterable[int], answer: _Answer
    ) -> None:
        form: PubForm | None = None
        for index in indexes:
            start = batch.starts[place + index]
            record = decode(batch.records, start)
            raw = record.raw_properties
            keys = record.properties.get(KEYS, "") if _KEYS in raw else ""
            tags = tag_of(raw).decode("utf-8", "replace")
            form = form or self._form(segment, answer)
            message_id = f"{segment.id_stream}{segment.first_counter + index:08X}"
            stored_at = ""
            if answer.log_offset is not None:
                stored_at = offset_id(record.store_host, answer.log_offset + start)
            kind = _message_type(segment, raw)
            text = form.encode(message_id, tags, keys, record.body_bytes, kind, stored_at)
            self._dispatcher.put_text(text, message_id, keys)


def _message_type(segment: Segment, raw_properties: bytes) -> int:
    if segment.stored.half is not None:
        return trace.HALF
    if segment.stored.waits:
        return trace.DELAY
    return trace.ORDER if sharding_key_of(raw_properties) else trace.NORMAL
