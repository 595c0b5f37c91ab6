"""What a server counts about its calls, under RocketMQ 5's name where it has one."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from cometmq.clock import Clock
from cometmq.rpc.secret import SharedSecret

_LATENCY_BUCKETS_MS = (1, 3, 5, 7, 10, 100, 1_000, 2_000, 3_000)


class RpcMetrics:
    """``rocketmq_rpc_latency`` (milliseconds; unary calls), ``cometmq_rpc_streams`` (open now) and
    ``cometmq_rpc_streams_ended_total``.

    ``request_code`` is the method's full name, ``response_code`` is OK, CANCELLED or the error's
    name: both come from the program, never from a client. Implements ``CallObserver``.

    ``awaited``: streams for whose good end an alert waits. Their series exist from the start, for
    the first one is no increase of a series that was not there.
    """

    def __init__(
        self, registry: CollectorRegistry, clock: Clock, awaited: Iterable[str] = ()
    ) -> None:
        self._clock = clock
        self._latency_ms = Histogram(
            "rocketmq_rpc_latency",
            "Time that unary calls took, in milliseconds.",
            ["protocol_type", "request_code", "response_code"],
            buckets=_LATENCY_BUCKETS_MS,
            registry=registry,
        )
        self._streams = Gauge(
            "cometmq_rpc_streams", "Streams open now.", ["request_code"], registry=registry
        )
        self._streams_ended = Counter(
            "cometmq_rpc_streams_ended",
            "Streams that came to their end, by how.",
            ["request_code", "response_code"],
            registry=registry,
        )
        for method in awaited:
            self._streams_ended.labels(method, "OK")
        self._children: dict[tuple[str, str], Histogram] = {}

    def started(self, method: str, *, stream: bool) -> float:
        if stream:
            self._streams.labels(method).inc()
        return self._clock.monotonic_s()

    def ended(self, method: str, token: float, result: str, *, stream: bool) -> None:
        if stream:
            self._streams.labels(method).dec()
            self._streams_ended.labels(method, result).inc()
            return
        child = self._children.get((method, result))
        if child is None:
            child = self._latency_ms.labels("grpc", method, result)
            self._children[method, result] = child
        child.observe((self._clock.monotonic_s() - token) * 1000)


class RefusedCallers(Collector):
    """``cometmq_internal_calls_refused_total``: calls that a port refused because the caller did
    not prove that it knows the secret. Read off at each scrape; always 0 where none is wanted.
    """

    def __init__(self, secret: SharedSecret | None) -> None:
        self._secret = secret

    def describe(self) -> Iterable[Metric]:
        return self.collect()

    def collect(self) -> Iterable[Metric]:
        refused = CounterMetricFamily(
            "cometmq_internal_calls_refused",
            "Calls whose caller did not prove that it knows the secret, by what was wrong.",
            labels=["reason"],
        )
        reasons = (SharedSecret.MISSING, SharedSecret.WRONG, SharedSecret.REPLAYED)
        counts = dict.fromkeys(reasons, 0) if self._secret is None else self._secret.refused
        for reason, count in counts.items():
            refused.add_metric([reason], count)
        return [refused]
