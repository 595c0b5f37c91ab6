"""The writer put together: the composition root. How a member starts and stops is told in
:mod:`cometmq.member.app`; here is what only the writer has.

Close: what is left of the offsets is written, unless the log was handed over; after a failed disk
the store is left as it is.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from prometheus_client.registry import Collector

from cometmq.errors import CometError, LeaseUnavailable
from cometmq.member import convert
from cometmq.member.admin_servicer import Holdings
from cometmq.member.advising import Adviser
from cometmq.member.app import (
    FOLLOWER_MODULE,
    WRITER,
    MemberApp,
    Surroundings,
)
from cometmq.member.arrivals_servicer import ArrivalCounts, ArrivalsServicer
from cometmq.member.config import MemberConfig, PromoteAsync
from cometmq.member.leases import Lease, Reading, open_lease
from cometmq.member.member_servicer import MemberServicer
from cometmq.member.metrics import MemberCollector
from cometmq.member.opening import Opened, open_writer
from cometmq.member.pacing import CatchUpPace
from cometmq.member.pulls_servicer import PullsServicer
from cometmq.member.reading import Reader
from cometmq.member.registration import Registrar
from cometmq.member.retaining import Retention, rules_of
from cometmq.member.retaining_metrics import RetentionCollector
from cometmq.member.statekeeper import StateKeeper
from cometmq.member.storage import MemberStorage, readable_at_start
from cometmq.member.tenure import DEPOSED, Deposed, LeaseHolder
from cometmq.messaging.groups import MemberTable
from cometmq.messaging.state import BrokerState
from cometmq.messaging.topics import AUTO_CREATE_TOPIC, is_system
from cometmq.model import TopicConfig
from cometmq.replication.insync import SetPolicy
from cometmq.replication.lease import LeaseRecord, Reason
from cometmq.replication.watermarks import (
    REPLICATED,
    STRICTEST,
    DurabilityClass,
    ReadableMaxima,
)
from cometmq.telemetry import fields
from cometmq.v1 import common_pb2, namesrv_pb2
from services.broker.admin_servicer import BrokerAdminServicer
from services.broker.consuming import Consuming
from services.broker.handover import HandOver
from services.broker.insync import InSyncSet
from services.broker.intake import AUTO_CREATED_QUEUES_MAX, Intake, IntakePolicy
from services.broker.membership import Groups
from services.broker.metrics import ReplicationCollector
from services.broker.replicas import Replicas
from services.broker.replication_servicer import ReplicationServicer
from services.broker.servicer import BrokerServicer
from services.broker.statewriter import StateWriter
from services.broker.structured import StructuredEncoder

log = logging.getLogger(__name__)

LEASE_RETRY_S = 1.0
RETIRE_S_MAX = 5.0  # that a hand-over may delay a stop


class App(MemberApp):
    """The writer of a broker group. With a lease it must be the recorded holder, which haslave saw
    to before it called this program; if it is not, it becomes a follower.
    """

    name = "broker"
    role = WRITER
    _hand_over: HandOver | None = None  # while it writes under a lease

    async def _open(self, around: Surroundings) -> _Parts | None:
        if not self._config.lease:
            return self._parts(around, await self._open_store(around, None), None)
        lease = open_lease(self._config.lease)
        reading = await self._our_lease(lease)
        if reading is None:
            return None
        assert reading.record is not None
        holder = LeaseHolder(lease, reading, self._config.lease_renew_s, self._clock)
        async with holder.renewed():  # recovery may take longer than the lease lasts
            opened = await self._open_store(around, reading.record)
        if await self._begin(holder, opened, around.internal_address):
            self._elections.won(_reason(reading.record))
            return self._parts(around, opened, holder)
        await asyncio.to_thread(opened.store.close)
        self.become(FOLLOWER_MODULE, DEPOSED)
        return None

    async def _begin(self, holder: LeaseHolder, opened: Opened, address: str) -> bool:
        """Say in the lease that our epoch is open; False: it is not ours, or we are to stop."""
        if holder.record.holder_store_id != opened.store.store_id:
            return False
        try:
            await holder.begin(opened.store.epochs, address, lambda: self.stopping)
        except (Deposed, LeaseUnavailable):
            return False
        return True

    async def _retire(self) -> None:
        """Let a follower go on at once, where one can: nobody has to wait for the lease to end."""
        if self._hand_over is None or not self._config.hand_over_at_stop:
            return
        try:
            async with asyncio.timeout(RETIRE_S_MAX):
                done = await self._hand_over.step_down(None)
        except (CometError, TimeoutError) as error:
            log.info("stops without a hand-over", extra=fields(reason=str(error)))
        else:
            log.info("handed over before the stop", extra=fields(to=done.member_id))

    async def _our_lease(self, lease: Lease) -> Reading | None:
        while not self.stopping:
            try:
                reading = await lease.read()
            except LeaseUnavailable as error:
                log.warning("waiting for the lease", extra=fields(error=error))
                await asyncio.sleep(LEASE_RETRY_S)
                continue
            record = reading.record
            if record and not record.released and record.holder_id == self._config.member_id:
                return reading
            self.become(FOLLOWER_MODULE, "not-holder")
            return None
        return None

    async def _open_store(self, around: Surroundings, lease: LeaseRecord | None) -> Opened:
        before = self._before
        reason = Reason.RESTART if lease is None else _reason(lease)
        handed_over = reason is Reason.HANDOVER and before is not None
        return await asyncio.to_thread(
            open_writer,
            self._config,
            around.identity.batch_limits,
            around.identity.store_host,
            self._clock,
            epoch_floor=0 if lease is None else lease.epoch,
            log_end=before.log_end if before is not None and handed_over else None,
            keeps_positions=reason.keeps_positions,
            branches=() if lease is None else lease.epochs,
            progress=self._progress(),
        )

    def _parts(self, around: Surroundings, opened: Opened, holder: LeaseHolder | None) -> _Parts:
        def ended(reason: str) -> None:
            self.become(FOLLOWER_MODULE, reason)

        parts = _Parts(around, opened, holder, ended)
        self._hand_over = parts.hand_over if holder is not None else None
        return parts


def _reason(lease: LeaseRecord) -> Reason:
    """Why we lead. What the lease says holds also when the process that took it has died since."""
    return Reason.RESTART if lease.opened else Reason(lease.reason)


class _Parts:
    """Everything that needs the open store."""

    def __init__(
        self,
        around: Surroundings,
        opened: Opened,
        holder: LeaseHolder | None,
        ended: Callable[[str], None],
    ) -> None:
        self._around = around
        self._config = config = around.config
        self._metrics = metrics = around.metrics
        self._clock = clock = around.clock
        identity, ports = around.identity, around.ports
        self._holder = holder
        self.seconds = opened.seconds
        self.state = opened.state
        self.storage = MemberStorage(
            opened.store,
            around.flush_policy(),
            clock,
            metrics.flush_s.observe,
            _readable_at_start(opened, holder),
            alone=holder is None,
        )
        self.registrar = Registrar(
            config.namesrv, self._registration, config.register_namesrv_period / 1000
        )
        changed, forget = self.registrar.changed, self._forget_topic
        self.keeper = StateKeeper(
            opened.state, self.storage, identity.store_host, clock, changed, forget
        )
        self._state_writer = StateWriter(config, self.keeper, self.storage, clock)
        pace = CatchUpPace(config.catch_up_bytes_per_s)
        self.reader = Reader(self.storage, opened.state, pace, clock)
        groups = Groups(MemberTable(config.groups_max))
        copy_pace = CatchUpPace(config.copy_bytes_per_s)
        self._replicas = Replicas(self.storage, copy_pace, clock)
        consuming = Consuming(
            self.keeper,
            self.storage,
            self.reader,
            groups,
            Adviser(
                config.slave_read_enable,
                config.access_message_in_memory_max_ratio,
                self._replicas.copies,
            ),
            auto_create_groups=config.auto_create_subscription_group,
        )
        self.retention = Retention(
            self.storage,
            opened.state,
            rules_of(config),
            clock,
            pause_s=config.delete_commit_log_files_interval / 1000,
            write_copy=self.keeper.write_copy,
        )
        self._in_sync = InSyncSet(
            self.storage,
            self._replicas,
            holder,
            lambda: bool(self.keeper.demands & REPLICATED),
            _set_policy(config),
            clock,
        )
        self.keeper.check_copies = self._in_sync.check_copies
        self.keeper.on_demands = self._in_sync.refresh
        intake = Intake(
            self.storage,
            self.keeper,
            _intake_policy(config),
            identity.store_host,
            metrics,
            clock,
            self._in_sync,
        )
        self.collectors: Iterable[Collector] = (
            MemberCollector(metrics, self.storage, opened.state, groups, intake),
            ReplicationCollector(self._replicas, self._in_sync, holder),
            RetentionCollector(metrics, self.retention, clock),
        )
        self.servicer = BrokerServicer(
            identity,
            intake,
            _structured_encoder(around, opened),
            self.reader,
            consuming,
            ports.gate,
            metrics,
        )
        store, state, members = opened.store, opened.state, groups.table
        self.admin_servicer = BrokerAdminServicer(
            Holdings(
                identity,
                store,
                state,
                self.reader,
                consuming,
                members,
                self.retention,
                clock.wall_ms(),
            ),
            self.keeper,
            _new_topic(config),
        )
        self.hand_over = HandOver(self.storage, self.keeper, self._replicas, holder, ended)
        self.member_servicer = MemberServicer(
            arrivals=ArrivalsServicer(
                self.storage.arrivals,
                self.reader,
                self.storage.hurry,
                ports.gate,
                ArrivalCounts(metrics, consuming, state),
            ),
            pulls=PullsServicer(self.servicer.Pull, ports.gate),
            replication=ReplicationServicer(
                self._replicas, self._in_sync, self.hand_over, identity, config, ports.gate
            ),
        )

    def _forget_topic(self, topic: str) -> None:
        self._metrics.forget_topic(topic)
        self.storage.arrivals.topic_changed(topic)

    def background(self) -> list[Coroutine[Any, Any, None]]:
        """What runs as long as the broker does."""
        return [
            self.storage.run(
                self._config.flush_interval_consume_queue / 1000,
                self._config.commit_interval_commit_log / 1000
                if self._config.transient_store_pool_enable
                else 0.0,
            ),
            self.registrar.run(),
            self._state_writer.write(),
            self._state_writer.export(),
            self.retention.run(),
            *([] if self._holder is None else [self._hold(self._holder)]),
        ]

    async def _hold(self, holder: LeaseHolder) -> None:
        """Renew the lease and keep its sets; raises Deposed."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(holder.run())
                tasks.create_task(self._in_sync.run())
        except* Deposed:
            self.storage.depose()
            raise

    def _registration(self) -> namesrv_pb2.RegisterMemberRequest:
        store = self.storage.store
        topics = [convert.topic_proto(config) for config in self.state.topics]
        if self._config.auto_create_topic_enable:
            count = min(AUTO_CREATED_QUEUES_MAX, self._config.default_topic_queue_nums)
            topics.append(convert.topic_proto(TopicConfig(AUTO_CREATE_TOPIC, count, count)))
        return namesrv_pb2.RegisterMemberRequest(
            member=self._around.member_proto(common_pb2.MEMBER_ROLE_WRITER, store.epoch),
            data_version=namesrv_pb2.DataVersion(
                epoch=store.epoch, counter=self.state.topics.version
            ),
            topics=topics,
        )

    async def close(self) -> None:
        """The last of the broker: the rest of the offsets, the exports, the store's clean mark."""
        try:
            if not self.storage.failed:
                await self._state_writer.finish()
        finally:
            self.reader.close()
            self._replicas.close()
            await asyncio.to_thread(self.retention.close)
            await asyncio.to_thread(self.storage.close)


