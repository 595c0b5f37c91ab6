"""A model of the Kubernetes API's Leases: optimistic locking by resourceVersion, over real HTTP.

``lose_answers`` lets the next writes be carried out and their connections break before the answer.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PATH = "/apis/coordination.k8s.io/v1/namespaces/"


class LeaseApi:
    """All leases by (namespace, name). ``failing``: every call is answered with this status."""

    def __init__(self) -> None:
        self.leases: dict[tuple[str, str], dict[str, Any]] = {}
        self.lose_answers = 0
        self.failing = 0
        self.calls: list[str] = []
        self.address = ""
        self._lock = threading.Lock()
        self._version = 100

    def get(self, key: tuple[str, str]) -> tuple[int, dict[str, Any]]:
        found = self.leases.get(key)
        return (200, found) if found else (404, {"reason": "NotFound"})

    def put(self, key: tuple[str, str], body: dict[str, Any], *, new: bool) -> tuple[int, Any]:
        with self._lock:
            before = self.leases.get(key)
            wanted = body["metadata"].get("resourceVersion")
            if new != (before is None) or (new and wanted):
                return (409 if new else 404), {"reason": "AlreadyExists"}
            if before is not None and wanted != before["metadata"]["resourceVersion"]:
                return 409, {"reason": "Conflict"}
            self._version += 1
            body["metadata"]["resourceVersion"] = str(self._version)
            body["metadata"].setdefault("uid", "made-here")
            self.leases[key] = body
            return (201 if new else 200), body


@contextmanager
def lease_api() -> Iterator[LeaseApi]:
    """The model, served on a free port."""
    api = LeaseApi()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(api.get(self._key()))

        def do_POST(self) -> None:
            body = self._body()
            namespace = self.path.removeprefix(PATH).split("/")[0]
            self._answer(api.put((namespace, body["metadata"]["name"]), body, new=True))

        def do_PUT(self) -> None:
            self._answer(api.put(self._key(), self._body(), new=False))

        def _key(self) -> tuple[str, str]:
            namespace, _, name = self.path.removeprefix(PATH).split("/")
            return namespace, name

        def _body(self) -> dict[str, Any]:
            body: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            return body

        def _answer(self, answer: tuple[int, object]) -> None:
            api.calls.append(self.command)
            status, body = answer
            if self.command != "GET" and api.lose_answers:
                api.lose_answers -= 1
                self.close_connection = True
                return
            if api.failing:
                status, body = api.failing, {"reason": "Failing"}
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            """Silence."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    api.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield api
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
