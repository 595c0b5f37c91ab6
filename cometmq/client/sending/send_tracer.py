"""Trace records of what a producer sends: made when a batch is answered, of its bytes, so that
sending costs nothing more.
"""

from __future__ import annotations

import math

from cometmq.client.options import TraceOptions
from cometmq.client.sending.batch import Batch, Segment
from cometmq.client.tracing.dispatcher import TraceDispatcher
from cometmq.client.tracing.pack import sent_form
from cometmq.client.tracing.sampling import Sampling
from cometmq.clock import SystemClock
from cometmq.format import trace

PRODUCER_GROUP = "DEFAULT_PRODUCER"  # RocketMQ's name of a group that nobody named


class SendTracer:
    """Records of what a producer sends, made of answered batches."""

    def __init__(
        self, dispatcher: TraceDispatcher, options: TraceOptions, timeout_s: float
    ) -> None:
        self._dispatcher = dispatcher
        self._sampling = Sampling(options.trace_sampling)
        self._timeout_s = timeout_s
        self._clock = SystemClock()

    def stored(self, batch: Batch, store_host: str, id_host: bytes, log_offset: int) -> None:
        """The batch is stored. ``store_host``: the broker's address; ``id_host``: its host as ids
        of messages have it.
        """
        self._decided(batch, store_host, id_host, log_offset)

    def failed(self, batch: Batch, store_host: str) -> None:
        """None of the batch is stored, as far as is known."""
        self._decided(batch, store_host, b"", 0)

    def _decided(self, batch: Batch, store_host: str, id_host: bytes, log_offset: int) -> None:
        began_s = batch.deadline_s - self._timeout_s
        cost_ms = max(0, math.ceil((self._clock.monotonic_s() - began_s) * 1000))
        began_ms = self._clock.wall_ms() - cost_ms
        first = 0
        for segment in batch.segments:
            stream, counter, count = segment.id_stream, segment.first_counter, segment.count
            topic = segment.queue.topic
            sampled = self._sampling.indexes(stream, counter, count)
            if (sampled or batch.is_marked) and topic != self._dispatcher.topic:
                form = sent_form(
                    *(began_ms, PRODUCER_GROUP, topic, store_host, cost_ms, stream, counter),
                    kind=_message_type(segment),
                    id_host=id_host,
                    log_offset=log_offset,
                )
                self._dispatcher.put_sent(
                    *(batch.records, batch.starts, first, count, sampled, form),
                    is_marked=batch.is_marked,
                )
            first += count

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


def _message_type(segment: Segment) -> int:
    """-1: it depends on the sharding key."""
    if segment.stored.half is not None:
        return trace.HALF
    return trace.DELAY if segment.stored.waits else -1
