"""Who leads which broker group, whether it could lose its writer now, and how to give it one."""

from __future__ import annotations

import asyncio

from cometmq.admin.connection import Connection, call, said, until
from cometmq.admin.group_judgement import GroupObservation, view_of
from cometmq.admin.views import ElectedView, GroupStatusView
from cometmq.errors import (
    CometError,
    GroupNotFound,
    InvalidRequest,
    LeaseConflict,
    LeaseUnavailable,
)
from cometmq.v1 import member_pb2, namesrv_pb2

DESCRIBE_DEADLINE_S = 3.0
ELECT_DEADLINE_S = 5.0
ELECTED_S_MAX = 60.0


async def describe(connection: Connection) -> list[GroupStatusView]:
    """Every broker group that a member is registered of, by name. RouteNotFound: there is none."""
    members = await connection.registered()
    groups = sorted({member.broker_group for member in members})
    observed = await asyncio.gather(
        *(_told(connection, g, [m for m in members if m.broker_group == g]) for g in groups)
    )
    return [view_of(each) for each in observed]


async def _told(
    connection: Connection, group: str, members: list[namesrv_pb2.Member]
) -> GroupObservation:
    """As :func:`_asked`. Who refuses may be the writer: where no other one writes its error is
    raised.
    """
    observed = await _asked(connection, group, members)
    if observed.refusals and observed.writer is None:
        number, error = next(iter(observed.refusals.items()))
        raise type(error)(f"member {number} of {group}: {error.message}")
    return observed


async def _asked(
    connection: Connection, group: str, members: list[namesrv_pb2.Member]
) -> GroupObservation:
    """What these members tell."""
    found = await asyncio.gather(*(said(_status(connection, member)) for member in members))
    answers = {m.member_id: answer for m, answer in zip(members, found, strict=True)}
    statuses = {
        n: a for n, a in answers.items() if isinstance(a, member_pb2.DescribeReplicaResponse)
    }
    refusals = {n: a for n, a in answers.items() if isinstance(a, CometError)}
    return GroupObservation(group, members, statuses, refusals)


async def _status(
    connection: Connection, member: namesrv_pb2.Member
) -> member_pb2.DescribeReplicaResponse:
    method = connection.member(member).DescribeReplica
    request = member_pb2.DescribeReplicaRequest()
    return await call(member.internal_address, method, request, deadline_s=DESCRIBE_DEADLINE_S)


async def elect(
    connection: Connection, broker_group: str, member_id: int, *, force: bool
) -> ElectedView:
    """Make a follower the writer of a group that has none, whatever may be lost; returns when it
    is registered. Raises GroupNotFound, InvalidRequest (a writer answers), LeaseConflict (another
    came to lead meanwhile), LeaseUnavailable (it cannot read the lease, or does not lead in time).
    """
    if not force:
        raise InvalidRequest(
            "a member that is not electable may lack messages that were acknowledged: "
            "say so with --force; while the writer lives use cometmq broker step-down"
        )
    members = [status.member for status in await connection.members()]
    of_group = [member for member in members if member.broker_group == broker_group]
    observed = await _told(connection, broker_group, of_group)
    if observed.writer is not None:
        raise InvalidRequest(
            f"{broker_group} has a writer that answers: use cometmq broker step-down"
        )
    wanted = next((member for member in of_group if member.member_id == member_id), None)
    if wanted is None:
        raise GroupNotFound(f"member {member_id} of {broker_group} is not registered")
    request = member_pb2.ElectRequest(force=True)
    method = connection.member(wanted).Elect
    await call(wanted.internal_address, method, request, deadline_s=ELECT_DEADLINE_S)
    return await _elected(connection, of_group, wanted)


async def _elected(
    connection: Connection, members: list[namesrv_pb2.Member], wanted: namesrv_pb2.Member
) -> ElectedView:
    group, member_id = wanted.broker_group, wanted.member_id
    writers: list[member_pb2.DescribeReplicaResponse] = []

    async def somebody_leads() -> bool:
        observed = await _asked(connection, group, members)
        if observed.writer is not None:
            writers.append(observed.writer)
        return bool(writers)

    if not await until(somebody_leads, ELECTED_S_MAX):
        raise LeaseUnavailable(
            f"member {member_id} of {group} has the order to lead and does not yet: its log says "
            "what it waits for, or that the order is void because the lease has changed"
        )
    writer = writers[-1]
    if writer.member_id != member_id:
        raise LeaseConflict(
            f"member {writer.member_id} of {group} writes: the order to member {member_id} is void"
        )
    return ElectedView(group, member_id, writer.epoch)