def _structured_encoder(around: Surroundings, opened: Opened) -> StructuredEncoder:
    """For messages that come field by field."""
    return StructuredEncoder(
        opened.state.topics,
        min(AUTO_CREATED_QUEUES_MAX, around.config.default_topic_queue_nums),
        around.identity.store_host,
        around.identity.batch_limits,
        around.clock,
        random.Random(),
    )


def _intake_policy(config: MemberConfig) -> IntakePolicy:
    return IntakePolicy(
        in_flight_bytes_max=config.send_in_flight_bytes_max,
        auto_create_topics=config.auto_create_topic_enable,
        new_topic=_new_topic(config),
        sync_flush_timeout_s=config.sync_flush_timeout / 1000,
        slave_timeout_s=config.slave_timeout / 1000,
    )


def _set_policy(config: MemberConfig) -> SetPolicy:
    return SetPolicy(
        lag_s_max=config.in_sync_lag_s_max,
        size_min=config.min_in_sync_replicas,
        promote_async=config.promote_async is PromoteAsync.BOUNDED,
        async_lag_bytes_max=config.async_promote_lag_max,
        async_silence_s_max=config.async_promote_silence_max,
        group_size=len(config.peers),
    )


def _readable_at_start(opened: Opened, holder: LeaseHolder | None) -> ReadableMaxima | None:
    """None: everything."""
    if holder is None:
        return None
    return readable_at_start(opened.store, _demands_in(opened.state), holder.record.shown)


def _demands_in(state: BrokerState) -> Callable[[str], DurabilityClass]:
    def demands_of(topic: str) -> DurabilityClass:
        known = is_system(topic) or topic in state.topics
        return DurabilityClass.of(*state.topics.demands(topic)) if known else STRICTEST

    return demands_of


def _new_topic(config: MemberConfig) -> TopicConfig:
    """What a request that says nothing asks for."""
    count = config.default_topic_queue_nums
    return TopicConfig(
        "",
        count,
        count,
        flush_mode=config.flush_disk_type.value,
        replication_mode=config.replication_mode,
    )
