"""``MemberService`` of a follower: it has no log to replicate and no role to hand over."""

from __future__ import annotations

from typing import Any

from cometmq.errors import InvalidRequest
from cometmq.member.context import MemberContext, MemberCore
from cometmq.member.lease.peers import replica_status_of
from cometmq.member.read.group_progress import GroupReads
from cometmq.member.rpc.broker_servicer import not_writer
from cometmq.member.rpc.member_servicer import MemberServicer, Pull
from cometmq.v1 import common_pb2, member_pb2
from services.haslave.elector import Elector

Context = Any  # grpc.aio.ServicerContext, whose message types differ from method to method


class FollowerServicer(MemberServicer):
    """Its replica, its elector, and the order to lead."""

    def __init__(
        self,
        context: MemberContext,
        core: MemberCore,
        groups: GroupReads,
        pull: Pull,
        elector: Elector,
    ) -> None:
        super().__init__(context, core, groups, pull)
        self._identity = context.identity
        self._config = context.config
        self._clocks = context.clocks
        self._elector = elector
        self._storage = core.storage

    async def Replicate(  # type: ignore[override]  # never answers
        self, request_iterator: object, context: Context
    ) -> None:
        raise not_writer(self._identity)

    async def StepDown(
        self, request: member_pb2.StepDownRequest, context: Context
    ) -> member_pb2.StepDownResponse:
        raise not_writer(self._identity)

    async def DescribeReplica(
        self, request: member_pb2.DescribeReplicaRequest, context: Context
    ) -> member_pb2.DescribeReplicaResponse:
        role = common_pb2.MEMBER_ROLE_FOLLOWER
        lease = self._elector.record
        return replica_status_of(
            self._identity,
            self._config,
            self._store,
            role,
            lease,
            self._clocks,
            send_refusal=self._storage.send_refusal,
        )

    async def Elect(
        self, request: member_pb2.ElectRequest, context: Context
    ) -> member_pb2.ElectResponse:
        if not request.force:
            raise InvalidRequest("force: must be said, for acknowledged messages may be lost")
        await self._elector.force()
        return member_pb2.ElectResponse()
