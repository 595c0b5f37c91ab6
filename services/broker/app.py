"""The writer put together: the composition root. How a member starts and stops is in
:mod:`cometmq.member.app`; here is how one comes to write, and which parts it has then: what it
writes, the copies of that, what its clients get.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any

from prometheus_client.registry import Collector

from cometmq.errors import CometError, LeaseUnavailable, StaleEpoch
from cometmq.member.app import WRITER, MemberApp
from cometmq.member.clocks import GuardedClock
from cometmq.member.context import MemberContext
from cometmq.member.lease.lease_holder import DEPOSED, Deposed, LeaseHolder
from cometmq.member.lease.stores import Lease, Reading, open_lease
from cometmq.member.pod.events import EventReason
from cometmq.member.registration import Registrar
from cometmq.member.role_change import FOLLOWER_MODULE
from cometmq.member.rpc import convert
from cometmq.member.rpc.servicers import Servicers
from cometmq.member.state.keeper import StateDemands
from cometmq.member.state.opening import Opened, open_writer
from cometmq.member.unplanned_start import NOT_HOLDER
from cometmq.messaging.topics import AUTO_CREATE_TOPIC
from cometmq.model import TopicConfig
from cometmq.replication.lease import LeaseRecord, Reason
from cometmq.telemetry import OutageLogger, fields
from cometmq.v1 import namesrv_pb2
from services.broker.admin_servicer import BrokerAdminServicer
from services.broker.client_api import ClientApi
from services.broker.delay.delayed_list import DelayedList
from services.broker.replication.handover import HandOver
from services.broker.replication.insync import InSyncSet, policy_of
from services.broker.replication.replicas import FollowerTable
from services.broker.replication.replication import Replication
from services.broker.replication.servicer import ReplicationServicer
from services.broker.writer_core import WriterCore

log = logging.getLogger(__name__)

LEASE_RETRY_S = 1.0
RETIRE_S_MAX = 5.0  # that a hand-over may delay a stop


class App(MemberApp):
    """The writer of a broker group. With a lease it must be the recorded holder, which haslave saw
    to before its role ended; if it is not, it becomes a follower.
    """

    name = "broker"
    role = WRITER
    _hand_over: HandOver | None = None  # while it writes under a lease

    async def _open(self, context: MemberContext) -> _Parts | None:
        if not self._config.lease:
            return self._parts(context, await self._open_store(context, None), None)
        lease = open_lease(self._config.lease, self._config.broker_group, self._config.pod_name)
        reading = await self._our_lease(lease)
        if reading is None:
            return None
        assert reading.record is not None
        holder = LeaseHolder(lease, reading, self._config.lease_renew_s, self._clock)
        async with holder.renewed():  # recovery may take longer than the lease lasts
            opened = await self._open_store(context, reading.record)
        if await self._begin(holder, opened, context.internal_address):
            self._elections.won(_reason(reading.record))
            self._record_election(_reason(reading.record), opened.store.epoch)
            return self._parts(context, opened, holder)
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

    def _record_election(self, reason: Reason, epoch: int) -> None:
        is_planned = reason in (Reason.FIRST, Reason.RESTART, Reason.HANDOVER)
        what = EventReason.WRITER_ELECTED if is_planned else EventReason.FAILED_OVER
        self.events.record(what, f"{self.label} leads, {reason.value}, epoch {epoch}")

    async def _retire(self) -> None:
        """Let a follower go on at once, where one can: nobody has to wait for the lease to end."""
        if self._hand_over is None or not self._config.hand_over_at_stop:
            return
        try:
            async with asyncio.timeout(RETIRE_S_MAX):
                done = await self._hand_over.step_down(None)
        except (CometError, TimeoutError) as error:
            reason = str(error) or "no follower caught up in time"
            if self._hand_over.is_alone_in_sync and self._config.has_followers:
                log.error("stops, and no other member has everything", extra=fields(reason=reason))
                alone = f"{self.label} stops, and no other member has everything: {reason}"
                self.events.record(EventReason.STOPPED_ALONE, alone)
            else:
                log.info("stops without a hand-over", extra=fields(reason=reason))
                if isinstance(error, TimeoutError):
                    self.events.record(
                        EventReason.HAND_OVER_FAILED, f"stops all the same: {reason}"
                    )
        else:
            log.info("handed over before the stop", extra=fields(to=done.member_id))

    async def _our_lease(self, lease: Lease) -> Reading | None:
        outage = OutageLogger(log, logging.WARNING, "waiting for the lease", "the lease is known")
        while not self.stopping:
            try:
                reading = await lease.read()
            except LeaseUnavailable as error:
                outage.failing(error)
                await asyncio.sleep(LEASE_RETRY_S)
                continue
            outage.recovered()
            record = reading.record
            if record and not record.released and record.holder_id == self._config.member_id:
                return reading
            self.become(FOLLOWER_MODULE, NOT_HOLDER)
            return None
        return None

    async def _open_store(self, context: MemberContext, lease: LeaseRecord | None) -> Opened:
        before = self._before
        reason = Reason.RESTART if lease is None else _reason(lease)
        handed_over = reason is Reason.HANDOVER and before is not None
        return await asyncio.to_thread(
            open_writer,
            self._config,
            context.identity.batch_limits,
            context.identity.store_host,
            GuardedClock(self._clock, context.clocks),
            epoch_floor=0 if lease is None else lease.epoch,
            log_end=before.log_end if before is not None and handed_over else None,
            keeps_positions=reason.keeps_positions,
            branches=() if lease is None else lease.epochs,
            progress=self._progress(),
            follower=None if before is None else before.store,
        )

    def _parts(self, context: MemberContext, opened: Opened, holder: LeaseHolder | None) -> _Parts:
        parts = _Parts(context, opened, holder, partial(self.become, FOLLOWER_MODULE))
        self._hand_over = parts.hand_over if holder is not None else None
        return parts


def _reason(lease: LeaseRecord) -> Reason:
    """Why we lead. What the lease says holds also when the process that took it has died since."""
    return Reason.RESTART if lease.opened else Reason(lease.reason)


class _Parts:
    """Everything that needs the open store."""

    def __init__(
        self,
        context: MemberContext,
        opened: Opened,
        holder: LeaseHolder | None,
        ended: Callable[[str], None],
    ) -> None:
        config = context.config
        self._context = context
        self.seconds = opened.seconds
        self.registrar = Registrar(
            config.namesrv,
            self._registration,
            config.register_namesrv_period / 1000,
            secret=context.ports.secret,
            overtaken=self._overtaken,
            clocks=context.clocks,
        )
        followers, demands = FollowerTable(), StateDemands(opened.state.topics)
        in_sync = InSyncSet(
            followers, holder, demands, policy_of(config), context.clock, context.events
        )
        self._writer = writer = WriterCore(
            context, opened, in_sync, demands, holder, self.registrar.changed
        )
        self._replication = replication = Replication(
            context, writer, followers, in_sync, holder, ended
        )
        self._client_api = client_api = ClientApi(context, writer, replication)
        self.hand_over = replication.hand_over
        core, coordinator = writer.core, client_api.coordinator
        admin = BrokerAdminServicer(
            core,
            coordinator,
            writer.keeper,
            writer.dead_letters,
            writer.resender,
            client_api.resets,
            client_api.clients,
            client_api.live_clients,
            writer.half_admin,
            DelayedList(writer.timers, writer.recalls, writer.storage, core.identity.broker_group),
            client_api.policy.new_topic,
        )
        members = ReplicationServicer(
            context,
            core,
            coordinator,
            client_api.servicer.pull,
            replication.replicas,
            in_sync,
            replication.hand_over,
        )
        self.servicers = Servicers(
            client_api.servicer, admin, members, writer.storage.until_certain
        )
        self.collectors: Iterable[Collector] = (
            client_api.collector,
            replication.collector,
            core.collector,
        )

    def background(self) -> list[Coroutine[Any, Any, None]]:
        """The coroutines that run as long as the broker does."""
        keep = self._context.restarts.keep
        return [
            *self._writer.background(),
            self.registrar.run(),
            keep("idle broadcasters", self._client_api.forget_broadcasters),
            keep("trace topic", self._client_api.make_trace_topic),
            keep("changed client ids", self._client_api.changed_ids.watch),
            *self._replication.background(),
        ]

    async def _overtaken(self, error: StaleEpoch) -> None:
        await self._replication.overtaken(error)

    def _registration(self) -> namesrv_pb2.RegisterMemberRequest:
        store, state = self._writer.storage.store, self._writer.core.state
        topics = [convert.topic_proto(config) for config in state.topics]
        policy = self._client_api.policy
        if policy.auto_create_topics:
            count = policy.auto_created_queues
            topics.append(convert.topic_proto(TopicConfig(AUTO_CREATE_TOPIC, count, count)))
        return namesrv_pb2.RegisterMemberRequest(
            member=self._writer.described(),
            data_version=namesrv_pb2.DataVersion(epoch=store.epoch, counter=state.topics.version),
            topics=topics,
            store_id=store.store_id,
        )

    async def close(self) -> None:
        """The last of the broker."""
        self._replication.replicas.close()
        await self._writer.close()
