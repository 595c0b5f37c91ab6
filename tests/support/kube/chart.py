"""The chart as Helm renders it, and how to find one's way in what comes out."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.helm import PINS, HelmMissing, helm

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "deploy/helm/cometmq"
VALUES = ROOT / "tests/chart/values"
VALUES_FILES = tuple(sorted(path.stem for path in VALUES.glob("*.yaml")))
HELMS = tuple(PINS)
RELEASE, NAMESPACE = "prod", "queues"
HELM_S_MAX = 50

WORKLOADS = ("StatefulSet", "Deployment", "CronJob")
SERVERS = ("StatefulSet", "Deployment")

Object = dict[str, Any]


def run_helm(major: int, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run Helm 3 or 4; a named skip when it cannot be had."""
    try:
        binary = helm(major)
    except HelmMissing as error:
        pytest.skip(f"Helm {major} is missing: {error}")
    command = [binary, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=HELM_S_MAX, check=False)


def template(major: int, *arguments: str | Path, chart: Path = CHART) -> list[Object]:
    """All objects of the chart, rendered with ``arguments``."""
    place = ["--namespace", NAMESPACE, "--kube-version", "1.34.0"]
    done = run_helm(major, "template", RELEASE, chart, *place, *arguments)
    assert done.returncode == 0, done.stderr
    documents = yaml.load_all(done.stdout, yaml.CSafeLoader)  # written in C: a tenth of the time
    return [document for document in documents if document]


@dataclass(frozen=True)
class Rendered:
    """What one file of values gives with one Helm."""

    values: str
    objects: tuple[Object, ...]

    def of(self, *kinds: str) -> list[Object]:
        return [found for found in self.objects if found["kind"] in kinds]

    def one(self, kind: str, name: str) -> Object:
        (found,) = (found for found in self.of(kind) if found["metadata"]["name"] == name)
        return found

    @property
    def prefix(self) -> str:
        """What all names begin with."""
        return "queue" if self.values == "everything" else RELEASE

    def members(self) -> list[Object]:
        """The StatefulSets of the broker groups."""
        return [found for found in self.of("StatefulSet") if component(found) == "broker"]

    def config_text(self, workload: Object) -> str:
        """The mounted config.yaml of a workload."""
        volumes = pod_template(workload)["spec"]["volumes"]
        (name,) = (volume["configMap"]["name"] for volume in volumes if "configMap" in volume)
        found: str = self.one("ConfigMap", name)["data"]["config.yaml"]
        return found

    def options(self, workload: Object) -> Object:
        """The same, read."""
        found: Object = yaml.safe_load(self.config_text(workload))
        return found


@cache
def rendered(values: str, major: int = HELMS[-1]) -> Rendered:
    """``tests/chart/values/<values>.yaml``; each is rendered once a session."""
    path = VALUES / f"{values}.yaml"
    return Rendered(values, tuple(template(major, "--values", path)))


def notes(values: str, *arguments: str) -> str:
    """What Helm tells after an installation with a file of values. Helm 3 would want a cluster for
    it.
    """
    file = VALUES / f"{values}.yaml"
    place = ["--namespace", NAMESPACE, "--values", str(file), "--dry-run=client"]
    done = run_helm(HELMS[-1], "install", RELEASE, CHART, *place, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("NOTES:\n")[2]


# --- inside an object -----------------------------------------------------------------------------


def label(thing: Object) -> str:
    """``Kind/name``, for messages."""
    return f"{thing['kind']}/{thing['metadata']['name']}"


def pod_template(workload: Object) -> Object:
    """The pod template of a StatefulSet, Deployment or CronJob."""
    spec = workload["spec"]
    found: Object = (spec["jobTemplate"]["spec"] if "jobTemplate" in spec else spec)["template"]
    return found


def containers(workload: Object) -> list[Object]:
    spec = pod_template(workload)["spec"]
    return [*spec.get("initContainers", []), *spec["containers"]]


def component(thing: Object) -> str:
    """namesrv, broker, pullhold, lag, storage or metrics."""
    found: str = thing["metadata"]["labels"]["app.kubernetes.io/component"]
    return found


def env(workload: Object) -> dict[str, str | None]:
    """The variables of a workload's containers; None: Kubernetes fills the value in."""
    return {e["name"]: e.get("value") for c in containers(workload) for e in c["env"]}


def matches(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


# --- the files of the chart -----------------------------------------------------------------------


def default_values() -> Object:
    loaded: Object = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    return loaded


def values_schema() -> Object:
    loaded: Object = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    return loaded


def properties(schema: Object, root: Object) -> Object | None:
    """The keys that an object of ``schema`` may have; None: it is no such object."""
    while "$ref" in schema:
        schema = root["$defs"][schema["$ref"].removeprefix("#/$defs/")]
    if schema.get("additionalProperties") is not False:
        return None
    found: Object = schema["properties"]
    return found


def walk(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every key of nested maps with its value; an item of a list counts as part of the list."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*path, key), inner
            yield from walk(inner, (*path, key))
    elif isinstance(value, list):
        for inner in value:
            yield from walk(inner, path)
