"""What is counted about calls."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from cometmq.rpc.metrics import RpcMetrics


class Ticks:
    """A clock on which each look takes 4 ms."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic_s(self) -> float:
        self.now_s += 0.004
        return self.now_s

    def wall_ms(self) -> int:
        return 0

    def boottime_s(self) -> float:
        return 0.0


def test_unary_calls_are_timed_by_method_and_result() -> None:
    registry = CollectorRegistry()
    metrics = RpcMetrics(registry, Ticks())
    for result in ("OK", "OK", "DISK_FULL"):
        metrics.ended("/s/M", metrics.started("/s/M", stream=False), result, stream=False)

    ok = {"protocol_type": "grpc", "request_code": "/s/M", "response_code": "OK"}
    assert registry.get_sample_value("rocketmq_rpc_latency_count", ok) == 2
    assert registry.get_sample_value("rocketmq_rpc_latency_bucket", ok | {"le": "3.0"}) == 0
    assert registry.get_sample_value("rocketmq_rpc_latency_bucket", ok | {"le": "5.0"}) == 2
    full = ok | {"response_code": "DISK_FULL"}
    assert registry.get_sample_value("rocketmq_rpc_latency_count", full) == 1


def test_open_streams_are_counted() -> None:
    registry = CollectorRegistry()
    metrics = RpcMetrics(registry, Ticks())
    token = metrics.started("/s/W", stream=True)
    metrics.started("/s/W", stream=True)
    metrics.ended("/s/W", token, "OK", stream=True)

    assert registry.get_sample_value("cometmq_rpc_streams", {"request_code": "/s/W"}) == 1


def test_streams_that_ended_are_counted_by_how() -> None:
    registry = CollectorRegistry()
    metrics = RpcMetrics(registry, Ticks())
    for result in ("OK", "CANCELLED", "OK"):
        metrics.ended("/s/W", metrics.started("/s/W", stream=True), result, stream=True)

    ended = "cometmq_rpc_streams_ended_total"
    labels = {"request_code": "/s/W", "response_code": "OK"}
    assert registry.get_sample_value(ended, labels) == 2
    assert registry.get_sample_value(ended, labels | {"response_code": "CANCELLED"}) == 1


def test_streams_that_alerts_wait_for_start_at_0() -> None:
    registry = CollectorRegistry()
    RpcMetrics(registry, Ticks(), awaited=["/s/W"])

    labels = {"request_code": "/s/W", "response_code": "OK"}
    assert registry.get_sample_value("cometmq_rpc_streams_ended_total", labels) == 0
