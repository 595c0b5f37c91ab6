"""The lease on a real API server, with the rights that the chart gives: the same contract that
tests/unit/member/test_leases.py plays on the file and on the model.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from cometmq.errors import LeaseUnavailable
from cometmq.member.lease import stores
from cometmq.member.lease.kube import Access, KubeApi, access, from_kubeconfig
from cometmq.member.lease.stores import NOT_THERE, KubernetesLease, Reading
from tests.kube.rights import LEASE, Rights
from tests.support.cluster.lease_contract import FULL, HELD, Body, KubernetesContract
from tests.support.kube.api_server import Answer, KubeServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


class RealKeeper:
    """The Lease of a group, reached as a pod reaches it."""

    def __init__(self, rights: Rights) -> None:
        self._rights = rights
        self._server = rights.server
        self._detour = ""

    def open(self, pod_name: str = "") -> KubernetesLease:
        api = KubeApi(self._access)
        return KubernetesLease(self._rights.namespace, LEASE, "g1", api, pod_name)

    def _access(self) -> Access:
        found = access(self._rights.environment(), self._rights.pod)
        return replace(found, server=self._detour) if self._detour else found

    def delete(self) -> None:
        self._rights.delete()

    def object(self) -> Body:
        return self._rights.lease()

    def put(self, body: Body) -> None:
        body["metadata"]["name"] = LEASE
        known = "uid" in body["metadata"]
        path = f"{self._rights.path}/{LEASE}" if known else self._rights.path
        self._server.done("PUT" if known else "POST", path, body)

    def spoil(self) -> None:
        body = self.object()
        body["metadata"]["annotations"]["cometmq.io/epoch"] = "{"
        self.put(body)

    def refusing(self) -> AbstractContextManager[None]:
        return self._rights.revoked()

    @contextmanager
    def unknown(self) -> Iterator[None]:
        before = self._rights.token
        (self._rights.pod / "token").write_text("nobody's")
        yield
        (self._rights.pod / "token").write_text(before)

    @contextmanager
    def away(self) -> Iterator[None]:
        with self._server.gone():
            yield

    @contextmanager
    def stuck(self) -> Iterator[None]:
        with self._server.paused():
            yield

    @contextmanager
    def losing_answers(self) -> Iterator[None]:
        with silent_proxy(self._server) as (address, passed):
            self._detour = address
            yield
            self._detour = ""
        assert passed == [200], "sent once: a second would find a conflict"


@contextmanager
def silent_proxy(server: KubeServer) -> Iterator[tuple[str, list[int]]]:
    """Passes writes on and never the answers; its address, and the answers' status."""
    passed: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            token = self.headers["Authorization"].removeprefix("Bearer ")
            passed.append(server.ask("PUT", self.path, body, token)[0])
            self.close_connection = True

    proxy = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=proxy.handle_request)  # one, and that is it
    thread.start()
    try:
        yield f"http://127.0.0.1:{proxy.server_port}", passed
    finally:
        thread.join()
        proxy.server_close()


@pytest.fixture
def keeper(rights: Rights) -> RealKeeper:
    return RealKeeper(rights)


class TestRealApi(KubernetesContract):
    """All of the contract."""


# --- what only a real one has ---------------------------------------------------------------------


