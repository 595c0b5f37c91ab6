"""A model of the Kubernetes API's Leases: optimistic locking by resourceVersion, over real HTTP.
And of events, and labels of pods, as far as members write them.

``lose_answers`` lets the next writes be carried out and their connections break before the answer.
``gate``: closed, calls are taken, and carried out and answered when it opens. ``accepted``: every
object that was written, oldest first. ``outdated``: who reads leases as they were. What the model
says is what a real API server says: tests/kube plays the same contract on both.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PATH = "/apis/coordination.k8s.io/v1/namespaces/"
EVENTS = "/apis/events.k8s.io/v1/namespaces/"

Leases = dict[tuple[str, str], dict[str, Any]]


class LeaseApi:
    """All leases by (namespace, name). ``failing``: every call is answered with this status."""

    def __init__(self) -> None:
        self.leases: Leases = {}
        self.lose_answers = 0
        self.failing = 0
        self.calls: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.accepted: list[dict[str, Any]] = []
        self.address = ""
        self.events: dict[str, dict[str, Any]] = {}  # by name, of all namespaces
        self.labels: dict[str, dict[str, str]] = {}  # of pods, by name
        self._views: dict[str, Leases] = {}  # of hosts that read what has been
        self._lock = threading.Lock()
        self._version = 100

    @contextmanager
    def outdated(self, host: str) -> Iterator[None]:
        """Who calls from this address reads everything as it is now, until it has written itself or
        the block ends.
        """
        self._views[host] = copy.deepcopy(self.leases)
        try:
            yield
        finally:
            self._views.pop(host, None)

    def has_written(self, host: str) -> None:
        self._views.pop(host, None)

    def get(self, key: tuple[str, str], host: str = "") -> tuple[int, dict[str, Any]]:
        found = self._views.get(host, self.leases).get(key)
        missing = {"reason": "NotFound", "details": {"name": key[1], "kind": "leases"}}
        return (200, found) if found else (404, missing)

    def put(self, key: tuple[str, str], body: dict[str, Any], *, new: bool) -> tuple[int, Any]:
        """A replacement makes what is not there, unless it names another object by its uid."""
        with self._lock:
            before = self.leases.get(key, {"metadata": {}})["metadata"]
            wanted = body["metadata"]
            if new and before:
                return 409, {"reason": "AlreadyExists"}
            if new and wanted.get("resourceVersion"):
                return 500, {"message": "resourceVersion should not be set"}
            if wanted.get("uid", before.get("uid")) != before.get("uid"):
                return 409, {"reason": "Conflict"}
            if before and not wanted.get("resourceVersion"):
                return 422, {"reason": "Invalid"}
            if before and wanted["resourceVersion"] != before["resourceVersion"]:
                return 409, {"reason": "Conflict"}
            self._version += 1
            body["metadata"] = {**wanted, "resourceVersion": str(self._version)}
            body["metadata"]["uid"] = before.get("uid", f"made-at-{self._version}")
            self.leases[key] = body
            self.accepted.append(copy.deepcopy(body))
            return (200 if before else 201), body

    def put_event(self, name: str, body: dict[str, Any], *, new: bool) -> tuple[int, Any]:
        with self._lock:
            if new == (name in self.events):
                return (409 if new else 404), {"message": name}
            self.events[name] = {**self.events.get(name, {}), **body}
            return (201 if new else 200), self.events[name]

    def patch_pod(self, name: str, body: Any) -> tuple[int, Any]:
        """A merge patch, or a JSON patch that tests a label and removes it."""
        with self._lock:
            labels = self.labels.setdefault(name, {})
            if isinstance(body, list):
                key = body[0]["path"].rpartition("/")[2].replace("~1", "/")
                if labels.get(key) != body[0]["value"]:
                    return 422, {"message": "the test failed"}
                del labels[key]
            else:
                labels.update(body["metadata"]["labels"])
            return 200, {"metadata": {"labels": labels}}

    def carry_out(self, method: str, path: str, body: Any, host: str) -> tuple[int, Any]:
        """One call of the API."""
        *_, last = path.split("/")
        if path.startswith(EVENTS):
            new = method == "POST"
            return self.put_event(body["metadata"]["name"] if new else last, body, new=new)
        if method == "PATCH":
            return self.patch_pod(last, body)
        namespace, _, *names = path.removeprefix(PATH).split("/")
        if method == "GET":
            return self.get((namespace, names[0]), host)
        name = names[0] if names else body["metadata"]["name"]
        return self.put((namespace, name), body, new=not names)

    def reasons(self) -> list[tuple[str, str]]:
        """The pod and the reason of all events, oldest first."""
        with self._lock:
            found = sorted(self.events.values(), key=lambda event: str(event["eventTime"]))
        return [(event["regarding"]["name"], event["reason"]) for event in found]


@contextmanager
def lease_api(host: str = "127.0.0.1") -> Iterator[LeaseApi]:
    """The model, served on a free port of ``host``."""
    api = LeaseApi()

    class Handler(BaseHTTPRequestHandler):
        def _carry_out(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size)) if size else None
            host = self.client_address[0]
            self._answer(lambda: api.carry_out(self.command, self.path, body, host))

        do_GET = do_POST = do_PUT = do_PATCH = _carry_out

        def _answer(self, act: Callable[[], tuple[int, object]]) -> None:
            assert api.gate.wait(30), "the test forgot to let the calls go"
            api.calls.append(self.command)
            failure = {"reason": "Failing", "message": "failing"}
            status, body = (api.failing, failure) if api.failing else act()
            if self.command != "GET" and status < 300:
                api.has_written(self.client_address[0])
            if self.command != "GET" and api.lose_answers:
                api.lose_answers -= 1
                self.close_connection = True
                return
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            with suppress(ConnectionError):  # who asked may have gone
                self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            """Silence."""

    server = ThreadingHTTPServer((host, 0), Handler)
    api.address = f"http://{host}:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield api
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
