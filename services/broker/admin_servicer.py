"""The internal port of a broker: what operators ask."""

from __future__ import annotations

from cometmq.errors import CometError, InvalidRequest, LimitExceeded
from cometmq.member.context import MemberCore
from cometmq.member.rpc import convert
from cometmq.member.rpc.admin_servicer import AdminReadServicer, Context
from cometmq.member.rpc.broker_servicer import check_items
from cometmq.member.state.keeper import StateKeeper
from cometmq.messaging.groups import GroupSettings, check_name
from cometmq.messaging.quotas import NO_QUOTA, Limits, Quota, Way, check_quota
from cometmq.messaging.timers import TIME_MS_MAX, Timer
from cometmq.messaging.topics import in_hours
from cometmq.model import TopicConfig
from cometmq.rpc.interceptors import to_proto
from cometmq.rpc.shares import address_of
from cometmq.v1 import broker_pb2
from services.broker.delay.delayed_list import COUNTS_MAX, DelayedList, DelayedMessage, Wanted
from services.broker.delay.delayed_list import PAGE_MAX as DELAYED_PAGE_MAX
from services.broker.groups.clients import Client, ClientList
from services.broker.groups.coordinator import GroupCoordinator
from services.broker.groups.live_clients import LiveClients
from services.broker.groups.resets import Bound, OffsetResets, QueueReset, ResetTarget
from services.broker.retry.dead_letters import DeadLetters
from services.broker.retry.resends import ITEMS_MAX, Asked, Resender, ResendItem
from services.broker.transactions.half_admin import HalfAdmin, HalfInfo

PAGE_MAX = 1_000  # half messages of an answer

_BOUNDS = {
    broker_pb2.RESET_BOUND_FIRST: Bound.FIRST,
    broker_pb2.RESET_BOUND_LAST: Bound.LAST,
}


def _reset_target(request: broker_pb2.ResetOffsetsRequest) -> ResetTarget:
    match request.WhichOneof("target"):
        case "bound" if request.bound in _BOUNDS:
            return ResetTarget(bound=_BOUNDS[request.bound])
        case "time_ms":
            return ResetTarget(time_ms=convert.time_ms("time_ms", request.time_ms))
        case "offset":
            return ResetTarget(offset=request.offset)
        case "clone_of":
            return ResetTarget(clone_of=request.clone_of)
    raise InvalidRequest("target: a reset is to a bound, a time, an offset, or another group's")


def _reset_result(answer: QueueReset | CometError) -> broker_pb2.ResetResult:
    if isinstance(answer, CometError):
        return broker_pb2.ResetResult(error=to_proto(answer))
    before = None if answer.before is None else convert.position_proto(answer.before)
    after = convert.position_proto(answer.after)
    return broker_pb2.ResetResult(queue_id=answer.queue_id, before=before, after=after)


def _resend_result(answer: CometError | None) -> broker_pb2.ResendResult:
    return broker_pb2.ResendResult(error=None if answer is None else to_proto(answer))


def _place_proto(timer: Timer) -> broker_pb2.DelayedPlace:
    return broker_pb2.DelayedPlace(due_ms=timer.due_ms, offset=timer.offset)


def _delayed_proto(one: DelayedMessage) -> broker_pb2.DelayedMessage:
    return broker_pb2.DelayedMessage(
        place=_place_proto(one.timer),
        queue=convert.queue_proto(one.topic, one.queue_id),
        message_id=one.message_id,
        unique_id=one.unique_id,
        store_time_ms=one.store_time_ms,
        size_bytes=one.size_bytes,
        recall_handle=one.recall_handle,
    )


def _client_proto(one: Client) -> broker_pb2.ClientInfo:
    return broker_pb2.ClientInfo(
        group=one.group,
        client_id=one.client_id,
        address=one.origin.address,
        agent=one.origin.agent,
        since_ms=one.origin.since_ms,
        is_away=one.is_away,
    )


