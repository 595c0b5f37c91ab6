"""Groups, storage, the lag job, metrics, and what users add."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import yaml

from cometmq import config
from cometmq.member.config import MemberConfig
from tests.support.kube.chart import (
    CHART,
    HELMS,
    NAMESPACE,
    ROOT,
    SERVERS,
    VALUES,
    WORKLOADS,
    Object,
    Rendered,
    containers,
    default_values,
    label,
    matches,
    pod_template,
    rendered,
    template,
)

# --- groups, storage, the job ---------------------------------------------------------------------


def test_groups_have_their_own_values_over_the_common_ones() -> None:
    chart = rendered("three-groups")
    sets = {name: chart.one("StatefulSet", f"prod-broker-{name}") for name in ("a", "b", "c-3")}
    assert [sets[name]["spec"]["replicas"] for name in sets] == [3, 2, 2]
    modes = [chart.options(sets[name])["flush_disk_type"] for name in sets]
    assert modes == ["SYNC_FLUSH", "ASYNC_FLUSH", "SYNC_FLUSH"]
    limits = [containers(sets[name])[0]["resources"] for name in sets]
    assert [each["limits"]["memory"] for each in limits] == ["2Gi", "4Gi", "2Gi"]
    assert {each["requests"]["cpu"] for each in limits} == {"500m"}
    assert [claim(sets[name])["resources"]["requests"]["storage"] for name in sets] == [
        "20Gi",
        "40Gi",
        "20Gi",
    ]
    spec = pod_template(sets["c-3"])["spec"]
    assert spec["nodeSelector"] == {"disk": "fast"}
    (spread,) = spec["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"]["cometmq.io/broker-group"] == "c-3"
    assert "nodeSelector" not in pod_template(sets["a"])["spec"]


@pytest.mark.parametrize(
    ("values", "expected"), [("defaults", ("SYNC", "APPENDED")), ("minimal", ("SYNC", "ASYNC"))]
)
def test_new_topics_are_as_safe_as_the_group_allows(values: str, expected: tuple[str, str]) -> None:
    chart = rendered(values)
    options = chart.options(chart.one("StatefulSet", "prod-broker-a"))
    with_place = {**options, "lease": "kubernetes://n/l", "member_id": 0}
    argv = [f"--{name}={_text(value)}" for name, value in with_place.items()]
    new = config.load(MemberConfig, argv=argv, environ={}).new_topic
    assert (new.flush_mode.name, new.replication_mode.name) == expected


def _text(value: object) -> str:
    if isinstance(value, list):
        return ";".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def claim(workload: Object) -> Object:
    (found,) = workload["spec"]["volumeClaimTemplates"]
    spec: Object = found["spec"]
    return spec


def test_members_know_each_other(chart: Rendered) -> None:
    """By the names that their pods keep, as the service reads the option."""
    services = {service["metadata"]["name"]: service for service in chart.of("Service")}
    for group in chart.members():
        name, options = group["metadata"]["name"], chart.options(group)
        assert group["spec"]["serviceName"] == name
        assert services[name]["spec"]["publishNotReadyAddresses"]
        (port,) = (p for p in services[name]["spec"]["ports"] if p["name"] == "internal")
        wanted = [
            f"{number}@{name}-{number}.{name}.{NAMESPACE}.svc.{domain(chart)}:{port['port']}"
            for number in range(group["spec"]["replicas"])
        ]
        assert options["peers"] == wanted
        for number in range(len(wanted)):
            config = MemberConfig(
                member_id=number,
                internal_port=port["port"],
                lease="kubernetes://namespace/name",
                peers=tuple(options["peers"]),
            )
            assert len(config.peer_addresses() or {}) == len(wanted) - 1


def domain(chart: Rendered) -> str:
    values = yaml.safe_load((VALUES / f"{chart.values}.yaml").read_text()) or {}
    return str(values.get("clusterDomain", default_values()["clusterDomain"]))


def test_large_numbers_stay_whole() -> None:
    chart = rendered("three-groups")
    text = chart.config_text(chart.one("StatefulSet", "prod-broker-a"))
    assert "mapped_file_size_commit_log: 1073741824\n" in text


KEPT_APART = [("defaults", "required"), ("everything", "preferred")]


@pytest.mark.parametrize(("values", "kind"), KEPT_APART)
def test_members_of_a_group_keep_apart(values: str, kind: str) -> None:
    for group in rendered(values).members():
        rule = pod_template(group)["spec"]["affinity"]["podAntiAffinity"]
        (term,) = rule[f"{kind}DuringSchedulingIgnoredDuringExecution"]
        term = term.get("podAffinityTerm", term)
        assert term["topologyKey"] == "kubernetes.io/hostname"
        assert term["labelSelector"]["matchLabels"] == group["spec"]["selector"]["matchLabels"]


def test_claims_and_their_class(chart: Rendered) -> None:
    wanted = {
        "minimal": None,
        "existing-class": "fast-ssd",
        "local-volumes": "nvme",
        "shared-class": "other-local",
    }
    for group in chart.members():
        name = claim(group).get("storageClassName")
        assert name == wanted.get(chart.values, f"{chart.prefix}-local")
        retention = group["spec"]["persistentVolumeClaimRetentionPolicy"]
        assert retention == {"whenDeleted": "Retain", "whenScaled": "Retain"}
    made = [thing["metadata"]["name"] for thing in chart.of("StorageClass")]
    without = {"minimal", "existing-class", "shared-class"}
    own = wanted.get(chart.values, f"{chart.prefix}-local")
    assert made == ([] if chart.values in without else [own])


def test_local_volumes() -> None:
    chart = rendered("local-volumes")
    (storage_class,) = chart.of("StorageClass")
    assert storage_class["provisioner"] == "kubernetes.io/no-provisioner"
    assert storage_class["volumeBindingMode"] == "WaitForFirstConsumer"
    volumes = chart.of("PersistentVolume")
    assert [v["spec"]["capacity"]["storage"] for v in volumes] == [
        *("20Gi", "20Gi", "4Gi", "100Mi", "100Mi")
    ]
    for volume in [*volumes, storage_class]:
        assert volume["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    for volume in volumes:
        assert volume["spec"]["storageClassName"] == "nvme"
        assert volume["spec"]["persistentVolumeReclaimPolicy"] == "Retain"
        (term,) = volume["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"]
        (rule,) = term["matchExpressions"]
        assert rule["key"] == "kubernetes.io/hostname"


def test_the_job_exports_then_computes_on_one_claim() -> None:
    chart = rendered("defaults")
    (job,) = chart.of("CronJob")
    spec = job["spec"]
    assert spec["concurrencyPolicy"] == "Forbid"
    assert spec["startingDeadlineSeconds"] > 10
    run = spec["jobTemplate"]["spec"]
    assert run["activeDeadlineSeconds"] > 0
    assert run["backoffLimit"] == 1
    pod = run["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    (export,), (compute,) = pod["initContainers"], pod["containers"]
    assert export["args"][:4] == ["-m", "cometmq.admin", "offsets", "export"]
    assert compute["args"][:2] == ["-m", "spark.lag.job"]
    assert export["args"][-1] == compute["args"][3]
    (wanted,) = chart.of("PersistentVolumeClaim")
    claims = [v["persistentVolumeClaim"] for v in pod["volumes"] if "persistentVolumeClaim" in v]
    assert claims == [{"claimName": wanted["metadata"]["name"]}]


def test_a_claim_that_exists_is_not_made() -> None:
    chart = rendered("existing-class")
    assert not chart.of("PersistentVolumeClaim")
    (job,) = chart.of("CronJob")
    volumes = pod_template(job)["spec"]["volumes"]
    assert {"name": "data", "persistentVolumeClaim": {"claimName": "lag-results"}} in volumes


def test_what_is_switched_off_is_not_there() -> None:
    chart = rendered("minimal")
    kinds = {thing["kind"] for thing in chart.objects}
    assert not kinds & {"Deployment", "CronJob", "PersistentVolumeClaim", "StorageClass"}
    assert not kinds & {"PodMonitor", "ServiceMonitor", "PrometheusRule"}
    assert len(chart.of("ConfigMap")) == 2  # no dashboards


# --- metrics --------------------------------------------------------------------------------------


def test_monitors_find_every_process() -> None:
    for values, kind in (("everything", SERVERS), ("service-monitor", ("Service",))):
        chart = rendered(values)
        (monitor,) = chart.of("PodMonitor", "ServiceMonitor")
        selector = monitor["spec"]["selector"]
        (rule,) = selector["matchExpressions"]
        for thing in chart.of(*kind):
            named = thing if kind == ("Service",) else pod_template(thing)
            labels = named["metadata"]["labels"]
            assert matches(selector["matchLabels"], labels)
            assert labels[rule["key"]] in rule["values"], label(thing)


def test_dashboards_and_rules_are_passed_on_byte_for_byte(tmp_path: Path) -> None:
    copy = Path(shutil.copytree(CHART, tmp_path / "cometmq"))
    board = '{"title": "{{ not for Helm }}", "panels": []}\n'
    rules = "# Kept.\ngroups:\n  - name: g\n    rules:\n      - alert: A\n        expr: up == 0\n"
    (copy / "files/dashboards").mkdir(parents=True, exist_ok=True)
    (copy / "files/dashboards/extra.json").write_text(board)
    (copy / "files/alerts.yaml").write_text(rules)
    objects = template(HELMS[-1], "--values", VALUES / "everything.yaml", chart=copy)
    (config,) = (o for o in objects if o["metadata"]["name"] == "queue-dashboard-extra")
    assert config["data"] == {"extra.json": board}
    assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
    (rule,) = (o for o in objects if o["kind"] == "PrometheusRule")
    assert rule["spec"] == yaml.safe_load(rules)


def test_alerts_link_to_where_the_runbooks_can_be_read() -> None:
    (rule,) = rendered("everything").of("PrometheusRule")
    links = [
        each["annotations"]["runbook_url"]
        for group in rule["spec"]["groups"]
        for each in group["rules"]
    ]
    assert links
    assert all(link.startswith("https://docs.example.com/runbooks#cometmq") for link in links)


# --- where pods run -------------------------------------------------------------------------------


def test_name_servers_are_not_lost_with_one_node() -> None:
    """A drain must not put them together, and a lost node is soon left."""
    chart = rendered("defaults")
    spec = pod_template(chart.one("StatefulSet", "prod-namesrv"))["spec"]
    (term,) = spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    for kind, name in (("StatefulSet", "prod-namesrv"), ("Deployment", "prod-pullhold")):
        tolerations = pod_template(chart.one(kind, name))["spec"]["tolerations"]
        assert {t["key"]: t["tolerationSeconds"] for t in tolerations} == {
            "node.kubernetes.io/not-ready": 30,
            "node.kubernetes.io/unreachable": 30,
        }
    assert "tolerations" not in pod_template(chart.members()[0])["spec"], "its volume stays"


# --- what users add -------------------------------------------------------------------------------


def test_users_additions_reach_every_pod() -> None:
    chart = rendered("everything")
    for workload in chart.of(*WORKLOADS):
        pod = pod_template(workload)
        assert pod["metadata"]["annotations"]["example.com/note"] == "yes"
        assert pod["metadata"]["labels"]["example.com/tier"] == "data"
        assert pod["metadata"]["labels"]["example.com/cost-centre"] == "42"
        spec = pod["spec"]
        assert spec["priorityClassName"] == "system-cluster-critical"
        assert spec["nodeSelector"] == {"kubernetes.io/os": "linux"}
        assert spec["tolerations"]
        assert "nodeAffinity" in spec["affinity"]
        assert spec["imagePullSecrets"] == [{"name": "pull-secret"}]
        for container in containers(workload):
            assert "extra" in {mount["name"] for mount in container["volumeMounts"]}
            assert {"TZ", "NODE"} <= {variable["name"] for variable in container["env"]}


def test_images() -> None:
    images = {c["image"] for w in rendered("everything").of(*WORKLOADS) for c in containers(w)}
    digest = "sha256:" + "0123456789abcdef" * 4
    assert images == {f"images.example.com/cometmq/service@{digest}", "cometmq/lag:1"}
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert version
    plain = {c["image"] for w in rendered("defaults").of(*WORKLOADS) for c in containers(w)}
    assert plain == {f"cometmq/service:{version[1]}", f"cometmq/lag:{version[1]}"}


def test_ipv6() -> None:
    chart = rendered("ipv6-openshift")
    for workload in chart.of(*SERVERS):
        assert chart.options(workload)["listen_host"] == "::"
    assert default_values()["listenHost"] == "0.0.0.0"
