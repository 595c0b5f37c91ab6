"""What a member's pod has of the API: the chart's ServiceAccount, Role, RoleBinding, a token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.kube.api_server import Body, KubeServer
from tests.support.kube.chart import NAMESPACE, rendered
from tests.support.waiting import wait_until

LEASE = "prod-broker-a"  # as the chart calls it, and the service account
KINDS = ("ServiceAccount", "Role", "RoleBinding")


@dataclass(frozen=True)
class Rights:
    """Of the pods of one group. ``pod``: the folder that the kubelet fills."""

    server: KubeServer
    namespace: str
    pod: Path

    @property
    def url(self) -> str:
        return f"kubernetes://{self.namespace}/{LEASE}"

    @property
    def token(self) -> str:
        return (self.pod / "token").read_text()

    @property
    def path(self) -> str:
        return f"/apis/coordination.k8s.io/v1/namespaces/{self.namespace}/leases"

    def environment(self) -> dict[str, str]:
        """What the kubelet puts into every container."""
        host, _, port = self.server.address.removeprefix("https://").rpartition(":")
        return {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}

    def until_answered(self, status: int) -> None:
        """Wait until a member that asks for the Lease is answered so: RBAC hears of it late."""

        def answered() -> bool:
            return self.server.ask("GET", f"{self.path}/{LEASE}", token=self.token)[0] == status

        wait_until(f"the answer {status}", answered)

    def lease(self) -> Body:
        """As it is now."""
        return self.server.done("GET", f"{self.path}/{LEASE}")

    def delete(self) -> None:
        self.server.done("DELETE", f"{self.path}/{LEASE}")

    @contextmanager
    def revoked(self) -> Iterator[None]:
        """Without the RoleBinding. What RBAC knows comes by a watch, soon after."""
        base = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{self.namespace}/rolebindings"
        binding = self.server.done("GET", f"{base}/{LEASE}")
        self.server.done("DELETE", f"{base}/{LEASE}")
        self.until_answered(403)
        yield
        del binding["metadata"]["resourceVersion"], binding["metadata"]["uid"]
        self.server.done("POST", base, binding)
        self.until_answered(200)

    def kubeconfig(self) -> Path:
        """The same for processes outside of a cluster."""
        own = {"server": self.server.address, "certificate-authority": str(self.pod / "ca.crt")}
        config = {
            "clusters": [{"name": "test", "cluster": own}],
            "users": [{"name": "member", "user": {"tokenFile": str(self.pod / "token")}}],
            "contexts": [{"name": "c", "context": {"cluster": "test", "user": "member"}}],
            "current-context": "c",
        }
        path = self.pod / "kubeconfig"
        path.write_text(json.dumps(config))
        return path


def grant(server: KubeServer, namespace: str, directory: Path) -> Rights:
    """Do what `helm install` and the kubelet do for the members of a group."""
    server.done("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
    for kind in KINDS:
        server.apply(_moved(rendered("defaults").one(kind, LEASE), namespace))
    pod = directory / "serviceaccount"
    pod.mkdir()
    (pod / "ca.crt").write_bytes(server.authority.read_bytes())
    (pod / "token").write_text(server.token(namespace, LEASE))
    found = Rights(server, namespace, pod)
    found.until_answered(404)
    return found


def _moved(thing: Body, namespace: str) -> Body:
    """An object of the chart in another namespace than it was rendered for."""
    text = json.dumps(thing)
    moved: Body = json.loads(text.replace(json.dumps(NAMESPACE), json.dumps(namespace)))
    return moved
