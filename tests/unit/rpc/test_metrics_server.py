"""What a process serves over the port of its metrics."""

from __future__ import annotations

import urllib.error
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge

from cometmq.clock import SystemClock
from cometmq.rpc.metrics_server import MetricsServer, start_metrics_server
from cometmq.telemetry import new_registry


def test_the_metrics_server_serves_on_its_bound_port() -> None:
    registry = CollectorRegistry()
    Counter("cometmq_tests", "Tests.", registry=registry).inc(3)
    server = start_metrics_server(registry, host="127.0.0.1", port=0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics") as answer:
            assert b"cometmq_tests_total 3.0" in answer.read()
    finally:
        server.close()


def _scraped(server: MetricsServer, query: str = "") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics{query}") as answer:
        return bytes(answer.read()).decode()


def test_the_labels_of_the_process_are_on_every_sample_without_them() -> None:
    registry = CollectorRegistry()
    Counter("cometmq_tests", "Tests.", registry=registry).inc()
    Gauge("cometmq_others", "Others.", ["cluster"], registry=registry).labels("b").set(1)
    labels = {"cluster": "a", "node_type": "broker"}
    server = start_metrics_server(registry, host="127.0.0.1", port=0, labels=labels)
    try:
        whole, part = _scraped(server), _scraped(server, "?name[]=cometmq_tests_total")
    finally:
        server.close()
    assert 'cometmq_tests_total{cluster="a",node_type="broker"} 1.0' in whole
    assert 'cometmq_others{cluster="b",node_type="broker"} 1.0' in whole
    assert 'cometmq_tests_total{cluster="a",node_type="broker"} 1.0' in part
    assert "cometmq_others" not in part


def test_the_trace_is_served_beside_the_metrics() -> None:
    registry = new_registry("test", SystemClock())
    server = start_metrics_server(
        registry, host="127.0.0.1", port=0, trace='{{"least": {}}}'.format
    )
    try:
        trace = f"http://127.0.0.1:{server.port}/trace"
        for query, least in (("", b"0"), ("?longer_than_ms=12", b"12")):
            with urllib.request.urlopen(trace + query, timeout=5) as answer:
                assert answer.read() == b'{"least": %s}' % least
        with pytest.raises(urllib.error.HTTPError, match="400"):
            urllib.request.urlopen(f"{trace}?longer_than_ms=-1", timeout=5)
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=5) as answer:
            assert b"cometmq_build_info" in answer.read()
    finally:
        server.close()
