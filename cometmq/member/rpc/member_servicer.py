"""``cometmq.v1.MemberService``, put together from parts, which differ from role to role."""

from __future__ import annotations

from typing import Any, Protocol

from cometmq.v1 import member_pb2, member_pb2_grpc

Context = Any  # grpc.aio.ServicerContext, whose message types differ from method to method


class ArrivalsPart(Protocol):
    """Who tells of arrivals."""

    async def WatchArrivals(self, request_iterator: Any, context: Context) -> None: ...


class PullsPart(Protocol):
    """Who answers pulls of pullholds."""

    async def PullStream(self, request_iterator: Any, context: Context) -> None: ...


class ReplicationPart(Protocol):
    """Who copies the log to followers."""

    async def Replicate(self, request_iterator: Any, context: Context) -> None: ...

    async def StepDown(
        self, request: member_pb2.StepDownRequest, context: Context
    ) -> member_pb2.StepDownResponse: ...

    async def DescribeReplica(
        self, request: member_pb2.DescribeReplicaRequest, context: Context
    ) -> member_pb2.DescribeReplicaResponse: ...

    async def Elect(
        self, request: member_pb2.ElectRequest, context: Context
    ) -> member_pb2.ElectResponse: ...

    async def ChecksumLog(
        self, request: member_pb2.ChecksumLogRequest, context: Context
    ) -> member_pb2.ChecksumLogResponse: ...


class MemberServicer(member_pb2_grpc.MemberServiceServicer):
    """Each method is answered by the part that it belongs to."""

    def __init__(
        self, arrivals: ArrivalsPart, pulls: PullsPart, replication: ReplicationPart
    ) -> None:
        self._arrivals = arrivals
        self._pulls = pulls
        self._replication = replication

    async def WatchArrivals(  # type: ignore[override]  # answers with context.write
        self, request_iterator: Any, context: Context
    ) -> None:
        await self._arrivals.WatchArrivals(request_iterator, context)

    async def PullStream(  # type: ignore[override]  # answers with context.write
        self, request_iterator: Any, context: Context
    ) -> None:
        await self._pulls.PullStream(request_iterator, context)

    async def Replicate(  # type: ignore[override]  # answers with context.write
        self, request_iterator: Any, context: Context
    ) -> None:
        await self._replication.Replicate(request_iterator, context)

    async def StepDown(
        self, request: member_pb2.StepDownRequest, context: Context
    ) -> member_pb2.StepDownResponse:
        return await self._replication.StepDown(request, context)

    async def DescribeReplica(
        self, request: member_pb2.DescribeReplicaRequest, context: Context
    ) -> member_pb2.DescribeReplicaResponse:
        return await self._replication.DescribeReplica(request, context)

    async def Elect(
        self, request: member_pb2.ElectRequest, context: Context
    ) -> member_pb2.ElectResponse:
        return await self._replication.Elect(request, context)

    async def ChecksumLog(
        self, request: member_pb2.ChecksumLogRequest, context: Context
    ) -> member_pb2.ChecksumLogResponse:
        return await self._replication.ChecksumLog(request, context)
