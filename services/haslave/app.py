"""The follower put together: the composition root. How a member starts and stops is in
:mod:`cometmq.member.app`; here is what only a follower has.

Every member of a group is born here. It opens its store, looks at the lease, and either leads at
once, without ever having served, or follows until it may. What ends it: the lease (then it becomes
``services.broker``, which goes on with the open store), or a log that went another way than the
writer's (then, after everything else has stopped, the log is cut, and a follower begins again).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

from prometheus_client.registry import Collector

from cometmq.errors import StateTooNew
from cometmq.member.app import FOLLOWER, MemberApp
from cometmq.member.context import MemberContext, MemberCore
from cometmq.member.lease.peers import Peers
from cometmq.member.lease.stores import open_lease
from cometmq.member.metrics import StoreCollector
from cometmq.member.pod.events import EventReason, EventRecorder
from cometmq.member.read.group_progress import GroupReads
from cometmq.member.read.replica_selector import ReplicaSelector
from cometmq.member.registration import Registrar
from cometmq.member.role_change import FOLLOWER_MODULE, WRITER_MODULE
from cometmq.member.rpc.admin_servicer import AdminReadServicer
from cometmq.member.rpc.broker_servicer import ReadServicer
from cometmq.member.rpc.servicers import Servicers
from cometmq.member.state.follower import FollowerStorage, cut
from cometmq.member.state.opening import OpenedFollower, can_lead, open_copy
from cometmq.messaging.replica_selection import ReadReplica
from cometmq.messaging.state import BrokerState
from cometmq.replication.election import Follow, Lead, ReplicaStatus
from cometmq.replication.lease import ReplicaId
from cometmq.store.follower import FollowerStore
from cometmq.telemetry import fields
from cometmq.v1 import common_pb2, namesrv_pb2
from services.haslave.elector import Elector
from services.haslave.following import CutNeeded, Follower, Following
from services.haslave.metrics import FollowerCollector
from services.haslave.readiness import InSyncReadiness
from services.haslave.servicer import FollowerServicer

log = logging.getLogger(__name__)

LEAVE_S_MAX = 2.0  # that the announcement may delay a stop


class App(MemberApp):
    """A follower of a broker group; without a lease there is no writer to follow, and it leads."""

    name = "haslave"
    role = FOLLOWER
    _following: Following | None = None  # once the store is open

    async def _open(self, context: MemberContext) -> _Parts | None:
        if not self._config.lease:
            self.become(WRITER_MODULE, "alone")
            return None
        config, metrics, clock = context.config, context.metrics, context.clock
        try:
            opened = await asyncio.to_thread(open_copy, config, clock, progress=self._progress())
        except StateTooNew as error:
            await self._wait_for_release(error, context.events)
            return None
        storage = FollowerStorage(
            opened.store,
            opened.state,
            context.flush_policy(),
            clock,
            metrics.flush_s.observe,
            metrics.forget_topic,
            metrics.forget_group,
        )
        peers = Peers(config.broker_group, config.peer_addresses(), context.ports.secret)
        status = partial(
            _replica_status, context, storage, opened.state.state, peers.ids, self._reads_state
        )
        lease = open_lease(config.lease, config.broker_group, config.pod_name)
        elector = Elector(lease, config.lease_duration_s, status, peers, clock, context.events)
        step = await elector.look()
        if isinstance(step, Lead):
            self.lead(step, opened.store, None)
            await asyncio.to_thread(self.end_store, storage)
            return None
        parts = _Parts(self, context, opened, storage, elector)
        self._following = parts.following
        if step is not None:
            parts.follow(step)
        return parts

    def _reads_state(self) -> bool:
        misfit = None if self._following is None else self._following.misfit
        return not isinstance(misfit, StateTooNew)

    async def _wait_for_release(self, error: StateTooNew, events: EventRecorder) -> None:
        """This program cannot read the state: it takes no role, serves nothing, and waits for a
        signal to stop. As a process that ends it would begin again and again.
        """
        log.error(
            "waits for a release that reads this store: not ready, and takes no role",
            extra=fields(error=error.message, advice=error.advice),
        )
        events.record(EventReason.NOT_READY, f"waits for another release: {error.message}")
        await self._ports.set_started()

    async def _retire(self) -> None:
        """Announce the stop, so that sends do not wait until this follower's silence shows."""
        if self._following is None:
            return
        try:
            async with asyncio.timeout(LEAVE_S_MAX):
                await self._following.leave()
        except TimeoutError:
            log.info("stops without the writer's leave")

    def lead(self, lead: Lead, store: FollowerStore, heard_s: float | None) -> None:
        """The lease is ours. ``heard_s``: when the last frame of the writer before came."""
        self.become(WRITER_MODULE, lead.reason.value, store.appended_offset, heard_s=heard_s)

    def end_store(self, storage: FollowerStorage) -> None:
        """Nothing follows any more: the store is for the writer that this member becomes, or it is
        closed. Blocking.
        """
        storage.end_threads()
        leads = self.change is not None and self.change.module == WRITER_MODULE
        if leads and not storage.failed and can_lead(self._config, storage.store):
            self.pass_on(storage.store)
        else:
            storage.close()


