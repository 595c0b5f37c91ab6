"""Who leads which broker group, whether it could lose its writer now, and how to give it one."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from cometmq.admin.connection import Connection, call, until
from cometmq.admin.views import ElectedView, GroupStatusView
from cometmq.errors import (
    CometError,
    GroupNotFound,
    InvalidRequest,
    LeaseUnavailable,
)
from cometmq.v1 import common_pb2, member_pb2, namesrv_pb2

STANDING_DEADLINE_S = 3.0
ELECT_DEADLINE_S = 5.0
ELECTED_S_MAX = 60.0

Standings = dict[int, member_pb2.StandingResponse]


async def describe(connection: Connection) -> list[GroupStatusView]:
    """Every broker group that a member is registered of, by name."""
    members = [status.member for status in await connection.members()]
    groups = sorted({member.broker_group for member in members})
    found = await asyncio.gather(
        *(_standings(connection, [m for m in members if m.broker_group == g]) for g in groups)
    )
    return [
        view_of(group, [m for m in members if m.broker_group == group], standings)
        for group, standings in zip(groups, found, strict=True)
    ]


async def _standings(connection: Connection, members: list[namesrv_pb2.Member]) -> Standings:
    found = await asyncio.gather(*(_standing(connection, member) for member in members))
    return {answer.member_id: answer for answer in found if answer is not None}


async def _standing(
    connection: Connection, member: namesrv_pb2.Member
) -> member_pb2.StandingResponse | None:
    method = connection.member(member).Standing
    request = member_pb2.StandingRequest()
    try:
        return await call(member.internal_address, method, request, deadline_s=STANDING_DEADLINE_S)
    except CometError:
        return None


def view_of(group: str, members: list[namesrv_pb2.Member], standings: Standings) -> GroupStatusView:
    """A group as its members tell."""
    writers = [s for s in standings.values() if s.role == common_pb2.MEMBER_ROLE_WRITER]
    writer = max(writers, key=lambda standing: standing.epoch, default=None)
    reign = writer.reign if writer is not None and writer.HasField("reign") else None
    status, advice = _judged(writer, reign, len(members), len(standings))
    known = sorted(member.member_id for member in members)
    view = GroupStatusView(
        broker_group=group,
        status=status,
        epoch=max([m.epoch for m in members] + [s.epoch for s in standings.values()]),
        members=known,
        silent=[number for number in known if number not in standings],
        advice=advice,
    )
    if writer is not None:
        behind = _behind_bytes_max(writer, standings)
        view = replace(view, writer=writer.member_id, behind_bytes_max=behind)
    if reign is None:
        return view
    return replace(
        view,
        reason=reign.reason,
        since_ms=reign.since_ms,
        in_sync=list(reign.in_sync),
        electable=list(reign.electable),
        min_in_sync=reign.min_in_sync,
    )


def _behind_bytes_max(writer: member_pb2.StandingResponse, standings: Standings) -> int | None:
    ends = [s.log_end_offset for s in standings.values() if s is not writer]
    return max(0, writer.log_end_offset - min(ends)) if ends else None


def _judged(
    writer: member_pb2.StandingResponse | None,
    reign: member_pb2.Reign | None,
    member_count: int,
    answer_count: int,
) -> tuple[str, str]:
    if writer is None:
        return (
            "no writer",
            "an electable member takes over within seconds; if not, docs/runbooks.md tells why",
        )
    if reign is None:  # it stands alone on purpose
        return "ok", ""
    if not reign.only_writer:
        return "waiting", "it cannot reach its lease, nor all that could take over"
    if len(reign.in_sync) < reign.min_in_sync:
        return "refusing", "bring followers back, or lower min_in_sync_replicas"
    if member_count < 2:
        return "degraded", "it has no follower: with its machine its messages are lost"
    if len(reign.in_sync) < (reign.in_sync_expected or member_count):
        return "degraded", "not all members are in sync: see cometmq broker status"
    if answer_count < member_count:
        return "degraded", "not all members answer"
    return "ok", ""


async def elect(
    connection: Connection, broker_group: str, member_id: int, *, force: bool
) -> ElectedView:
    """Make a follower the writer of a group that has none, whatever may be lost; returns when it
    is registered. Raises GroupNotFound, InvalidRequest (a writer answers), LeaseUnavailable (it has
    not come to lead in time).
    """
    if not force:
        raise InvalidRequest(
            "a member that is not electable may lack messages that were acknowledged: "
            "say so with --force; while the writer lives use cometmq broker step-down"
        )
    members = [status.member for status in await connection.members()]
    of_group = [member for member in members if member.broker_group == broker_group]
    standings = await _standings(connection, of_group)
    if any(s.role == common_pb2.MEMBER_ROLE_WRITER for s in standings.values()):
        raise InvalidRequest(
            f"{broker_group} has a writer that answers: use cometmq broker step-down"
        )
    wanted = next((member for member in of_group if member.member_id == member_id), None)
    if wanted is None:
        raise GroupNotFound(f"member {member_id} of {broker_group} is not registered")
    request = member_pb2.ElectRequest(force=True)
    method = connection.member(wanted).Elect
    await call(wanted.internal_address, method, request, deadline_s=ELECT_DEADLINE_S)
    return await _elected(connection, wanted)


async def _elected(connection: Connection, wanted: namesrv_pb2.Member) -> ElectedView:
    found: list[member_pb2.StandingResponse] = []

    async def leads() -> bool:
        answer = await _standing(connection, wanted)
        if answer is not None and answer.role == common_pb2.MEMBER_ROLE_WRITER:
            found.append(answer)
        return bool(found)

    if not await until(leads, ELECTED_S_MAX):
        raise LeaseUnavailable(
            f"member {wanted.member_id} of {wanted.broker_group} was told to lead and does not yet:"
            " its log tells what it waits for"
        )
    return ElectedView(wanted.broker_group, wanted.member_id, found[-1].epoch)
