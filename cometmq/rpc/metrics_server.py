"""The port of the metrics: the registry of a process, and what its flight recorder has."""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from cometmq.errors import ConfigInvalid
from cometmq.flight_recorder import TRACE_PATH, name_thread, recorder

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric
    from prometheus_client.registry import RestrictedRegistry

_log = logging.getLogger(__name__)

# The server looks so often whether it is to stop; a connection makes it look too. Each look wakes
# an idle process.
LOOK_S = 3600.0
# Prometheus needs one connection. Each has a thread; a peer may keep it waiting so long.
CONNECTIONS_MAX = 16
SILENCE_S_MAX = 5.0


class MetricsServer:
    """Serves in a thread of its own; ``port`` is the bound port."""

    def __init__(self, app: WSGIApplication, host: str, port: int) -> None:
        self._server = _listen(app, host, port)
        self._thread = threading.Thread(target=self._serve, name="metrics", daemon=True)
        self._thread.start()
        self._host = host
        self.port: int = self._server.server_port

    def _serve(self) -> None:
        name_thread("metrics")
        self._server.serve_forever(LOOK_S)

    def close(self) -> None:
        """Stop serving, break connections off, give the port back. Blocking, while an answer is
        made.
        """
        stopping = threading.Thread(target=self._server.shutdown)
        stopping.start()
        while stopping.is_alive():
            with contextlib.suppress(OSError):
                socket.create_connection((self._host, self.port), timeout=0.1).close()
            stopping.join(0.01)
        self._server.break_off()
        self._server.server_close()  # waits for the threads of connections
        self._thread.join()


def start_metrics_server(
    registry: CollectorRegistry,
    *,
    host: str,
    port: int,
    labels: Mapping[str, str] | None = None,
    trace: Callable[[int], str] = recorder.as_json,
) -> MetricsServer:
    """Serve ``registry`` on ``host:port``; 0 = any free port. ConfigInvalid: the port is taken.
    ``trace``: the JSON of the page of the flight recorder, made when it is wanted, in a thread;
    without the stages that took less than the page's parameter ``longer_than_ms``.

    ``labels`` go on every sample that has no label of that name itself, so that each series of the
    interpreter and of the process names its process, too.
    """
    app = _with_trace(make_wsgi_app(_Labelled(registry, labels or {})), trace)
    try:
        return MetricsServer(app, host, port)
    except OSError as error:
        raise ConfigInvalid(f"option metrics_port: {host}:{port}: {error.strerror}") from error


class _Handler(WSGIRequestHandler):
    """Gives up a peer that sends or takes nothing. Neither this nor a scrape is an event."""

    timeout = SILENCE_S_MAX

    def log_message(self, *_: object) -> None:
        pass


class _Server(ThreadingWSGIServer):
    """Has at most CONNECTIONS_MAX connections: a new one replaces the oldest."""

    request_queue_size = CONNECTIONS_MAX
    daemon_threads = False  # none reads what is served here after the end

    def __init__(self, *arguments: Any) -> None:
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, None] = {}  # oldest first
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._connections) >= CONNECTIONS_MAX:
                oldest = next(iter(self._connections))
                del self._connections[oldest]
                with contextlib.suppress(OSError):  # its peer has gone
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread ends and closes it
            self._connections[request] = None
        super().process_request(request, client_address)

    def break_off(self) -> None:
        """No connection waits for its peer any more."""
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):  # its peer has gone
                    connection.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connections.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A peer that breaks a connection is no event either; a fault of ours is."""
        error = sys.exception()
        if not isinstance(error, OSError):
            _log.exception("metrics request failed")


def _listen(app: WSGIApplication, host: str, port: int) -> _Server:
    [(family, *_, address), *_] = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )

    class Server(_Server):
        address_family = family

    return make_server(str(address[0]), port, app, Server, _Handler)


def _with_trace(app: WSGIApplication, trace: Callable[[int], str]) -> WSGIApplication:
    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ["PATH_INFO"] != TRACE_PATH:
            return app(environ, start_response)
        least_ms = parse_qs(environ["QUERY_STRING"]).get("longer_than_ms", ["0"])[-1]
        if not (least_ms.isascii() and least_ms.isdecimal() and len(least_ms) < 10):
            start_response("400 Bad Request", [("Content-Type", "text/plain")])
            return [b"longer_than_ms: whole milliseconds\n"]
        start_response("200 OK", [("Content-Type", "application/json")])
        return [trace(int(least_ms)).encode()]

    return answer


class _Labelled:
    """The metrics of a registry, with the labels of the process as a whole."""

    def __init__(
        self,
        whole: CollectorRegistry,
        labels: Mapping[str, str],
        part: RestrictedRegistry | None = None,
    ) -> None:
        self._whole = whole
        self._part = part or whole
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        for metric in self._part.collect():
            metric.samples = [
                s._replace(labels={**self._labels, **s.labels}) for s in metric.samples
            ]
            yield metric

    def restricted_registry(self, names: Iterable[str]) -> _Labelled:
        """Asked by the server for a scrape of some names only (``?name[]=…``)."""
        return _Labelled(self._whole, self._labels, self._whole.restricted_registry(names))
