"""Where the members of broker groups are, by all name servers that answer. While none answers, the
last known members are asked for their roles.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from cometmq.clock import Clock
from cometmq.errors import CometError, PeerUnavailable, RouteNotFound
from cometmq.rpc.addresses import Resolver
from cometmq.rpc.channel_pool import ChannelPool
from cometmq.rpc.failure_backoff import FailureBackoff
from cometmq.rpc.interceptors import wire_errors
from cometmq.rpc.retry import BackoffPolicy
from cometmq.rpc.tasks import stop_all
from cometmq.v1 import (
    broker_pb2,
    broker_pb2_grpc,
    common_pb2,
    namesrv_pb2,
    namesrv_pb2_grpc,
)

CALL_DEADLINE_S = 3.0
MEMBER_DEADLINE_S = 1.0
OTHERS_S = 0.3  # the wait for other answers after the first one
FRESH_S = 0.5  # how long answers of name servers are valid
PASS_OVER = BackoffPolicy(first_s=0.5, max_s=5.0)  # a member that does not answer


@dataclass(frozen=True, slots=True)
class Member:
    """A member of a broker group, and where it can be reached."""

    address: str
    internal_address: str
    epoch: int
    writes: bool


Members: TypeAlias = "dict[str, list[Member]]"  # by broker group


class Directory:
    """Finds the member to watch in each broker group: its writer, or a follower while the writer
    does not answer.
    """

    def __init__(self, namesrv: Sequence[str], clock: Clock) -> None:
        self._namesrv = Resolver(namesrv)
        self._clock = clock
        self._members: Members = {}
        self._asked_s = float("-inf")
        self._one_at_a_time = asyncio.Lock()
        self._channels = ChannelPool(clock=clock)
        self._aside = FailureBackoff(PASS_OVER, random.Random())

    async def member(self, broker_group: str) -> Member:
        """Raises RouteNotFound (the group has no member), PeerUnavailable (no name server answers,
        and none has answered before).
        """
        async with self._one_at_a_time:
            if self._clock.monotonic_s() - self._asked_s > FRESH_S:
                addresses = await self._namesrv.addresses()
                answers = await self._answers(map(self._ask, addresses))
                if answers:
                    self._members = _merged(answers)
                    known = {one.address for some in self._members.values() for one in some}
                    self._channels.keep_only(known.union(addresses))
                elif self._members:
                    asked = [
                        self._ask_member(group, one)
                        for group, some in self._members.items()
                        for one in some
                    ]
                    self._members = _merged([self._members, *await self._answers(asked)])
                else:
                    raise PeerUnavailable("no name server answers")
                self._asked_s = self._clock.monotonic_s()
        members = ranked(self._members.get(broker_group, ()))
        if not members:
            raise RouteNotFound(f"broker group {broker_group[:127]!r} has no live member")
        now_s = self._clock.monotonic_s()
        there = (m for m in members if not self._aside.is_aside(_name(m), now_s))
        return next(there, members[0])

    def failed(self, member: Member) -> None:
        """The member does not answer: others come first for a while."""
        self._aside.failed(_name(member), self._clock.monotonic_s())

    def answered(self, member: Member) -> None:
        self._aside.answered(_name(member))

    async def _answers(self, asked: Iterable[Coroutine[Any, Any, Members]]) -> list[Members]:
        """All answers within a moment after the first: a peer that has gone never answers."""
        found: list[Members] = []
        pending = {asyncio.create_task(one) for one in asked}
        try:
            while pending:
                wait_s = OTHERS_S if found else None
                done, pending = await asyncio.wait(
                    pending, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    break
                for task in done:
                    with suppress(CometError):
                        found.append(task.result())
        finally:
            await stop_all(pending)
        return found

    async def _ask(self, address: str) -> Members:
        stub = namesrv_pb2_grpc.NameServiceStub(self._channels.get(address))
        with wire_errors():
            request = namesrv_pb2.DescribeClusterRequest()
            described = await stub.DescribeCluster(request, timeout=CALL_DEADLINE_S)
        found: Members = {}
        for one in (status.member for status in described.members):
            found.setdefault(one.broker_group, []).append(_member(one))
        return found

    async def _ask_member(self, broker_group: str, known: Member) -> Members:
        stub = broker_pb2_grpc.BrokerServiceStub(self._channels.get(known.address))
        with wire_errors():
            request = broker_pb2.DescribeMemberRequest()
            described = (await stub.DescribeMember(request, timeout=MEMBER_DEADLINE_S)).member
        if described.broker_group != broker_group:  # another process has its address now
            return {}
        # Addresses come from name servers only: no other process decides where a secret goes.
        now = _member(described)
        return {broker_group: [replace(known, epoch=now.epoch, writes=now.writes)]}

    async def close(self) -> None:
        self._namesrv.close()
        await self._channels.close()


def _member(proto: namesrv_pb2.Member) -> Member:
    writes = proto.role == common_pb2.MEMBER_ROLE_WRITER
    return Member(proto.address, proto.internal_address, proto.epoch, writes)


def ranked(members: Iterable[Member]) -> list[Member]:
    """The writer of the newest epoch, then the followers, the newest epoch first. A deposed writer
    is neither.
    """
    known = sorted(members, key=lambda m: (not m.writes, -m.epoch, m.address))
    writer = known[:1] if known and known[0].writes else []
    taken = {member.address for member in writer}
    return writer + [m for m in known if not m.writes and m.address not in taken]


def _merged(answers: Iterable[Members]) -> Members:
    """Of each address the newest that several name servers answer."""
    found: dict[str, dict[str, Member]] = {}
    for members in answers:
        for group, some in members.items():
            known = found.setdefault(group, {})
            for member in some:
                other = known.get(member.address)
                if other is None or (other.epoch, other.writes) < (member.epoch, member.writes):
                    known[member.address] = member
    return {group: list(known.values()) for group, known in found.items()}


def _name(member: Member) -> str:
    # With the epoch: a member that comes back at the same address is another process.
    return f"{member.address} {member.epoch}"
