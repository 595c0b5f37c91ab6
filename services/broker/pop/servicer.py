"""Groups that receive (POP), on the client port: protobuf in and out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cometmq.errors import CometError, InvalidRequest, LimitExceeded
from cometmq.filters import tags
from cometmq.format import record
from cometmq.member.hosts import BrokerIdentity, caller_of_peer
from cometmq.member.metrics import MemberMetrics
from cometmq.member.read.reader import Reader
from cometmq.member.rpc import convert
from cometmq.member.rpc.broker_servicer import ReadServicer
from cometmq.messaging.assignment import averagely
from cometmq.messaging.group_policy import ConsumeMode
from cometmq.messaging.pop import acking
from cometmq.messaging.pull import clamp
from cometmq.names import check_client_id
from cometmq.rpc.interceptors import to_proto
from cometmq.rpc.shares import address_of
from cometmq.v1 import broker_pb2, namesrv_pb2
from services.broker.groups.coordinator import GroupCoordinator
from services.broker.groups.resets import Bound, ResetTarget
from services.broker.pop import receive
from services.broker.pop.acks import AckItem, AckService, Changed, ChangeItem
from services.broker.pop.receive import ReceiveAsk, Received, ReceiveService, Run, Wanted

Context = Any  # grpc.aio.ServicerContext, whose message types differ from method to method


@dataclass(frozen=True, slots=True)
class PopServices:
    """The services behind the calls."""

    receives: ReceiveService
    acks: AckService


class PopServicer(ReadServicer):
    """``cometmq.v1.BrokerService``: what groups with mode POP ask."""

    def __init__(
        self,
        identity: BrokerIdentity,
        reader: Reader,
        coordinator: GroupCoordinator,
        metrics: MemberMetrics,
        described: Callable[[], namesrv_pb2.Member],
        pop: PopServices,
    ) -> None:
        super().__init__(identity, reader, coordinator, metrics, described)
        self._coordinator = coordinator
        self._pop = pop

    async def Receive(
        self, request: broker_pb2.ReceiveRequest, context: Context
    ) -> broker_pb2.ReceiveResponse:
        ask, form = _ask(request), convert.form(request.form)
        peer = context.peer()
        caller = caller_of_peer(peer, request.client_id)
        if request.client_id:
            check_client_id(request.client_id)
        if is_metered := self._coordinator.has_quotas:
            topics = [wanted.topic for wanted in ask.wanted]
            self._coordinator.check_quotas(caller, topics, ask.group)
        if not self._coordinator.is_there(ask.group):
            for wanted in ask.wanted:  # no group is made for nothing
                self._coordinator.readable_queues(wanted.topic)
                self._reader.queue(wanted.topic, ask.queue_id or 0)
            await self._coordinator.ensure_group(ask.group, address_of(peer), ConsumeMode.POP)
        answer = await self._pop.receives.receive(ask, context.room)
        if is_metered:
            got = [(run.key[0], run.count, len(run.records)) for run in answer.runs]
            self._coordinator.use_quotas(caller, got, ask.group)
        for run in answer.runs:
            self._metrics.pull_answered(run.key[0], ask.group, run.count, run.records)
        return self._response(answer, form)

    def _response(
        self, answer: Received, form: broker_pb2.MessageForm.ValueType
    ) -> broker_pb2.ReceiveResponse:
        return broker_pb2.ReceiveResponse(
            runs=[self._run(run, form) for run in answer.runs],
            has_more=answer.has_more,
            again_ms=answer.again_ms,
            is_blocked=answer.is_blocked,
            positions=[
                broker_pb2.ReceivePosition(
                    queue=convert.queue_proto(*key),
                    position=convert.position_proto(position),
                    return_number=number,
                )
                for key, position, number in answer.positions
            ],
        )

    def _run(self, run: Run, form: broker_pb2.MessageForm.ValueType) -> broker_pb2.ReceivedRun:
        found = broker_pb2.ReceivedRun(
            queue=convert.queue_proto(*run.key),
            handle=run.handle,
            count=run.count,
            attempt=run.attempt,
            visible_ms=run.visible_ms,
        )
        if form == broker_pb2.MESSAGE_FORM_MESSAGES:
            group = self._identity.broker_group
            decoded = record.decode_all(run.records)
            found.messages.extend(convert.message_proto(one, group) for one in decoded)
        else:
            found.records = run.records
        return found

    async def AckMessages(
        self, request: broker_pb2.AckMessagesRequest, context: Context
    ) -> broker_pb2.AckMessagesResponse:
        items = [_item(item) for item in request.items]
        answers = await self._pop.acks.acknowledge(request.group, items)
        return broker_pb2.AckMessagesResponse(
            results=[
                broker_pb2.AckResult(error=None if answer is None else to_proto(answer))
                for answer in answers
            ]
        )

    async def ChangeInvisibleTime(
        self, request: broker_pb2.ChangeInvisibleTimeRequest, context: Context
    ) -> broker_pb2.ChangeInvisibleTimeResponse:
        items = [
            ChangeItem(_item(item.messages), item.invisible_ms, item.failed)
            for item in request.items
        ]
        answers = await self._pop.acks.change(request.group, items)
        return broker_pb2.ChangeInvisibleTimeResponse(results=map(_changed, answers))

    async def QueryAssignment(
        self, request: broker_pb2.QueryAssignmentRequest, context: Context
    ) -> broker_pb2.QueryAssignmentResponse:
        check_client_id(request.client_id)
        mode, members = self._coordinator.mode_and_members(request.group, request.topic)
        count = self._coordinator.readable_queues(request.topic)
        if mode is ConsumeMode.POP:
            pop = broker_pb2.QueueAssignment(mode=broker_pb2.CONSUME_MODE_POP)
            return broker_pb2.QueryAssignmentResponse(assignments=[pop])
        mine = averagely(range(count), members, request.client_id)
        return broker_pb2.QueryAssignmentResponse(
            assignments=[
                broker_pb2.QueueAssignment(mode=broker_pb2.CONSUME_MODE_PULL, queue_id=queue_id)
                for queue_id in mine
            ]
        )


def _ask(request: broker_pb2.ReceiveRequest) -> ReceiveAsk:
    """Raises InvalidRequest, InvisibleTimeInvalid, LimitExceeded, FilterInvalid."""
    if not 1 <= len(request.subscriptions) <= receive.TOPICS_MAX:
        raise LimitExceeded(f"subscriptions: 1 to {receive.TOPICS_MAX} topics")
    wanted = [
        Wanted(
            one.topic,
            tags.codes(convert.filter_tags(one.filter)),
            convert.filter_program(one.filter),
        )
        for one in request.subscriptions
    ]
    if len({one.topic for one in wanted}) != len(wanted):
        raise InvalidRequest("subscriptions: a topic is named twice")
    queue_id = request.queue_id if request.HasField("queue_id") else None
    if queue_id is not None and len(wanted) > 1:
        raise InvalidRequest("queue_id: a queue is of one topic")
    if request.max_count > receive.COUNT_MAX:
        raise LimitExceeded(f"max_count: {receive.COUNT_MAX} messages are allowed")
    attempt_id = request.attempt_id
    if len(attempt_id) > receive.ATTEMPT_ID_LENGTH_MAX or not attempt_id.isprintable():
        raise InvalidRequest("attempt_id is at most 64 printable characters")
    acking.check_invisible(request.invisible_ms)
    max_count, max_bytes = clamp(request.max_count, request.max_bytes)
    max_bytes = min(max_bytes, receive.BYTES_MAX)
    return ReceiveAsk(
        request.group,
        tuple(wanted),
        queue_id,
        max_count,
        max_bytes,
        request.invisible_ms,
        _start(request),
        attempt_id,
        frozenset(request.begun_topics),
    )


def _start(request: broker_pb2.ReceiveRequest) -> ResetTarget:
    match request.start:
        case broker_pb2.RECEIVE_START_UNSPECIFIED | broker_pb2.RECEIVE_START_FIRST:
            return ResetTarget(bound=Bound.FIRST)
        case broker_pb2.RECEIVE_START_LAST:
            return ResetTarget(bound=Bound.LAST)
        case broker_pb2.RECEIVE_START_TIME:
            return ResetTarget(time_ms=convert.time_ms("start_time_ms", request.start_time_ms))
    raise InvalidRequest(f"start {request.start} is not known here")


def _item(item: broker_pb2.AckItem) -> AckItem:
    return AckItem(item.handle, item.first_offset, item.count)


def _changed(answer: Changed | CometError) -> broker_pb2.ChangeInvisibleTimeResult:
    if isinstance(answer, CometError):
        return broker_pb2.ChangeInvisibleTimeResult(error=to_proto(answer))
    return broker_pb2.ChangeInvisibleTimeResult(handle=answer.handle, visible_ms=answer.visible_ms)
