"""``MemberService`` of a follower: nothing to copy from, nothing to hand over."""

from __future__ import annotations

from typing import Any

from cometmq.member.checksum import checksum_log
from cometmq.member.hosts import BrokerIdentity
from cometmq.member.read_servicer import not_writer
from cometmq.store.base import BaseStore
from cometmq.v1 import member_pb2

Context = Any  # grpc.aio.ServicerContext, whose message types differ from method to method


class FollowerServicer:
    """The part of ``cometmq.v1.MemberService`` about copies of the log."""

    def __init__(self, identity: BrokerIdentity, store: BaseStore) -> None:
        self._identity = identity
        self._store = store

    async def Replicate(self, request_iterator: object, context: Context) -> None:
        raise not_writer(self._identity)

    async def StepDown(
        self, request: member_pb2.StepDownRequest, context: Context
    ) -> member_pb2.StepDownResponse:
        raise not_writer(self._identity)

    async def ChecksumLog(
        self, request: member_pb2.ChecksumLogRequest, context: Context
    ) -> member_pb2.ChecksumLogResponse:
        return await checksum_log(self._store, request)