class BrokerAdminServicer(AdminReadServicer):
    """``cometmq.v1.BrokerAdminService`` of the writer."""

    def __init__(
        self,
        core: MemberCore,
        coordinator: GroupCoordinator,
        keeper: StateKeeper,
        dead_letters: DeadLetters,
        resender: Resender,
        resets: OffsetResets,
        clients: ClientList,
        live_clients: LiveClients,
        half_admin: HalfAdmin,
        delayed: DelayedList,
        new_topic: TopicConfig,
    ) -> None:
        super().__init__(core, coordinator)
        self._coordinator = coordinator
        self._reserved_ms = core.retention.rules.reserved_ms
        self._keeper = keeper
        self._dead_letters = dead_letters
        self._resender = resender
        self._resets = resets
        self._clients = clients
        self._live_clients = live_clients
        self._halves = half_admin
        self._delayed = delayed
        self._new_topic = new_topic  # settings of a new topic, where a request says nothing

    async def PutTopic(
        self, request: broker_pb2.PutTopicRequest, context: Context
    ) -> broker_pb2.PutTopicResponse:
        def wanted(before: TopicConfig | None) -> TopicConfig:
            config = convert.topic(request.topic, before or self._new_topic)
            if config != before:
                self._check_reserve(config.reserve_time_ms)
            return config

        quota = self._send_quota(request)
        config, created = await self._keeper.change_topic(request.topic.name, wanted)
        if quota is not None:
            await self._keeper.put_quota(config.name, quota)
        quota = self._state.quotas.of_clients[Way.SEND].get(config.name, NO_QUOTA)
        return broker_pb2.PutTopicResponse(
            topic=convert.topic_proto(config),
            created=created,
            send_quota=convert.quota_proto(quota),
        )

    def _send_quota(self, request: broker_pb2.PutTopicRequest) -> Quota | None:
        """The quota that the request asks for; None: it says nothing about it."""
        if not request.HasField("send_quota"):
            return None
        wanted = convert.quota(request.send_quota)
        check_quota("send_quota", wanted)
        return wanted

    async def PutQuota(
        self, request: broker_pb2.PutQuotaRequest, context: Context
    ) -> broker_pb2.PutQuotaResponse:
        def wanted(before: Limits) -> Limits:
            send, read = before.send, before.read
            if request.HasField("send"):
                send = convert.quota(request.send)
            if request.HasField("read"):
                read = convert.quota(request.read)
            return Limits(send, read)

        scope, name = convert.limited(request.scope, request.name)
        limits = await self._keeper.put_limits(scope, name, wanted)
        return broker_pb2.PutQuotaResponse(limits=convert.limits_proto(scope, name, limits))

    async def DropQuota(
        self, request: broker_pb2.DropQuotaRequest, context: Context
    ) -> broker_pb2.DropQuotaResponse:
        scope, name = convert.limited(request.scope, request.name)
        await self._keeper.put_limits(scope, name, lambda _: Limits())
        return broker_pb2.DropQuotaResponse()

    def _check_reserve(self, reserve_time_ms: int) -> None:
        if reserve_time_ms > self._reserved_ms:
            raise InvalidRequest(
                f"a reserve time of {in_hours(reserve_time_ms)} is more than the "
                f"{in_hours(self._reserved_ms)} for which the log is kept (file_reserved_time), "
                "which all topics share"
            )

    async def CleanStore(
        self, request: broker_pb2.CleanStoreRequest, context: Context
    ) -> broker_pb2.CleanStoreResponse:
        response = await super().CleanStore(request, context)
        response.topics.extend(self._keeper.drop_orphans())
        return response

    async def DeleteTopic(
        self, request: broker_pb2.DeleteTopicRequest, context: Context
    ) -> broker_pb2.DeleteTopicResponse:
        await self._keeper.drop_topic(request.topic)
        return broker_pb2.DeleteTopicResponse()

    async def ResendDeadLetters(
        self, request: broker_pb2.ResendDeadLettersRequest, context: Context
    ) -> broker_pb2.ResendDeadLettersResponse:
        if len(request.offsets) > ITEMS_MAX:
            raise LimitExceeded(f"{len(request.offsets)} dead letters, {ITEMS_MAX} are allowed")
        asked = Asked(request.again, address_of(context.peer()))
        answers = await self._dead_letters.resend(request.group, request.offsets, asked)
        return broker_pb2.ResendDeadLettersResponse(results=map(_resend_result, answers))

    async def ResendMessages(
        self, request: broker_pb2.ResendMessagesRequest, context: Context
    ) -> broker_pb2.ResendMessagesResponse:
        if len(request.items) > ITEMS_MAX:
            raise LimitExceeded(f"{len(request.items)} messages, {ITEMS_MAX} are allowed")
        items = [ResendItem(one.queue_id, convert.position(one.position)) for one in request.items]
        asked = Asked(request.again, address_of(context.peer()), request.dry_run)
        answers = await self._resender.resend(request.topic, request.group, items, asked)
        return broker_pb2.ResendMessagesResponse(results=map(_resend_result, answers))

    async def QueryHalves(
        self, request: broker_pb2.QueryHalvesRequest, context: Context
    ) -> broker_pb2.QueryHalvesResponse:
        if request.producer_group:
            check_name(request.producer_group)
        if request.first_half_offset < 0 or request.max_count > PAGE_MAX:
            raise InvalidRequest(f"first_half_offset from 0, max_count to {PAGE_MAX}")
        page = await self._halves.query(
            request.producer_group, request.first_half_offset, request.max_count or PAGE_MAX
        )
        return broker_pb2.QueryHalvesResponse(
            halves=[self._half_info(one) for one in page.found], next_half_offset=page.next_offset
        )

    def _half_info(self, one: HalfInfo) -> broker_pb2.HalfInfo:
        found = one.record
        return broker_pb2.HalfInfo(
            half_offset=one.half_offset,
            log_offset=one.log_offset,
            producer_group=one.group,
            check_count=one.check_count,
            producer_count=one.producer_count,
            message=found and convert.message_proto(found, self._identity.broker_group),
        )

    async def ResumeChecks(
        self, request: broker_pb2.ResumeChecksRequest, context: Context
    ) -> broker_pb2.ResumeChecksResponse:
        if len(request.offsets) > ITEMS_MAX:
            raise LimitExceeded(f"{len(request.offsets)} half messages, {ITEMS_MAX} are allowed")
        answers = await self._halves.resume(request.offsets, address_of(context.peer()))
        return broker_pb2.ResumeChecksResponse(results=map(_resend_result, answers))

    async def DropHalves(
        self, request: broker_pb2.DropHalvesRequest, context: Context
    ) -> broker_pb2.DropHalvesResponse:
        if len(request.half_offsets) > ITEMS_MAX:
            raise LimitExceeded(f"{len(request.half_offsets)} halves, {ITEMS_MAX} are allowed")
        answers = await self._halves.drop(request.half_offsets, address_of(context.peer()))
        return broker_pb2.DropHalvesResponse(results=map(_resend_result, answers))

    async def ListDelayed(
        self, request: broker_pb2.ListDelayedRequest, context: Context
    ) -> broker_pb2.ListDelayedResponse:
        if not 0 <= request.count_max <= DELAYED_PAGE_MAX:
            raise InvalidRequest(f"count_max: 0 to {DELAYED_PAGE_MAX}, not {request.count_max}")
        if len(request.until_ms) > COUNTS_MAX:
            raise InvalidRequest(f"until_ms: {len(request.until_ms)}, {COUNTS_MAX} are allowed")
        for name in ("first_ms", "last_ms"):
            convert.time_ms(name, getattr(request, name))
        for until_ms in request.until_ms:
            convert.time_ms("until_ms", until_ms)
        after = None
        if request.HasField("after"):
            convert.time_ms("after.due_ms", request.after.due_ms)
            if request.after.offset < 0:
                raise InvalidRequest(f"after.offset: {request.after.offset} is negative")
            after = Timer(request.after.due_ms, request.after.offset)
        wanted = Wanted(request.topic, request.first_ms, request.last_ms or TIME_MS_MAX, after)
        page = await self._delayed.page(wanted, request.count_max)
        return broker_pb2.ListDelayedResponse(
            messages=[_delayed_proto(one) for one in page.messages],
            next=None if page.next is None else _place_proto(page.next),
            counts=[await self._delayed.count_until(until_ms) for until_ms in request.until_ms],
        )

    async def PurgeDeadLetters(
        self, request: broker_pb2.PurgeDeadLettersRequest, context: Context
    ) -> broker_pb2.PurgeDeadLettersResponse:
        await self._dead_letters.purge(request.group)
        return broker_pb2.PurgeDeadLettersResponse()

    async def ResetOffsets(
        self, request: broker_pb2.ResetOffsetsRequest, context: Context
    ) -> broker_pb2.ResetOffsetsResponse:
        check_items(request.queue_ids)
        answers = await self._resets.reset(
            request.group,
            request.topic,
            sorted(set(request.queue_ids)),
            _reset_target(request),
            dry=request.dry_run,
            asked_by=address_of(context.peer()),
        )
        return broker_pb2.ResetOffsetsResponse(results=map(_reset_result, answers))

    async def ForgetOffsets(
        self, request: broker_pb2.ForgetOffsetsRequest, context: Context
    ) -> broker_pb2.ForgetOffsetsResponse:
        asked_by = address_of(context.peer())
        queue_ids = await self._resets.forget(request.group, request.topic, asked_by)
        return broker_pb2.ForgetOffsetsResponse(queue_ids=queue_ids)

    async def ListGroups(
        self, request: broker_pb2.ListGroupsRequest, context: Context
    ) -> broker_pb2.ListGroupsResponse:
        found = self._coordinator.summaries()
        return broker_pb2.ListGroupsResponse(
            groups=[one.group for one in found],
            summaries=[
                broker_pb2.GroupSummary(
                    group=one.group,
                    member_count=one.member_count,
                    away_count=one.away_count,
                    queue_count=one.queue_count,
                    idle_ms=round(one.idle_s * 1000),
                    retry_count=one.retry_count,
                    dead_letter_count=one.dead_letter_count,
                )
                for one in found
            ],
        )

    async def DescribeGroup(
        self, request: broker_pb2.DescribeGroupRequest, context: Context
    ) -> broker_pb2.DescribeGroupResponse:
        response = await super().DescribeGroup(request, context)
        known = self._clients.members(request.group)
        for one in response.members:
            origin, stay = known[one.client_id]
            one.address = origin.address
            one.member_ms = round(stay.member_s * 1000)
            if stay.away_s is not None:
                one.away_ms = round(stay.away_s * 1000)
                one.session_left_ms = max(0, one.session_ms - one.away_ms)
        return response

    async def RemoveMembers(
        self, request: broker_pb2.RemoveMembersRequest, context: Context
    ) -> broker_pb2.RemoveMembersResponse:
        check_items(request.client_ids, "members")
        removed, connected = self._coordinator.remove_members(request.group, request.client_ids)
        return broker_pb2.RemoveMembersResponse(removed=removed, connected=connected)

    async def ListClients(
        self, request: broker_pb2.ListClientsRequest, context: Context
    ) -> broker_pb2.ListClientsResponse:
        if request.group:
            check_name(request.group)
        found, token = self._clients.page(
            producers=request.kind == broker_pb2.CLIENT_KIND_PRODUCER,
            group=request.group,
            after=request.page_token,
            count_max=request.max_count,
            client_id=request.client_id,
        )
        return broker_pb2.ListClientsResponse(
            clients=map(_client_proto, found), next_page_token=token
        )

    async def DescribeClient(
        self, request: broker_pb2.DescribeClientRequest, context: Context
    ) -> broker_pb2.DescribeClientResponse:
        client, said = await self._live_clients.describe(
            request.group,
            request.client_id,
            request.timeout_ms,
            with_stacks=request.with_stacks,
        )
        return broker_pb2.DescribeClientResponse(client=_client_proto(client), description=said)

    async def VerifyMessage(
        self, request: broker_pb2.VerifyMessageRequest, context: Context
    ) -> broker_pb2.VerifyMessageResponse:
        result = await self._live_clients.verify(
            request.group, request.client_id, request.message_id, request.timeout_ms
        )
        return broker_pb2.VerifyMessageResponse(result=result)

    async def PutGroup(
        self, request: broker_pb2.PutGroupRequest, context: Context
    ) -> broker_pb2.PutGroupResponse:
        name = request.settings.group

        def wanted(before: GroupSettings | None) -> GroupSettings:
            settings = convert.group_settings(request.settings, before or GroupSettings(name))
            self._check_reserve(settings.policy.dlq_reserve_ms)
            return settings

        settings, created = await self._coordinator.change_group(name, wanted)
        return broker_pb2.PutGroupResponse(
            settings=convert.group_settings_proto(settings), created=created
        )

    async def DeleteGroup(
        self, request: broker_pb2.DeleteGroupRequest, context: Context
    ) -> broker_pb2.DeleteGroupResponse:
        topics = await self._coordinator.drop_group(
            request.group, dead_letters=request.dead_letters
        )
        return broker_pb2.DeleteGroupResponse(topics=topics)
