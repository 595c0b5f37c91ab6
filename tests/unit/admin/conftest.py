"""A cluster of pretended brokers and a name server, served over real gRPC on free ports."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from cometmq.admin.connection import Connection
from cometmq.errors import (
    CometError,
    GroupNotFound,
    MessageNotFound,
    PositionFenced,
    TopicNotFound,
)
from cometmq.rpc.interceptors import ERROR_METADATA, to_proto
from cometmq.v1 import broker_pb2 as b
from cometmq.v1 import broker_pb2_grpc, member_pb2_grpc, namesrv_pb2_grpc
from cometmq.v1 import common_pb2 as c
from cometmq.v1 import namesrv_pb2 as n

Context = Any


async def refuse(context: Context, error: CometError) -> None:
    metadata = ((ERROR_METADATA, to_proto(error).SerializeToString()),)
    await context.abort(grpc.StatusCode[error.status], error.message, metadata)


@dataclass
class FakeBroker(broker_pb2_grpc.BrokerServiceServicer, broker_pb2_grpc.BrokerAdminServiceServicer):
    """Topics as lists of messages; nothing is checked."""

    group: str
    address: str = ""
    topics: dict[str, c.TopicConfig] = field(default_factory=dict)
    queues: dict[tuple[str, int], list[b.StoredMessage]] = field(default_factory=dict)
    min_offsets: dict[tuple[str, int], int] = field(default_factory=dict)
    groups: dict[str, b.DescribeGroupResponse] = field(default_factory=dict)
    fence: tuple[int, int] | None = None  # the next pull is fenced there
    flushed_offsets: list[int] = field(default_factory=list)  # told from last to first, then 100
    indexed_offsets: list[int] = field(default_factory=list)  # the same
    unreadable_count: int = 0  # appended to every queue, but not on disk yet
    refusal: CometError | None = None  # of whoever asks how it stands
    idle_ms: int = 0  # of groups without members

    def put(self, name: str, queue_count: int = 2) -> None:
        self.topics[name] = c.TopicConfig(
            name=name,
            read_queue_count=queue_count,
            write_queue_count=queue_count,
            permission=6,
            flush_mode=c.FLUSH_MODE_ASYNC,
            replication_mode=c.REPLICATION_MODE_ASYNC,
        )

    def add(self, topic: str, queue_id: int, body: bytes, **fields: Any) -> b.StoredMessage:
        messages = self.queues.setdefault((topic, queue_id), [])
        number = sum(len(queue) for queue in self.queues.values())
        message = b.StoredMessage(
            message_id=f"{self.group}/{number}",
            queue=c.QueueRef(topic=topic, queue_id=queue_id),
            queue_offset=len(messages),
            log_offset=number,
            body=body,
            store_time_ms=1_700_000_000_000 + number,
            **fields,
        )
        messages.append(message)
        return message

    async def PutTopic(self, request: b.PutTopicRequest, context: Context) -> b.PutTopicResponse:
        created = request.topic.name not in self.topics
        self.put(request.topic.name, request.topic.read_queue_count or 4)
        return b.PutTopicResponse(topic=self.topics[request.topic.name], created=created)

    async def DeleteTopic(
        self, request: b.DeleteTopicRequest, context: Context
    ) -> b.DeleteTopicResponse:
        if self.topics.pop(request.topic, None) is None:
            await refuse(context, TopicNotFound(f"no {request.topic}"))
        return b.DeleteTopicResponse()

    async def ListTopics(
        self, request: b.BrokerAdminServiceListTopicsRequest, context: Context
    ) -> b.BrokerAdminServiceListTopicsResponse:
        return b.BrokerAdminServiceListTopicsResponse(topics=self.topics.values())

    async def DescribeTopic(
        self, request: b.DescribeTopicRequest, context: Context
    ) -> b.DescribeTopicResponse:
        if request.topic not in self.topics:
            await refuse(context, TopicNotFound(f"no {request.topic}"))
        config = self.topics[request.topic]
        rows = []
        for queue_id in range(config.read_queue_count):
            low, high = self.bounds(request.topic, queue_id)
            row = b.QueueStatus(
                queue_id=queue_id,
                generation=1,
                min_offset=low,
                max_offset=high,
                appended_offset=high + self.unreadable_count,
            )
            rows.append(row)
        return b.DescribeTopicResponse(topic=config, queues=rows)

    async def ListGroups(
        self, request: b.ListGroupsRequest, context: Context
    ) -> b.ListGroupsResponse:
        names = sorted(self.groups)
        summaries = [
            b.GroupSummary(
                group=name,
                member_count=len(self.groups[name].members),
                queue_count=len(self.groups[name].progress),
                idle_ms=0 if self.groups[name].members else self.idle_ms,
            )
            for name in names
        ]
        return b.ListGroupsResponse(groups=names, summaries=summaries)

    async def DeleteGroup(
        self, request: b.DeleteGroupRequest, context: Context
    ) -> b.DeleteGroupResponse:
        if self.groups.pop(request.group, None) is None:
            await refuse(context, GroupNotFound(f"no {request.group}"))
        return b.DeleteGroupResponse()

    async def DescribeGroup(
        self, request: b.DescribeGroupRequest, context: Context
    ) -> b.DescribeGroupResponse:
        if request.group not in self.groups:
            await refuse(context, GroupNotFound(f"no {request.group}"))
        return self.groups[request.group]

    async def DescribeBroker(
        self, request: b.DescribeBrokerRequest, context: Context
    ) -> b.DescribeBrokerResponse:
        if self.refusal is not None:
            await refuse(context, self.refusal)
        return b.DescribeBrokerResponse(
            broker_group=self.group,
            version="0.1.0",
            epoch=3,
            log_appended_offset=100,
            log_flushed_offset=self.flushed_offsets.pop() if self.flushed_offsets else 100,
        )

    async def Send(self, request: b.SendRequest, context: Context) -> b.SendResponse:
        [outgoing] = request.messages
        found = self.add(
            outgoing.topic,
            outgoing.queue_id,
            outgoing.body,
            tag=outgoing.tag,
            keys=outgoing.keys,
            properties=outgoing.properties,
        )
        position = c.Position(generation=1, offset=found.queue_offset)
        sent = b.SentMessage(message_id=found.message_id, queue=found.queue, position=position)
        return b.SendResponse(sent=[sent], store_time_ms=found.store_time_ms)

    async def GetMessage(
        self, request: b.GetMessageRequest, context: Context
    ) -> b.GetMessageResponse:
        for queue in self.queues.values():
            for message in queue:
                if message.message_id == request.message_id:
                    return b.GetMessageResponse(message=message)
        await refuse(context, MessageNotFound(f"no {request.message_id}"))
        raise AssertionError("refused")

    async def QueryMessages(
        self, request: b.QueryMessagesRequest, context: Context
    ) -> b.QueryMessagesResponse:
        """By key or id, newest first; ``indexed_offsets`` are told as ``flushed_offsets`` are. What
        lies behind them is not found.
        """
        indexed = self.indexed_offsets.pop() if self.indexed_offsets else 100
        found = [
            message
            for (topic, _), queue in self.queues.items()
            for message in queue
            if topic == request.topic and message.log_offset < indexed
            if request.key in message.keys or (request.unique_id or None) == message.unique_id
        ]
        found.sort(key=lambda message: -message.log_offset)
        found = found[: request.max_count or 32]
        return b.QueryMessagesResponse(messages=found, count=len(found), indexed_offset=indexed)

    async def QueryOffsetsByTime(
        self, request: b.QueryOffsetsByTimeRequest, context: Context
    ) -> b.QueryOffsetsByTimeResponse:
        """Store times are 1_700_000_000_000 and the message's number."""
        rows = []
        for queue in request.queues:
            times = [m.store_time_ms for m in self.queues.get((queue.topic, queue.queue_id), [])]
            offset = bisect_left(times, request.time_ms)
            if request.boundary == b.TIME_BOUNDARY_UPPER:
                offset = max(0, bisect_right(times, request.time_ms) - 1)
            row = b.OffsetByTime(
                queue=queue,
                position=c.Position(generation=1, offset=offset),
                store_time_ms=times[offset] if offset < len(times) else 0,
            )
            rows.append(row)
        return b.QueryOffsetsByTimeResponse(queues=rows)

    def bounds(self, topic: str, queue_id: int) -> tuple[int, int]:
        messages = self.queues.get((topic, queue_id), [])
        return self.min_offsets.get((topic, queue_id), 0), len(messages)

    async def Pull(self, request: b.PullRequest, context: Context) -> b.PullResponse:
        """Two messages at a time; a run without a wanted tag is NO_MATCHED_MESSAGE."""
        if self.fence is not None:
            fence, self.fence = self.fence, None
            await refuse(context, PositionFenced("fenced", fence=fence))
        messages = self.queues.get((request.queue.topic, request.queue.queue_id), [])
        start = request.position.offset
        run = messages[start : start + 2]
        following = c.Position(generation=1, offset=start + len(run))
        tags = request.filter.tags
        wanted = [message for message in run if not tags or message.tag in tags]
        status = b.PULL_STATUS_FOUND if wanted else b.PULL_STATUS_NO_MATCHED_MESSAGE
        if not run:
            status = b.PULL_STATUS_NOT_FOUND
        return b.PullResponse(
            status=status, messages=wanted, count=len(wanted), next_position=following
        )


