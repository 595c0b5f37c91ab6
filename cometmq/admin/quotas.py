"""Quotas of addresses and of topics."""

from __future__ import annotations

from cometmq.admin.connection import CHANGE_DEADLINE_S, Connection, call, each, each_that_knows
from cometmq.admin.views import QuotaView
from cometmq.errors import TopicNotFound
from cometmq.v1 import broker_pb2

SCOPES = {
    "address": broker_pb2.QUOTA_SCOPE_ADDRESS,
    "topic": broker_pb2.QUOTA_SCOPE_TOPIC,
}


async def set_quota(
    connection: Connection,
    scope: str,
    name: str,
    send: broker_pb2.Quota | None = None,
    read: broker_pb2.Quota | None = None,
    broker_groups: tuple[str, ...] = (),
) -> list[QuotaView]:
    """Let an address or a topic (empty: each that has no quota of its own) send and read so much;
    None: as it was. Raises InvalidRequest, LimitExceeded, NoPermission, and TopicNotFound when no
    broker group has the topic.
    """
    request = broker_pb2.PutQuotaRequest(scope=SCOPES[scope], name=name, send=send, read=read)
    answers = await each_that_knows(
        await connection.writers(broker_groups),
        lambda m: call(
            m.internal_address, connection.admin(m).PutQuota, request, deadline_s=CHANGE_DEADLINE_S
        ),
        TopicNotFound(f"no broker group has a topic {name}"),
    )
    return [_view(group, answer.limits) for group, answer in answers.items()]


async def unset_quota(
    connection: Connection, scope: str, name: str, broker_groups: tuple[str, ...] = ()
) -> list[QuotaView]:
    """Remove what was set; then the quota of each counts. Raises as :func:`set_quota`."""
    request = broker_pb2.DropQuotaRequest(scope=SCOPES[scope], name=name)
    answers = await each_that_knows(
        await connection.writers(broker_groups),
        lambda m: call(
            m.internal_address, connection.admin(m).DropQuota, request, deadline_s=CHANGE_DEADLINE_S
        ),
        TopicNotFound(f"no broker group has a topic {name}"),
    )
    return [QuotaView(scope, name, group, "", "") for group in answers]


async def list_quotas(connection: Connection) -> list[QuotaView]:
    """All that was set."""
    request = broker_pb2.ListQuotasRequest()
    answers = await each(
        await connection.writers(),
        lambda m: call(m.internal_address, connection.admin(m).ListQuotas, request),
    )
    views = [_view(group, one) for group, answer in answers.items() for one in answer.limits]
    return sorted(views, key=lambda view: (view.scope, view.name, view.broker_group))


def _view(broker_group: str, limits: broker_pb2.QuotaLimits) -> QuotaView:
    scope = next(name for name, value in SCOPES.items() if value == limits.scope)
    send = _text(limits.send) if limits.HasField("send") else ""
    read = _text(limits.read) if limits.HasField("read") else ""
    return QuotaView(scope, limits.name, broker_group, send, read)


def _text(quota: broker_pb2.Quota) -> str:
    return f"{quota.messages_per_s}/{quota.bytes_per_s}"
