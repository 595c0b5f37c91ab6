"""The name service on the wire: proto ↔ tables, nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc

from cometmq.clock import Clock
from cometmq.messaging import order
from cometmq.rpc.gate import Gate
from cometmq.rpc.shares import address_of
from cometmq.v1 import namesrv_pb2 as pb
from cometmq.v1 import namesrv_pb2_grpc
from services.namesrv import convert
from services.namesrv.pullholds import PullholdTable
from services.namesrv.routes import GroupRoute, RouteTable
from services.namesrv.values import Values
from services.namesrv.watches import Registrations, Watcher, Watchers

ROUTE_BYTES_USUAL = 256
WATCH_MESSAGE_BYTES = 1024 * 1024  # a message of a watch stream takes no more routes above it

Context = Any  # grpc.aio.ServicerContext of the method's messages


class NameServicer(namesrv_pb2_grpc.NameServiceServicer):
    """See ``proto/cometmq/v1/namesrv.proto``."""

    def __init__(
        self,
        table: RouteTable,
        watchers: Watchers,
        values: Values,
        pullholds: PullholdTable,
        registrations: Registrations,
        *,
        gate: Gate,
        clock: Clock,
    ) -> None:
        self._table = table
        self._pullholds = pullholds
        self._registrations = registrations
        self._watchers = watchers
        self._values = values
        self._gate = gate
        self._clock = clock

    async def RegisterMember(
        self, request: pb.RegisterMemberRequest, context: Context
    ) -> pb.RegisterMemberResponse:
        writer = self._table.register(
            convert.member_from_proto(request.member),
            convert.version_from_proto(request.data_version),
            map(convert.topic_from_proto, request.topics),
            topic_count=len(request.topics),
            now_s=self._clock.monotonic_s(),
            now_ms=self._clock.wall_ms(),
            store_id=request.store_id,
        )
        known = convert.member_to_proto(writer) if writer else None
        return pb.RegisterMemberResponse(writer=known, now_ms=self._clock.wall_ms())

    async def UnregisterMember(
        self, request: pb.UnregisterMemberRequest, context: Context
    ) -> pb.UnregisterMemberResponse:
        self._table.unregister(
            request.cluster,
            request.broker_group,
            request.member_id,
            request.epoch,
            request.store_id,
        )
        return pb.UnregisterMemberResponse()

    async def WatchRegistration(  # type: ignore[override]  # answers with context.write
        self, request: pb.WatchRegistrationRequest, context: Context
    ) -> None:
        woken = asyncio.Event()
        sent: pb.WatchRegistrationResponse | None = None
        key: tuple[str, int | str] = (request.broker_group, request.member_id)
        if not request.broker_group:
            key = (request.cluster, request.address)
        with self._registrations.watching(key, woken.set):
            while True:
                self._gate.check()
                now = pb.WatchRegistrationResponse()
                if request.broker_group:
                    member = self._table.member(
                        request.cluster, request.broker_group, request.member_id
                    )
                    if member is not None:
                        now.member.CopyFrom(convert.member_to_proto(member))
                else:
                    now.pullhold = self._pullholds.knows(request.cluster, request.address)
                if now != sent:
                    await context.write(now)
                    sent = now
                await woken.wait()
                woken.clear()

    async def QueryRoute(
        self, request: pb.QueryRouteRequest, context: Context
    ) -> pb.QueryRouteResponse:
        groups = self._table.find(request.topic)
        return pb.QueryRouteResponse(route=self._route(request.topic, groups))

    async def WatchRoutes(  # type: ignore[override]  # answers with context.write
        self, request_iterator: object, context: Context
    ) -> None:
        """Reads here, writes in a task; a client that half-closes the call still gets changes."""
        self._gate.check()
        woken = asyncio.Event()
        watcher = self._watchers.open(woken.set, address_of(context.peer()))
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._send_changes(watcher, woken, context))
                while (request := await context.read()) is not grpc.aio.EOF:
                    self._watchers.remove(watcher, request.remove)
                    self._watchers.add(watcher, request.add)
        finally:
            self._watchers.close(watcher)

    async def DescribeCluster(
        self, request: pb.DescribeClusterRequest, context: Context
    ) -> pb.DescribeClusterResponse:
        members = [convert.status_to_proto(live) for live in self._table.members()]
        return pb.DescribeClusterResponse(members=members)

    async def ListTopics(
        self, request: pb.ListTopicsRequest, context: Context
    ) -> pb.ListTopicsResponse:
        return pb.ListTopicsResponse(topics=self._table.topics())

    async def SetWritePermission(
        self, request: pb.SetWritePermissionRequest, context: Context
    ) -> pb.SetWritePermissionResponse:
        count = self._table.set_write_permission(request.broker_group, request.writable)
        return pb.SetWritePermissionResponse(topic_count=count)

    async def PutValue(self, request: pb.PutValueRequest, context: Context) -> pb.PutValueResponse:
        await self._values.put(request.namespace, request.key, request.value)
        self._value_changed(request.namespace, request.key)
        return pb.PutValueResponse()

    async def DeleteValue(
        self, request: pb.DeleteValueRequest, context: Context
    ) -> pb.DeleteValueResponse:
        await self._values.delete(request.namespace, request.key)
        self._value_changed(request.namespace, request.key)
        return pb.DeleteValueResponse()

    def _value_changed(self, namespace: str, key: str) -> None:
        if namespace == order.NAMESPACE:
            self._watchers.changed([key])

    async def ListValues(
        self, request: pb.ListValuesRequest, context: Context
    ) -> pb.ListValuesResponse:
        return pb.ListValuesResponse(values=self._values.of(request.namespace))

    async def RegisterPullhold(
        self, request: pb.RegisterPullholdRequest, context: Context
    ) -> pb.RegisterPullholdResponse:
        self._pullholds.register(request.cluster, request.address, self._clock.monotonic_s())
        return pb.RegisterPullholdResponse()

    async def UnregisterPullhold(
        self, request: pb.UnregisterPullholdRequest, context: Context
    ) -> pb.UnregisterPullholdResponse:
        self._pullholds.unregister(request.cluster, request.address)
        return pb.UnregisterPullholdResponse()

    async def ListPullholds(
        self, request: pb.ListPullholdsRequest, context: Context
    ) -> pb.ListPullholdsResponse:
        return pb.ListPullholdsResponse(addresses=self._pullholds.addresses(request.cluster))

    async def _send_changes(self, watcher: Watcher, woken: asyncio.Event, context: Context) -> None:
        """Sends changed routes until the stream ends. BrokerDraining."""
        while True:
            await woken.wait()
            woken.clear()
            self._gate.check()
            while watcher.pending_count:
                await context.room(
                    min(watcher.pending_count * ROUTE_BYTES_USUAL, WATCH_MESSAGE_BYTES)
                )
                routes = self._next_routes(watcher)
                await context.write(pb.WatchRoutesResponse(routes=routes))

    def _route(self, topic: str, groups: Sequence[GroupRoute]) -> pb.TopicRoute:
        return convert.route_to_proto(topic, groups, self._values.order_of(topic))

    def _next_routes(self, watcher: Watcher) -> list[pb.TopicRoute]:
        """The latest routes of the watcher's changed topics, as many as one message takes."""
        routes: list[pb.TopicRoute] = []
        size_bytes = 0
        while size_bytes < WATCH_MESSAGE_BYTES and (topic := watcher.take()) is not None:
            routes.append(self._route(topic, self._table.route(topic)))
            size_bytes += routes[-1].ByteSize()
        return routes
