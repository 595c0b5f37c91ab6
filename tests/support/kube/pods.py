"""Rendered objects → the pods that Kubernetes would make of them: addresses, names, environment."""

from __future__ import annotations

import copy
import re
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.support.kube.chart import Object, containers, matches, pod_template

NODE_ADDRESS, SUBNET_BITS = "10.123.0.1", 24
POD_INDEX = "apps.kubernetes.io/pod-index"
API_SERVER = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}


@dataclass(frozen=True)
class Pod:
    """A pod that was scheduled: it has a name and an address."""

    name: str
    address: str
    labels: dict[str, str]
    spec: Object
    owner: Object
    claims: dict[str, str] = field(default_factory=dict)  # volume → claim

    @property
    def namespace(self) -> str:
        found: str = self.owner["metadata"]["namespace"]
        return found

    def field(self, path: str) -> str:
        """What the downward API answers."""
        labelled = re.fullmatch(r"metadata\.labels\['(.*)'\]", path)
        if labelled:
            return self.labels[labelled[1]]
        known = {
            "metadata.name": self.name,
            "metadata.namespace": self.namespace,
            "metadata.uid": f"uid-of-{self.name}",
            "status.podIP": self.address,
            "spec.nodeName": "node",
        }
        return known[path]

    def environment(self, container: Object, cluster: Cluster) -> dict[str, str]:
        """All variables that the kubelet sets, in its order."""
        given = {"HOSTNAME": self.name, **API_SERVER}
        if self.spec.get("enableServiceLinks", True):
            given |= cluster.service_links()
        for variable in container.get("env", []):
            text = variable.get("value", "")
            if "valueFrom" in variable:
                text = self.field(variable["valueFrom"]["fieldRef"]["fieldPath"])
            given[variable["name"]] = _expand(text, given)
        return given


@dataclass(frozen=True)
class Cluster:
    """All pods of a rendered chart, jobs left out, and what resolves to them."""

    objects: tuple[Object, ...]
    pods: tuple[Pod, ...]

    def of(self, owner: str) -> list[Pod]:
        """The pods of a workload, by its name."""
        return [pod for pod in self.pods if pod.owner["metadata"]["name"] == owner]

    def config_map(self, name: str) -> dict[str, str]:
        (found,) = (o for o in self._kind("ConfigMap") if o["metadata"]["name"] == name)
        data: dict[str, str] = found["data"]
        return data

    def secret(self, name: str) -> dict[str, bytes]:
        (found,) = (o for o in self._kind("Secret") if o["metadata"]["name"] == name)
        return {key: b64decode(value) for key, value in found["data"].items()}

    def hosts(self, domain: str) -> str:
        """The text of /etc/hosts that stands in for the cluster's DNS.

        The resolver of gRPC takes lines that share a name or an address for one host with all
        their addresses. So no pod has two lines: members of broker groups go by their own names,
        all others by their Service's.
        """
        lines = ["127.0.0.1 localhost"]
        for service, pods in self._services():
            name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
            own = service["metadata"]["labels"]["app.kubernetes.io/component"].startswith("broker")
            for pod in pods:
                shown = f"{pod.name}.{name}" if own else name
                lines.append(f"{pod.address} {_names(shown, namespace, domain)}")
        return "\n".join([*lines, ""])

    def service_links(self) -> dict[str, str]:
        """The variables that a Service with an address puts into every pod that allows it."""
        found = {}
        for service, pods in self._services():
            if service["spec"].get("clusterIP") != "None":
                name = service["metadata"]["name"].upper().replace("-", "_")
                found[f"{name}_SERVICE_HOST"] = pods[0].address
                found[f"{name}_SERVICE_PORT"] = str(service["spec"]["ports"][0]["port"])
        return found

    def _services(self) -> Iterator[tuple[Object, list[Pod]]]:
        for service in self._kind("Service"):
            selector = service["spec"]["selector"]
            yield service, [pod for pod in self.pods if matches(selector, pod.labels)]

    def _kind(self, kind: str) -> list[Object]:
        return [thing for thing in self.objects if thing["kind"] == kind]


def schedule(objects: tuple[Object, ...]) -> Cluster:
    """The pods of every StatefulSet and Deployment, with addresses in one subnet."""
    pods: list[Pod] = []
    for workload in objects:
        if workload["kind"] in ("StatefulSet", "Deployment"):
            for index in range(workload["spec"]["replicas"]):
                pods.append(_pod(workload, index, f"10.123.0.{10 + len(pods)}"))
    return Cluster(objects, tuple(pods))


def job_pod(job: Object, address: str) -> Pod:
    """The pod of one run of a CronJob."""
    return _pod(job, 0, address)


def _pod(workload: Object, index: int, address: str) -> Pod:
    template = pod_template(workload)
    name = f"{workload['metadata']['name']}-{index}"
    labels = dict(template["metadata"]["labels"])
    claims = {}
    if workload["kind"] == "StatefulSet":
        labels[POD_INDEX] = str(index)
        for claim in workload["spec"].get("volumeClaimTemplates", []):
            volume = claim["metadata"]["name"]
            claims[volume] = f"{volume}-{name}"
    for volume in template["spec"]["volumes"]:
        if "persistentVolumeClaim" in volume:
            claims[volume["name"]] = volume["persistentVolumeClaim"]["claimName"]
    assert containers(workload), "a pod runs something"
    return Pod(name, address, labels, copy.deepcopy(template["spec"]), workload, claims)


def _names(name: str, namespace: str, domain: str) -> str:
    long = f"{name}.{namespace}.svc"
    return f"{long}.{domain} {long} {name}.{namespace} {name}"


def _expand(text: Any, given: dict[str, str]) -> str:
    """``$(NAME)`` → the value of a variable that stands before."""
    return re.sub(r"\$\(([A-Za-z_]\w*)\)", lambda m: given.get(m[1], m[0]), str(text))
