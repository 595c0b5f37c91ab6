"""The members of a consumer group as an operator sees them, and how one that is away is removed."""

from __future__ import annotations

from collections.abc import Iterable

from cometmq.admin.connection import Connection, call, each
from cometmq.admin.views import GroupMemberView, RemovedMemberView
from cometmq.errors import ClientNotFound
from cometmq.messaging.groups import Stay, changed_ids, check_name
from cometmq.names import check_client_id
from cometmq.v1 import broker_pb2, namesrv_pb2


def members_of(answers: Iterable[broker_pb2.DescribeGroupResponse]) -> list[GroupMemberView]:
    """The members by client id. One that is away at some broker groups only is shown as connected:
    a client joins at each broker group of its topics.
    """
    told = [one for answer in answers for one in answer.members]
    members = {one.client_id: one for one in sorted(told, key=lambda one: not one.is_away)}
    return [_view(one) for _, one in sorted(members.items())]


def _view(member: broker_pb2.GroupMember) -> GroupMemberView:
    return GroupMemberView(
        member.client_id,
        # The tags, or the SQL92 expression; empty = every message.
        {
            s.topic: [s.filter.sql] if s.filter.sql else sorted(s.filter.tags)
            for s in member.subscriptions
        },
        _message_model(member),
        member.allocation,
        sum(len(held.queue_ids) for held in member.held),
        member.session_ms,
        member.is_away,
        member.address,
        member.member_ms,
        member.away_ms,
        member.session_left_ms,
    )


def _message_model(member: broker_pb2.GroupMember) -> str:
    if member.mode == broker_pb2.CONSUME_MODE_POP:
        return "pop"
    return "broadcasting" if member.is_broadcasting else "clustering"


def disagreement(members: list[GroupMemberView]) -> str:
    """What members of one group must have in common, and have not; empty: nothing."""
    wrong = []
    if len({one.message_model for one in members}) > 1:
        wrong.append("the message model")
    if len({one.allocation for one in members if one.allocation}) > 1:
        wrong.append("the allocation (all use average)")
    filters: dict[str, set[tuple[str, ...]]] = {}
    for one in members:
        for topic, wanted in one.subscriptions.items():
            filters.setdefault(topic, set()).add(tuple(wanted))
    wrong += [f"the filter of {topic}" for topic, some in sorted(filters.items()) if len(some) > 1]
    return f"members do not agree on {', '.join(wrong)}" if wrong else ""


def ids_changed(members: list[GroupMemberView]) -> str:
    """Why client ids seem to change at restarts, and what to do; empty: they do not."""
    return changed_ids(
        Stay(one.client_id, one.member_ms / 1000, one.away_ms / 1000 if one.is_away else None)
        for one in members
    )


def trouble(members: list[GroupMemberView]) -> str:
    """What is wrong with the members of one group; empty: nothing."""
    return "; ".join(filter(None, [disagreement(members), ids_changed(members)]))


async def remove_members(
    connection: Connection, group: str, client_ids: tuple[str, ...] = ()
) -> list[RemovedMemberView]:
    """End the sessions of members that are away, at all broker groups; of all when none is named.
    Their queues go to the others; a client that comes back joins again as a new member. A member
    that has a stream stays. Raises GroupNameInvalid, InvalidRequest; ClientNotFound: one that is
    named is no member.
    """
    check_name(group)
    for client_id in client_ids:
        check_client_id(client_id)
    request = broker_pb2.RemoveMembersRequest(group=group, client_ids=client_ids)

    async def remove(member: namesrv_pb2.Member) -> broker_pb2.RemoveMembersResponse:
        method = connection.admin(member).RemoveMembers
        return await call(member.internal_address, method, request)

    answers = await each(await connection.writers(), remove)
    views = []
    for client_id in sorted({*client_ids, *(c for one in answers.values() for c in one.removed)}):
        at = [where for where, one in answers.items() if client_id in one.removed]
        connected = [where for where, one in answers.items() if client_id in one.connected]
        if not at and not connected:
            raise ClientNotFound(f"client {client_id} is no member of group {group}")
        views.append(RemovedMemberView(group, client_id, at, connected))
    return views
