"""The client port of a broker: protobuf in and out; the parts behind it do the work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import grpc

from cometmq.clock import Clock
from cometmq.errors import (
    BatchOutOfOrder,
    CometError,
    InternalError,
    InvalidRequest,
    LimitExceeded,
)
from cometmq.format import ids
from cometmq.format.delayed import check_level
from cometmq.format.halves import HalfForm
from cometmq.format.timers import TimerForm
from cometmq.member.hosts import BrokerIdentity, caller_of_peer, host_of_peer, ip_and_port
from cometmq.member.metrics import MemberMetrics
from cometmq.member.read.reader import Reader
from cometmq.member.rpc import convert
from cometmq.member.rpc.broker_servicer import check_items
from cometmq.messaging.groups import Membership
from cometmq.messaging.locks import LEASE_S
from cometmq.messaging.send_order import SendOrder
from cometmq.names import check_client_id
from cometmq.rpc.gate import Gate
from cometmq.rpc.interceptors import from_proto, to_proto
from cometmq.rpc.shares import Shares, address_of, host_and_port
from cometmq.v1 import broker_pb2, common_pb2, namesrv_pb2
from services.broker.delay import recalls
from services.broker.delay.recalls import RecallService
from services.broker.groups.clients import Senders
from services.broker.groups.coordinator import GroupCoordinator
from services.broker.groups.membership import MemberStream, Origin
from services.broker.groups.pacing import Admission
from services.broker.groups.questions import (
    ANSWER_BYTES_MAX,
    REFUSALS,
    Description,
    Questioned,
    Questions,
    Result,
)
from services.broker.groups.queue_locks import QueueLocks
from services.broker.groups.views import GroupViews
from services.broker.memory import BATCHES_IN_FLIGHT_MAX, request_memory
from services.broker.pop.servicer import PopServicer, PopServices
from services.broker.replies import Outbox, Replies
from services.broker.retry.retries import ITEMS_MAX, RetryService, SendBackItem, SentBack
from services.broker.sending.produce import Accepted, Claim, ProduceHandler
from services.broker.sending.send_calls import SendCalls, SentPlace
from services.broker.transactions import wire as transaction_wire
from services.broker.transactions.checks import CheckStream, TransactionChecks
from services.broker.transactions.ends import TransactionService

Context = Any  # grpc.aio.ServicerContext, whose message types differ from method to method
LONE_BYTES_MAX = 4096  # of a batch whose sender may wait for its answer and send nothing else


class StreamShares:
    """How many streams of each kind an address may have open."""

    def __init__(self, each_max: int) -> None:
        self.sending = Shares(each_max, "send streams", "streams_per_peer_max")
        self.members = Shares(each_max, "memberships in groups", "streams_per_peer_max")
        self.checks = Shares(each_max, "streams of checks", "streams_per_peer_max")
        self.requesters = Shares(each_max, "reply streams", "streams_per_peer_max")


def _claims(segments: Iterable[broker_pb2.Segment]) -> list[Claim]:
    """Raises what is wrong with a segment, with its number: the others may be sent without it."""
    claims: list[Claim] = []
    for index, segment in enumerate(segments):
        try:
            claims.append(_claim(segment))
        except CometError as error:
            error.segment = index
            raise
    return claims


def _claim(segment: broker_pb2.Segment) -> Claim:
    """Raises InvalidRequest for a kind that we do not know, DelayLevelInvalid."""
    topic, queue_id, count = segment.topic, segment.queue_id, segment.count
    wait_store = not segment.no_wait_store
    if segment.kind == broker_pb2.SEGMENT_KIND_HALF:
        if segment.delay_level:
            raise InvalidRequest("delay_level: a message of a transaction does not wait")
        half = HalfForm(segment.producer_group, segment.check_immunity_s)
        return Claim(topic, queue_id, count, 0, wait_store, half)
    if segment.producer_group or segment.check_immunity_s:
        raise InvalidRequest("producer_group, check_immunity_s: only segments of kind HALF have it")
    if segment.kind == broker_pb2.SEGMENT_KIND_TIMER:
        if segment.delay_level:
            raise InvalidRequest("delay_level: a segment of kind TIMER has none")
        timer = TimerForm.AFTER if segment.timer_from_now else TimerForm.AT
        return Claim(topic, queue_id, count, 0, wait_store, timer=timer)
    if segment.timer_from_now:
        raise InvalidRequest("timer_from_now: only a segment of kind TIMER has it")
    if segment.kind == broker_pb2.SEGMENT_KIND_DELAY_LEVEL:
        check_level(segment.delay_level)
        return Claim(topic, queue_id, count, segment.delay_level, wait_store)
    if segment.kind not in (
        broker_pb2.SEGMENT_KIND_UNSPECIFIED,
        broker_pb2.SEGMENT_KIND_NORMAL,
    ):
        raise InvalidRequest(f"kind: this broker takes no segments of kind {segment.kind}")
    if segment.delay_level:
        raise InvalidRequest("delay_level: a segment of kind NORMAL has none")
    return Claim(topic, queue_id, count, 0, wait_store)


def _send_back_result(answer: SentBack | CometError) -> broker_pb2.SendBackResult:
    if isinstance(answer, CometError):
        return broker_pb2.SendBackResult(error=to_proto(answer))
    return broker_pb2.SendBackResult(delay_level=answer.delay_level, delay_ms=answer.delay_ms)


def _recall_result(answer: bool | CometError) -> broker_pb2.RecallResult:
    if isinstance(answer, CometError):
        return broker_pb2.RecallResult(error=to_proto(answer))
    return broker_pb2.RecallResult(recalled=answer)


def _lock_result(answer: int | CometError) -> broker_pb2.LockResult:
    if isinstance(answer, CometError):
        return broker_pb2.LockResult(error=to_proto(answer))
    return broker_pb2.LockResult(lock_number=answer)


def _know(client: Questioned, request: broker_pb2.SendStreamRequest) -> None:
    """A producer names itself. A bad name is refused with the batch."""
    with suppress(InvalidRequest):
        check_client_id(request.client_id)
        client.client_id, client.known = request.client_id, frozenset(request.known_questions)


def _said(request: broker_pb2.AnswerQuestionRequest) -> Description | Result | CometError:
    """The answer of a client. A client cannot speak for the broker: of the catalogue it has only
    what is about itself.
    """
    match request.WhichOneof("answer"):
        case "description":
            return request.description
        case "result":
            return request.result
        case "refused":
            error = from_proto(request.refused)
            return (
                error if isinstance(error, REFUSALS) else InternalError(f"client: {error.message}")
            )
    raise InvalidRequest("answer: there is none")


class _Answers(asyncio.Queue["tuple[int, Accepted | CometError] | Questioned | None"]):
    """Of one stream, by batch id, in the order of the batches; between them the client, when it has
    questions. ``is_idle``: none waits, and none is being written by the task that takes them.
    ``is_writing``: another task writes an answer.
    """

    is_idle = True
    is_writing = False
    client: Questioned

    def look_for_questions(self) -> None:
        """There may be questions to the client."""
        if not self.is_writing:
            self.is_idle = False
            self.put_nowait(self.client)


class BrokerServicer(PopServicer):
    """``cometmq.v1.BrokerService``. Streams end by themselves when the gate drains."""

    def __init__(
        self,
        identity: BrokerIdentity,
        produce: ProduceHandler,
        send_calls: SendCalls,
        reader: Reader,
        coordinator: GroupCoordinator,
        pop: PopServices,
        retries: RetryService,
        recalls: RecallService,
        locks: QueueLocks,
        transactions: TransactionService,
        checks: TransactionChecks,
        replies: Replies,
        gate: Gate,
        metrics: MemberMetrics,
        shares: StreamShares,
        senders: Senders,
        questions: Questions,
        clock: Clock,
        described: Callable[[], namesrv_pb2.Member],
    ) -> None:
        super().__init__(identity, reader, coordinator, metrics, described, pop)
        self._produce = produce
        self._memory = request_memory(dedup_enable=produce.dedup)
        self._send_calls = send_calls
        self._retries = retries
        self._recalls = recalls
        self._locks = locks
        self._transactions = transactions
        self._checks = checks
        self._replies = replies
        self._gate = gate
        self._shares = shares
        self._senders = senders
        self._questions = questions
        self._clock = clock
        self._views = GroupViews()
        self._admission = Admission()  # to groups
        gate.at_drain(coordinator.end_members)
        gate.at_drain(replies.end_all)
        gate.at_drain(questions.end)

    async def DescribeMember(
        self, request: broker_pb2.DescribeMemberRequest, context: Context
    ) -> broker_pb2.DescribeMemberResponse:
        answer = await super().DescribeMember(request, context)
        answer.memory.CopyFrom(self._memory)
        return answer

    # --- sending ---

    async def SendStream(self, request_iterator: Any, context: Context) -> None:  # type: ignore[override]
        answers = _Answers()  # bounded by `room`
        answers.client = Questioned(answers.look_for_questions)
        with (
            self._shares.sending.held(address_of(context.peer())),
            self._senders.sending(self._origin(context), answers.client),
        ):
            try:
                await self._send_stream(context, answers)
            finally:
                self._questions.left(answers.client)

    async def _send_stream(self, context: Context, answers: _Answers) -> None:
        born_host = host_of_peer(context.peer())
        await context.write(broker_pb2.SendStreamResponse(opened=self._opened(born_host)))
        room = asyncio.Semaphore(BATCHES_IN_FLIGHT_MAX)
        with self._metrics.producer_connections.track_inprogress():
            async with asyncio.TaskGroup() as tasks:
                reading = tasks.create_task(self._read_batches(context, born_host, answers, room))
                stopping = tasks.create_task(self._gate.when_draining(reading.cancel))
                while (answer := await answers.get()) is not None:
                    if isinstance(answer, Questioned):
                        await self._put_questions(context, answer)
                    else:
                        await self._answer(context, *answer)
                        room.release()
                    answers.is_idle = answers.empty()
                stopping.cancel()

    async def _put_questions(self, context: Context, client: Questioned) -> None:
        while (question := client.take()) is not None:
            response = broker_pb2.SendStreamResponse(question=question)
            await context.room(response.ByteSize())
            await context.write(response)

    async def _read_batches(
        self, context: Context, born_host: bytes, answers: _Answers, room: asyncio.Semaphore
    ) -> None:
        next_id = 1
        order = SendOrder()
        client_id = ""
        try:
            while True:
                await room.acquire()
                request = await context.read()
                if request is grpc.aio.EOF:
                    return
                if request.batch_id == next_id:
                    next_id += 1
                    if request.client_id:
                        client_id = request.client_id
                        _know(answers.client, request)
                    taken = await self._take_in_order(request, order, born_host, client_id)
                else:  # lost, sent twice, or out of order
                    taken = InvalidRequest(f"batch_id: the next is {next_id}")
                if isinstance(taken, CometError):
                    self._metrics.batches_refused.labels(taken.name()).inc()
                is_decided = isinstance(taken, CometError) or taken.ticket.acked is None
                if is_decided and answers.is_idle and len(request.records) <= LONE_BYTES_MAX:
                    # Its sender may wait for just this: no other task is woken for the answer.
                    answers.is_writing = True
                    await self._answer(context, request.batch_id, taken)
                    answers.is_writing = False
                    room.release()
                    if answers.client.has_questions:  # which came meanwhile
                        answers.look_for_questions()
                else:
                    answers.is_idle = False
                    answers.put_nowait((request.batch_id, taken))
        finally:
            answers.put_nowait(None)

    async def _take_in_order(
        self,
        request: broker_pb2.SendStreamRequest,
        order: SendOrder,
        born_host: bytes,
        client_id: str,
    ) -> Accepted | CometError:
        if not request.HasField("in_order_after"):
            return await self._take(request, born_host, client_id)
        try:
            order.check(request.in_order_after)
        except BatchOutOfOrder as error:
            return error
        taken = await self._take(request, born_host, client_id)
        if isinstance(taken, CometError) or taken.is_partial:
            order.refused(request.batch_id)
        return taken

    async def _take(
        self, request: broker_pb2.SendStreamRequest, born_host: bytes, client_id: str
    ) -> Accepted | CometError:
        checksum = request.records_crc32 if request.HasField("records_crc32") else None
        try:
            self._gate.check()
            claims = _claims(request.segments)
            if client_id:
                check_client_id(client_id)
            return await self._produce.take(
                request.records, claims, born_host, checksum, client_id=client_id
            )
        except CometError as error:
            return error

    async def _answer(self, context: Context, batch_id: int, taken: Accepted | CometError) -> None:
        result = await self._batch_result(batch_id, taken)
        await context.write(broker_pb2.SendStreamResponse(result=result))

    async def _batch_result(
        self, batch_id: int, taken: Accepted | CometError
    ) -> broker_pb2.SendBatchResult:
        if isinstance(taken, CometError):
            return broker_pb2.SendBatchResult(batch_id=batch_id, error=to_proto(taken))
        try:
            status = await self._produce.settled(taken)
        except CometError as error:  # the disk has failed, or another member writes now
            return broker_pb2.SendBatchResult(
                batch_id=batch_id, error=to_proto(error), may_be_stored=True
            )
        appended = taken.ticket.appended
        result = broker_pb2.SendBatchResult(
            batch_id=batch_id,
            log_offset=appended.log_offset,
            queue_offsets=appended.queue_offsets,
            store_time_ms=appended.store_time_ms,
            status=convert.status_proto(status),
            stored_count=taken.record_count if taken.is_known else 0,
        )
        if taken.timers:
            result.timer_generation = self._recalls.generation
            result.clock_ms = appended.clock_ms
            result.recall_macs.extend(self._recalls.mac(*run) for run in taken.timers)
        return result

    def _opened(self, born_host: bytes) -> broker_pb2.SendStreamOpened:
        born_address, born_port = ip_and_port(born_host)
        store_address, store_port = ip_and_port(self._identity.store_host)
        limits = self._identity.batch_limits
        return broker_pb2.SendStreamOpened(
            broker_group=self._identity.broker_group,
            born_host=born_address,
            born_port=born_port,
            store_host=store_address,
            store_port=store_port,
            body_max_bytes=limits.body_bytes_max,
            batch_max_bytes=limits.batch_bytes_max,
            batch_max_count=limits.batch_count_max,
            memory=self._memory,
        )

    async def Send(
        self, request: broker_pb2.SendRequest, context: Context
    ) -> broker_pb2.SendResponse:
        try:
            if request.client_id:
                check_client_id(request.client_id)
            born_host = host_of_peer(context.peer())
            call = await self._send_calls.send(request.messages, born_host, request.client_id)
        except CometError as error:
            self._metrics.batches_refused.labels(error.name()).inc()
            raise
        return broker_pb2.SendResponse(
            sent=[self._sent(place) for place in call.places],
            store_time_ms=call.store_time_ms,
            status=convert.status_proto(call.status),
        )

    def _sent(self, place: SentPlace) -> broker_pb2.SentMessage:
        position = None
        if place.queue_offset is not None:
            generation = self._reader.queue(place.topic, place.queue_id).generation
            position = common_pb2.Position(generation=generation, offset=place.queue_offset)
        return broker_pb2.SentMessage(
            message_id=ids.message_id(self._identity.broker_group, place.log_offset),
            queue=convert.queue_proto(place.topic, place.queue_id),
            position=position,
            half=None if place.half is None else transaction_wire.half_ref(place.half),
            recall_handle=""
            if place.timer is None
            else self._recalls.handle(place.topic, *place.timer),
        )

    # --- transactions ---

    async def EndTransactions(
        self, request: broker_pb2.EndTransactionsRequest, context: Context
    ) -> broker_pb2.EndTransactionsResponse:
        self._gate.check()
        runs = transaction_wire.runs(request.ends)
        outcomes = await self._transactions.end_runs(request.producer_group, runs)
        group = self._identity.broker_group
        return transaction_wire.results(outcomes, group, self._reader)

    async def CheckTransactions(self, request_iterator: Any, context: Context) -> None:  # type: ignore[override]
        first = await context.read()
        if first is grpc.aio.EOF:
            return
        if not first.HasField("join") or first.answers:
            raise InvalidRequest("join: the first request joins, and answers nothing")
        with self._shares.checks.held(address_of(context.peer())):
            stream = self._checks.join(first.join.producer_group, first.join.client_id)
            try:
                await self._check(stream, context)
            finally:
                self._checks.leave(stream)

    async def _check(self, stream: CheckStream, context: Context) -> None:
        await context.write(broker_pb2.CheckTransactionsResponse())
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(self._read_answers(context, stream))
            stopping = tasks.create_task(self._gate.when_draining(stream.end))
            async for checks, refused in stream.outgoing(context.room):
                await context.write(transaction_wire.outgoing(checks, refused))
            reading.cancel()
            stopping.cancel()

    async def _read_answers(self, context: Context, stream: CheckStream) -> None:
        while (request := await context.read()) is not grpc.aio.EOF:
            if request.HasField("join"):
                raise InvalidRequest("join: a stream joins once")
            runs = transaction_wire.runs(request.answers)
            await self._checks.answered(stream, [end for run in runs for end in run.ends()])
        stream.end()

    # --- replies ---

    async def Replies(self, request_iterator: Any, context: Context) -> None:  # type: ignore[override]
        first = await context.read()
        if first is grpc.aio.EOF:
            return
        with self._shares.requesters.held(address_of(context.peer())):
            self._coordinator.check_open()
            outbox = await self._replies.open(first.client_id)
            try:
                await self._hand_out(outbox, first, context)
            finally:
                self._replies.close(outbox)

    async def _hand_out(
        self, outbox: Outbox, first: broker_pb2.RepliesRequest, context: Context
    ) -> None:
        opened = broker_pb2.RepliesOpened(
            broker_group=self._identity.broker_group, topic=self._replies.topic
        )
        await context.write(broker_pb2.RepliesResponse(opened=opened))
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(self._read_requester(outbox, first, context))
            async for spans in outbox.answers():
                await context.room(sum(size for _, size in spans))
                records = await self._replies.read(spans)
                await context.write(broker_pb2.RepliesResponse(records=records))
            reading.cancel()

    async def _read_requester(
        self, outbox: Outbox, first: broker_pb2.RepliesRequest, context: Context
    ) -> None:
        await self._hear(outbox, first)
        while (request := await context.read()) is not grpc.aio.EOF:
            await self._hear(outbox, request)
        outbox.end()

    async def _hear(self, outbox: Outbox, request: broker_pb2.RepliesRequest) -> None:
        self._replies.late(request.late_count)
        await self._replies.look_for(outbox, request.correlation_ids)

    # --- consuming ---

    async def JoinGroup(self, request_iterator: Any, context: Context) -> None:  # type: ignore[override]
        await self._admission.enter()
        first = await context.read()
        if first is grpc.aio.EOF:
            return
        address = address_of(context.peer())
        self._shares.members.take(address)
        stream = None
        try:
            subscriptions = [convert.subscription(s) for s in first.subscriptions]
            stream = await self._coordinator.join(
                first.group,
                first.client_id,
                subscriptions,
                convert.member_details(first),
                address,
                self._origin(context),
                first.known_questions,
            )
            await self._follow_group(stream, context)
        finally:
            if stream is not None:
                self._questions.left(stream.questioned)
            # A member that is away keeps its share until it is forgotten: see ClientApi.
            if stream is None or not self._coordinator.left(stream):
                self._shares.members.give_back(address)

    async def _follow_group(self, stream: MemberStream, context: Context) -> None:
        """Tell the group to its member, and hear what it reads, until one of them ends it."""
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(self._read_subscriptions(context, stream))
            async for told in stream.outgoing():
                packed = self._packed(stream, told)
                await context.room(len(packed))
                await context.write(packed)
            reading.cancel()

    def _packed(self, stream: MemberStream, told: Membership | broker_pb2.ClientQuestion) -> bytes:
        if isinstance(told, broker_pb2.ClientQuestion):
            return broker_pb2.JoinGroupResponse(question=told).SerializeToString()
        return self._views.pack(
            stream.group,
            told,
            consume_disabled=self._coordinator.is_consume_disabled(stream.group),
            reset_number=self._coordinator.newest_reset(stream.group),
            retry_times_max=self._coordinator.retry_times_max(stream.group),
        )

    async def AnswerQuestion(
        self, request: broker_pb2.AnswerQuestionRequest, context: Context
    ) -> broker_pb2.AnswerQuestionResponse:
        if request.ByteSize() > ANSWER_BYTES_MAX:
            raise LimitExceeded(f"an answer has at most {ANSWER_BYTES_MAX} bytes")
        self._questions.answered(request.client_id, request.question_id, _said(request))
        return broker_pb2.AnswerQuestionResponse()

    def _origin(self, context: Context) -> Origin:
        return Origin(host_and_port(context.peer()), context.agent(), self._clock.wall_ms())

    async def _read_subscriptions(self, context: Context, stream: MemberStream) -> None:
        while (request := await context.read()) is not grpc.aio.EOF:
            subscriptions = [convert.subscription(s) for s in request.subscriptions]
            details = convert.member_details(request)
            stream.subscribe(request.group, request.client_id, subscriptions, details)
        stream.end()

    async def Pull(
        self, request: broker_pb2.PullRequest, context: Context
    ) -> broker_pb2.PullResponse:
        if not request.HasField("commit"):
            return await super().Pull(request, context)
        [result] = await self._commit_all(request.group, [request.commit], context)
        response = await super().Pull(request, context)
        response.committed.CopyFrom(result)
        return response

    async def _commit_all(
        self, group: str, commits: Sequence[broker_pb2.OffsetCommit], context: Context
    ) -> list[broker_pb2.OffsetResult]:
        self._coordinator.check_open()  # the whole call then: a client asks the new writer at once
        if not self._coordinator.is_there(group):
            refused = list(filter(None, map(self._unreal, commits)))
            if len(refused) == len(commits):
                return refused
            await self._coordinator.ensure_group(group, address_of(context.peer()))
        return [self._commit(group, commit) for commit in commits]

    async def CommitOffsets(
        self, request: broker_pb2.CommitOffsetsRequest, context: Context
    ) -> broker_pb2.CommitOffsetsResponse:
        check_items(request.commits)
        results = await self._commit_all(request.group, request.commits, context)
        kept = {result.queue.topic for result in results if not result.HasField("error")}
        if kept:
            await self._coordinator.stored(kept)
        return broker_pb2.CommitOffsetsResponse(results=results)

    async def LockQueues(
        self, request: broker_pb2.LockQueuesRequest, context: Context
    ) -> broker_pb2.LockQueuesResponse:
        check_items(request.queues)
        check_client_id(request.client_id)
        self._coordinator.check_open()
        keys = [(queue.topic, queue.queue_id) for queue in request.queues]
        absent = self._locks.absent(keys)
        answers: Sequence[int | CometError]
        if not self._coordinator.is_there(request.group) and len(absent) == len(set(keys)):
            answers = [absent[key] for key in keys]  # no group is made for nothing
        else:
            await self._coordinator.ensure_group(request.group, address_of(context.peer()))
            answers = await self._locks.lock(request.group, request.client_id, keys)
        return broker_pb2.LockQueuesResponse(
            results=map(_lock_result, answers), lease_ms=round(LEASE_S * 1000)
        )

    async def UnlockQueues(
        self, request: broker_pb2.UnlockQueuesRequest, context: Context
    ) -> broker_pb2.UnlockQueuesResponse:
        check_items(request.queues)
        self._coordinator.check_open()
        keys = [(queue.topic, queue.queue_id) for queue in request.queues]
        await self._locks.unlock(request.group, request.client_id, keys)
        return broker_pb2.UnlockQueuesResponse()

    async def Recall(
        self, request: broker_pb2.RecallRequest, context: Context
    ) -> broker_pb2.RecallResponse:
        if len(request.handles) > recalls.ITEMS_MAX:
            raise LimitExceeded(f"{len(request.handles)} handles, {recalls.ITEMS_MAX} are allowed")
        self._gate.check()
        answers = await self._recalls.recall(request.handles)
        return broker_pb2.RecallResponse(results=[_recall_result(answer) for answer in answers])

    async def SendBack(
        self, request: broker_pb2.SendBackRequest, context: Context
    ) -> broker_pb2.SendBackResponse:
        if len(request.items) > ITEMS_MAX:
            raise LimitExceeded(f"{len(request.items)} messages, {ITEMS_MAX} are allowed")
        self._gate.check()
        self._coordinator.check_open()
        items = [
            SendBackItem(
                item.queue.topic,
                item.queue.queue_id,
                convert.position(item.position),
                item.delay_level,
                item.retry_times_max if item.HasField("retry_times_max") else None,
                delay_ms=item.delay_ms,
            )
            for item in request.items
        ]
        if not self._coordinator.is_there(request.group) and any(map(self._is_real, items)):
            await self._coordinator.ensure_group(request.group, address_of(context.peer()))
        caller = caller_of_peer(context.peer(), "")
        self._produce.check_address(caller)
        answers = await self._retries.send_back(request.group, items)
        stored = [one.size_bytes for one in answers if isinstance(one, SentBack) and one.size_bytes]
        self._produce.use_address(caller, len(stored), sum(stored))
        return broker_pb2.SendBackResponse(
            results=[_send_back_result(answer) for answer in answers]
        )

    def _is_real(self, item: SendBackItem) -> bool:
        """Whether a group is made for it: it names a message that is there."""
        try:
            view = self._reader.queue(item.topic, item.queue_id)
        except CometError:
            return False
        return view.min_offset <= item.position.offset < view.max_offset

    def _unreal(self, commit: broker_pb2.OffsetCommit) -> broker_pb2.OffsetResult | None:
        """Why no group is made for a commit; None: one is."""
        queue, position = commit.queue, convert.position(commit.position)
        try:
            self._coordinator.check_real(queue.topic, queue.queue_id, position)
        except CometError as error:
            return broker_pb2.OffsetResult(queue=queue, error=to_proto(error))
        return None

    def _commit(self, group: str, commit: broker_pb2.OffsetCommit) -> broker_pb2.OffsetResult:
        queue = commit.queue
        try:
            self._coordinator.check_commit(
                group, queue.topic, queue.queue_id, commit.lock_number, commit.reset_number
            )
            take = self._coordinator.begin if commit.begins else self._coordinator.commit
            kept = take(group, queue.topic, queue.queue_id, convert.position(commit.position))
        except CometError as error:
            number = self._coordinator.reset_number(group, queue.topic, queue.queue_id)
            return broker_pb2.OffsetResult(queue=queue, error=to_proto(error), reset_number=number)
        return broker_pb2.OffsetResult(queue=queue, position=convert.position_proto(kept))
