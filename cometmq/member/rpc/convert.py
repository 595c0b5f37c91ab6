"""Protobuf ↔ domain, for what more than one servicer of a member answers. Values only, no rules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final, cast

from cometmq.errors import InvalidRequest
from cometmq.filters import sql, tags
from cometmq.format import ids, properties, record
from cometmq.format.indexfile import TIME_MS_MAX
from cometmq.member.read.reader import PullAnswer
from cometmq.member.read.search import KeyAnswer, KeyQuery
from cometmq.messaging.group_policy import (
    EXPONENTIAL,
    ConsumeMode,
    CustomizedRetry,
    ExponentialRetry,
    GroupPolicy,
    RetryPolicy,
)
from cometmq.messaging.groups import (
    GroupSettings,
    HeldQueues,
    Member,
    MemberDetails,
    Membership,
)
from cometmq.messaging.quotas import Limits, Quota, Scope, address_name
from cometmq.messaging.topics import is_closed
from cometmq.model import (
    FlushMode,
    MessageType,
    Position,
    ReplicationMode,
    SendStatus,
    Subscription,
    TopicConfig,
)
from cometmq.store.queries import Boundary
from cometmq.v1 import broker_pb2, common_pb2

# Properties that have a field of their own in StoredMessage.
_FORMS = frozenset(broker_pb2.MessageForm.values())
_OWN_FIELDS = frozenset({properties.TAGS, properties.KEYS, properties.UNIQ_KEY})


def position(proto: common_pb2.Position) -> Position:
    return Position(proto.generation, proto.offset)


def position_proto(value: Position) -> common_pb2.Position:
    return common_pb2.Position(generation=value.generation, offset=value.offset)


def queue_proto(topic: str, queue_id: int) -> common_pb2.QueueRef:
    return common_pb2.QueueRef(topic=topic, queue_id=queue_id)


def topic(proto: common_pb2.TopicConfig, default: TopicConfig) -> TopicConfig:
    """The wanted settings, ``default`` for what is not said; the topic rules check the values."""
    try:
        mode = FlushMode(proto.flush_mode) if proto.flush_mode else default.flush_mode
    except ValueError:
        raise InvalidRequest(f"flush_mode {proto.flush_mode} is not known here") from None
    try:
        copies = ReplicationMode(proto.replication_mode or default.replication_mode)
    except ValueError:
        raise InvalidRequest(
            f"replication_mode {proto.replication_mode} is not known here"
        ) from None
    try:
        message_type = (
            MessageType(proto.message_type) if proto.message_type else default.message_type
        )
    except ValueError:
        raise InvalidRequest(f"message_type {proto.message_type} is not known here") from None
    return TopicConfig(
        name=proto.name,
        read_queue_count=proto.read_queue_count or default.read_queue_count,
        write_queue_count=proto.write_queue_count or default.write_queue_count,
        permission=proto.permission or default.permission,
        flush_mode=mode,
        replication_mode=copies,
        reserve_time_ms=(
            proto.reserve_time_ms if proto.HasField("reserve_time_ms") else default.reserve_time_ms
        ),
        message_type=message_type,
        is_ordered=proto.is_ordered if proto.HasField("is_ordered") else default.is_ordered,
        attributes=default.attributes,
    )


def topic_proto(config: TopicConfig) -> common_pb2.TopicConfig:
    return common_pb2.TopicConfig(
        name=config.name,
        read_queue_count=config.read_queue_count,
        write_queue_count=config.write_queue_count,
        permission=config.permission,
        flush_mode=common_pb2.FlushMode.ValueType(config.flush_mode.value),
        replication_mode=common_pb2.ReplicationMode.ValueType(config.replication_mode.value),
        reserve_time_ms=config.reserve_time_ms,
        message_type=common_pb2.MessageType.ValueType(config.message_type.value),
        is_ordered=config.is_ordered,
    )


def status_proto(status: SendStatus) -> broker_pb2.SendStatus.ValueType:
    return broker_pb2.SendStatus.ValueType(status.value)


def filter_tags(proto: common_pb2.Filter) -> frozenset[str]:
    """The tags wanted; empty = every message. Raises FilterInvalid."""
    return tags.check(proto.tags)


def filter_program(proto: common_pb2.Filter) -> sql.Program | None:
    """The SQL92 filter, compiled; None = there is none. Raises FilterInvalid."""
    return sql.program_of(proto.sql, proto.tags)


def subscription(proto: broker_pb2.Subscription) -> Subscription:
    """Raises FilterInvalid."""
    filter_program(proto.filter)
    return Subscription(proto.topic, filter_tags(proto.filter), proto.filter.sql)


def group_settings(proto: broker_pb2.GroupSettings, default: GroupSettings) -> GroupSettings:
    """The wanted settings, ``default`` for what is not said. Raises InvalidRequest."""
    given = {name: getattr(proto, name) for name in _GROUP_SETTINGS if proto.HasField(name)}
    policy = _group_policy(proto, default.policy)
    return replace(default, name=proto.group, policy=policy, **given)


def group_settings_proto(settings: GroupSettings) -> broker_pb2.GroupSettings:
    policy = settings.policy
    return broker_pb2.GroupSettings(
        group=settings.name,
        **{name: getattr(settings, name) for name in _GROUP_SETTINGS},
        **{name: getattr(policy, field) for name, field in _GROUP_POLICY.items()},
        retry_policy=_retry_policy_proto(policy.retry),
        mode=broker_pb2.ConsumeMode.ValueType(policy.mode.value),
        read_quota=quota_proto(policy.read_quota),
        attributes=dict(policy.attributes),
    )


_GROUP_SETTINGS: Final = (
    "consume_enable",
    "consume_from_min_enable",
    "consume_broadcast_enable",
    "retry_queue_count",
    "retry_times_max",
    "broker_id",
    "broker_id_when_slow",
    "notify_members_enable",
)
_GROUP_POLICY: Final = {
    "consume_orderly": "is_orderly",
    "consume_timeout_min": "consume_timeout_min",
    "dlq_reserve_time_ms": "dlq_reserve_ms",
}


def _group_policy(proto: broker_pb2.GroupSettings, default: GroupPolicy) -> GroupPolicy:
    given = {
        field: getattr(proto, name)
        for name, field in _GROUP_POLICY.items()
        if proto.HasField(cast(Any, name))
    }
    try:
        mode = ConsumeMode(proto.mode) if proto.mode else default.mode
    except ValueError:
        raise InvalidRequest(f"mode {proto.mode} is not known here") from None
    return replace(
        default,
        retry=_retry_policy(proto.retry_policy, default.retry),
        mode=mode,
        read_quota=quota(proto.read_quota) if proto.HasField("read_quota") else default.read_quota,
        **given,
    )


def quota(proto: broker_pb2.Quota) -> Quota:
    return Quota(proto.messages_per_s, proto.bytes_per_s)


_SCOPES = {
    broker_pb2.QUOTA_SCOPE_ADDRESS: Scope.ADDRESS,
    broker_pb2.QUOTA_SCOPE_TOPIC: Scope.TOPIC,
}


def limited(scope: broker_pb2.QuotaScope.ValueType, name: str) -> tuple[Scope, str]:
    """Whose quota it is; an address by the name that is counted. Raises InvalidRequest."""
    if scope not in _SCOPES:
        raise InvalidRequest(f"scope: {scope} is neither an address nor a topic")
    found = _SCOPES[scope]
    return found, address_name(name) if found is Scope.ADDRESS else name


def limits_proto(scope: Scope, name: str, limits: Limits) -> broker_pb2.QuotaLimits:
    return broker_pb2.QuotaLimits(
        scope=next(proto for proto, one in _SCOPES.items() if one is scope),
        name=name,
        send=None if limits.send is None else quota_proto(limits.send),
        read=None if limits.read is None else quota_proto(limits.read),
    )


def quota_proto(value: Quota) -> broker_pb2.Quota:
    return broker_pb2.Quota(messages_per_s=value.messages_per_s, bytes_per_s=value.bytes_per_s)


def _retry_policy(proto: broker_pb2.RetryPolicy, default: RetryPolicy | None) -> RetryPolicy | None:
    match proto.kind:
        case broker_pb2.RETRY_POLICY_KIND_UNSPECIFIED:
            return default
        case broker_pb2.RETRY_POLICY_KIND_DELAY_LEVELS:
            return None
        case broker_pb2.RETRY_POLICY_KIND_CUSTOMIZED:
            return CustomizedRetry.of_steps(tuple(proto.steps_ms))
        case broker_pb2.RETRY_POLICY_KIND_EXPONENTIAL:
            return ExponentialRetry(
                proto.initial_ms or EXPONENTIAL.initial_ms,
                proto.multiplier or EXPONENTIAL.multiplier,
                proto.max_ms or EXPONENTIAL.max_ms,
            )
    raise InvalidRequest(f"retry_policy: kind {proto.kind} is not known here")


def _retry_policy_proto(retry: RetryPolicy | None) -> broker_pb2.RetryPolicy:
    match retry:
        case CustomizedRetry():
            return broker_pb2.RetryPolicy(
                kind=broker_pb2.RETRY_POLICY_KIND_CUSTOMIZED, steps_ms=retry.steps_ms
            )
        case ExponentialRetry(initial_ms, multiplier, max_ms):
            return broker_pb2.RetryPolicy(
                kind=broker_pb2.RETRY_POLICY_KIND_EXPONENTIAL,
                initial_ms=initial_ms,
                multiplier=multiplier,
                max_ms=max_ms,
            )
    return broker_pb2.RetryPolicy(kind=broker_pb2.RETRY_POLICY_KIND_DELAY_LEVELS)


def member_details(proto: broker_pb2.JoinGroupRequest) -> MemberDetails:
    return MemberDetails(
        proto.instance_id,
        proto.allocation,
        tuple(HeldQueues(h.topic, h.broker_group, tuple(h.queue_ids)) for h in proto.held),
        proto.is_broadcasting,
        proto.retry_times_max if proto.HasField("retry_times_max") else None,
        proto.session_ms,
        receives=proto.mode == broker_pb2.CONSUME_MODE_POP,
        instance_number=proto.instance_number,
    )


def members_proto(view: Membership) -> list[broker_pb2.GroupMember]:
    return [member_proto(member) for member in view.members]


def member_proto(member: Member) -> broker_pb2.GroupMember:
    return broker_pb2.GroupMember(
        client_id=member.client_id,
        subscriptions=[
            broker_pb2.Subscription(
                topic=s.topic, filter=common_pb2.Filter(tags=sorted(s.tags), sql=s.sql)
            )
            for s in member.subscriptions
        ],
        instance_id=member.details.instance_id,
        instance_number=member.instance_number,
        allocation=member.details.allocation,
        held=[
            broker_pb2.HeldQueues(topic=h.topic, broker_group=h.broker_group, queue_ids=h.queue_ids)
            for h in member.details.held
        ],
        is_broadcasting=member.details.is_broadcasting,
        session_ms=member.details.session_ms,
        is_away=member.is_away,
        mode=broker_pb2.CONSUME_MODE_POP
        if member.details.receives
        else broker_pb2.CONSUME_MODE_PULL,
    )


def form(proto: broker_pb2.MessageForm.ValueType) -> broker_pb2.MessageForm.ValueType:
    """Raises InvalidRequest for a form that is not known here."""
    if proto not in _FORMS:
        raise InvalidRequest(f"form {proto} is not known here")
    return proto


def time_ms(what: str, value: int) -> int:
    """Raises InvalidRequest for a time before 1970."""
    if value < 0:
        raise InvalidRequest(f"{what}: {value} is before 1970")
    return value


def pull_proto(
    answer: PullAnswer, broker_group: str, form: broker_pb2.MessageForm.ValueType
) -> broker_pb2.PullResponse:
    response = broker_pb2.PullResponse(
        status=broker_pb2.PullStatus.ValueType(answer.status.value),
        count=answer.count,
        next_position=position_proto(answer.next_position),
        min_offset=answer.min_offset,
        max_offset=answer.max_offset,
    )
    if form == broker_pb2.MESSAGE_FORM_MESSAGES:
        for found in record.decode_all(answer.records):
            response.messages.append(message_proto(found, broker_group))
    else:
        response.records = answer.records
    return response


def key_query(proto: broker_pb2.QueryMessagesRequest) -> KeyQuery:
    """What is looked for. Raises InvalidRequest."""
    by = proto.WhichOneof("by")
    key = proto.unique_id if by == "unique_id" else proto.key
    if not key:
        raise InvalidRequest("neither a key nor a unique id was given")
    first_ms = time_ms("begin_ms", proto.begin_ms) if proto.HasField("begin_ms") else 0
    last_ms = time_ms("end_ms", proto.end_ms) if proto.HasField("end_ms") else TIME_MS_MAX
    if first_ms > last_ms:
        raise InvalidRequest(f"begin_ms {first_ms} is later than end_ms {last_ms}")
    if proto.max_count < 0:
        raise InvalidRequest(f"max_count: {proto.max_count} is not a number of messages")
    return KeyQuery(proto.topic, key, by == "unique_id", first_ms, last_ms, proto.max_count)


def key_proto(
    answer: KeyAnswer, broker_group: str, form: broker_pb2.MessageForm.ValueType
) -> broker_pb2.QueryMessagesResponse:
    response = broker_pb2.QueryMessagesResponse(
        count=len(answer.found),
        has_more=answer.has_more,
        indexed_offset=answer.indexed_offset,
    )
    if form == broker_pb2.MESSAGE_FORM_MESSAGES:
        messages = (shown_message_proto(found.message, broker_group) for found in answer.found)
        response.messages.extend(messages)
    else:
        response.records = b"".join(found.raw for found in answer.found)
    return response


def boundary(proto: broker_pb2.TimeBoundary.ValueType) -> Boundary:
    """Raises InvalidRequest."""
    if proto == broker_pb2.TIME_BOUNDARY_UPPER:
        return Boundary.UPPER
    if proto in (broker_pb2.TIME_BOUNDARY_LOWER, broker_pb2.TIME_BOUNDARY_UNSPECIFIED):
        return Boundary.LOWER
    raise InvalidRequest(f"boundary {proto} is not known here")


def shown_message_proto(found: record.Record, broker_group: str) -> broker_pb2.StoredMessage:
    """A message as any client may see it. Of one that a pull would refuse only the place, the times
    and the broker's own properties.
    """
    message = message_proto(found, broker_group)
    if is_closed(found.topic):
        for name in ("body", "tag", "keys", "flag"):
            message.ClearField(name)
        for name in [name for name in message.properties if not properties.is_reserved(name)]:
            del message.properties[name]
        message.withheld = True
    return message


def message_proto(found: record.Record, broker_group: str) -> broker_pb2.StoredMessage:
    others = {k: v for k, v in found.properties.items() if k not in _OWN_FIELDS}
    return broker_pb2.StoredMessage(
        message_id=ids.message_id(broker_group, found.log_offset),
        queue=queue_proto(found.topic, found.queue_id),
        queue_offset=found.queue_offset,
        log_offset=found.log_offset,
        body=found.body,
        tag=found.tag,
        keys=found.keys,
        properties=others,
        flag=found.flag,
        sys_flag=found.sys_flag,
        born_time_ms=found.born_time_ms,
        store_time_ms=found.store_time_ms,
        born_host=record.host_text(found.born_host),
        store_host=record.host_text(found.store_host),
        reconsume_times=found.reconsume_times,
        unique_id=found.unique_id,
    )
