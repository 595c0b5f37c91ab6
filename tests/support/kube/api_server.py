"""A real API server of Kubernetes with its etcd, as local processes.

What it is asked here goes past the program under test: plain HTTPS, as the administrator.
"""

from __future__ import annotations

import json
import signal
import socket
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from scripts.kube import kube
from tests.support.waiting import wait_until

HOST = "127.0.0.1"
ADMIN = "administrator"  # its token, too
ISSUER = "https://kubernetes.default.svc"
READY_S_MAX = 90.0
CALL_S_MAX = 30.0

Body = dict[str, Any]
Answer = tuple[int, Body]


def free_port() -> int:
    with socket.create_server((HOST, 0)) as server:
        port: int = server.getsockname()[1]
        return port


class KubeServer:
    """Lives in ``directory`` from the beginning of the block to its end. Raises KubeMissing."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._program = kube()
        self._ports = {name: free_port() for name in ("etcd", "peers", "api")}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.address = f"https://{HOST}:{self._ports['api']}"
        self.authority = directory / "certificates" / "apiserver.crt"  # signed by itself

    def __enter__(self) -> Self:
        (self.directory / "certificates").mkdir(parents=True)
        (self.directory / "tokens.csv").write_text(f'{ADMIN},{ADMIN},{ADMIN},"system:masters"\n')
        self._spawn("etcd", *self._etcd_flags())
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        for name in ("apiserver", "etcd"):
            process = self._running.get(name)
            if process is not None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()

    def start(self) -> None:
        """Start the API server, and wait until it answers."""
        self._spawn("apiserver", *self._api_flags())
        wait_until("the API server is ready", self._is_ready, READY_S_MAX)

    def kill(self) -> None:
        self._running["apiserver"].kill()
        self._running["apiserver"].wait()

    @contextmanager
    def gone(self) -> Iterator[None]:
        """Without the API server; its etcd lives."""
        self.kill()
        yield
        self.start()

    @contextmanager
    def paused(self, name: str = "apiserver") -> Iterator[None]:
        """``apiserver`` or ``etcd``: connections are accepted, and nothing is answered."""
        self._running[name].send_signal(signal.SIGSTOP)
        yield
        self._running[name].send_signal(signal.SIGCONT)

    @contextmanager
    def without_etcd(self) -> Iterator[None]:
        self._running["etcd"].kill()
        self._running["etcd"].wait()
        yield
        self._spawn("etcd", *self._etcd_flags())
        wait_until("the API server is ready again", self._is_ready, READY_S_MAX)

    def ask(self, method: str, path: str, body: Body | None = None, token: str = ADMIN) -> Answer:
        """Status and answer of one call. Raises OSError."""
        request = urllib.request.Request(
            self.address + path,
            None if body is None else json.dumps(body).encode(),
            {"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
            method=method,
        )
        secure = urllib.request.HTTPSHandler(
            context=ssl.create_default_context(cafile=self.authority)
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), secure)
        try:
            with opener.open(request, timeout=CALL_S_MAX) as answer:
                return answer.status, _read(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, _read(error.read())

    def done(self, method: str, path: str, body: Body | None = None) -> Body:
        """The answer of a call that must succeed."""
        status, answer = self.ask(method, path, body)
        assert status in (200, 201), answer
        return answer

    def token(self, namespace: str, account: str) -> str:
        """A token such as the kubelet puts into a pod of that service account."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        wanted = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest"}
        found = self.done("POST", path, {**wanted, "spec": {"expirationSeconds": 3_600}})
        token: str = found["status"]["token"]
        return token

    def apply(self, thing: Body) -> None:
        """Make an object that Helm has rendered."""
        group = thing["apiVersion"]
        base = f"/apis/{group}" if "/" in group else f"/api/{group}"
        place = f"namespaces/{thing['metadata']['namespace']}/"
        self.done("POST", f"{base}/{place}{thing['kind'].lower()}s", thing)

    def _is_ready(self) -> bool:
        assert self._running["apiserver"].poll() is None, self.log("apiserver")
        if not self.authority.exists():
            return False
        try:
            return self.ask("GET", "/readyz")[0] == 200
        except OSError:
            return False

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()[-4_000:]

    def _spawn(self, name: str, *flags: str) -> None:
        with (self.directory / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                [self._program, name, *flags], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _etcd_flags(self) -> Iterator[str]:
        clients, peers = (f"http://{HOST}:{self._ports[name]}" for name in ("etcd", "peers"))
        yield from ("--name=one", f"--data-dir={self.directory / 'etcd'}", "--log-level=warn")
        yield from (f"--listen-client-urls={clients}", f"--advertise-client-urls={clients}")
        yield from (f"--listen-peer-urls={peers}", f"--initial-advertise-peer-urls={peers}")
        yield f"--initial-cluster=one={peers}"

    def _api_flags(self) -> Iterator[str]:
        """It makes its own certificate, whose key signs the tokens of service accounts too."""
        key = self.directory / "certificates" / "apiserver.key"
        yield from (f"--bind-address={HOST}", f"--secure-port={self._ports['api']}")
        yield f"--cert-dir={key.parent}"
        yield f"--etcd-servers=http://{HOST}:{self._ports['etcd']}"
        # No machine but this one is to find it.
        yield from (f"--advertise-address={HOST}", "--endpoint-reconciler-type=none")
        yield from ("--authorization-mode=RBAC", "--service-cluster-ip-range=10.96.0.0/24")
        yield f"--token-auth-file={self.directory / 'tokens.csv'}"
        yield from (f"--service-account-issuer={ISSUER}", f"--service-account-key-file={key}")
        yield f"--service-account-signing-key-file={key}"


def _read(content: bytes) -> Body:
    """An answer as JSON; of a health check it is a word."""
    try:
        found: Body = json.loads(content)
    except ValueError:
        return {"message": content.decode()}
    return found
