"""The composition root of a pull-hold."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from types import TracebackType

from cometmq.clock import Clock, SystemClock
from cometmq.rpc.background import Restarts, failures_of
from cometmq.rpc.loop_lag import LoopLagMonitor
from cometmq.rpc.metrics import RpcMetrics
from cometmq.rpc.metrics_server import start_metrics_server
from cometmq.rpc.process import announce
from cometmq.rpc.readiness import await_registration, open_server
from cometmq.rpc.registrar import Registrar
from cometmq.rpc.secret import open_secret
from cometmq.rpc.server import RpcServer, join_address
from cometmq.telemetry import fields, new_registry
from cometmq.v1.hold_pb2_grpc import add_HoldServiceServicer_to_server
from services.pullhold.answers import Answers
from services.pullhold.broker_link import Brokers, LinkPolicy
from services.pullhold.config import PullholdConfig
from services.pullhold.directory import Directory
from services.pullhold.hold_service import HoldService
from services.pullhold.holds import Holds
from services.pullhold.metrics import HoldMetrics
from services.pullhold.model import HoldLimits
from services.pullhold.peers import new_registrar
from services.pullhold.servicer import HoldServicer

_log = logging.getLogger(__name__)


class App:
    """A pull-hold on ``server``, which has started already; ready within ``async with``."""

    def __init__(
        self, config: PullholdConfig, server: RpcServer, *, clock: Clock | None = None
    ) -> None:
        self._config = config
        self._server = server
        self._clock = clock or SystemClock()
        self.registry = new_registry("pullhold", self._clock)
        self._metrics = HoldMetrics(self.registry, self._clock)
        self._restarts = Restarts(failures_of(self.registry), self._clock)
        self._loop_lag = LoopLagMonitor(
            self.registry, server.gate, self._clock, config.loop_stall_ms
        )
        self._secret = open_secret(config.internal_secret_file, self._clock)
        limits = HoldLimits(
            holds_max=config.holds_max,
            holds_per_client_max=config.holds_per_client_max,
            holds_per_stream_max=config.holds_per_stream_max,
            holds_per_peer_max=config.holds_per_peer_max,
            streams_per_peer_max=config.streams_per_peer_max,
            clients_max=config.clients_max,
            unsent_bytes_per_stream_max=config.unsent_bytes_per_stream_max,
            unsent_bytes_max=config.unsent_bytes_max,
        )
        policy = LinkPolicy(
            broker_groups_max=config.broker_groups_max,
            pulls_per_broker_max=config.pulls_per_broker_max,
            safety_check_interval_s=config.safety_check_interval_s,
            watch_linger_s=config.watch_linger_s,
            secret=self._secret,
        )
        self.holds = Holds(limits, grace_s=config.unreachable_grace_s)
        self._directory = Directory(config.namesrv, self._clock)
        self._answers = Answers(self.holds, limits, self._clock, self._metrics)
        self._brokers = Brokers(
            *(self.holds, self._answers, self._directory, policy, self._clock, self._metrics),
            self._restarts,
        )
        self._service = HoldService(
            self.holds, self._answers, self._brokers, self._clock, self._metrics
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
        """Answers all holds, refuses new ones, unregisters."""
        await self._stack.aclose()

    async def _start(self) -> None:
        self._stack.push_async_callback(self._directory.close)
        self._stack.push_async_callback(self._brokers.close)
        observer = RpcMetrics(self.registry, self._clock)
        servicer = HoldServicer(self._service, self._server.gate)
        self._server.add(add_HoldServiceServicer_to_server, servicer, observer=observer)
        config, gauge = self._config, self._metrics.gauge
        gauge("cometmq_holds_waiting", "Held pulls.", lambda: len(self.holds))
        gauge("cometmq_hold_clients", "Connections that hold.", lambda: len(self.holds.clients))
        gauge("cometmq_hold_queues", "Queues that are watched.", lambda: len(self.holds.queues))
        gauge("cometmq_hold_pulls_in_flight", "Pulls now.", lambda: self._brokers.pulls_count)
        gauge(
            "cometmq_hold_unsent_bytes",
            "Answers that clients have not taken.",
            lambda: self._answers.unsent_bytes,
        )
        metrics = start_metrics_server(
            self.registry,
            host=config.listen_host,
            port=config.metrics_port,
            labels={"cluster": config.cluster, "node_type": "pullhold"},
        )
        self._stack.callback(metrics.close)
        self.metrics_address = join_address(config.listen_host, metrics.port)
        registrar = new_registrar(
            config.namesrv,
            config.cluster,
            join_address(config.advertised_host or config.listen_host, self._server.port),
            config.register_namesrv_period / 1000,
            self._secret,
        )
        tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
        for coroutine in (
            self._restarts.keep("holds", self._service.run),
            self._restarts.name("broker links", self._brokers.run()),
            self._restarts.name("registration", registrar.run()),
            self._restarts.keep("loop lag", self._loop_lag.run),
        ):
            self._stack.callback(tasks.create_task(coroutine).cancel)
        self._stack.push_async_callback(self._drain, registrar)
        await open_server(self._server)
        await await_registration(self._server, registrar, tasks, self._stack)
        announce(
            config.announce_file,
            address=self._server.address,
            metrics_address=self.metrics_address,
        )
        _log.info("ready", extra=fields(address=self._server.address))

    async def _drain(self, registrar: Registrar) -> None:
        _log.info("draining")
        await self._server.begin_drain()
        self._service.drain()
        await registrar.unregister()
        await self._server.stop(self._config.drain_grace_s)