@pytest.mark.parametrize("how", ["away", "paused"])
async def test_an_api_server_without_its_etcd(
    keeper: RealKeeper, rights: Rights, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It accepts the call, and waits for etcd longer than we do."""
    server = rights.server
    lease = keeper.open()
    version = await lease.write(HELD, NOT_THERE)
    with monkeypatch.context() as patch:
        patch.setattr(stores, "DEADLINE_S", 1.0)
        with server.without_etcd() if how == "away" else server.paused("etcd"):
            for call in (lease.read(), lease.write(FULL, version), keeper.open().read()):
                with pytest.raises(LeaseUnavailable):
                    await call
    after = await lease.read()
    assert after.record in (HELD, FULL)
    assert await lease.write(replace(HELD, epoch=9), after.version)


async def test_what_is_not_found_is_named(rights: Rights) -> None:
    """So that an API which knows no Leases is not taken for a lease that nobody has written."""
    name = "/apis/coordination.k8s.io/v9/namespaces/a/leases/b"
    for path, details in ((f"{rights.path}/{LEASE}", LEASE), (name, None)):
        status, answer = rights.server.ask("GET", path)
        assert status == 404
        assert answer.get("details", {}).get("name") == details


async def test_a_token_that_the_kubelet_has_replaced(keeper: RealKeeper, rights: Rights) -> None:
    lease = keeper.open()
    version = await lease.write(HELD, NOT_THERE)
    before = rights.token
    (rights.pod / "token").write_text(rights.server.token(rights.namespace, LEASE))
    assert rights.token != before
    assert await lease.write(FULL, version)


async def test_a_server_that_we_do_not_trust(keeper: RealKeeper, rights: Rights) -> None:
    await keeper.open().write(HELD, NOT_THERE)
    (rights.pod / "ca.crt").write_text("")  # then the system's authorities count
    with pytest.raises(LeaseUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
        await keeper.open().read()


async def test_a_kubeconfig_instead_of_a_pod(keeper: RealKeeper, rights: Rights) -> None:
    version = await keeper.open().write(HELD, NOT_THERE)
    config = rights.kubeconfig()
    outside = KubernetesLease(
        rights.namespace, LEASE, "g1", KubeApi(lambda: from_kubeconfig(config))
    )
    assert await outside.read() == Reading(HELD, version)


async def test_a_certificate_instead_of_a_token(keeper: RealKeeper, rights: Rights) -> None:
    """It is shown; this server knows no authority of its users, and so nobody."""
    await keeper.open().write(HELD, NOT_THERE)
    certificate = rights.server.authority.read_bytes()
    certificate += rights.server.authority.with_suffix(".key").read_bytes()
    there = Access(rights.server.address, rights.server.authority.read_bytes(), "", certificate)
    lease = KubernetesLease(rights.namespace, LEASE, "g1", KubeApi(lambda: there))
    with pytest.raises(LeaseUnavailable, match="403"):
        await lease.read()


async def test_a_hundred_renewals_leave_one_small_object(keeper: RealKeeper) -> None:
    lease = keeper.open()
    version = await lease.write(HELD, NOT_THERE)
    for number in range(100):
        version = await lease.write(replace(HELD, renewals=number + 1), version)
    found = keeper.object()
    assert len(found["metadata"]["managedFields"]) == 1
    assert len(str(found)) < 4_096


# --- the rights that the chart gives --------------------------------------------------------------


def as_member(rights: Rights, method: str, path: str, body: Body | None = None) -> Answer:
    return rights.server.ask(method, path, body, rights.token)


def test_a_member_may_do_what_it_needs_and_no_more(rights: Rights) -> None:
    def lease(name: str) -> Body:
        return {"metadata": {"name": name}, "spec": {}}

    def status(method: str, path: str, body: Body | None = None) -> int:
        return as_member(rights, method, path, body)[0]

    own = f"{rights.path}/{LEASE}"
    assert status("GET", own) == 404
    assert status("POST", rights.path, lease(LEASE)) == 201
    found = rights.lease()
    assert status("GET", own) == 200
    assert status("PUT", own, found) == 200
    assert status("DELETE", own) == 403
    assert status("PATCH", own, {}) in (403, 415)
    assert status("GET", rights.path) == 403, "no list"
    # RBAC cannot limit this verb to a name. What it makes, it cannot read or change.
    other = f"{rights.path}/prod-broker-b"
    assert status("POST", rights.path, lease("prod-broker-b")) == 201
    assert status("GET", other) == 403
    assert status("PUT", other, found | {"metadata": {"name": "prod-broker-b"}}) == 403
    elsewhere = rights.path.replace(rights.namespace, "default")
    assert status("POST", elsewhere, lease(LEASE)) == 403
    assert status("GET", f"/api/v1/namespaces/{rights.namespace}/pods") == 403
    assert status("GET", f"/api/v1/namespaces/{rights.namespace}/secrets") == 403