@dataclass
class FakeNamesrv(namesrv_pb2_grpc.NameServiceServicer):
    """Routes made from what the brokers hold at this moment."""

    brokers: list[FakeBroker]
    address: str = ""
    ghosts: list[n.Member] = field(default_factory=list)  # registered beside them, or gone

    def member(self, broker: FakeBroker) -> n.Member:
        return n.Member(
            cluster="test",
            broker_group=broker.group,
            role=c.MEMBER_ROLE_WRITER,
            address=broker.address,
            internal_address=broker.address,
            epoch=3,
        )

    async def DescribeCluster(
        self, request: n.DescribeClusterRequest, context: Context
    ) -> n.DescribeClusterResponse:
        members = [*(self.member(broker) for broker in self.brokers), *self.ghosts]
        return n.DescribeClusterResponse(members=[n.RegisteredMember(member=m) for m in members])

    async def QueryRoute(
        self, request: n.QueryRouteRequest, context: Context
    ) -> n.QueryRouteResponse:
        groups = [
            n.GroupRoute(
                broker_group=broker.group,
                topic=broker.topics[request.topic],
                members=[self.member(broker)],
            )
            for broker in self.brokers
            if request.topic in broker.topics
        ]
        if not groups:
            await refuse(context, TopicNotFound(f"topic {request.topic} has no route"))
        return n.QueryRouteResponse(route=n.TopicRoute(topic=request.topic, groups=groups))


