"""Where the members of broker groups are, by all name servers that answer. While none does the last
that was known holds, and members tell themselves what they are now.
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
from cometmq.rpc.channel_pool import ChannelPool
from cometmq.rpc.channels import Resolver
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
OTHERS_S = 0.3
FRESH_S = 0.5  # how long what name servers told is taken for now
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
    """Who can tell of a broker group's queues, by all name servers that answer: its writer, or a
    follower while that one does not answer.
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
        """Raises RouteNotFound (nobody serves the group), PeerUnavailable (no name server, and none
        has told before).
        """
        async with self._one_at_a_time:
            if self._clock.monotonic_s() - self._asked_s > FRESH_S:
                await self._ask_all()
                self._asked_s = self._clock.monotonic_s()
        members = ranked(self._members.get(broker_group, ()))
        if not members:
            raise RouteNotFound(f"broker group {broker_group[:127]!r} has no live member")
        now_s = self._clock.monotonic_s()
        there = (m for m in members if not self._aside.is_aside(_name(m), now_s))
        return next(there, members[0])

    def failed(self, member: Member) -> None:
        """It does not answer: others are asked for a while."""
        self._aside.failed(_name(member), self._clock.monotonic_s())

    def answered(self, member: Member) -> None:
        self._aside.answered(_name(member))

    async def _ask_all(self) -> None:
        addresses = await self._namesrv.addresses()
        told = await self._answers(map(self._ask, addresses))
        if told:
            self._members = _merged(told)
            known = {member.address for some in self._members.values() for member in some}
            self._channels.keep_only(known.union(addresses))
        elif self._members:
            asked = [
                self._ask_member(group, member)
                for group, some in self._members.items()
                for member in some
            ]
            self._members = _merged([self._members, *await self._answers(asked)])
        else:
            raise PeerUnavailable("no name server answers")

    async def _answers(self, asked: Iterable[Coroutine[Any, Any, Members]]) -> list[Members]:
        """What those say who answer. After the first the others have a moment left: one that has
        gone says nothing.
        """
        told: list[Members] = []
        pending = {asyncio.create_task(one) for one in asked}
        try:
            while pending:
                wait_s = OTHERS_S if told else None
                done, pending = await asyncio.wait(
                    pending, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    break
                for task in done:
                    with suppress(CometError):
                        told.append(task.result())
        finally:
            await stop_all(pending)
        return told

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
            told = (await stub.DescribeMember(request, timeout=MEMBER_DEADLINE_S)).member
        if told.broker_group != broker_group:  # somebody else has its address now
            return {}
        # Where it is name servers have told: nobody is to choose where a secret goes.
        now = _member(told)
        return {broker_group: [replace(known, epoch=now.epoch, writes=now.writes)]}

    async def close(self) -> None:
        self._namesrv.close()
        await self._channels.close()


def _member(proto: namesrv_pb2.Member) -> Member:
    writes = proto.role == common_pb2.MEMBER_ROLE_WRITER
    return Member(proto.address, proto.internal_address, proto.epoch, writes)


def ranked(members: Iterable[Member]) -> list[Member]:
    """The writer of the newest epoch, then the followers, the newest epoch first. Who was deposed
    is neither.
    """
    known = sorted(members, key=lambda m: (not m.writes, -m.epoch, m.address))
    writer = known[:1] if known and known[0].writes else []
    taken = {member.address for member in writer}
    return writer + [m for m in known if not m.writes and m.address not in taken]


def _merged(told: Iterable[Members]) -> Members:
    """What several name servers say: of each address what is newest."""
    found: dict[str, dict[str, Member]] = {}
    for members in told:
        for group, some in members.items():
            known = found.setdefault(group, {})
            for member in some:
                other = known.get(member.address)
                if other is None or (other.epoch, other.writes) < (member.epoch, member.writes):
                    known[member.address] = member
    return {group: list(known.values()) for group, known in found.items()}


def _name(member: Member) -> str:
    # With the epoch: whoever comes back at the same place is somebody new.
    return f"{member.address} {member.epoch}"
