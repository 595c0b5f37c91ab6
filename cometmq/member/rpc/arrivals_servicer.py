"""``MemberService.WatchArrivals`` on the wire."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import grpc

from cometmq.errors import InvalidRequest
from cometmq.flight_recorder import Stage, queue_end, recorder
from cometmq.member.metrics import MemberMetrics
from cometmq.member.read.group_progress import GroupReads
from cometmq.member.rpc import convert
from cometmq.member.storage.arrivals import Arrival, Arrivals, Queues, Watch
from cometmq.messaging.state import BrokerState
from cometmq.model import QueueKey
from cometmq.rpc.gate import Gate
from cometmq.rpc.interceptors import to_proto
from cometmq.rpc.wire import field, tag, varint
from cometmq.v1 import common_pb2, member_pb2

ARRIVALS_PER_MESSAGE_MAX = 4_096
# Above it a message of the stream ends. The next message has the newest state of the other queues,
# so this is all that a slow stream has in memory.
INLINE_BYTES_PER_MESSAGE_MAX = 256 * 1024
DELIVERED_MAX = 2**32  # in one InlineDelivery
DELIVERED_BYTES_MAX = 2**48

Context = Any  # grpc.aio.ServicerContext of the method's messages


class ArrivalCounts:
    """Counts what goes out with arrivals, and what consumers got of it: to them it was a pull."""

    def __init__(self, metrics: MemberMetrics, groups: GroupReads, state: BrokerState) -> None:
        self._metrics = metrics
        self._groups = groups
        self._topics = state.topics

    def sent_along(self, size_bytes: int) -> None:
        """Records were sent with arrivals."""
        self._metrics.arrival_bytes.inc(size_bytes)

    def delivered(self, topic: str, group: str, count: int, size_bytes: int) -> None:
        """Consumers of a group got messages out of arrivals."""
        if topic in self._topics:  # the series of a deleted one must not come back
            known_group = self._groups.known_or_empty(group)
            self._metrics.messages_out(topic, known_group, count, size_bytes)


class ArrivalsServicer:
    """``WatchArrivals`` for pull-holds. ``flush_now`` is called when queues are added, because a
    pull-hold waits from now on for messages that are not on disk yet.
    """

    def __init__(
        self,
        arrivals: Arrivals,
        queues: Queues,
        flush_now: Callable[[], None],
        gate: Gate,
        counts: ArrivalCounts,
    ) -> None:
        self._arrivals = arrivals
        self._flush_now = flush_now
        self._queues = queues
        self._gate = gate
        self._counts = counts

    async def WatchArrivals(self, request_iterator: object, context: Context) -> None:
        """Reads here, and writes in a task of its own. A half-closed stream still gets arrivals."""
        woken = asyncio.Event()
        watch = self._arrivals.open(woken.set)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._write_arrivals(watch, woken, context))
                tasks.create_task(self._gate.when_draining(self._gate.check))
                while (request := await context.read()) is not grpc.aio.EOF:
                    self._take(watch, request)
        finally:
            self._arrivals.close(watch)

    def _take(self, watch: Watch, request: member_pb2.WatchArrivalsRequest) -> None:
        self._arrivals.remove(watch, map(_key, request.remove))
        if request.add:
            self._arrivals.add(watch, map(_key, request.add))
            self._flush_now()
        self._arrivals.want(watch, map(_key, request.inline_wanted))
        for one in request.inline_deliveries:
            _check_delivered(one)
            self._counts.delivered(one.topic, one.group, one.message_count, one.record_bytes)

    async def _write_arrivals(self, watch: Watch, woken: asyncio.Event, context: Context) -> None:
        while True:
            await woken.wait()
            woken.clear()
            while watch.is_pending:
                await context.room(INLINE_BYTES_PER_MESSAGE_MAX)
                if packed := self._next(watch):
                    await context.write(packed)
            context.leave_room()

    def _next(self, watch: Watch) -> bytes:
        """A WatchArrivalsResponse, serialized, with as many as one message takes; empty: there is
        none.
        """
        arrivals: list[bytes] = []
        size_bytes, begun_ns = 0, recorder.now_ns()
        while (
            len(arrivals) < ARRIVALS_PER_MESSAGE_MAX and size_bytes < INLINE_BYTES_PER_MESSAGE_MAX
        ):
            arrival = self._arrivals.next_arrival(watch, self._queues)
            if arrival is None:
                break
            arrivals.append(field(_ARRIVAL, *_packed(arrival)))
            recorder.note(Stage.ARRIVAL, begun_ns, queue_end(arrival.key[1], arrival.max_offset))
            if arrival.inline_messages is not None:
                size_bytes += len(arrival.inline_messages.records)
        assert len(arrivals) <= ARRIVALS_PER_MESSAGE_MAX
        self._counts.sent_along(size_bytes)
        return b"".join(arrivals)


def _check_delivered(one: member_pb2.InlineDelivery) -> None:
    # One absurd number would make the counter useless.
    if one.message_count > DELIVERED_MAX or one.record_bytes > DELIVERED_BYTES_MAX:
        raise InvalidRequest(
            f"inline_deliveries: at most {DELIVERED_MAX} messages and {DELIVERED_BYTES_MAX} bytes"
        )


def _key(queue: common_pb2.QueueRef) -> QueueKey:
    return queue.topic, queue.queue_id


def _packed(arrival: Arrival) -> Iterable[bytes]:
    """An Arrival, serialized, in parts: its records are copied into the message alone."""
    proto = member_pb2.Arrival(queue=convert.queue_proto(*arrival.key))
    if arrival.error is not None:
        proto.error.CopyFrom(to_proto(arrival.error))
        return [proto.SerializeToString()]
    proto.generation = arrival.generation
    proto.max_offset = arrival.max_offset
    proto.tag_codes.extend(sorted(arrival.codes))
    for group, came_back in arrival.returns:
        number, count = came_back
        proto.returns.add(group=group, number=number, count=count)
    found = arrival.inline_messages
    if found is None:
        return [proto.SerializeToString()]
    head = member_pb2.InlineMessages(
        first_offset=found.first_offset,
        min_offset=found.min_offset,
        sizes=found.sizes,
        tag_codes=found.codes,
    ).SerializeToString()
    size_bytes = varint(len(found.records))
    messages = field(_MESSAGES, head, _RECORDS, size_bytes, found.records)
    return [proto.SerializeToString(), messages]


_ARRIVAL = tag(member_pb2.WatchArrivalsResponse.ARRIVALS_FIELD_NUMBER)
_MESSAGES = tag(member_pb2.Arrival.MESSAGES_FIELD_NUMBER)
_RECORDS = tag(member_pb2.InlineMessages.RECORDS_FIELD_NUMBER)
