"""``MemberService`` of a follower: it has no log to replicate and no role to hand over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cometmq.errors import InvalidRequest
from cometmq.member.context import MemberContext, MemberCore
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
        misfit: Callable[[], str],
    ) -> None:
        """``misfit``: why this member cannot follow the writer; empty: its release fits."""
        super().__init__(context, core, groups, pull)
        self._elector = elector
        self._misfit = misfit

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
        status = self._replica_status(common_pb2.MEMBER_ROLE_FOLLOWER, self._elector.record)
        status.cannot_follow = self._misfit()
        return status

    async def Elect(
        self, request: member_pb2.ElectRequest, context: Context
    ) -> member_pb2.ElectResponse:
        if not request.force:
            raise InvalidRequest("force: must be said, for acknowledged messages may be lost")
        await self._elector.force()
        return member_pb2.ElectResponse()
