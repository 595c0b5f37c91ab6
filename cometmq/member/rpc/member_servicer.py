"""``cometmq.v1.MemberService``: what every role answers alike, to pull-holds and to operators."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from cometmq.errors import CometError, OffsetInvalid
from cometmq.member.context import MemberContext, MemberCore
from cometmq.member.lease.peers import replica_status_of
from cometmq.member.read.group_progress import GroupReads
from cometmq.member.rpc.arrivals_servicer import ArrivalCounts, ArrivalsServicer
from cometmq.replication.lease import LeaseRecord
from cometmq.rpc.interceptors import to_proto
from cometmq.store.base import BaseStore
from cometmq.v1 import broker_pb2, common_pb2, member_pb2, member_pb2_grpc

CHECKSUM_PIECE_BYTES = 1024 * 1024

Context = Any  # grpc.aio.ServicerContext, whose message types differ from method to method
Pull = Callable[[broker_pb2.PullRequest, Context, str], Awaitable[broker_pb2.PullResponse]]


class MemberServicer(  # type: ignore[misc]  # streams answer with context.write
    ArrivalsServicer, member_pb2_grpc.MemberServiceServicer
):
    """Arrivals, pulls and checksums. A role adds Replicate, StepDown, DescribeReplica and Elect."""

    def __init__(
        self, context: MemberContext, core: MemberCore, groups: GroupReads, pull: Pull
    ) -> None:
        """``pull`` is the method of BrokerService."""
        storage = core.storage
        super().__init__(
            storage.arrivals,
            core.reader,
            storage.flusher.flush_now,
            context.ports.gate,
            ArrivalCounts(context.metrics, groups, core.state),
        )
        self._pull = pull
        self._store: BaseStore = storage.store
        self._storage = storage
        self._identity = context.identity
        self._config = context.config
        self._clocks = context.clocks

    def _replica_status(
        self, role: common_pb2.MemberRole.ValueType, lease: LeaseRecord | None
    ) -> member_pb2.DescribeReplicaResponse:
        """What this member says of itself in its role."""
        return replica_status_of(
            self._identity,
            self._config,
            self._store,
            role,
            lease,
            self._clocks,
            send_refusal=self._storage.send_refusal,
        )

    async def PullStream(  # type: ignore[override]  # answers with context.write
        self, request_iterator: object, context: Context
    ) -> None:
        """Pulls are answered one after the other, because pull-holds read what is new and in
        memory. A pull-hold that also reads old messages opens more streams.
        """
        async with asyncio.TaskGroup() as tasks:
            draining = tasks.create_task(self._gate.when_draining(self._gate.check))
            while (request := await context.read()) is not grpc.aio.EOF:
                try:
                    response = await self._pull(request.pull, context, request.client_address)
                    answer = member_pb2.PullStreamResponse(response=response)
                except CometError as error:
                    answer = member_pb2.PullStreamResponse(error=to_proto(error))
                await context.write(answer)
            draining.cancel()

    async def ChecksumLog(
        self, request: member_pb2.ChecksumLogRequest, context: Context
    ) -> member_pb2.ChecksumLogResponse:
        """SHA-256 of a range of the log, read in a thread. OffsetInvalid: the range is not within
        the log; MessageNotFound: retention has removed it meanwhile.
        """
        low, end = self._store.min_offset, self._store.written_offset
        start, stop = request.from_offset, request.to_offset
        if not low <= start <= stop <= end:
            raise OffsetInvalid(f"{start} to {stop} is not within the log, {low} to {end}")
        digest = await asyncio.to_thread(_sha256, self._store, start, stop)
        return member_pb2.ChecksumLogResponse(log_min_offset=low, log_end_offset=end, sha256=digest)


def _sha256(store: BaseStore, at: int, end: int) -> str:
    digest = hashlib.sha256()
    with store.cleaner.pins.hold(at) as pin:
        while at < end:
            piece = store.read_raw(at, min(CHECKSUM_PIECE_BYTES, end - at))
            assert piece, at
            digest.update(piece)
            at += len(piece)
            pin.offset = at
    return digest.hexdigest()
