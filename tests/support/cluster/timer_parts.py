"""What sends, delivers and removes messages with a time of their own, in one life of a writer."""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry

from cometmq.errors import StoreDamaged
from cometmq.member.metrics import MemberMetrics
from cometmq.member.relay import RelayWriter
from cometmq.member.state.keeper import StateKeeper
from cometmq.member.state.retention import Retention
from cometmq.model import TopicConfig
from cometmq.store.retention import RetentionRules
from services.broker.delay.believed_time import BelievedTime
from services.broker.delay.recalls import RecallService
from services.broker.delay.timers import TimerService
from services.broker.sending.produce import ProduceHandler, ProducePolicy
from tests.support.cluster.members import Member
from tests.support.stores.small_stores import HOST, WallClock

RESERVED_MS = 72 * 3_600_000


class TimerParts:
    """What sends and delivers in one life of the writer."""

    def __init__(self, member: Member, clock: WallClock) -> None:
        self.metrics = metrics = MemberMetrics(CollectorRegistry(), "c", "g")
        policy = ProducePolicy(1 << 30, False, TopicConfig(""), 30.0, 30.0)
        self.produce = ProduceHandler(member.storage, member.keeper, policy, HOST, metrics, clock)
        relays = RelayWriter(member.storage, member.state.topics, HOST, metrics)
        self.time = BelievedTime(clock, metrics, 0)
        member.store.stamp_by(self.time)
        self.timers = TimerService(
            *(member.storage, member.keeper, relays, metrics, clock), self.time, RESERVED_MS
        )
        self.retention = Retention(
            member.storage,
            member.state,
            RetentionRules(reserved_ms=1, delete_hours=frozenset()),
            clock,
            pause_s=0.0,
            write_snapshot=member.keeper.write_snapshot,
        )
        self.retention.before_removal = partial(self._make_way, member.keeper)
        self.recalls = RecallService(member.storage, member.keeper, relays, self.timers, "g")

    async def _make_way(self, keeper: StateKeeper, log_offset: int) -> None:
        await self.timers.roll_before(log_offset)
        keeper.write_progress(0.0)

    def close(self) -> None:
        self.timers.close()
        self.retention.close()

    async def deliver(self) -> None:
        """As the service's task does it."""
        while True:
            try:
                if await self.timers.turn() != 0.0:
                    return
                job = await self.timers._next_job()
                if job is not None:
                    await self.timers._run_job(job)
            except StoreDamaged as error:
                self.timers._forget_index(error)
