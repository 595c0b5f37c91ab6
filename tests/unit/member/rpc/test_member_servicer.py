"""The member service is put together from parts."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import grpc

from cometmq.member.rpc.member_servicer import MemberServicer
from cometmq.rpc.gate import Gate
from cometmq.rpc.server import RpcServer
from cometmq.v1 import broker_pb2, member_pb2, member_pb2_grpc


class Told:
    """An arrivals part that tells one thing."""

    async def WatchArrivals(self, request_iterator: Any, context: Any) -> None:
        arrival = member_pb2.Arrival(max_offset=7)
        await context.write(member_pb2.WatchArrivalsResponse(arrivals=[arrival]))


class Pulled:
    """A pulls part that tells one thing."""

    async def PullStream(self, request_iterator: Any, context: Any) -> None:
        response = broker_pb2.PullResponse(count=5)
        await context.write(member_pb2.PullStreamResponse(response=response))


class Copied:
    """A replication part that answers."""

    async def Replicate(self, request_iterator: Any, context: Any) -> None:
        chunk = member_pb2.LogChunk(epoch=3)
        await context.write(member_pb2.ReplicateResponse(chunk=chunk))

    async def StepDown(self, request: Any, context: Any) -> member_pb2.StepDownResponse:
        return member_pb2.StepDownResponse(member_id=1)

    async def DescribeReplica(
        self, request: Any, context: Any
    ) -> member_pb2.DescribeReplicaResponse:
        return member_pb2.DescribeReplicaResponse(epoch=4)

    async def Elect(self, request: Any, context: Any) -> member_pb2.ElectResponse:
        return member_pb2.ElectResponse()

    async def ChecksumLog(self, request: Any, context: Any) -> member_pb2.ChecksumLogResponse:
        return member_pb2.ChecksumLogResponse(log_end_offset=9)


async def outcomes(servicer: MemberServicer) -> dict[str, Any]:
    """What each method answers."""
    server = RpcServer(host="127.0.0.1", port=0, services=[], gate=Gate())
    await server.start()
    server.add(member_pb2_grpc.add_MemberServiceServicer_to_server, servicer)
    await server.set_ready()
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = member_pb2_grpc.MemberServiceStub(channel)
        calls: dict[str, Awaitable[Any]] = {
            "WatchArrivals": stub.WatchArrivals().read(),
            "PullStream": stub.PullStream().read(),
            "Replicate": stub.Replicate().read(),
            "StepDown": stub.StepDown(member_pb2.StepDownRequest()),
            "DescribeReplica": stub.DescribeReplica(member_pb2.DescribeReplicaRequest()),
            "Elect": stub.Elect(member_pb2.ElectRequest()),
            "ChecksumLog": stub.ChecksumLog(member_pb2.ChecksumLogRequest()),
        }
        found = {name: await call for name, call in calls.items()}
    await server.stop(0)
    return found


async def test_each_method_is_answered_by_its_part() -> None:
    found = await outcomes(MemberServicer(Told(), Pulled(), Copied()))
    assert found["WatchArrivals"].arrivals[0].max_offset == 7
    assert found["PullStream"].response.count == 5
    assert found["Replicate"].chunk.epoch == 3
    assert found["StepDown"].member_id == 1
    assert found["DescribeReplica"].epoch == 4
    assert found["Elect"] == member_pb2.ElectResponse()
    assert found["ChecksumLog"].log_end_offset == 9
