"""Where the members of broker groups are, by all name servers that answer. The last that was known
holds while none does.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import grpc

from cometmq.clock import Clock
from cometmq.errors import CometError, PeerUnavailable, RouteNotFound
from cometmq.rpc.aside import SetAside
from cometmq.rpc.channels import open_channel, resolve
from cometmq.rpc.interceptors import wire_errors
from cometmq.rpc.retry import BackoffPolicy
from cometmq.v1 import common_pb2, namesrv_pb2, namesrv_pb2_grpc

CALL_DEADLINE_S = 3.0
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
        self._namesrv = tuple(namesrv)
        self._clock = clock
        self._members: Members = {}
        self._asked_s = float("-inf")
        self._one_at_a_time = asyncio.Lock()
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._aside = SetAside(PASS_OVER, random.Random())

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
        """While no name server answers, what they told last is taken for the truth."""
        addresses = await resolve(self._namesrv)
        for gone in self._channels.keys() - set(addresses):
            await self._channels.pop(gone).close()
        answers = await asyncio.gather(*map(self._ask, addresses), return_exceptions=True)
        told: list[Members] = []
        for answer in answers:
            if isinstance(answer, BaseException):
                if not isinstance(answer, CometError):
                    raise answer
            else:
                told.append(answer)
        if told:
            self._members = _merged(told)
        elif not self._members:
            raise PeerUnavailable("no name server answers")

    async def _ask(self, address: str) -> Members:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = open_channel(address)
        stub = namesrv_pb2_grpc.NameServiceStub(channel)
        with wire_errors():
            request = namesrv_pb2.DescribeClusterRequest()
            described = await stub.DescribeCluster(request, timeout=CALL_DEADLINE_S)
        found: Members = {}
        for one in (status.member for status in described.members):
            writes = one.role == common_pb2.MEMBER_ROLE_WRITER
            member = Member(one.address, one.internal_address, one.epoch, writes)
            found.setdefault(one.broker_group, []).append(member)
        return found

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()


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
