"""The services of a group that receives (POP) over a real store, without a network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from cometmq.format import properties
from cometmq.format.properties import SHARDING_KEY
from cometmq.member.relay import RelayWriter
from cometmq.messaging.group_policy import ConsumeMode, GroupPolicy
from cometmq.messaging.groups import GroupSettings, MemberTable
from cometmq.messaging.pop.leases import QueueLeases
from cometmq.model import FlushMode, TopicConfig
from services.broker.groups.resets import Bound, ResetTarget
from services.broker.pop.acks import AckItem, AckService
from services.broker.pop.groups import PopGroups
from services.broker.pop.receive import ReceiveAsk, Received, ReceiveService, Wanted
from services.broker.retry.retries import RetryService
from tests.support.cluster.members import Member, living_member
from tests.support.stores.small_stores import HOST, WallClock

KEY = ("T", 0)
ASK = ReceiveAsk("G", (Wanted("T"),), None, 1, 1 << 20, 10_000, ResetTarget(bound=Bound.FIRST))


async def fast(_size_bytes: int) -> None:
    """There is room at once."""


class Room:
    """A peer that takes its answers late."""

    def __init__(self) -> None:
        self.is_waited_for, self.is_there = asyncio.Event(), asyncio.Event()

    async def __call__(self, _size_bytes: int) -> None:
        self.is_waited_for.set()
        await self.is_there.wait()


class Pop:
    """A topic, a group that receives from it, and the services of a broker."""

    def __init__(self, member: Member) -> None:
        self.member, self.clock = member, WallClock()
        metrics, storage, keeper = mock.MagicMock(), member.storage, member.keeper
        relays = RelayWriter(storage, member.state.topics, HOST, metrics)
        retries = RetryService(storage, keeper, relays, metrics, MemberTable(), self.clock)
        self.groups = PopGroups(storage, keeper, retries, metrics, self.clock)
        self.acks = AckService(self.groups)
        self.receives = ReceiveService(self.groups, storage, member.reader)

    async def send(self, *bodies: bytes, key: str = "") -> None:
        pairs = properties.encode({SHARDING_KEY: key}) if key else b""
        self.member.append("T", 0, *bodies, properties=pairs)
        await self.member.on_disk()

    async def receive(
        self, room: Callable[[int], Awaitable[None]] = fast, **asked: Any
    ) -> Received:
        return await self.receives.receive(replace(ASK, **asked), room)

    async def ack(self, answer: Received) -> list[object]:
        items = [AckItem(run.handle) for run in answer.runs]
        return list(await self.acks.acknowledge("G", items))

    def queues(self) -> list[QueueLeases]:
        return list(self.groups.pops.of_group("G").values())

    def left_ms(self, answer: Received) -> int:
        [run] = answer.runs
        return run.visible_ms - self.groups.now_ms()


@asynccontextmanager
async def living_pop(
    directory: Path, *, flush: FlushMode = FlushMode.ASYNC, orderly: bool = False
) -> AsyncIterator[Pop]:
    """A topic T, and a group G that receives from it."""
    async with living_member(directory) as member:
        await member.keeper.put_topic(TopicConfig("T", 1, 1, flush_mode=flush))
        policy = GroupPolicy(mode=ConsumeMode.POP, is_orderly=orderly)
        await member.keeper.put_group(GroupSettings("G", policy=policy))
        yield Pop(member)
