"""Parts of a member for unit tests: an open store with its state, no ports, no network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from cometmq.clock import SystemClock
from cometmq.errors import CometError, VersionUnsupported
from cometmq.format.batch import BatchLimits
from cometmq.member.read.reader import Reader
from cometmq.member.read.throttle import CatchUpThrottle
from cometmq.member.state.keeper import StateDemands, StateKeeper
from cometmq.member.state.opening import Opened, open_writer
from cometmq.member.storage.authority import Replicated, SoleWriter, WriteAuthority
from cometmq.member.storage.flusher import FlushPolicy
from cometmq.member.storage.member_storage import MemberStorage, Segment, Ticket
from cometmq.model import FlushMode, TopicConfig
from cometmq.replication.watermarks import DurabilityClass, Watermarks
from cometmq.store.writer import MessageStore
from tests.support.cluster.broker import config_for, encoded
from tests.support.stores.small_stores import HOST, WallClock
from tests.support.waiting import until

NEVER = FlushPolicy(interval_s=3600.0, thorough_s=3600.0)
AT_ONCE = FlushPolicy(interval_s=0.0, least_bytes=0, thorough_s=0.0)


def opened(directory: Path, clock: WallClock | None = None, **options: Any) -> Opened:
    """The store in ``directory``, opened as the writer does it."""
    config = config_for(directory, **options)
    return open_writer(config, BatchLimits(), HOST, clock or WallClock())


class SetAuthority(SoleWriter):
    """Answers what a test has set; a sole writer's answers until then."""

    def __init__(self) -> None:
        self.allowed = True
        self.check: Callable[[], None] = lambda: None
        self.kinds_checked: Callable[[frozenset[str]], None] = lambda _kinds: None
        self.kinds_unread: set[str] = set()  # by some member
        self._found: list[Replicated | None] = []

    def set_replicated(self, found: Replicated | None) -> None:
        self._found = [found]

    def may_acknowledge(self) -> bool:
        return self.allowed

    def replicated(self, own: Watermarks) -> Replicated | None:
        return self._found[0] if self._found else super().replicated(own)

    def check_in_sync(self) -> None:
        self.check()

    def check_kinds(self, kinds: frozenset[str]) -> None:
        self.kinds_checked(kinds)
        if kinds & self.kinds_unread:
            raise VersionUnsupported("a member")


class Member:
    """The parts, put together as the broker does; asyncio stands still unless a test lets go.
    ``authority`` gets what the state demands.
    """

    def __init__(
        self,
        found: Opened,
        policy: FlushPolicy,
        authority: Callable[[StateDemands], WriteAuthority] | None = None,
    ) -> None:
        self.store: MessageStore = found.store
        self.state = found.state
        self.delays = found.delays
        self.told: list[str] = []  # what the keeper said about topics
        self.demands = StateDemands(found.state.topics)
        self.set_authority = SetAuthority()
        asked = self.set_authority if authority is None else authority(self.demands)
        self.storage = MemberStorage(found.store, policy, WallClock(), asked)
        self.keeper = StateKeeper(
            found.state,
            self.storage,
            HOST,
            WallClock(),
            self.demands,
            found.delays,
            lambda: self.told.append("changed"),
            lambda topic: self.told.append(f"dropped {topic}"),
        )
        self.reader = Reader(self.storage, found.state, CatchUpThrottle(0), SystemClock())

    async def put(self, name: str, queues: int = 1, mode: FlushMode = FlushMode.ASYNC) -> bool:
        return await self.keeper.put_topic(TopicConfig(name, queues, queues, flush_mode=mode))

    def append(self, topic: str, queue_id: int, *bodies: bytes, **fields: Any) -> Ticket:
        """Append messages as the topic's settings say."""
        demands = DurabilityClass.of(*self.state.topics.demands(topic))
        records = b"".join(encoded(topic, queue_id, body, **fields) for body in bodies)
        segment = Segment(topic, queue_id, len(bodies), demands)
        return self.storage.append(records, [segment], born_host=HOST, store_host=HOST)

    async def on_disk_alone(self) -> None:
        """Without waiting for what the writer may say."""
        end = self.store.appended_offset
        await until(lambda: self.storage.watermarks.flushed >= end)

    async def on_disk(self) -> None:
        await self.storage.stored(self.store.appended_offset, DurabilityClass.FLUSHED)


@asynccontextmanager
async def living_member(
    directory: Path,
    *,
    policy: FlushPolicy = AT_ONCE,
    clean: bool = True,
    authority: Callable[[StateDemands], WriteAuthority] | None = None,
    clock: WallClock | None = None,
    **options: Any,
) -> AsyncIterator[Member]:
    """A member whose flusher runs. ``clean`` False: it ends without a write, as by a crash."""
    member = Member(opened(directory, clock, **options), policy, authority)
    running = asyncio.create_task(member.storage.run(0.01))
    try:
        yield member
        member.storage.validate()
        member.storage.arrivals.validate()
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError, CometError):
            await running
        member.reader.close()
        member.storage.failed = not clean
        member.storage.close()
