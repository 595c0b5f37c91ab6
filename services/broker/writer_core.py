"""The writing half of a writer: the log, and in it the state of topics, groups and offsets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from cometmq.errors import Shortage, StoreFailed
from cometmq.member.context import MemberContext, MemberCore
from cometmq.member.lease.lease_holder import LeaseHolder
from cometmq.member.read.search import Finder
from cometmq.member.relay import RelayWriter
from cometmq.member.state.demands import topic_demands
from cometmq.member.state.keeper import StateDemands, StateKeeper
from cometmq.member.state.opening import Opened
from cometmq.member.storage.authority import WriteAuthority
from cometmq.member.storage.member_storage import MemberStorage, readable_at_start
from cometmq.messaging.topics import is_system
from cometmq.replication.watermarks import STRICTEST, DurabilityClass, ReadableMaxima
from cometmq.telemetry import fields, logger
from cometmq.v1 import common_pb2, namesrv_pb2
from services.broker.delay.believed_time import BelievedTime
from services.broker.delay.recalls import RecallService
from services.broker.delay.schedule import ScheduleService
from services.broker.delay.timer_slots import TimerSlots
from services.broker.delay.timers import TimerService
from services.broker.groups.queue_locks import QueueLocks
from services.broker.pop.groups import PopGroups
from services.broker.retry.dead_letters import DeadLetters
from services.broker.retry.resends import Resender
from services.broker.retry.retries import RetryService
from services.broker.statewriter import StateWriter
from services.broker.transactions.checks import TransactionChecks
from services.broker.transactions.ends import TransactionService
from services.broker.transactions.half_admin import HalfAdmin

log = logger(__name__)


class WriterCore:
    """``on_topics`` is called after topics have changed. ``holder`` is None for a broker that
    stands alone.
    """

    def __init__(
        self,
        context: MemberContext,
        opened: Opened,
        authority: WriteAuthority,
        demands: StateDemands,
        holder: LeaseHolder | None,
        on_topics: Callable[[], None],
    ) -> None:
        clock, metrics = context.clock, context.metrics
        self._context = context
        self._config = context.config
        self._metrics = metrics
        self.storage = MemberStorage(
            opened.store,
            context.flush_policy(),
            clock,
            authority,
            metrics.flush_s.observe,
            _readable_at_start(opened, holder),
        )
        if holder is not None:
            holder.serve(self.storage)
        host, drop = context.identity.store_host, self._forget_topic
        self.keeper = StateKeeper(
            opened.state,
            self.storage,
            host,
            clock,
            demands,
            opened.delays,
            on_topics,
            drop,
            self._forget_group,
            self._system_topic_made,
        )
        relays = RelayWriter(self.storage, opened.state.topics, host, metrics)
        self.time = time = BelievedTime(clock, metrics, opened.stored_ms, context.clocks)
        opened.store.stamp_by(time)
        self.schedule = ScheduleService(self.storage, self.keeper, relays, metrics, clock, time)
        self.timers = TimerService(
            self.storage,
            self.keeper,
            relays,
            metrics,
            clock,
            time,
            self._config.file_reserved_time * 3_600_000,
        )
        self.timer_slots = self._new_timer_slots()
        self.recalls = RecallService(
            self.storage,
            self.keeper,
            relays,
            self.timers,
            context.config.broker_group,
            self.timer_slots,
        )
        self.resender = Resender(self.storage, self.keeper, relays)
        self.dead_letters = DeadLetters(self.keeper, self.resender)
        self.queue_locks = QueueLocks(self.keeper, self.storage, clock)
        write_snapshot = self.keeper.write_snapshot
        self.core = MemberCore(context, self.storage, opened.state, write_snapshot=write_snapshot)
        self.retries = RetryService(
            self.storage, self.keeper, relays, metrics, self.core.members, time
        )
        self.transactions = TransactionService(
            self.storage,
            self.keeper,
            relays,
            Finder(self.core.reader),
            metrics,
            context.config.check_rules(),
            clock,
        )
        self.half_admin = HalfAdmin(self.transactions, self.storage, self.keeper, relays, clock)
        self.checks = TransactionChecks(self.transactions, self.storage, metrics, clock)
        self.core.retention.before_removal = self._before_removal
        self.pop = PopGroups(self.storage, self.keeper, self.retries, metrics, time)
        self._state_writer = StateWriter(context.config, self.keeper, self.storage, clock)

    def _new_timer_slots(self) -> TimerSlots | None:
        count_max = self._config.timer_messages_per_second_max
        if not count_max:
            return None
        recalled = self.keeper.state.timers.skips.values()
        return TimerSlots(count_max, self.timers.count_between, recalled)

    async def _before_removal(self, log_offset: int) -> None:
        """The log goes up to there. Raises what keeps the others from being stored once more."""
        try:
            await self.transactions.giving_up.leave(log_offset)
        finally:
            try:
                await self.schedule.leave(log_offset)
            finally:
                try:
                    await self.timers.roll_before(log_offset)
                finally:
                    self.keeper.write_progress(self._context.clock.monotonic_s())

    def described(self) -> namesrv_pb2.Member:
        """This member as it registers with name servers."""
        return self._context.member_proto(common_pb2.MEMBER_ROLE_WRITER, self.storage.store.epoch)

    def _forget_topic(self, topic: str) -> None:
        self._metrics.forget_topic(topic)
        self.storage.arrivals.topic_changed(topic)
        self.pop.forget_topic(topic)

    def _forget_group(self, group: str) -> None:
        self._metrics.forget_group(group)
        self.queue_locks.forget_group(group)
        self.pop.forget_group(group)

    def _system_topic_made(self, topic: str) -> None:
        self.pop.system_topic_made(topic)

    def background(self) -> list[Coroutine[Any, Any, None]]:
        """The coroutines that run as long as the broker does."""
        config = self._config
        commit_s = config.commit_interval_commit_log / 1000
        keep = self._context.restarts.keep
        return [
            self.storage.run(
                config.flush_interval_consume_queue / 1000,
                commit_s if config.transient_store_pool_enable else 0.0,
            ),
            self._state_writer.write(),
            keep("exports", self._state_writer.export),
            keep("delay levels", self.schedule.run),
            keep("transaction checks", self.checks.run),
            self.timers.run(),
            keep("returns", self.pop.returns.run),
            keep("retention", self.core.retention.run),
        ]

    async def _list_ended_halves(self) -> None:
        try:
            if not self.storage.sealed:
                await self.transactions.list_singly()
        except (Shortage, StoreFailed) as error:
            log.warning(
                "RocketMQ 4.9 would ask about ended halves", extra=fields(reason=str(error))
            )

    async def close(self) -> None:
        """The rest of the offsets, unless the log was handed over; the exports; the store's clean
        mark. After a failed disk the store is left as it is.
        """
        try:
            if not self.storage.failed:
                await self._list_ended_halves()
                await self._state_writer.finish()
        finally:
            self.core.reader.close()
            await asyncio.to_thread(self.timers.close)
            await asyncio.to_thread(self.core.retention.close)
            await asyncio.to_thread(self.storage.close)


def _readable_at_start(opened: Opened, holder: LeaseHolder | None) -> ReadableMaxima | None:
    """None: everything."""
    if holder is None:
        return None
    topics = opened.state.topics

    def demands_of(topic: str) -> DurabilityClass:
        known = is_system(topic) or topic in topics
        return topic_demands(topics, topic) if known else STRICTEST

    return readable_at_start(opened.store, demands_of, holder.record.shown)
