"""The way to a cluster: one channel for each process that is asked, name servers in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Protocol, Self, TypeVar

import grpc

from cometmq.errors import (
    BrokerDraining,
    BrokerStarting,
    CometError,
    GroupNotFound,
    InvalidRequest,
    PeerUnavailable,
    RouteNotFound,
    TopicNotFound,
)
from cometmq.rpc.addresses import parse_addresses
from cometmq.rpc.channel_pool import ChannelPool
from cometmq.rpc.interceptors import error_from, is_not_served
from cometmq.rpc.secret import SharedSecret
from cometmq.v1 import (
    broker_pb2_grpc,
    common_pb2,
    member_pb2,
    member_pb2_grpc,
    namesrv_pb2,
    namesrv_pb2_grpc,
)

DEADLINE_S = 3.0  # for a read
CHANGE_DEADLINE_S = 10.0  # for what is answered when it is on disk
POLL_INTERVAL_S = 0.05
# A member that says nothing of itself, or not now: it may change its role.
SILENCE = (PeerUnavailable, BrokerStarting, BrokerDraining)
NOBODY = (
    "no broker is registered at the name server; one that has just started knows them in seconds"
)

Request = TypeVar("Request", contravariant=True)
Response = TypeVar("Response", covariant=True)
Key = TypeVar("Key")
Answer = TypeVar("Answer")
Writers = Mapping[str, namesrv_pb2.Member]  # by broker group


class Method(Protocol[Request, Response]):
    """A unary call of a generated stub."""

    def __call__(self, request: Request, /, *, timeout: float) -> Awaitable[Response]: ...


class Connection:
    """A cluster as its name servers show it. An async context manager; channels open when needed.

    Every operation raises the catalogue error of the process that refused, or PeerUnavailable
    that names the address which does not answer.
    """

    def __init__(self, namesrv: str, secret: SharedSecret | None = None) -> None:
        """``namesrv``: addresses as ``host:port;host:port``; ``secret`` is for internal ports."""
        self._namesrvs = parse_addresses(namesrv)
        self._secret = secret
        self._channels = ChannelPool()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channels.close()

    async def ask_namesrv(
        self,
        ask: Callable[[namesrv_pb2_grpc.NameServiceAsyncStub], Method[Request, Response]],
        request: Request,
    ) -> Response:
        """Ask the name servers in turn until one answers; an answer may be a refusal. A name server
        that did not answer is asked last the next time.
        """
        silent: list[str] = []
        stranger: CometError | None = None  # what a process of another kind said
        for address in self._namesrvs:
            stub = namesrv_pb2_grpc.NameServiceStub(self._channels.get(address))
            try:
                answer = await call(address, ask(stub), request)
            except PeerUnavailable:
                silent.append(address)
            except InvalidRequest as error:
                if not is_not_served(error):
                    raise
                silent.append(address)
                stranger = error
            else:
                answering = (known for known in self._namesrvs if known not in silent)
                self._namesrvs = (*answering, *silent)
                return answer
        if stranger is not None:
            raise stranger
        raise PeerUnavailable(f"no name server answers: {', '.join(silent)}")

    async def ask_namesrvs(
        self,
        ask: Callable[[namesrv_pb2_grpc.NameServiceAsyncStub], Method[Request, Response]],
        request: Request,
    ) -> dict[str, Response]:
        """Ask all name servers: they do not talk to each other. PeerUnavailable names those that do
        not answer, after all others have.
        """
        answers: dict[str, Response] = {}
        silent: list[str] = []
        for address in sorted(self._namesrvs):
            stub = namesrv_pb2_grpc.NameServiceStub(self._channels.get(address, self._secret))
            try:
                answers[address] = await call(address, ask(stub), request)
            except PeerUnavailable:
                silent.append(address)
        if silent:
            raise PeerUnavailable(
                f"name servers that do not answer: {', '.join(silent)}; once they do, do it again"
            )
        return answers

    async def members(self) -> list[namesrv_pb2.RegisteredMember]:
        """Every registered member, in the name server's order."""
        request = namesrv_pb2.DescribeClusterRequest()
        answer = await self.ask_namesrv(lambda stub: stub.DescribeCluster, request)
        return list(answer.members)

    async def registered(self) -> list[namesrv_pb2.Member]:
        """Every registered member; RouteNotFound when there is none."""
        members = [status.member for status in await self.members()]
        if not members:
            raise RouteNotFound(NOBODY)
        return members

    async def writers(self, wanted: tuple[str, ...] = ()) -> dict[str, namesrv_pb2.Member]:
        """The registered writers by broker group: all, or those of the ``wanted`` groups.

        GroupNotFound when a wanted group has none, RouteNotFound when there is none at all.
        """
        members = [status.member for status in await self.members()]
        writers = {m.broker_group: m for m in members if m.role == common_pb2.MEMBER_ROLE_WRITER}
        if not writers:
            raise RouteNotFound(NOBODY)
        if missing := sorted(set(wanted) - writers.keys()):
            known = ", ".join(sorted(writers))
            raise GroupNotFound(f"no writer of {', '.join(missing)} is registered (known: {known})")
        return {group: writers[group] for group in (wanted or sorted(writers))}

    async def route(self, topic: str) -> namesrv_pb2.TopicRoute:
        """The route of a topic; TopicNotFound when no broker group serves it."""
        request = namesrv_pb2.QueryRouteRequest(topic=topic)
        return (await self.ask_namesrv(lambda stub: stub.QueryRoute, request)).route

    def broker(self, member: namesrv_pb2.Member) -> broker_pb2_grpc.BrokerServiceAsyncStub:
        return broker_pb2_grpc.BrokerServiceStub(self._channels.get(member.address))

    def admin(self, member: namesrv_pb2.Member) -> broker_pb2_grpc.BrokerAdminServiceAsyncStub:
        return broker_pb2_grpc.BrokerAdminServiceStub(self._internal(member))

    def member(self, member: namesrv_pb2.Member) -> member_pb2_grpc.MemberServiceAsyncStub:
        return member_pb2_grpc.MemberServiceStub(self._internal(member))

    def _internal(self, member: namesrv_pb2.Member) -> grpc.aio.Channel:
        return self._channels.get(member.internal_address, self._secret)


