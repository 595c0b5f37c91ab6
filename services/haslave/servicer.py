"""``MemberService`` of a follower: nothing to copy from, nothing to hand over."""

from __future__ import annotations

from typing import Any

from cometmq.errors import InvalidRequest
from cometmq.member.config import MemberConfig
from cometmq.member.hosts import BrokerIdentity
from cometmq.member.lease.peers import replica_status_of
from cometmq.member.rpc.broker_servicer import not_writer
from cometmq.member.rpc.checksum import checksum_log
from cometmq.store.base import BaseStore
from cometmq.v1 import common_pb2, member_pb2
from services.haslave.elector import Elector

Context = Any  # grpc.aio.ServicerContext, whose message types differ from method to method


class FollowerServicer:
    """The part of ``cometmq.v1.MemberService`` about copies of the log."""

    def __init__(
        self,
        identity: BrokerIdentity,
        config: MemberConfig,
        store: BaseStore,
        elector: Elector,
    ) -> None:
        self._identity = identity
        self._config = config
        self._store = store
        self._elector = elector

    async def Replicate(self, request_iterator: object, context: Context) -> None:
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
        return replica_status_of(self._identity, self._config, self._store, role, lease)

    async def Elect(
        self, request: member_pb2.ElectRequest, context: Context
    ) -> member_pb2.ElectResponse:
        if not request.force:
            raise InvalidRequest("force: must be said, for acknowledged messages may be lost")
        await self._elector.force()
        return member_pb2.ElectResponse()

    async def ChecksumLog(
        self, request: member_pb2.ChecksumLogRequest, context: Context
    ) -> member_pb2.ChecksumLogResponse:
        return await checksum_log(self._store, request)
