"""The writer of each broker group, what endangers it, and how to force an election."""

from __future__ import annotations

import asyncio

from cometmq.admin.connection import Connection, call, describe_replica, each, said, until
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
        *(_observe(connection, g, [m for m in members if m.broker_group == g]) for g in groups)
    )
    return [view_of(one) for one in observed]


async def _observe(
    connection: Connection, group: str, members: list[namesrv_pb2.Member]
) -> GroupObservation:
    """As :func:`_ask_members`. A member that refuses may be the writer: where no other member
    writes, its error is raised.
    """
    observed = await _ask_members(connection, group, members)
    if observed.refusals and observed.writer is None:
        number, error = next(iter(observed.refusals.items()))
        raise type(error)(f"member {number} of {group}: {error.message}")
    return observed


async def _ask_members(
    connection: Connection, group: str, members: list[namesrv_pb2.Member]
) -> GroupObservation:
    """What these members answer about their log, their lease and their role."""
    answers = await each(
        {member.member_id: member for member in members},
        lambda m: said(describe_replica(connection, m, deadline_s=DESCRIBE_DEADLINE_S)),
    )
    statuses = {
        n: a for n, a in answers.items() if isinstance(a, member_pb2.DescribeReplicaResponse)
    }
    refusals = {n: a for n, a in answers.items() if isinstance(a, CometError)}
    return GroupObservation(group, members, statuses, refusals)


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
    observed = await _observe(connection, broker_group, of_group)
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
    writers: list[member_pb2.DescribeReplicaResponse] = []

    async def has_writer() -> bool:
        observed = await _ask_members(connection, broker_group, of_group)
        if observed.writer is not None:
            writers.append(observed.writer)
        return bool(writers)

    if not await until(has_writer, ELECTED_S_MAX):
        raise LeaseUnavailable(
            f"member {member_id} of {broker_group} has the order to lead and does not yet: its log "
            "says what it waits for, or that the order is void because the lease has changed"
        )
    writer = writers[-1]
    if writer.member_id != member_id:
        raise LeaseConflict(
            f"member {writer.member_id} of {broker_group} writes: the order to member {member_id} "
            "is void"
        )
    return ElectedView(broker_group, member_id, writer.epoch)
