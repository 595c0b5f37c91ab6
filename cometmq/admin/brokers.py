"""Operations on the members of broker groups: roles, logs, clean-up, the planned hand-over."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TypeAlias

from cometmq.admin import ops
from cometmq.admin.connection import Connection, call, describe_replica, each, until
from cometmq.admin.convert import role_name
from cometmq.admin.views import BrokerMemberView, CleanedView, HandoverView, LogChecksumView
from cometmq.errors import GroupNotFound, NoFollower, PeerUnavailable, RouteNotFound
from cometmq.v1 import broker_pb2, member_pb2, namesrv_pb2

STEP_DOWN_DEADLINE_S = 30.0
CHECKSUM_DEADLINE_S = 60.0
CLEAN_DEADLINE_S = 60.0
TAKEN_OVER_S_MAX = 30.0

Members: TypeAlias = Mapping[tuple[str, int], namesrv_pb2.Member]  # by group and member id


async def describe(connection: Connection) -> list[BrokerMemberView]:
    """Every registered member, by group and member id."""
    members = await ops.describe_cluster(connection)
    ends = {m.broker_group: m.log_appended_offset for m in members if m.role == "writer"}
    views = []
    for member in sorted(members, key=lambda m: (m.broker_group, m.member_id)):
        end, own = ends.get(member.broker_group), member.log_appended_offset
        views.append(
            BrokerMemberView(
                broker_group=member.broker_group,
                member_id=member.member_id,
                role=member.role,
                epoch=member.epoch,
                address=member.address,
                reachable=member.reachable,
                error=member.error,
                log_min_offset=member.log_min_offset,
                log_appended_offset=own,
                log_flushed_offset=member.log_flushed_offset,
                behind_bytes=None if end is None or own is None else max(0, end - own),
                refusal=member.refusal,
                clock_skew_ms=member.clock_skew_ms,
            )
        )
    return views


async def clean(connection: Connection, broker_groups: tuple[str, ...] = ()) -> list[CleanedView]:
    """Let every member of all broker groups, or of these, remove expired files, and the queues of
    topics that do not exist. GroupNotFound when a wanted group has no registered member.
    """
    members = await _members_of(connection, broker_groups)
    request = broker_pb2.CleanStoreRequest()
    answers = await each(
        members,
        lambda m: call(
            m.internal_address,
            connection.admin(m).CleanStore,
            request,
            deadline_s=CLEAN_DEADLINE_S,
        ),
    )
    return [
        CleanedView(
            broker_group=broker_group,
            member_id=member_id,
            role=role_name(members[broker_group, member_id]),
            log_file_count=done.log_file_count,
            log_bytes=done.log_bytes,
            queue_file_count=done.queue_file_count,
            topics=list(done.topics),
            log_min_offset=done.log_min_offset,
        )
        for (broker_group, member_id), done in answers.items()
    ]


async def _members_of(connection: Connection, broker_groups: tuple[str, ...]) -> Members:
    """The members of these groups, or of all, in order. RouteNotFound: there are none at all."""
    members = await connection.registered()
    known = {member.broker_group for member in members}
    if missing := sorted(set(broker_groups) - known):
        raise GroupNotFound(f"no member of {', '.join(missing)} is registered")
    found = {
        (member.broker_group, member.member_id): member
        for member in members
        if not broker_groups or member.broker_group in broker_groups
    }
    return {key: found[key] for key in sorted(found)}


async def step_down(
    connection: Connection, broker_group: str, to_member: int | None = None
) -> HandoverView:
    """Let the group's writer hand over to a follower; returns when that one is registered as the
    writer. Raises GroupNotFound, and NoFollower also when it does not register in time.
    """
    writer = (await connection.writers((broker_group,)))[broker_group]
    request = member_pb2.StepDownRequest(member_id=to_member)
    stub = connection.member(writer)
    done = await call(
        writer.internal_address, stub.StepDown, request, deadline_s=STEP_DOWN_DEADLINE_S
    )
    registered: list[namesrv_pb2.Member] = []

    async def taken_over() -> bool:
        try:
            now = (await connection.writers((broker_group,)))[broker_group]
        except (GroupNotFound, RouteNotFound, PeerUnavailable):
            return False
        registered.append(now)
        return now.epoch > writer.epoch

    if not await until(taken_over, TAKEN_OVER_S_MAX):
        raise NoFollower(
            f"member {done.member_id} of {broker_group} may take over since the log ended at "
            f"{done.log_end_offset}, and has not registered within {TAKEN_OVER_S_MAX:g} s"
        )
    return HandoverView(
        broker_group=broker_group,
        from_member=writer.member_id,
        to_member=registered[-1].member_id,
        log_end_offset=done.log_end_offset,
        epoch=registered[-1].epoch,
    )


async def compare_logs(
    connection: Connection, broker_groups: tuple[str, ...] = ()
) -> list[LogChecksumView]:
    """Checksums of all members' logs, from the highest minimum to the lowest end of each group.

    GroupNotFound when a wanted group has no registered member.
    """
    members = await _members_of(connection, broker_groups)
    found = []
    for group in broker_groups or sorted({name for name, _ in members}):
        of_group = {key: member for key, member in members.items() if key[0] == group}
        logs = (await each(of_group, lambda m: describe_replica(connection, m))).values()
        start = max(log.log_min_offset for log in logs)
        stop = max(start, min(log.log_end_offset for log in logs))
        request = member_pb2.ChecksumLogRequest(from_offset=start, to_offset=stop)
        answers = await each(of_group, partial(_checksum, connection, request))
        peers = {number for log in logs for number in log.peers}
        found += [
            LogChecksumView(
                broker_group=group,
                member_id=member_id,
                role=role_name(of_group[group, member_id]),
                from_offset=start,
                to_offset=stop,
                sha256=answer.sha256,
                equal=len({one.sha256 for one in answers.values()}) == 1,
                missing=sorted(peers - {number for _, number in of_group}),
            )
            for (_, member_id), answer in answers.items()
        ]
    return found


async def _checksum(
    connection: Connection, request: member_pb2.ChecksumLogRequest, member: namesrv_pb2.Member
) -> member_pb2.ChecksumLogResponse:
    method = connection.member(member).ChecksumLog
    return await call(member.internal_address, method, request, deadline_s=CHECKSUM_DEADLINE_S)


def doubt(compared: list[LogChecksumView]) -> str:
    """What keeps a comparison from showing that all copies are alike; empty: nothing."""
    groups: dict[str, list[LogChecksumView]] = {}
    for view in compared:
        groups.setdefault(view.broker_group, []).append(view)
    return "; ".join(filter(None, (_doubt(group, views) for group, views in groups.items())))


def _doubt(group: str, views: list[LogChecksumView]) -> str:
    if len(views) < 2:
        return f"{group}: only member {views[0].member_id} is registered, so nothing was compared"
    if not all(view.equal for view in views):
        return f"{group}: the logs differ"
    if missing := views[0].missing:
        who = " and ".join(map(str, missing))
        return f"{group}: member {who} not registered, so not compared"
    if views[0].from_offset == views[0].to_offset:
        return f"{group}: the logs have nothing in common to compare"
    return ""
