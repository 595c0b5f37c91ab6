"""What every member answers on its client port: reads. A writer adds the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from typing import Any

from cometmq.errors import CometError, LimitExceeded, NoPermission, NotWriter
from cometmq.filters import tags
from cometmq.member.hosts import BrokerIdentity, caller_of_peer
from cometmq.member.metrics import MemberMetrics
from cometmq.member.read.group_progress import GroupReads
from cometmq.member.read.reader import PullQuery, Reader
from cometmq.member.read.search import Finder, TimeAnswer
from cometmq.member.rpc import convert
from cometmq.messaging.groups import check_name as check_group_name
from cometmq.messaging.quotas import Caller, address_name
from cometmq.messaging.topics import is_closed
from cometmq.model import Position, QueueKey
from cometmq.names import check_client_id
from cometmq.rpc.interceptors import to_proto
from cometmq.v1 import broker_pb2, broker_pb2_grpc, common_pb2, namesrv_pb2

Context = Any  # grpc.aio.ServicerContext, whose message types differ from method to method

ITEMS_MAX = 4_096  # queues of one many-at-once call


class ReadServicer(broker_pb2_grpc.BrokerServiceServicer):
    """``cometmq.v1.BrokerService`` of a follower: reads as far as they are visible, NOT_WRITER for
    everything else.
    """

    def __init__(
        self,
        identity: BrokerIdentity,
        reader: Reader,
        group_reads: GroupReads,
        metrics: MemberMetrics,
        described: Callable[[], namesrv_pb2.Member],
    ) -> None:
        self._identity = identity
        self._described = described
        self._reader = reader
        self._finder = Finder(reader)
        self._group_reads = group_reads
        self._metrics = metrics

    async def DescribeMember(
        self, request: broker_pb2.DescribeMemberRequest, context: Context
    ) -> broker_pb2.DescribeMemberResponse:
        return broker_pb2.DescribeMemberResponse(member=self._described())

    # --- reading ---

    async def Pull(
        self, request: broker_pb2.PullRequest, context: Context
    ) -> broker_pb2.PullResponse:
        return await self.pull(request, context)

    async def pull(
        self, request: broker_pb2.PullRequest, context: Context, address: str | None = None
    ) -> broker_pb2.PullResponse:
        """A pull for a client at ``address``; None: it is the peer. A commit in the request is left
        alone: it may be old.
        """
        if request.group:
            check_group_name(request.group)
        self._group_reads.check_read(
            request.group, request.queue.topic, request.queue.queue_id, request.lock_number
        )
        caller = None
        if self._group_reads.has_quotas:
            caller = _caller(request, context, address)
            self._check_quotas(caller, request.queue.topic, request.group)
        form = convert.form(request.form)
        key, asked = (
            (request.queue.topic, request.queue.queue_id),
            convert.position(request.position),
        )
        start, stop = self._group_reads.next_wanted(request.group, key, asked.offset)
        query = PullQuery(
            *key,
            Position(asked.generation, start),
            tags.codes(convert.filter_tags(request.filter)),
            request.max_count,
            request.max_bytes,
            convert.filter_program(request.filter),
            stop,
        )
        answer = await self._reader.pull(query, context.room)
        if caller is not None:
            got = (query.topic, answer.count, len(answer.records))
            self._group_reads.use_quotas(caller, [got], request.group)
        known_group = self._group_reads.known_or_empty(request.group)
        self._metrics.pull_answered(query.topic, known_group, answer.count, answer.records)
        response = convert.pull_proto(answer, self._identity.broker_group, form)
        suggested = self._group_reads.suggested(request.group, answer.backlog_bytes)
        if suggested is not None:
            response.suggested_member_id = suggested
            self._metrics.pulls_suggested.inc()
        return response

    def _check_quotas(self, caller: Caller, topic: str, group: str = "") -> None:
        if caller.client:
            check_client_id(caller.client)
        self._group_reads.check_quotas(caller, [topic], group)

    async def QueryQueues(
        self, request: broker_pb2.QueryQueuesRequest, context: Context
    ) -> broker_pb2.QueryQueuesResponse:
        check_items(request.queues)
        keys = [(queue.topic, queue.queue_id) for queue in request.queues]
        uncertain: Mapping[QueueKey, CometError] = {}
        if request.end_wanted:
            uncertain = await self._reader.uncertain_ends(keys)
        else:
            await self._reader.show_appended(keys)
        return broker_pb2.QueryQueuesResponse(
            queues=[
                self._bounds(queue, uncertain.get(key))
                for queue, key in zip(request.queues, keys, strict=True)
            ]
        )

    def _bounds(
        self, queue: common_pb2.QueueRef, refusal: CometError | None
    ) -> broker_pb2.QueueBounds:
        try:
            view = self._reader.queue(queue.topic, queue.queue_id)
            if refusal is not None:
                raise refusal
        except CometError as error:
            return broker_pb2.QueueBounds(queue=queue, error=to_proto(error))
        return broker_pb2.QueueBounds(
            queue=queue,
            generation=view.generation,
            min_offset=view.min_offset,
            max_offset=view.max_offset,
        )

    async def GetMessage(
        self, request: broker_pb2.GetMessageRequest, context: Context
    ) -> broker_pb2.GetMessageResponse:
        log_offset = self._identity.log_offset_of(request.message_id)
        found = await self._reader.message(log_offset)
        if self._group_reads.has_quotas:
            caller = caller_of_peer(context.peer(), "")
            self._check_quotas(caller, found.topic)
            self._group_reads.use_quotas(caller, [(found.topic, 1, found.size)])
        return broker_pb2.GetMessageResponse(
            message=convert.shown_message_proto(found, self._identity.broker_group)
        )

    async def QueryMessages(
        self, request: broker_pb2.QueryMessagesRequest, context: Context
    ) -> broker_pb2.QueryMessagesResponse:
        form = convert.form(request.form)
        if form != broker_pb2.MESSAGE_FORM_MESSAGES and is_closed(request.topic):
            raise NoPermission(f"{request.topic} is a system topic")
        caller = caller_of_peer(context.peer(), "")
        if is_metered := self._group_reads.has_quotas:
            self._check_quotas(caller, request.topic)
        answer = await self._finder.by_key(convert.key_query(request))
        if is_metered:
            size_bytes = sum(len(found.raw) for found in answer.found)
            got = (request.topic, len(answer.found), size_bytes)
            self._group_reads.use_quotas(caller, [got])
        return convert.key_proto(answer, self._identity.broker_group, form)

    async def QueryOffsetsByTime(
        self, request: broker_pb2.QueryOffsetsByTimeRequest, context: Context
    ) -> broker_pb2.QueryOffsetsByTimeResponse:
        check_items(request.queues)
        keys = [(queue.topic, queue.queue_id) for queue in request.queues]
        boundary = convert.boundary(request.boundary)
        time_ms = convert.time_ms("time_ms", request.time_ms)
        answers = await self._finder.by_time(keys, time_ms, boundary)
        pairs = zip(request.queues, answers, strict=True)
        return broker_pb2.QueryOffsetsByTimeResponse(
            queues=[_offset_by_time(queue, answer) for queue, answer in pairs]
        )

    async def QueryOffsets(
        self, request: broker_pb2.QueryOffsetsRequest, context: Context
    ) -> broker_pb2.QueryOffsetsResponse:
        check_items(request.queues)
        check_group_name(request.group)
        return broker_pb2.QueryOffsetsResponse(
            results=[self._committed(request.group, queue) for queue in request.queues],
            begin_at_end=self._group_reads.begins_at_end(request.group),
        )

    def _committed(self, group: str, queue: common_pb2.QueueRef) -> broker_pb2.OffsetResult:
        try:
            found = self._group_reads.committed(group, queue.topic, queue.queue_id)
        except CometError as error:
            return broker_pb2.OffsetResult(queue=queue, error=to_proto(error))
        return broker_pb2.OffsetResult(
            queue=queue,
            position=None if found is None else convert.position_proto(found),
            reset_number=self._group_reads.reset_number(group, queue.topic, queue.queue_id),
        )

    # --- what a follower does not do ---

    async def SendStream(self, request_iterator: Any, context: Context) -> None:  # type: ignore[override]
        raise not_writer(self._identity)

    async def Send(
        self, request: broker_pb2.SendRequest, context: Context
    ) -> broker_pb2.SendResponse:
        raise not_writer(self._identity)

    async def JoinGroup(self, request_iterator: Any, context: Context) -> None:  # type: ignore[override]
        raise not_writer(self._identity)

    async def AnswerQuestion(
        self, request: broker_pb2.AnswerQuestionRequest, context: Context
    ) -> broker_pb2.AnswerQuestionResponse:
        raise not_writer(self._identity)

    async def Replies(self, request_iterator: Any, context: Context) -> None:  # type: ignore[override]
        raise not_writer(self._identity)

    async def CommitOffsets(
        self, request: broker_pb2.CommitOffsetsRequest, context: Context
    ) -> broker_pb2.CommitOffsetsResponse:
        raise not_writer(self._identity)

    async def LockQueues(
        self, request: broker_pb2.LockQueuesRequest, context: Context
    ) -> broker_pb2.LockQueuesResponse:
        raise not_writer(self._identity)

    async def UnlockQueues(
        self, request: broker_pb2.UnlockQueuesRequest, context: Context
    ) -> broker_pb2.UnlockQueuesResponse:
        raise not_writer(self._identity)

    async def EndTransactions(
        self, request: broker_pb2.EndTransactionsRequest, context: Context
    ) -> broker_pb2.EndTransactionsResponse:
        raise not_writer(self._identity)

    async def CheckTransactions(self, request_iterator: Any, context: Context) -> None:  # type: ignore[override]
        raise not_writer(self._identity)

    async def Recall(
        self, request: broker_pb2.RecallRequest, context: Context
    ) -> broker_pb2.RecallResponse:
        raise not_writer(self._identity)

    async def SendBack(
        self, request: broker_pb2.SendBackRequest, context: Context
    ) -> broker_pb2.SendBackResponse:
        raise not_writer(self._identity)

    async def Receive(
        self, request: broker_pb2.ReceiveRequest, context: Context
    ) -> broker_pb2.ReceiveResponse:
        raise not_writer(self._identity)

    async def AckMessages(
        self, request: broker_pb2.AckMessagesRequest, context: Context
    ) -> broker_pb2.AckMessagesResponse:
        raise not_writer(self._identity)

    async def ChangeInvisibleTime(
        self, request: broker_pb2.ChangeInvisibleTimeRequest, context: Context
    ) -> broker_pb2.ChangeInvisibleTimeResponse:
        raise not_writer(self._identity)

    async def QueryAssignment(
        self, request: broker_pb2.QueryAssignmentRequest, context: Context
    ) -> broker_pb2.QueryAssignmentResponse:
        raise not_writer(self._identity)


def _caller(request: broker_pb2.PullRequest, context: Context, address: str | None) -> Caller:
    if address is None:
        return caller_of_peer(context.peer(), request.client_id)
    return Caller(request.client_id, address_name(address))


def _offset_by_time(
    queue: common_pb2.QueueRef, answer: TimeAnswer | CometError
) -> broker_pb2.OffsetByTime:
    if isinstance(answer, CometError):
        return broker_pb2.OffsetByTime(queue=queue, error=to_proto(answer))
    return broker_pb2.OffsetByTime(
        queue=queue,
        position=convert.position_proto(answer.position),
        store_time_ms=answer.store_time_ms,
    )


def not_writer(identity: BrokerIdentity) -> NotWriter:
    """The refusal of a follower."""
    return NotWriter(f"this member of {identity.broker_group} follows another")


def check_items(items: Sized, what: str = "queues") -> None:
    """LimitExceeded when a call names more than it may."""
    if len(items) > ITEMS_MAX:
        raise LimitExceeded(f"{len(items)} {what} in a call, {ITEMS_MAX} are allowed")
