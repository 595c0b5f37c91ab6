"""A member as a process: what broker and haslave have in common, and the order of start and stop.

Start: ports (health answers) → metrics → store and state in a thread → parts → ready. Stop: not
ready, refuse what is new, unregister → let calls in flight end → stop the tasks → close the store.
A change of role is a stop that names the next role: see :mod:`cometmq.member.main`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable
from contextlib import AsyncExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, ClassVar, Protocol, Self

from prometheus_client import Gauge
from prometheus_client.registry import Collector

from cometmq import native
from cometmq.clock import Clock, SystemClock
from cometmq.errors import ConfigInvalid
from cometmq.format.batch import BatchLimits
from cometmq.format.delayed import use_levels
from cometmq.format.record import BLANK_BYTES, host_bytes
from cometmq.member.clocks import Clocks
from cometmq.member.config import MemberConfig
from cometmq.member.context import MemberContext
from cometmq.member.election_metrics import Elections
from cometmq.member.hosts import BrokerIdentity
from cometmq.member.lease.lease_holder import DEPOSED, Deposed
from cometmq.member.listen import Ports, rebound
from cometmq.member.metrics import DiskCollector, MemberMetrics
from cometmq.member.pod.events import UNRECORDED, EventReason, EventRecorder
from cometmq.member.pod.reporter import EventCollector, PodReporter, open_reporter
from cometmq.member.recovery import RecoveryGauges, RecoveryProgress, RecoveryStopped
from cometmq.member.registration import Registrar
from cometmq.member.role_change import FOLLOWER_MODULE, WRITER_MODULE, RoleChange, recent
from cometmq.member.rpc.servicers import Servicers
from cometmq.member.unplanned_start import UnplannedStart
from cometmq.rpc.loop_lag import LoopLagMonitor
from cometmq.rpc.metrics import RefusedCallers, RpcMetrics
from cometmq.rpc.metrics_server import MetricsServer, start_metrics_server
from cometmq.rpc.process import StopSignal, announce
from cometmq.rpc.readiness import await_registration, open_server
from cometmq.rpc.server import join_address
from cometmq.rpc.tasks import race
from cometmq.store.follower import FollowerStore
from cometmq.telemetry import fields, new_registry

log = logging.getLogger(__name__)

WRITER, FOLLOWER = "writer", "follower"  # what MemberApp.role says
# An alert waits for the lag job's exports.
OFFSET_EXPORT = "/cometmq.v1.BrokerAdminService/SnapshotOffsets"
DEPOSED_GRACE_S = 0.5


class Parts(Protocol):
    """Everything of a role that needs the open store."""

    @property
    def servicers(self) -> Servicers: ...
    @property
    def registrar(self) -> Registrar: ...
    @property
    def collectors(self) -> Iterable[Collector]: ...
    @property
    def seconds(self) -> float:
        """How long opening the store took."""

    def background(self) -> list[Coroutine[Any, Any, None]]:
        """Tasks that run as long as the role lasts."""

    async def close(self) -> None:
        """Close the store with its clean mark."""


class MemberApp(ABC):
    """A member on ``ports``, which have started already. It is ready within ``async with``, unless
    it takes another role at once: see :meth:`until`.

    ``before`` is the change into this role; None: the process has just started. ``stop`` ends every
    wait.
    """

    name: ClassVar[str]  # of the service
    role: ClassVar[str]

    def __init__(
        self,
        config: MemberConfig,
        ports: Ports,
        *,
        before: RoleChange | None = None,
        stop: StopSignal | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._config = config
        use_levels(config.delay_levels_s())
        self._ports = ports
        self._before = before
        self._stop = stop
        self._clock = clock or SystemClock()
        self._registry = new_registry(self.name, self._clock)
        self._metrics = MemberMetrics(
            self._registry, config.cluster, config.broker_group, self._clock
        )
        self._recovery = RecoveryGauges(self._registry)
        self._registry.register(DiskCollector(self._metrics, config.store_path))
        self._registry.register(RefusedCallers(ports.secret))
        self._loop_lag = LoopLagMonitor(
            self._registry, ports.gate, self._clock, config.loop_stall_ms
        )
        self._elections = Elections(self._registry, before)
        self._unplanned = UnplannedStart(self._registry, before, self._clock)
        self._clocks = Clocks(self._clock, config.clock_skew_s_max, before)
        self._registry.register(self._clocks)
        # In a pod, from the start of the process on.
        self._reporter: PodReporter | None = None if before is None else before.reporter
        self._count_roles()
        self._stack = AsyncExitStack()
        self._change: RoleChange | None = None
        self._ended = asyncio.Event()
        self._metrics_port = 0
        self.metrics_address = ""

    def _count_roles(self) -> None:
        role = Gauge(
            "cometmq_role",
            "1 for the present role of this process.",
            ["role"],
            registry=self._registry,
        )
        role.labels(self.role).set(1)
        changes = Gauge(
            "cometmq_role_changes_recent",
            "Changes of role within the last minute; more than three make it wait.",
            registry=self._registry,
        )
        changes.set_function(lambda: recent(self._before, self._clock.boottime_s()))

    async def __aenter__(self) -> Self:
        async with self._stack:
            await self._start()
            self._stack = self._stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stack.__aexit__(kind, error, traceback)

    async def until(self, stop: StopSignal) -> None:
        """Wait for a signal to stop, or for the end of this role."""
        await race(stop.wait(), self._ended.wait())
        if stop.is_set and self._change is None:
            await self._retire()
        if stop.is_set:
            self._show_role("")  # a pod that ends has none

    @property
    def change(self) -> RoleChange | None:
        """The next role, once this one has closed; None: a signal to stop has come."""
        return None if self.stopping else self._change

    @property
    def events(self) -> EventRecorder:
        """Where this member says what has happened to it."""
        return self._reporter or UNRECORDED

    @property
    def label(self) -> str:
        """This member, for people."""
        return f"member {self._config.member_id} of broker group {self._config.broker_group}"

    def _report(self) -> None:
        """From now on Kubernetes shows what happens to this member."""
        if self._reporter is None:
            self._reporter = open_reporter(self._config, WRITER, self._clock)
        self._registry.register(EventCollector(self._reporter))
        if self._reporter is not None:
            self._stack.push_async_callback(self._end_reports, self._reporter)

    async def _end_reports(self, reporter: PodReporter) -> None:
        """The next role goes on with the reporter: none waits for what it has to write."""
        if self.change is None:
            await asyncio.to_thread(reporter.close)

    def _show_role(self, role: str) -> None:
        if self._reporter is not None:
            self._reporter.show_role(role)

    async def _retire(self) -> None:  # noqa: B027  most have nothing to do
        """A signal to stop has come: what the role does for its group before it drains."""

    async def ended(self) -> RoleChange:
        """Wait for the end of this role, for tests."""
        await self._ended.wait()
        assert self._change is not None
        return self._change

    # --- for the roles ----------------------------------------------------------------------------

    @abstractmethod
    async def _open(self, context: MemberContext) -> Parts | None:
        """Open the store and put the parts together. None after :meth:`become`, and when a signal
        to stop came first; then the store is closed. RecoveryStopped: the signal came during
        recovery.
        """

    def become(
        self,
        module: str,
        reason: str,
        log_end: int | None = None,
        *,
        heard_s: float | None = None,
    ) -> None:
        """This role is to end, and that of ``module`` follows."""
        assert module in (WRITER_MODULE, FOLLOWER_MODULE), module
        if self._change is not None:
            return
        ports = {
            "port": self._ports.clients.port,
            "internal_port": self._ports.internal.port,
            "metrics_port": self._metrics_port,
        }
        counts = self._elections.counts
        change = RoleChange(
            module,
            reason,
            ports,
            log_end,
            heard_s=heard_s,
            elections=counts,
            clocks=self._clocks.readings,
            unplanned_ms=self._unplanned.time_ms,
            reporter=self._reporter,
        )
        self._change = change.after(self._before, self._clock.boottime_s())
        log.info("role ends", extra=fields(next=module, reason=reason))
        self._ended.set()

    def pass_on(self, store: FollowerStore) -> None:
        """The next role goes on with the open ``store``, which nothing uses any more."""
        assert self._change is not None, "a role that lasts needs its store"
        self._change = replace(self._change, store=store)

    def _progress(self) -> RecoveryProgress:
        """For opening the store."""
        return RecoveryProgress(self._recovery, self._clock, lambda: self.stopping)

    @property
    def stopping(self) -> bool:
        """A signal to stop has come."""
        return self._stop is not None and self._stop.is_set

    # --- start ------------------------------------------------------------------------------------

    async def _start(self) -> None:
        await self._serve_metrics()  # long before the rest: a recovery may take minutes
        self._report()
        self._unplanned.look(self._config.store_path)
        identity = await self._identity()
        context = MemberContext(
            self._config,
            identity,
            self._ports,
            self._metrics,
            self._clock,
            self._clocks,
            self.events,
        )
        try:
            parts = await self._open(context)
        except RecoveryStopped as stopped:
            log.info("a stop has ended the recovery of the store", extra=fields(read=str(stopped)))
            return
        if parts is None:
            return
        assert self._change is None, "a role that ends opens nothing"
        await self._ports.set_started()
        self._recovery.seconds.set(parts.seconds)
        self._stack.push_async_callback(parts.close)
        for collector in parts.collectors:
            self._registry.register(collector)
        observer = RpcMetrics(self._registry, self._clock, awaited=[OFFSET_EXPORT])
        parts.servicers.add_to(self._ports, observer)
        tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
        restarts = context.restarts
        for coroutine in (restarts.keep("loop lag", self._loop_lag.run), *parts.background()):
            name = getattr(coroutine, "__qualname__", "")
            task = tasks.create_task(self._until_deposed(restarts.name(name, coroutine)))
            self._stack.callback(task.cancel)
        self._stack.push_async_callback(self._drain, parts)
        self._show_role(self.role)
        await open_server(self._ports)
        if self.role == WRITER:
            self._elections.ready(self._clock.boottime_s())
        await await_registration(self._ports, parts.registrar, tasks, self._stack)
        address, loops = self._ports.clients.address, native.description()
        announce(
            self._config.announce_file,
            address=address,
            internal_address=self._ports.internal.address,
            metrics_address=self.metrics_address,
        )
        log.info("ready", extra=fields(role=self.role, address=address, loops=loops))

    async def _until_deposed(self, coroutine: Coroutine[Any, Any, None]) -> None:
        try:
            await coroutine
        except* Deposed as errors:
            reason = "; ".join(map(str, errors.exceptions))
            log.warning("deposed", extra=fields(reason=reason))
            self.events.record(
                EventReason.WRITER_DEPOSED, f"{self.label} writes no longer: {reason}"
            )
            self.become(FOLLOWER_MODULE, DEPOSED)

    async def _serve_metrics(self) -> None:
        host = self._config.listen_host
        port = self._config.metrics_port
        labels = self._metrics.process_labels

        async def bind() -> MetricsServer:
            return start_metrics_server(self._registry, host=host, port=port, labels=labels)

        metrics = await (bind() if self._before is None else rebound(bind))
        self._stack.push_async_callback(asyncio.to_thread, metrics.close)
        self._metrics_port = metrics.port
        self.metrics_address = join_address(host, metrics.port)

    async def _drain(self, parts: Parts) -> None:
        log.info("draining")
        await self._ports.begin_drain()
        # A follower that is about to lead stays in the routes. Its writer has just left
        # them: without both the group would be gone, and consumers would give its queues back.
        if self._change is None or self.role == WRITER:
            await parts.registrar.unregister()
        # A deposed writer can answer none of the calls in flight.
        deposed = self._change is not None and self._change.reason == DEPOSED
        grace_s = self._config.drain_grace_s
        await self._ports.stop(min(grace_s, DEPOSED_GRACE_S) if deposed else grace_s)

    async def _identity(self) -> BrokerIdentity:
        config = self._config
        host = config.advertised_host or config.listen_host
        try:
            found = await asyncio.get_running_loop().getaddrinfo(
                host, None, type=socket.SOCK_STREAM
            )
        except OSError as error:
            raise ConfigInvalid(f"option advertised_host: {host} has no address: {error}") from None
        store_host = host_bytes(str(found[0][4][0]), self._ports.clients.port)
        limits = BatchLimits(
            body_bytes_max=config.max_message_size,
            timer_delay_ms_max=1000 * config.timer_max_delay_sec,
        )
        # A batch lies in one log file.
        file_bytes = config.mapped_file_size_commit_log - BLANK_BYTES
        limits = replace(limits, batch_bytes_max=min(limits.batch_bytes_max, file_bytes))
        return BrokerIdentity(config.cluster, config.broker_group, store_host, limits)
