"""``MemberService.PullStream`` on the wire."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from cometmq.errors import CometError
from cometmq.rpc.gate import Gate
from cometmq.rpc.interceptors import to_proto
from cometmq.v1 import broker_pb2, member_pb2

Context = Any  # grpc.aio.ServicerContext of the method's messages
Pull = Callable[[broker_pb2.PullRequest, Context], Awaitable[broker_pb2.PullResponse]]


class PullsServicer:
    """Answers pulls as ``pull``, the method of ``BrokerService``, does; one after the other, since
    what pullholds read is new and in memory. Whoever reads old messages too opens more streams.
    """

    def __init__(self, pull: Pull, gate: Gate) -> None:
        self._pull = pull
        self._gate = gate

    async def PullStream(self, request_iterator: object, context: Context) -> None:
        async with asyncio.TaskGroup() as tasks:
            draining = tasks.create_task(self._gate.when_draining(self._gate.check))
            while (request := await context.read()) is not grpc.aio.EOF:
                await context.write(await self._answer(request.pull, context))
            draining.cancel()

    async def _answer(
        self, request: broker_pb2.PullRequest, context: Context
    ) -> member_pb2.PullStreamResponse:
        try:
            return member_pb2.PullStreamResponse(response=await self._pull(request, context))
        except CometError as error:
            return member_pb2.PullStreamResponse(error=to_proto(error))
