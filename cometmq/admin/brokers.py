"""Operations on the members of broker groups: roles, logs, clean-up, the planned hand-over."""

from __future__ import annotations

import asyncio

from cometmq.admin import ops
from cometmq.admin.connection import Connection, call, describe_replica, until
from cometmq.admin.views import BrokerMemberView, CleanedView, HandoverView, LogChecksumView
from cometmq.errors import GroupNotFound, NoFollower, PeerUnavailable, RouteNotFound
from cometmq.v1 import broker_pb2, common_pb2, member_pb2, namesrv_pb2

STEP_DOWN_DEADLINE_S = 30.0
CHECKSUM_DEADLINE_S = 60.0
CLEAN_DEADLINE_S = 60.0
TAKEN_OVER_S_MAX = 30.0


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
            )
        )
    return views


async def clean(connection: Connection, broker_groups: tuple[str, ...] = ()) -> list[CleanedView]:
    """Let every member of all broker groups, or of these, remove expired files, and the queues of
    topics that do not exist. GroupNotFound when a wanted group has no registered member.
    """
    members = await _members_of(connection, broker_groups)
    request = broker_pb2.CleanStoreRequest()
    answers = await asyncio.gather(
        *(
            call(
                member.internal_address,
                connection.admin(member).CleanStore,
                request,
                deadline_s=CLEAN_DEADLINE_S,
            )
            for member in members
        )
    )
    return [
        CleanedView(
            broker_group=member.broker_group,
            member_id=member.member_id,
            role=_role_name(member),
            log_file_count=done.log_file_count,
            log_bytes=done.log_bytes,
            queue_file_count=done.queue_file_count,
            topics=list(done.topics),
            log_min_offset=done.log_min_offset,
        )
        for member, done in zip(members, answers, strict=True)
    ]


async def _members_of(
    connection: Connection, broker_groups: tuple[str, ...]
) -> list[namesrv_pb2.Member]:
    """The members of these groups, or of all, by group and member id. RouteNotFound: there are
    none at all.
    """
    members = await connection.registered()
    known = {member.broker_group for member in members}
    if missing := sorted(set(broker_groups) - known):
        raise GroupNotFound(f"no member of {', '.join(missing)} is registered")
    wanted = [m for m in members if not broker_groups or m.broker_group in broker_groups]
    return sorted(wanted, key=lambda member: (member.broker_group, member.member_id))


def _role_name(member: namesrv_pb2.Member) -> str:
    return "writer" if member.role == common_pb2.MEMBER_ROLE_WRITER else "follower"


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
    for group in broker_groups or sorted({member.broker_group for member in members}):
        of_group = [member for member in members if member.broker_group == group]
        logs = await asyncio.gather(*(describe_replica(connection, m) for m in of_group))
        start = max(log.log_min_offset for log in logs)
        stop = max(start, min(log.log_end_offset for log in logs))
        peers = {number for log in logs for number in log.peers}
        request = member_pb2.ChecksumLogRequest(from_offset=start, to_offset=stop)
        sums = await asyncio.gather(
            *(
                call(
                    member.internal_address,
                    connection.member(member).ChecksumLog,
                    request,
                    deadline_s=CHECKSUM_DEADLINE_S,
                )
                for member in of_group
            )
        )
        found += [
            LogChecksumView(
                broker_group=group,
                member_id=member.member_id,
                role=_role_name(member),
                from_offset=start,
                to_offset=stop,
                sha256=answer.sha256,
                equal=len({each.sha256 for each in sums}) == 1,
                missing=sorted(peers - {m.member_id for m in of_group}),
            )
            for member, answer in zip(of_group, sums, strict=True)
        ]
    return found


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
