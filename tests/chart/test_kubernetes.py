"""Kubernetes would take what is rendered: strict schemas of every minor that the chart supports."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from kubernetes_validate import utils  # type: ignore[import-untyped]
from referencing import Registry, Resource

from tests.support.kube.chart import HELMS, VALUES_FILES, Object, label, rendered

KUBERNETES = tuple(f"1.{minor}" for minor in range(30, 38))
OPERATOR = "monitoring.coreos.com/v1"  # the Prometheus operator's; Kubernetes has no schema for it


@cache
def schema_of(version: str, kind: str, group_version: str) -> Any:
    """The strict validator of a kind. FileNotFoundError: this Kubernetes does not know it."""
    (full,) = {found for found in utils.all_versions() if utils.major_minor(found) == version}
    folder = f"v{full}-local-strict"
    group, _, name = group_version.rpartition("/")
    stem = "-".join(part for part in (kind, group.split(".")[0], name) if part).lower()
    schema = utils.schema_contents(f"kubernetes-json-schema/{folder}/{stem}.json", version)
    return Draft202012Validator(schema, registry=registry(folder, version))


@cache
def registry(folder: str, version: str) -> Any:
    definitions = utils.schema_contents(
        f"kubernetes-json-schema/{folder}/_definitions.json", version
    )
    resource: Any = Resource.from_contents(definitions)
    empty: Any = Registry()
    return (resource @ empty).crawl()


@cache
def faults(version: str, text: str) -> tuple[str, ...]:
    """What ``version`` has against an object given as JSON; most come again and again."""
    thing = json.loads(text)
    try:
        validator = schema_of(version, thing["kind"], thing["apiVersion"])
    except FileNotFoundError:
        return (f"{version} does not know {thing['apiVersion']} {thing['kind']}",)
    return tuple(
        f"{version} {label(thing)} {error.json_path}: {error.message}"
        for error in validator.iter_errors(thing)
    )


@pytest.mark.parametrize("major", HELMS)
@pytest.mark.parametrize("values", VALUES_FILES)
def test_strictly_valid(values: str, major: int) -> None:
    objects = [o for o in rendered(values, major).objects if o["apiVersion"] != OPERATOR]
    assert objects
    texts = [json.dumps(thing, sort_keys=True) for thing in objects]
    found = [faults(version, text) for text in texts for version in KUBERNETES]
    assert not [fault for each in found for fault in each]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"kind": "StatefulSets"}, "does not know"),
        ({"apiVersion": "apps/v2"}, "does not know"),
        ({"unknown": 1}, "unknown"),
        ({"spec": {}}, "required"),
    ],
)
def test_the_check_can_fail(change: Object, complaint: str) -> None:
    thing = {**rendered("defaults").one("StatefulSet", "prod-namesrv"), **change}
    found = faults("1.37", json.dumps(thing))
    assert complaint in " ".join(found)


def test_the_check_sees_what_is_deep_inside() -> None:
    text = json.dumps(rendered("defaults").one("StatefulSet", "prod-namesrv"))
    broken = text.replace('"readOnlyRootFilesystem"', '"readOnlyRootFileSystem"')
    assert broken != text
    assert any("readOnlyRootFileSystem" in fault for fault in faults("1.30", broken))


# --- the Prometheus operator's kinds, by its documentation ----------------------------------------


@pytest.mark.parametrize(
    ("values", "kind", "endpoints"),
    [
        ("everything", "PodMonitor", "podMetricsEndpoints"),
        ("service-monitor", "ServiceMonitor", "endpoints"),
    ],
)
def test_monitor(values: str, kind: str, endpoints: str) -> None:
    (monitor,) = rendered(values).of("PodMonitor", "ServiceMonitor")
    assert (monitor["apiVersion"], monitor["kind"]) == (OPERATOR, kind)
    known = {"namespaceSelector", "selector", "podTargetLabels", endpoints}
    assert set(monitor["spec"]) == known
    (endpoint,) = monitor["spec"][endpoints]
    assert set(endpoint) == {"port", "path", "interval", "scrapeTimeout", "relabelings"}
    (relabeling,) = endpoint["relabelings"]
    assert set(relabeling) == {"sourceLabels", "targetLabel"}


def test_rules() -> None:
    (rule,) = rendered("everything").of("PrometheusRule")
    assert rule["apiVersion"] == OPERATOR
    assert set(rule["spec"]) == {"groups"}
    for group in rule["spec"]["groups"]:
        assert set(group) <= {"name", "interval", "limit", "rules"}
        for each in group["rules"]:
            assert each["expr"]
            assert ("alert" in each) != ("record" in each)
