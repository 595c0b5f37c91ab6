"""A name server and brokers in the test's own process: real gRPC, tables in memory, faults to
order.

They keep the contract of ``proto/cometmq/v1`` as far as clients can see it. What a test may order
is said at each attribute; everything that a client sent is kept for the test to look at.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Self

from cometmq.errors import BatchOutOfOrder, CometError, PositionFenced, QueueNotFound, TopicNotFound
from cometmq.format.batch import BatchLimits, SegmentClaim, stamp
from cometmq.format.record import Record, decode_all, encode
from cometmq.messaging.send_order import SendOrder
from cometmq.rpc.gate import Gate
from cometmq.rpc.interceptors import to_proto
from cometmq.rpc.server import RpcServer
from cometmq.v1 import (
    broker_pb2,
    broker_pb2_grpc,
    common_pb2,
    namesrv_pb2,
    namesrv_pb2_grpc,
)

Key = tuple[str, int]  # topic, queue number
STORE_TIME_MS = 1_800_000_000_000


async def _not_asked(request: object, context: object) -> None:
    raise AssertionError("the SDK does not ask this")


class _Servicer:
    """Refuses every method that a fake does not have."""

    def __getattr__(self, name: str) -> Any:
        if name[:1].isupper():
            return _not_asked
        raise AttributeError(name)


class FakeNameServer(_Servicer):
    """Answers route watches from ``routes``; :meth:`put` changes one and tells the watchers."""

    def __init__(self) -> None:
        self.routes: dict[str, namesrv_pb2.TopicRoute] = {}
        self.asked: list[str] = []  # topics, in the order of asking
        self.silent = False  # it listens, and says nothing
        self._changed = asyncio.Condition()
        self._gate = Gate()
        self._server: RpcServer | None = None

    @property
    def address(self) -> str:
        assert self._server is not None
        return self._server.address

    async def start(self) -> Self:
        self._server = await _serve(
            namesrv_pb2_grpc.add_NameServiceServicer_to_server, self, self._gate
        )
        return self

    async def stop(self) -> None:
        assert self._server is not None
        await self._server.stop(0)

    async def put(self, topic: str, *brokers: FakeBroker, queues: int = 4, perm: int = 6) -> None:
        """The topic's route: these brokers, each with so many queues; those of one name are members
        of one group.
        """
        groups: dict[str, namesrv_pb2.GroupRoute] = {}
        for broker in brokers:
            group = broker.route(topic, queues, perm)
            known = groups.setdefault(broker.name, group)
            if known is not group:
                known.members.extend(group.members)
        self.routes[topic] = namesrv_pb2.TopicRoute(topic=topic, groups=groups.values())
        async with self._changed:
            self._changed.notify_all()

    async def WatchRoutes(self, request_iterator: Any, context: Any) -> None:
        topics: set[str] = set()
        told: dict[str, bytes] = {}
        asking = asyncio.create_task(self._hear(context, topics, told))
        try:
            while True:
                changed = [r for t in topics if self._is_new(r := self._route(t), told)]
                if changed and not self.silent:
                    await context.write(namesrv_pb2.WatchRoutesResponse(routes=changed))
                async with self._changed:
                    await self._changed.wait_for(lambda: self._has_changed(topics, told))
        finally:
            asking.cancel()

    async def _hear(self, context: Any, topics: set[str], told: dict[str, bytes]) -> None:
        while isinstance(request := await context.read(), namesrv_pb2.WatchRoutesRequest):
            self.asked += request.add
            topics.update(request.add)
            for topic in request.add:
                told.pop(topic, None)
            async with self._changed:
                self._changed.notify_all()

    def _route(self, topic: str) -> namesrv_pb2.TopicRoute:
        return self.routes.get(topic, namesrv_pb2.TopicRoute(topic=topic))

    def _is_new(self, route: namesrv_pb2.TopicRoute, told: dict[str, bytes]) -> bool:
        data = route.SerializeToString(deterministic=True)
        new = told.get(route.topic) != data
        told[route.topic] = data
        return new

    def _has_changed(self, topics: set[str], told: dict[str, bytes]) -> bool:
        return any(
            told.get(t) != self._route(t).SerializeToString(deterministic=True) for t in topics
        )


class FakeBroker(_Servicer):
    """One broker group with queues in memory."""

    def __init__(self, name: str = "g1", *, host_bytes: int = 4) -> None:
        self.name = name
        self.member_id, self.epoch = 0, 1
        self.role = common_pb2.MEMBER_ROLE_WRITER
        self.suggests: int | None = None  # the member that every pull's answer names
        self.host_bytes = host_bytes  # 4 or 16: the address length told to producers
        self.batch_max_count = 1024
        self.memory: broker_pb2.RequestMemory | None = None  # None: of a release that tells none
        self.topics: dict[str, int] = {}  # queues of each topic
        self.queues: dict[Key, list[Record]] = {}
        self.generations: dict[str, int] = {}  # by topic; 1 unless set
        self.committed: dict[tuple[str, Key], tuple[int, int]] = {}  # by (group, queue)
        self.batches: list[broker_pb2.SendStreamRequest] = []  # as received, refused ones too
        self.commits: list[broker_pb2.CommitOffsetsRequest] = []
        self.pulls: list[broker_pb2.PullRequest] = []
        self.streams = 0  # send streams opened
        self.most_unanswered = 0  # batches at a time
        self.refuse: list[CometError] = []  # for the next batches, one each
        self.status = broker_pb2.SEND_STATUS_SEND_OK  # of what is stored
        self.lose_answers = 0  # so many batches are stored and then the stream breaks
        self.answering = asyncio.Event()  # cleared: batches are taken, nothing is answered
        self.answering.set()
        self.pull_errors: list[CometError] = []  # for the next pulls, one each
        self.pulling = asyncio.Event()  # cleared: pulls are taken, nothing is answered
        self.pulling.set()
        self.asked_bytes = self.most_asked_bytes = 0  # by pulls that have no answer yet
        self.fences: dict[Key, tuple[int, int]] = {}  # positions above it are fenced, once
        self.min_offsets: dict[Key, int] = {}
        self.members: dict[str, dict[str, broker_pb2.JoinGroupRequest]] = {}
        self.end_of_log = 0
        self._membership = asyncio.Condition()
        self._version = 0
        self._breaking = asyncio.Event()
        self.advertised_host = ""  # by which clients know it; empty: its address
        self._gate = Gate()
        self._server: RpcServer | None = None

    # --- the test's side --------------------------------------------------------------------------

    @property
    def address(self) -> str:
        assert self._server is not None
        host = self.advertised_host
        return f"{host}:{self.port}" if host else self._server.address

    @property
    def port(self) -> int:
        assert self._server is not None
        return self._server.port

    async def start(self, port: int = 0, host: str = "127.0.0.1") -> Self:
        self._gate = Gate()
        self._server = await _serve(
            broker_pb2_grpc.add_BrokerServiceServicer_to_server, self, self._gate, port, host
        )
        return self

    async def stop(self) -> None:
        assert self._server is not None
        await self._server.stop(0)

    def break_streams(self) -> None:
        """Every send stream that is open fails now."""
        self._breaking.set()
        self._breaking = asyncio.Event()

    def route(self, topic: str, queues: int, permission: int) -> namesrv_pb2.GroupRoute:
        self.topics[topic] = queues
        return namesrv_pb2.GroupRoute(
            broker_group=self.name,
            topic=common_pb2.TopicConfig(
                name=topic,
                read_queue_count=queues,
                write_queue_count=queues,
                permission=permission,
                flush_mode=common_pb2.FLUSH_MODE_ASYNC,
            ),
            members=[self.described],
        )

    @property
    def described(self) -> namesrv_pb2.Member:
        return namesrv_pb2.Member(
            cluster="c",
            broker_group=self.name,
            member_id=self.member_id,
            role=self.role,
            address=self.address,
            epoch=self.epoch,
        )

    def copy_of(self, writer: FakeBroker, member_id: int = 1) -> Self:
        """This one is a follower: it has all that ``writer`` has, at any time."""
        self.name, self.member_id, self.epoch = writer.name, member_id, writer.epoch
        self.role = common_pb2.MEMBER_ROLE_FOLLOWER
        self.topics, self.queues = writer.topics, writer.queues
        return self

    def stored(self, topic: str) -> list[Record]:
        """All records of a topic in the order of the log."""
        records = [r for (name, _), rs in self.queues.items() if name == topic for r in rs]
        return sorted(records, key=lambda record: record.log_offset)

    def bodies(self, topic: str) -> list[bytes]:
        return [record.body for record in self.stored(topic)]

    # --- sending ----------------------------------------------------------------------------------

    async def DescribeMember(
        self, request: broker_pb2.DescribeMemberRequest, context: Any
    ) -> broker_pb2.DescribeMemberResponse:
        return broker_pb2.DescribeMemberResponse(member=self.described)

    async def SendStream(self, request_iterator: Any, context: Any) -> None:
        self.streams += 1
        await context.write(broker_pb2.SendStreamResponse(opened=self._opened()))
        breaking, order = self._breaking, SendOrder()
        unanswered: asyncio.Queue[broker_pb2.SendBatchResult] = asyncio.Queue(1024)
        answers = asyncio.create_task(self._answer(context, unanswered))
        broken = asyncio.create_task(breaking.wait())
        try:
            while True:
                reading = asyncio.ensure_future(context.read())
                await asyncio.wait({reading, broken}, return_when=asyncio.FIRST_COMPLETED)
                if not reading.done() or not isinstance(
                    request := reading.result(), broker_pb2.SendStreamRequest
                ):
                    reading.cancel()
                    return
                result = self._take(request, order)
                if self.lose_answers and not result.HasField("error"):
                    self.lose_answers -= 1
                    return
                unanswered.put_nowait(result)
                self.most_unanswered = max(self.most_unanswered, unanswered.qsize())
        finally:
            answers.cancel()
            broken.cancel()

    async def _answer(
        self, context: Any, unanswered: asyncio.Queue[broker_pb2.SendBatchResult]
    ) -> None:
        while True:
            await self.answering.wait()
            result = await unanswered.get()
            await self.answering.wait()
            await context.write(broker_pb2.SendStreamResponse(result=result))

    def _opened(self) -> broker_pb2.SendStreamOpened:
        return broker_pb2.SendStreamOpened(
            broker_group=self.name,
            born_host=bytes(self.host_bytes),
            born_port=1,
            store_host=bytes(self.host_bytes),
            store_port=2,
            body_max_bytes=4 << 20,
            batch_max_bytes=(4 << 20) + 65_536,
            batch_max_count=self.batch_max_count,
            memory=self.memory,
        )

    def _take(
        self, request: broker_pb2.SendStreamRequest, order: SendOrder
    ) -> broker_pb2.SendBatchResult:
        self.batches.append(request)
        in_order = request.HasField("in_order_after")
        try:
            if in_order:
                order.check(request.in_order_after)
            if self.refuse:
                raise self.refuse.pop(0)
            return self._store(request)
        except CometError as error:
            if in_order and not isinstance(error, BatchOutOfOrder):
                order.refused(request.batch_id)
            return broker_pb2.SendBatchResult(batch_id=request.batch_id, error=to_proto(error))

    def _store(self, request: broker_pb2.SendStreamRequest) -> broker_pb2.SendBatchResult:
        claims: list[SegmentClaim] = []
        for index, s in enumerate(request.segments):
            self._check(s.topic, s.queue_id, index)
            first = len(self.queues.get((s.topic, s.queue_id), ()))
            pending = [c for c in claims if (c.topic, c.queue_id) == (s.topic.encode(), s.queue_id)]
            first += sum(c.count for c in pending)
            claims.append(SegmentClaim(s.topic.encode(), s.queue_id, s.count, first))
        host = bytes(self.host_bytes + 4)
        stamped = stamp(
            request.records,
            claims,
            log_offset=self.end_of_log,
            store_time_ms=STORE_TIME_MS,
            born_host=host,
            store_host=host,
            limits=BatchLimits(),
        )
        for record in decode_all(bytes(stamped.buffer)):
            self.queues.setdefault((record.topic, record.queue_id), []).append(record)
        log_offset = self.end_of_log
        self.end_of_log += len(request.records)
        return broker_pb2.SendBatchResult(
            batch_id=request.batch_id,
            log_offset=log_offset,
            queue_offsets=[claim.first_queue_offset for claim in claims],
            store_time_ms=STORE_TIME_MS,
            status=self.status,
        )

    def _check(self, topic: str, queue_id: int, segment: int | None = None) -> None:
        if topic not in self.topics:
            raise TopicNotFound(f"no topic {topic}", segment=segment)
        if not 0 <= queue_id < self.topics[topic]:
            raise QueueNotFound(f"no queue {queue_id}", segment=segment)

    # --- reading ----------------------------------------------------------------------------------

    async def Pull(self, request: broker_pb2.PullRequest, context: Any) -> broker_pb2.PullResponse:
        self.pulls.append(request)
        self.asked_bytes += request.max_bytes
        self.most_asked_bytes = max(self.most_asked_bytes, self.asked_bytes)
        try:
            await self.pulling.wait()
        finally:
            self.asked_bytes -= request.max_bytes
        if self.pull_errors:
            raise self.pull_errors.pop(0)
        key = request.queue.topic, request.queue.queue_id
        self._check(*key)
        self._check_fence(key, request.position)
        return self._found(key, request)

    def _check_fence(self, key: Key, position: common_pb2.Position) -> None:
        fence = self.fences.get(key)
        if fence is not None and position.offset > fence[1]:
            del self.fences[key]
            raise PositionFenced("an older generation", fence=fence)

    def _found(self, key: Key, request: broker_pb2.PullRequest) -> broker_pb2.PullResponse:
        records = self.queues.get(key, [])
        low, offset = self.min_offsets.get(key, 0), request.position.offset
        response = broker_pb2.PullResponse(min_offset=low, max_offset=len(records))
        if self.suggests is not None:
            response.suggested_member_id = self.suggests
        response.next_position.generation = self.generations.get(key[0], 1)
        response.next_position.offset = offset
        if not low <= offset <= len(records):
            response.status = broker_pb2.PULL_STATUS_OFFSET_MOVED
            response.next_position.offset = low if offset < low else len(records)
        elif offset == len(records):
            response.status = broker_pb2.PULL_STATUS_NOT_FOUND
        else:
            self._fill(response, records[offset : offset + request.max_count], request)
        return response

    def _fill(
        self,
        response: broker_pb2.PullResponse,
        records: list[Record],
        request: broker_pb2.PullRequest,
    ) -> None:
        tags, size = set(request.filter.tags), 0
        chosen: list[bytes] = []
        for record in records:
            wanted = not tags or record.tag in tags
            if wanted and chosen and size + record.size > request.max_bytes:
                break
            response.next_position.offset = record.queue_offset + 1
            if wanted:
                chosen.append(encode_stored(record))
                size += record.size
        response.records = b"".join(chosen)
        response.count = len(chosen)
        response.status = (
            broker_pb2.PULL_STATUS_FOUND if chosen else broker_pb2.PULL_STATUS_NO_MATCHED_MESSAGE
        )

    # --- groups -----------------------------------------------------------------------------------

    async def JoinGroup(self, request_iterator: Any, context: Any) -> None:
        me: broker_pb2.JoinGroupRequest | None = None
        telling = asyncio.create_task(self._tell_members(context))
        try:
            while isinstance(request := await context.read(), broker_pb2.JoinGroupRequest):
                me = request
                self.members.setdefault(request.group, {})[request.client_id] = request
                await self._members_changed()
        finally:
            telling.cancel()
            if me is not None and self.members[me.group].get(me.client_id) is me:
                del self.members[me.group][me.client_id]
                await self._members_changed()

    async def add_member(self, group: str, client_id: str, *topics: str) -> None:
        """Another client of the group, out of nowhere."""
        subscriptions = [broker_pb2.Subscription(topic=topic) for topic in topics]
        self.members.setdefault(group, {})[client_id] = broker_pb2.JoinGroupRequest(
            group=group, client_id=client_id, subscriptions=subscriptions
        )
        await self._members_changed()

    async def _members_changed(self) -> None:
        async with self._membership:
            self._version += 1
            self._membership.notify_all()

    async def _tell_members(self, context: Any) -> None:
        told = 0
        while True:
            async with self._membership:
                while self._version == told:
                    await self._membership.wait()
                told = self._version
            (group,) = self.members  # the tests use one group at a time
            await context.write(
                broker_pb2.JoinGroupResponse(
                    version=told,
                    members=[
                        broker_pb2.GroupMember(client_id=name, subscriptions=member.subscriptions)
                        for name, member in sorted(self.members[group].items())
                    ],
                )
            )

    async def CommitOffsets(
        self, request: broker_pb2.CommitOffsetsRequest, context: Any
    ) -> broker_pb2.CommitOffsetsResponse:
        self.commits.append(request)
        return broker_pb2.CommitOffsetsResponse(
            results=[self._commit(request.group, item) for item in request.commits]
        )

    def _commit(self, group: str, item: broker_pb2.OffsetCommit) -> broker_pb2.OffsetResult:
        key = item.queue.topic, item.queue.queue_id
        result = broker_pb2.OffsetResult(queue=item.queue)
        try:
            self._check(*key)
            self._check_fence(key, item.position)
        except CometError as error:
            result.error.CopyFrom(to_proto(error))
            return result
        new = item.position.generation, item.position.offset
        kept = max(new, self.committed.get((group, key), new))
        self.committed[group, key] = kept
        result.position.generation, result.position.offset = kept
        return result

    async def QueryOffsets(
        self, request: broker_pb2.QueryOffsetsRequest, context: Any
    ) -> broker_pb2.QueryOffsetsResponse:
        response = broker_pb2.QueryOffsetsResponse()
        for queue in request.queues:
            result = response.results.add(queue=queue)
            known = self.committed.get((request.group, (queue.topic, queue.queue_id)))
            if known is not None:
                result.position.generation, result.position.offset = known
        return response

    async def QueryQueues(
        self, request: broker_pb2.QueryQueuesRequest, context: Any
    ) -> broker_pb2.QueryQueuesResponse:
        return broker_pb2.QueryQueuesResponse(queues=map(self._bounds, request.queues))

    def _bounds(self, queue: common_pb2.QueueRef) -> broker_pb2.QueueBounds:
        key = queue.topic, queue.queue_id
        bounds = broker_pb2.QueueBounds(queue=queue)
        try:
            self._check(*key)
        except CometError as error:
            bounds.error.CopyFrom(to_proto(error))
            return bounds
        bounds.generation = self.generations.get(key[0], 1)
        bounds.min_offset = self.min_offsets.get(key, 0)
        bounds.max_offset = len(self.queues.get(key, ()))
        return bounds


def encode_stored(record: Record) -> bytes:
    """The bytes of a stored record."""
    return encode(
        record.topic.encode(),
        record.queue_id,
        record.body,
        record.raw_properties,
        born_time_ms=record.born_time_ms,
        born_host=record.born_host,
        store_host=record.store_host,
        flag=record.flag,
        sys_flag=record.sys_flag,
        queue_offset=record.queue_offset,
        log_offset=record.log_offset,
        store_time_ms=record.store_time_ms,
    )


async def _serve(
    add: Any, servicer: Any, gate: Gate, port: int = 0, host: str = "127.0.0.1"
) -> RpcServer:
    server = RpcServer(host=host, port=port, services=(), gate=gate)
    await server.start()
    server.add(add, servicer, observer=None)
    await server.set_ready()
    return server


@asynccontextmanager
async def fake_cluster(
    *names: str, topic: str = "T", queues: int = 4
) -> AsyncIterator[tuple[FakeNameServer, list[FakeBroker]]]:
    """A name server and brokers (``g1`` when none is named) that all serve ``topic``."""
    namesrv = await FakeNameServer().start()
    brokers = [await FakeBroker(name).start() for name in names or ("g1",)]
    try:
        await namesrv.put(topic, *brokers, queues=queues)
        yield namesrv, brokers
    finally:
        await namesrv.stop()
        for broker in brokers:
            await broker.stop()