@dataclass
class FakeCluster:
    namesrv: FakeNamesrv
    g1: FakeBroker
    g2: FakeBroker


Serve = Callable[[object], Awaitable[str]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts a server for one servicer; gives its address."""
    servers: list[grpc.aio.Server] = []

    async def start(servicer: Any) -> str:
        server = grpc.aio.server()
        if isinstance(servicer, FakeNamesrv):
            namesrv_pb2_grpc.add_NameServiceServicer_to_server(servicer, server)
        elif isinstance(servicer, member_pb2_grpc.MemberServiceServicer):
            member_pb2_grpc.add_MemberServiceServicer_to_server(servicer, server)
        else:
            broker_pb2_grpc.add_BrokerServiceServicer_to_server(servicer, server)
            broker_pb2_grpc.add_BrokerAdminServiceServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        servers.append(server)
        return f"127.0.0.1:{port}"

    yield start
    for server in servers:
        await server.stop(None)


@pytest.fixture
async def cluster(serve: Serve) -> FakeCluster:
    """A name server and two brokers."""
    # They serve only what the operations ask for.
    g1 = FakeBroker("g1")  # type: ignore[abstract]
    g2 = FakeBroker("g2")  # type: ignore[abstract]
    namesrv = FakeNamesrv([g1, g2])  # type: ignore[abstract]
    g1.address = await serve(g1)
    g2.address = await serve(g2)
    namesrv.address = await serve(namesrv)
    return FakeCluster(namesrv, g1, g2)


@pytest.fixture
async def connection(cluster: FakeCluster) -> AsyncIterator[Connection]:
    async with Connection(cluster.namesrv.address) as opened:
        yield opened