async def said(answer: Awaitable[Answer]) -> Answer | CometError | None:
    """What a member says when it is asked, or why it refuses to; None: it does not answer."""
    try:
        return await answer
    except SILENCE:
        return None
    except CometError as error:
        return error


async def call(
    address: str,
    method: Method[Request, Response],
    request: Request,
    *,
    deadline_s: float = DEADLINE_S,
) -> Response:
    """One unary call; a refusal becomes its catalogue error, silence a PeerUnavailable."""
    try:
        return await method(request, timeout=deadline_s)
    except grpc.aio.AioRpcError as refused:
        error: CometError = error_from(refused)
    if isinstance(error, PeerUnavailable):
        raise PeerUnavailable(f"{address} does not answer: {error.message}")
    if is_not_served(error):
        raise InvalidRequest(f"{address} does not know this call").advising(error.advice)
    raise error


async def describe_replica(
    connection: Connection, member: namesrv_pb2.Member, *, deadline_s: float = DEADLINE_S
) -> member_pb2.DescribeReplicaResponse:
    """The bounds of a member's log, its peers, its lease and its role."""
    method, request = connection.member(member).DescribeReplica, member_pb2.DescribeReplicaRequest()
    return await call(member.internal_address, method, request, deadline_s=deadline_s)


# --- asking many --------------------------------------------------------------------------------


async def each(
    members: Mapping[Key, namesrv_pb2.Member],
    ask: Callable[[namesrv_pb2.Member], Awaitable[Answer]],
) -> dict[Key, Answer]:
    """Ask all members at once; the first refusal is raised."""
    answers = await asyncio.gather(*map(ask, members.values()))
    return dict(zip(members, answers, strict=True))


async def each_that_knows(
    writers: Writers,
    ask: Callable[[namesrv_pb2.Member], Awaitable[Answer]],
    unknown: TopicNotFound | GroupNotFound,
) -> dict[str, Answer]:
    """As :func:`each`, without the groups that refuse as ``unknown`` does; all of them: it is
    raised."""

    async def ask_one(member: namesrv_pb2.Member) -> Answer | None:
        try:
            return await ask(member)
        except type(unknown):
            return None

    answers = await each(writers, ask_one)
    known = {group: answer for group, answer in answers.items() if answer is not None}
    if not known:
        raise unknown
    return known


async def until(condition: Callable[[], Awaitable[bool]], deadline_s: float) -> bool:
    """Ask until the condition holds; False when it did not in time."""
    with suppress(TimeoutError):
        async with asyncio.timeout(deadline_s):
            while not await condition():  # noqa: ASYNC110  another process notifies nobody
                await asyncio.sleep(POLL_INTERVAL_S)
            return True
    return False
