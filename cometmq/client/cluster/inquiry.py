"""What members are now, asked of themselves where no name server knows."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from cometmq.client.cluster.connections import Connections
from cometmq.errors import CometError
from cometmq.rpc.streams import ask
from cometmq.v1 import broker_pb2, namesrv_pb2

ANSWER_S = 1.0


async def describe(
    connections: Connections, members: Iterable[namesrv_pb2.Member]
) -> list[namesrv_pb2.Member]:
    """Each of the members as it describes itself; those that do not answer are missing."""
    answers = await asyncio.gather(*(_describe(connections, member) for member in members))
    return [answer for answer in answers if answer is not None]


async def _describe(
    connections: Connections, member: namesrv_pb2.Member
) -> namesrv_pb2.Member | None:
    stub = connections.broker(member.address)
    try:
        answer = await ask(stub.DescribeMember, broker_pb2.DescribeMemberRequest(), ANSWER_S)
    except CometError:
        return None
    if _identity(answer.member) != _identity(member):  # somebody else has its address now
        return None
    now = namesrv_pb2.Member()
    now.CopyFrom(member)
    now.role, now.epoch = answer.member.role, answer.member.epoch
    return now


def _identity(member: namesrv_pb2.Member) -> tuple[str, str, int]:
    return member.cluster, member.broker_group, member.member_id
