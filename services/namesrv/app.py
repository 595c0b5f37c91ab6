"""The composition root of a name server."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from types import TracebackType

from cometmq.clock import Clock, SystemClock
from cometmq.rpc.background import Restarts, failures_of
from cometmq.rpc.loop_lag import LoopLagMonitor
from cometmq.rpc.metrics import RefusedCallers, RpcMetrics
from cometmq.rpc.metrics_server import start_metrics_server
from cometmq.rpc.process import announce
from cometmq.rpc.server import RpcServer, join_address
from cometmq.telemetry import fields, new_registry
from cometmq.v1.namesrv_pb2_grpc import add_NameServiceServicer_to_server
from services.namesrv.config import NamesrvConfig
from services.namesrv.metrics import PROCESS_LABELS, NamesrvMetrics
from services.namesrv.pullholds import PullholdTable
from services.namesrv.routes import RouteTable
from services.namesrv.run_mark import RunMark
from services.namesrv.servicer import NameServicer
from services.namesrv.values import Values
from services.namesrv.watches import Registrations, Watchers

_log = logging.getLogger(__name__)


class App:
    """A name server on ``server``, which has started already; ready within ``async with``."""

    def __init__(
        self, config: NamesrvConfig, server: RpcServer, *, clock: Clock | None = None
    ) -> None:
        self._config = config
        self._server = server
        self._clock = clock or SystemClock()
        self._watchers = Watchers(
            streams_max=config.watch_streams_max,
            topics_max=config.watch_topics_max,
            streams_per_peer_max=config.watch_streams_per_peer_max,
            topics_per_peer_max=config.watch_topics_per_peer_max,
        )
        self._registrations = Registrations(streams_max=config.members_max + config.holds_max)
        self._table = RouteTable(
            silence_max_s=config.member_silence_max_s,
            members_max=config.members_max,
            topics_max=config.topics_max,
            changed=self._watchers.changed,
            moved=self._registrations.changed,
        )
        self._pullholds = PullholdTable(
            silence_max_s=config.member_silence_max_s,
            holds_max=config.holds_max,
            moved=self._registrations.changed,
        )
        self._values = Values(config.kv_config_path)
        self._mark = RunMark(config.kv_config_path)
        self._registry = new_registry("namesrv", self._clock)
        self._metrics = NamesrvMetrics(self._registry, self._table)
        self._registry.register(RefusedCallers(server.secret))
        self._loop_lag = LoopLagMonitor(
            self._registry, server.gate, self._clock, config.loop_stall_ms
        )
        self._stack = AsyncExitStack()
        self.metrics_address = ""

    async def __aenter__(self) -> App:
        async with self._stack:
            await self._start()
            self._stack = self._stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Refuses new calls, ends the watch streams, lets calls in flight finish."""
        await self._stack.aclose()
        if kind is None:
            self._mark.end()

    async def _start(self) -> None:
        if self._server.secret is None:
            _log.warning(
                "without internal_secret_file every process that reaches this port can register as"
                " a member or a pull-hold, remove live ones, and change values"
            )
        self._metrics.started(after_crash=self._mark.begin(), now_ms=self._clock.wall_ms())
        await self._values.load()
        servicer = NameServicer(
            self._table,
            self._watchers,
            self._values,
            self._pullholds,
            self._registrations,
            gate=self._server.gate,
            clock=self._clock,
        )
        observer = RpcMetrics(self._registry, self._clock)
        self._server.add(add_NameServiceServicer_to_server, servicer, observer=observer)
        gauge = self._metrics.gauge
        gauge("cometmq_namesrv_watch_streams", "Open watch streams.", self._watchers.__len__)
        gauge("cometmq_namesrv_holds", "Registered pullholds.", self._pullholds.__len__)
        host, port = self._config.listen_host, self._config.metrics_port
        metrics = start_metrics_server(self._registry, host=host, port=port, labels=PROCESS_LABELS)
        self._stack.callback(metrics.close)
        self.metrics_address = join_address(host, metrics.port)
        tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
        keep = Restarts(failures_of(self._registry), self._clock).keep
        for coroutine in (
            keep("silent members", self._remove_silent_members),
            keep("loop lag", self._loop_lag.run),
        ):
            self._stack.callback(tasks.create_task(coroutine).cancel)
        self._stack.push_async_callback(self._drain)
        await self._server.set_ready()
        announce(
            self._config.announce_file,
            address=self._server.address,
            metrics_address=self.metrics_address,
        )
        _log.info("ready", extra=fields(address=self._server.address))

    async def _remove_silent_members(self) -> None:
        while True:
            await asyncio.sleep(self._config.scan_interval_s)
            for member in self._table.expire(self._clock.monotonic_s()):
                self._metrics.members_expired.inc()
                _log.warning(
                    "member removed: silent",
                    extra=fields(group=member.broker_group, member=member.member_id),
                )
            for address in self._pullholds.expire(self._clock.monotonic_s()):
                self._metrics.holds_expired.inc()
                _log.warning("pullhold removed: silent", extra=fields(address=address))

    async def _drain(self) -> None:
        _log.info("draining")
        await self._server.begin_drain()
        self._watchers.wake_all()
        self._registrations.wake_all()
        await self._server.stop(self._config.drain_grace_s)