def _replica_status(
    context: MemberContext,
    storage: FollowerStorage,
    state: BrokerState,
    peer_ids: frozenset[int] | None,
    reads_state: Callable[[], bool],
    promised_until_s: float,
    forced: bool,
) -> ReplicaStatus:
    """What this member brings into an election."""
    config, store = context.config, storage.store
    return ReplicaStatus(
        config.broker_group,
        config.member_id,
        store.store_id,
        context.internal_address,
        store.epoch,
        store.appended_offset,
        store.former_store_id,
        promised_until_s,
        peer_ids,
        forced,
        epochs=tuple(store.epochs),
        counted_in=state.generations.last_fork,
        shown=storage.watermarks.shown,
        clock_is_off=context.clocks.is_off,
        reads_state=reads_state(),
    )


class _Parts:
    """Everything that needs the open store."""

    def __init__(
        self,
        app: App,
        context: MemberContext,
        opened: OpenedFollower,
        storage: FollowerStorage,
        elector: Elector,
    ) -> None:
        config, identity, metrics = context.config, context.identity, context.metrics
        self._app = app
        self._context = context
        self._elector = elector
        self._cut: CutNeeded | None = None
        self._lease_known = False
        self._ready = InSyncReadiness(config.in_sync_ready_wait_s)
        self._unready_recorded = False  # as an event
        self._store = opened.store
        self.seconds = opened.seconds
        register_s = config.register_namesrv_period / 1000
        self.registrar = Registrar(
            config.namesrv,
            self._registration,
            register_s,
            secret=context.ports.secret,
            clocks=context.clocks,
        )
        self._storage = storage
        self._core = core = MemberCore(context, storage, opened.state.state, copy=True)
        follower = Follower(
            config.cluster,
            config.broker_group,
            config.member_id,
            config.mapped_file_size_commit_log,
            context.ports.secret,
        )
        self.following = following = Following(
            storage, follower, elector.promise, context.clock, context.clocks
        )
        selector = ReplicaSelector(
            config.slave_read_enable,
            config.access_message_in_memory_max_ratio,
            # Of the followers this one knows only itself.
            lambda: [ReadReplica(config.member_id, following.behind_bytes)],
        )
        groups = GroupReads(
            core.state, core.reader, core.members, selector, context.clock, metrics.throttled
        )
        clients = ReadServicer(identity, core.reader, groups, metrics, self._described)
        members = FollowerServicer(context, core, groups, clients.pull, elector, self._misfit)
        self.servicers = Servicers(clients, AdminReadServicer(core, groups), members)
        self.collectors: Iterable[Collector] = (
            StoreCollector(metrics, storage, core.state),
            FollowerCollector(self.following, config.member_id, opened.store.kept_aside_bytes),
            core.collector,
        )

    def _misfit(self) -> str:
        error = self.following.misfit
        return "" if error is None else f"{error.name()} {error.message}"

    def background(self) -> list[Coroutine[Any, Any, None]]:
        """Tasks that run as long as the process follows."""
        return [
            self._storage.run(self._context.config.flush_interval_consume_queue / 1000),
            self.registrar.run(),
            self._context.restarts.keep("retention", self._core.retention.run),
            self._follow(),
            self._watch_lease(),
            self._register_epochs(),
        ]

    async def _follow(self) -> None:
        try:
            await self.following.run()
        except CutNeeded as needed:
            self._cut = needed
            log.warning(
                "the log went another way",
                extra=fields(
                    cut=needed.offset, whole=needed.whole, end=self._store.appended_offset
                ),
            )
            self._app.become(FOLLOWER_MODULE, "reset" if needed.whole else "cut")

    async def _watch_lease(self) -> None:
        """Look at the lease each ``lease_poll_s``, when the stream ends, when it may be taken."""
        pause_s = self._context.config.lease_poll_s
        await self._report_ready()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self.following.lost.wait()
            self.following.lost.clear()
            step = await self._elector.look()
            await self._report_ready()
            pause_s = self._context.config.lease_poll_s
            if isinstance(step, Lead):
                self.following.follow("")
                self._app.lead(step, self._store, self.following.heard_s)
                return
            if step is not None:
                self.follow(step)
                pause_s = min(pause_s, step.look_again_s or pause_s)

    async def _report_ready(self) -> None:
        """Tell health checks when this member enters or leaves the in-sync set."""
        me = ReplicaId(self._context.config.member_id, self._store.store_id)
        now_s = self._context.clock.boottime_s()
        has_changed = self._ready.saw(self._elector.record, me, now_s, self.following.misfit)
        self._record_ready(now_s)
        if not has_changed:
            return
        await self._context.ports.hold_ready(not self._ready.is_ready)
        if self._ready.is_ready:
            log.info("ready for health checks")
        else:
            log.warning("not ready for health checks", extra=fields(reason=self._ready.reason))

    def _record_ready(self, now_s: float) -> None:
        events = self._context.events
        if self._unready_recorded and self._ready.is_ready:
            self._unready_recorded = False
            events.record(EventReason.READY, "ready for health checks")
        elif not self._unready_recorded and self._ready.is_remarkable(now_s):
            self._unready_recorded = True
            why = f"not ready for health checks: {self._ready.reason}"
            events.record(EventReason.NOT_READY, why)

    def follow(self, step: Follow) -> None:
        """Another member has the lease, or none."""
        if not self._lease_known:
            self._lease_known = True
            self.registrar.changed()
        # A connected writer whose lease is gone writes it again: this member still follows it.
        if step.address or not self.following.connected:
            self.following.follow(step.address)

    async def _register_epochs(self) -> None:
        """Register again when the epoch of a writer is adopted."""
        while True:
            await self.following.adopted.wait()
            self.following.adopted.clear()
            self.registrar.changed()

    def _registration(self) -> namesrv_pb2.RegisterMemberRequest | None:
        epoch = self._store.epoch
        # Without an epoch no writer was ever here. Without the lease this member may be the writer
        # that restarts: a registration as follower would change the routes for a moment.
        if not epoch or not self._lease_known:
            return None
        return namesrv_pb2.RegisterMemberRequest(
            member=self._described(), store_id=self._store.store_id
        )

    def _described(self) -> namesrv_pb2.Member:
        return self._context.member_proto(common_pb2.MEMBER_ROLE_FOLLOWER, self._store.epoch)

    async def close(self) -> None:
        """The last of the follower: the cut, if there is one to make, and the store's mark."""
        self._core.reader.close()
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._core.retention.close()
        if self._cut is not None and not self._storage.failed:
            self._storage.end_threads()
            if self._cut.whole:
                self._store.reset_to(self._cut.offset)
            else:
                assert self._cut.offset <= self._store.appended_offset
                cut(self._store, self._cut.offset)
        self._app.end_store(self._storage)
