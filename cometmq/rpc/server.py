"""A gRPC server of a service: health first, everything else once it is ready, limits, drain.

server = RpcServer(host="127.0.0.1", port=0, services=["cometmq.v1.NameService"], gate=Gate())
await server.start()                    # health answers; all else is refused: BROKER_STARTING
server.add(add_NameServiceServicer_to_server, servicer, observer=metrics)
await server.set_ready()
…
await server.begin_drain()              # not ready; new calls are refused: BROKER_DRAINING
await server.stop(grace_s=10)           # what is in flight may end
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_health.v1.health import aio as health_aio  # type: ignore[import-untyped]

from cometmq.clock import SystemClock
from cometmq.config import ServiceConfig
from cometmq.errors import CometError, ConfigInvalid
from cometmq.rpc.background import Restarts
from cometmq.rpc.calls import BeforeAnswer, Calls, SilentPeers
from cometmq.rpc.descriptors import share_of_connections
from cometmq.rpc.gate import Gate
from cometmq.rpc.guard import CallObserver, Handler, guard, refuse
from cometmq.rpc.secret import Metadata, SharedSecret
from cometmq.rpc.unread import UnreadLimits
from cometmq.v1 import auth_pb2, auth_pb2_grpc

S = TypeVar("S")
# Why a call of a method with this metadata is refused; None: it is not.
Admit: TypeAlias = Callable[[str, Metadata], CometError | None]

MESSAGE_BYTES_MAX = 8 * 1024 * 1024

READY = "ready"  # health of this name: whether the process serves; of "": whether it lives
STARTED = "started"  # that what comes before, a recovery above all, is done: for startup probes
_HEALTH_PREFIX = "/grpc.health.v1.Health/"
_AUTH_PREFIX = "/cometmq.v1.AuthService/"
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What one server allows its clients."""

    message_bytes_max: int = MESSAGE_BYTES_MAX  # of one received or sent message, inflated
    streams_per_connection_max: int = 1_024  # calls in flight on one connection
    calls_max: int = 65_536  # calls in flight on all connections
    untaken_calls_max: int = 3_000  # of these, before the loop has seen them: each takes 15 KiB
    connections_max: int = field(default_factory=share_of_connections)  # more are closed at once
    handshake_ms_max: int = 10_000
    keepalive_ms: int = 30_000  # silence after which the server asks whether the client lives
    keepalive_timeout_ms: int = 10_000  # … and how long it waits for the answer
    ping_interval_ms_min: int = 1_000  # clients that ping more often are cut off
    unread: UnreadLimits = field(default_factory=UnreadLimits)

    def channel_options(self) -> list[tuple[str, int]]:
        return [
            ("grpc.so_reuseport", 0),  # else a second process takes the same port silently
            ("grpc.max_receive_message_length", self.message_bytes_max),
            ("grpc.max_send_message_length", -1),  # what we answer is limited where it is built
            ("grpc.max_allowed_incoming_connections", self.connections_max),
            ("grpc.max_concurrent_streams", self.streams_per_connection_max),
            # A crowd of calls that gRPC refuses by itself costs nothing once they are refused, and
            # one connection's do not come before all the others'.
            ("grpc.http.tarpit", 0),
            ("grpc.http2.max_requests_per_read", 8),
            # Calls that come faster than the loop takes them wait; those above end with CANCELLED,
            # by gRPC, which from 1,000 on would do so with some.
            ("grpc.server.max_pending_requests", self.untaken_calls_max),
            ("grpc.server.max_pending_requests_hard_limit", self.untaken_calls_max),
            ("grpc.server_handshake_timeout_ms", self.handshake_ms_max),
            ("grpc.keepalive_time_ms", self.keepalive_ms),
            ("grpc.keepalive_timeout_ms", self.keepalive_timeout_ms),
            ("grpc.http2.ping_timeout_ms", self.keepalive_timeout_ms),  # else it is a minute
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", self.ping_interval_ms_min),
        ]


