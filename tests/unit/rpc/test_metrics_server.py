"""What a process serves over the port of its metrics."""

from __future__ import annotations

import socket
import threading
import time
import urllib.error
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge

from cometmq.clock import SystemClock
from cometmq.rpc.metrics_server import CONNECTIONS_MAX, MetricsServer, start_metrics_server
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


def test_peers_that_send_half_a_request_neither_pile_up_nor_keep_a_scrape_out() -> None:
    registry = CollectorRegistry()
    Counter("cometmq_tests", "Tests.", registry=registry).inc(3)
    server = start_metrics_server(registry, host="127.0.0.1", port=0)
    before = threading.active_count()
    halves = []
    try:
        for _ in range(5 * CONNECTIONS_MAX):
            half = socket.create_connection(("127.0.0.1", server.port), timeout=30)
            half.sendall(b"GET /metrics HTTP/1.1\r\nHost:")
            halves.append(half)
        assert "cometmq_tests_total 3.0" in _scraped(server)
        for half in halves[: 4 * CONNECTIONS_MAX]:
            assert half.recv(1) == b"", "the oldest are closed"
        deadline_s = time.monotonic() + 30
        while threading.active_count() > before + CONNECTIONS_MAX:  # they are about to end
            assert time.monotonic() < deadline_s
    finally:
        for half in halves:
            half.close()
        server.close()


def test_a_silent_peer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cometmq.rpc.metrics_server._Handler.timeout", 0.05)
    server = start_metrics_server(CollectorRegistry(), host="127.0.0.1", port=0)
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as peer:
            peer.sendall(b"GET /metrics")
            assert peer.recv(1) == b""
    finally:
        server.close()


def test_no_thread_reads_what_is_served_after_the_end() -> None:
    before = set(threading.enumerate())
    server = start_metrics_server(CollectorRegistry(), host="127.0.0.1", port=0)
    with socket.create_connection(("127.0.0.1", server.port)) as peer:
        peer.sendall(b"GET /metrics")
        _scraped(server)  # so the peer before it has its thread
        server.close()
        assert set(threading.enumerate()) == before
