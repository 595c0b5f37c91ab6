"""``MemberService.WatchArrivals`` on the wire."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from cometmq.member import convert
from cometmq.member.arrivals import Arrival, Arrivals, Queues, Watch
from cometmq.replication.watermarks import QueueKey
from cometmq.rpc.gate import Gate
from cometmq.rpc.interceptors import to_proto
from cometmq.v1 import common_pb2, member_pb2

ARRIVALS_PER_MESSAGE_MAX = 4_096

Context = Any  # grpc.aio.ServicerContext of the method's messages


class ArrivalsServicer:
    """The part of ``cometmq.v1.MemberService`` that tells of arrivals. ``hurry`` is called when
    queues were added: what waits for the disk there is waited for from now on.
    """

    def __init__(
        self, arrivals: Arrivals, queues: Queues, hurry: Callable[[], None], gate: Gate
    ) -> None:
        self._arrivals = arrivals
        self._hurry = hurry
        self._queues = queues
        self._gate = gate

    async def WatchArrivals(self, request_iterator: object, context: Context) -> None:
        """Reads here, writes in a task of its own; who only half-closed goes on watching."""
        woken = asyncio.Event()
        watch = self._arrivals.open(woken.set)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._tell(watch, woken, context))
                tasks.create_task(self._end_when_draining())
                while (request := await context.read()) is not grpc.aio.EOF:
                    self._arrivals.remove(watch, map(_key, request.remove))
                    if request.add:
                        self._arrivals.add(watch, map(_key, request.add))
                        self._hurry()
        finally:
            self._arrivals.close(watch)

    async def _tell(self, watch: Watch, woken: asyncio.Event, context: Context) -> None:
        while True:
            await woken.wait()
            woken.clear()
            while arrivals := self._next(watch):
                await context.write(member_pb2.WatchArrivalsResponse(arrivals=arrivals))

    def _next(self, watch: Watch) -> list[member_pb2.Arrival]:
        """As many as one message takes."""
        arrivals: list[member_pb2.Arrival] = []
        while len(arrivals) < ARRIVALS_PER_MESSAGE_MAX:
            arrival = self._arrivals.next_arrival(watch, self._queues)
            if arrival is None:
                break
            arrivals.append(_arrival_proto(arrival))
        return arrivals

    async def _end_when_draining(self) -> None:
        await self._gate.wait_draining()
        self._gate.check()


def _key(queue: common_pb2.QueueRef) -> QueueKey:
    return queue.topic, queue.queue_id


def _arrival_proto(arrival: Arrival) -> member_pb2.Arrival:
    proto = member_pb2.Arrival(queue=convert.queue_proto(*arrival.key))
    if arrival.error is not None:
        proto.error.CopyFrom(to_proto(arrival.error))
        return proto
    proto.generation = arrival.generation
    proto.max_offset = arrival.max_offset
    proto.tag_codes.extend(sorted(arrival.codes))
    return proto