def limits_of(config: ServiceConfig, message_bytes_max: int = MESSAGE_BYTES_MAX) -> ServerLimits:
    """The limits that the options of a service say."""
    return ServerLimits(
        message_bytes_max=message_bytes_max,
        streams_per_connection_max=config.calls_per_connection_max,
        unread=UnreadLimits(
            bytes_max=config.unread_bytes_max,
            bytes_per_connection_max=config.unread_bytes_per_connection_max,
            bytes_per_address_max=config.unread_bytes_per_address_max,
            calls_max=config.unread_calls_max,
            silence_s_max=config.unread_s_max,
        ),
    )


class _PeersThatWent(logging.Filter):
    """gRPC logs a traceback for each answer whose peer goes before it has come; to us that is no
    fault of anybody's.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        kind = record.exc_info[0] if record.exc_info else None
        return kind is None or kind.__name__ != "ExecuteBatchError"


logging.getLogger("grpc._cython.cygrpc").addFilter(_PeersThatWent())


class RpcServer:
    """One listening port. ``services`` are the names that health answers for, besides "ready".

    With ``secret`` callers have to prove that they know it, before anything else is looked at: for
    the methods ``proven`` (full names), or for all but health's. ``silent`` is informed of
    peers that do not read; the ports of a process share it.
    """

    def __init__(
        self,
        *,
        host: str,
        port: int,
        services: Sequence[str],
        gate: Gate,
        limits: ServerLimits | None = None,
        secret: SharedSecret | None = None,
        proven: Collection[str] | None = None,
        silent: SilentPeers | None = None,
    ) -> None:
        limits = limits or ServerLimits()
        self.gate = gate
        self.secret = secret
        self._host = host
        self._port = port
        self._health_names = (READY, *services)
        self._health = health_aio.HealthServicer()
        self._status = _NOT_SERVING  # as the process has it
        self._is_held = False
        self._router = _Router(gate, None if secret is None else _admit(secret, proven))
        clock = SystemClock()
        self.calls = Calls(limits.unread, clock, silent or SilentPeers(clock))
        self._tending: asyncio.Task[None] | None = None
        self._server = grpc.aio.server(
            handlers=[self._router],
            options=limits.channel_options(),
            maximum_concurrent_rpcs=limits.calls_max,
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, _Unguarded(self._router))
        if secret is not None:
            self.add(auth_pb2_grpc.add_AuthServiceServicer_to_server, _AuthServicer(secret))

    @property
    def port(self) -> int:
        """The bound port, once started."""
        return self._port

    @property
    def address(self) -> str:
        """``host:port`` as bound, ``[host]:port`` for IPv6."""
        return join_address(self._host, self._port)

    async def start(self) -> int:
        """Bind, answer health checks, return the port. ConfigInvalid: the port is not free."""
        await self._health.set(STARTED, _NOT_SERVING)
        await self._set_health(_NOT_SERVING)
        try:
            self._port = self._server.add_insecure_port(self.address)
        except RuntimeError as error:
            raise ConfigInvalid(f"cannot listen on {self.address}: {error}") from error
        await self._server.start()
        self._tending = asyncio.create_task(Restarts().keep("calls", self.calls.run))
        return self._port

    def add(
        self,
        add_to_server: Callable[[S, Any], None],
        servicer: S,
        *,
        observer: CallObserver | None = None,
        before_answers: Mapping[str, BeforeAnswer] = MappingProxyType({}),
    ) -> None:
        """Serve ``servicer``; ``add_to_server`` is the generated function. Before set_ready.
        ``before_answers``: by full name of a method, what its answers wait for.
        """
        guarded = _Guarded(self._router, observer, self.calls, before_answers)
        add_to_server(servicer, guarded)

    async def set_started(self) -> None:
        """Tell that the start is over, though the process may not serve yet."""
        await self._health.set(STARTED, _SERVING)

    async def open(self) -> None:
        """Take calls. Clients that ask a name server do not find this process yet."""
        self.gate.open()
        await self.set_started()

    async def set_ready(self) -> None:
        """Open the gate, then report ready to health checks."""
        await self.open()
        await self._set_health(_SERVING)

    async def hold_ready(self, is_held: bool) -> None:
        """While held, health checks of READY fail. The process serves all the same."""
        self._is_held = is_held
        await self._set_health(self._status)

    async def begin_drain(self) -> None:
        """Tell that no more calls are taken, then take none. Calls in flight go on."""
        await self._set_health(_NOT_SERVING)
        self.gate.drain()

    async def stop(self, grace_s: float) -> None:
        """Close the port, wait at most ``grace_s`` for calls in flight, then cancel them."""
        await self._server.stop(grace_s)
        if self._tending is not None:
            self._tending.cancel()

    async def _set_health(self, status: int) -> None:
        self._status = status
        for name in self._health_names:
            is_held = name == READY and self._is_held
            await self._health.set(name, _NOT_SERVING if is_held else status)


def join_address(host: str, port: int) -> str:
    """``host:port``; the host of an IPv6 address gets its brackets."""
    try:
        bracketed = ipaddress.ip_address(host).version == 6
    except ValueError:
        bracketed = False
    return f"[{host}]:{port}" if bracketed else f"{host}:{port}"


class _AuthServicer(auth_pb2_grpc.AuthServiceServicer):
    """See ``proto/cometmq/v1/auth.proto``."""

    def __init__(self, secret: SharedSecret) -> None:
        self._secret = secret

    async def Challenge(
        self, request: auth_pb2.ChallengeRequest, context: Any
    ) -> auth_pb2.ChallengeResponse:
        challenge, proofs = self._secret.challenge(request.nonce)
        return auth_pb2.ChallengeResponse(challenge=challenge, proofs=proofs)


def _admit(secret: SharedSecret, proven: Collection[str] | None) -> Admit:
    def admit(method: str, metadata: Metadata) -> CometError | None:
        wanted = proven is None or method in proven
        return secret.check(method, metadata) if wanted else None

    return admit


class _Router(grpc.GenericRpcHandler):
    """Full method name → handler, filled while the server already runs; each call is admitted, and
    the gate asked.
    """

    def __init__(self, gate: Gate, admit: Admit | None) -> None:
        self._gate = gate
        self._admit = admit
        self._handlers: dict[str, Handler] = {}

    def put(self, method: str, handler: Handler) -> None:
        self._handlers[method] = handler

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        method = handler_call_details.method
        if not method.startswith((_HEALTH_PREFIX, _AUTH_PREFIX)):
            refusal = self._refusal(method, handler_call_details.invocation_metadata)
            if refusal is not None:
                return refuse(refusal)
        return self._handlers.get(method)  # None: gRPC answers UNIMPLEMENTED

    def _refusal(self, method: str, metadata: Metadata | None) -> CometError | None:
        # Strangers do not even learn whether the process is ready.
        stranger = None if self._admit is None else self._admit(method, metadata or ())
        return stranger or self._gate.refusal


class _Unguarded:
    """What the generated ``add_…_to_server`` takes for a server: puts methods into the router."""

    def __init__(self, router: _Router) -> None:
        self._router = router

    def add_generic_rpc_handlers(self, generic_rpc_handlers: object) -> None:
        """The same methods once more, without their names."""

    def add_registered_method_handlers(
        self, service_name: str, method_handlers: Mapping[str, Handler]
    ) -> None:
        for name, handler in method_handlers.items():
            method = f"/{service_name}/{name}"
            self._router.put(method, self.prepare(method, handler))

    def prepare(self, method: str, handler: Handler) -> Handler:
        return handler


class _Guarded(_Unguarded):
    """The same for methods of ours: errors become statuses, calls are counted."""

    def __init__(
        self,
        router: _Router,
        observer: CallObserver | None,
        calls: Calls,
        before_answers: Mapping[str, BeforeAnswer],
    ) -> None:
        super().__init__(router)
        self._observer = observer
        self._calls = calls
        self._before_answers = before_answers

    def prepare(self, method: str, handler: Handler) -> Handler:
        before_answer = self._before_answers.get(method)
        return guard(method, handler, self._observer, self._calls, before_answer)
