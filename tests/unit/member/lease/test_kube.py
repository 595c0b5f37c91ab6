"""How a member finds Kubernetes' API. What it then does there: test_leases.py, tests/kube."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
import yaml

from cometmq.errors import LeaseUnavailable
from cometmq.member.lease.kube import Access, KubeApi, access, from_kubeconfig
from tests.support.kube.lease_api import lease_api

POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
PATH = "/apis/coordination.k8s.io/v1/namespaces/spaces/leases/a"


@pytest.fixture
def pod(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("one\n")
    (tmp_path / "ca.crt").write_text("PEM")
    return tmp_path


def kubeconfig(path: Path, cluster: dict[str, Any], user: dict[str, Any]) -> Path:
    config = {
        "clusters": [{"name": "other", "cluster": {}}, {"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "now", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "now",
    }
    path.write_text(yaml.safe_dump(config))
    return path


def test_in_a_pod(pod: Path) -> None:
    assert access(POD, pod) == Access("https://10.96.0.1:443", b"PEM", "one")
    (pod / "token").write_text("two")
    assert access(POD, pod).token == "two", "the kubelet has replaced it"


def test_in_a_pod_with_addresses_of_ipv6(pod: Path) -> None:
    found = access({**POD, "KUBERNETES_SERVICE_HOST": "fd00::1"}, pod)
    assert found.server == "https://[fd00::1]:443"


def test_a_kubeconfig_that_is_named_goes_before_the_pod(pod: Path) -> None:
    path = kubeconfig(pod / "config", {"server": "http://127.0.0.1:8001"}, {})
    assert access({**POD, "KUBECONFIG": str(path)}, pod) == Access("http://127.0.0.1:8001")


def test_files_of_a_kubeconfig_lie_beside_it(pod: Path) -> None:
    cluster = {"server": "https://host", "certificate-authority": "ca.crt"}
    path = kubeconfig(pod / "config", cluster, {"tokenFile": "token"})
    assert from_kubeconfig(path) == Access("https://host", b"PEM", "one")


def test_what_stands_in_a_kubeconfig_itself(tmp_path: Path) -> None:
    def data(text: str) -> str:
        return base64.b64encode(text.encode()).decode()

    cluster = {"server": "https://host", "certificate-authority-data": data("PEM")}
    user = {"client-certificate-data": data("mine,"), "client-key-data": data("key")}
    found = from_kubeconfig(kubeconfig(tmp_path / "config", cluster, user))
    assert found == Access("https://host", b"PEM", "", b"mine,key")


@pytest.mark.parametrize(
    "content", ["", "a: [", "current-context: gone\ncontexts: []", "contexts: 1", "[]"]
)
def test_no_kubeconfig(content: str, tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_text(content)
    api = KubeApi(lambda: access({"KUBECONFIG": str(path)}))
    with pytest.raises(LeaseUnavailable, match="no Kubernetes API is configured"):
        api.call("GET", PATH, None, 1.0)


def test_a_pod_without_a_token(pod: Path) -> None:
    (pod / "token").unlink()
    with pytest.raises(LeaseUnavailable, match="token"):
        KubeApi(lambda: access(POD, pod)).call("GET", PATH, None, 1.0)


def test_an_authority_that_is_none() -> None:
    api = KubeApi(lambda: Access("https://127.0.0.1:1", b"PEM"))
    with pytest.raises(LeaseUnavailable, match=r"127\.0\.0\.1"):
        api.call("GET", PATH, None, 1.0)


def test_the_access_is_asked_for_before_each_call() -> None:
    with lease_api() as first, lease_api() as second:
        there = iter([first, second])
        api = KubeApi(lambda: Access(next(there).address))
        for _ in range(2):
            assert api.call("GET", PATH, None, 5.0)[0] == 404
        assert (first.calls, second.calls) == (["GET"], ["GET"])
