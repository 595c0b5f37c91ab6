"""What is rendered fits together and is hardened."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.support.kube.chart import (
    CHART,
    HELMS,
    NAMESPACE,
    RELEASE,
    SERVERS,
    VALUES_FILES,
    WORKLOADS,
    Object,
    Rendered,
    component,
    containers,
    env,
    label,
    matches,
    pod_template,
    rendered,
    run_helm,
    template,
)

CLUSTER_WIDE = {"StorageClass", "PersistentVolume"}


# --- Helm -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("major", HELMS)
def test_lint_is_clean(major: int) -> None:
    done = run_helm(major, "lint", "--strict", CHART)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not re.search(r"\[(WARNING|ERROR)\]", done.stdout)


@pytest.mark.parametrize("values", VALUES_FILES)
def test_helm_3_and_helm_4_agree(values: str) -> None:
    first, *others = (rendered(values, major) for major in HELMS)
    key = label
    for other in others:
        assert sorted(_settled(first), key=key) == sorted(_settled(other), key=key)


def _settled(chart: Rendered) -> list[Object]:
    """The objects without what is made by chance."""
    return [
        {**thing, "data": {}} if thing["kind"] == "Secret" else thing for thing in chart.objects
    ]


def test_objects_are_different_and_labelled(chart: Rendered) -> None:
    names = [label(thing) for thing in chart.objects]
    assert len(set(names)) == len(names)
    for thing in chart.objects:
        assert thing["metadata"]["labels"]["app.kubernetes.io/instance"] == RELEASE
        assert thing["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "Helm"
        inside = None if thing["kind"] in CLUSTER_WIDE else NAMESPACE
        assert thing["metadata"].get("namespace") == inside, label(thing)


def test_nothing_but_the_version_of_the_chart_changes_no_pod(tmp_path: Path) -> None:
    copy = Path(shutil.copytree(CHART, tmp_path / "cometmq"))
    text = (copy / "Chart.yaml").read_text()
    (copy / "Chart.yaml").write_text(re.sub(r"^version: .*", "version: 9.9.9", text, flags=re.M))
    newer = template(HELMS[-1], chart=copy)
    for workload in rendered("defaults").of(*WORKLOADS):
        (same,) = (thing for thing in newer if label(thing) == label(workload))
        assert pod_template(same) == pod_template(workload)


# --- who selects whom -----------------------------------------------------------------------------


def test_selectors_select_their_own_pods_only(chart: Rendered) -> None:
    pods = {label(each): pod_template(each)["metadata"]["labels"] for each in chart.of(*WORKLOADS)}
    for workload in chart.of(*SERVERS):
        wanted = workload["spec"]["selector"]["matchLabels"]
        assert [n for n, labels in pods.items() if matches(wanted, labels)] == [label(workload)]
        assert not [key for key in wanted if "role" in key or "version" in key]


def test_services_lead_to_ports_that_exist(chart: Rendered) -> None:
    for service in chart.of("Service"):
        (workload,) = (
            each
            for each in chart.of(*SERVERS)
            if matches(service["spec"]["selector"], pod_template(each)["metadata"]["labels"])
        )
        ports = {p["name"]: p["containerPort"] for c in containers(workload) for p in c["ports"]}
        for port in service["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"]


def test_every_port_names_its_protocol(chart: Rendered) -> None:
    ports = [port for service in chart.of("Service") for port in service["spec"]["ports"]]
    for workload in chart.of(*WORKLOADS):
        ports += [port for each in containers(workload) for port in each.get("ports", [])]
    assert ports
    assert {port.get("protocol") for port in ports} == {"TCP"}


def test_stable_names(chart: Rendered) -> None:
    for workload in chart.of("StatefulSet"):
        service = chart.one("Service", workload["spec"]["serviceName"])
        assert service["spec"]["clusterIP"] == "None"
        before_ready = service["spec"].get("publishNotReadyAddresses", False)
        assert before_ready == (component(workload) in ("broker", "namesrv"))


def test_one_pod_at_a_time(chart: Rendered) -> None:
    for workload in chart.of("StatefulSet"):
        assert workload["spec"]["podManagementPolicy"] == "Parallel"
        assert workload["spec"]["updateStrategy"] == {"type": "RollingUpdate"}
    budgets = chart.of("PodDisruptionBudget")
    assert {budget["spec"]["maxUnavailable"] for budget in budgets} == {1}
    selectors = [workload["spec"]["selector"] for workload in chart.of(*SERVERS)]
    unprotected = [s for s in selectors if s not in [b["spec"]["selector"] for b in budgets]]
    assert len(unprotected) == (1 if chart.values == "minimal" else 0)


# --- hardening ------------------------------------------------------------------------------------


def test_pods_are_hardened(chart: Rendered) -> None:
    for workload in chart.of(*WORKLOADS):
        spec = pod_template(workload)["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["enableServiceLinks"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        ids = {"runAsUser", "runAsGroup", "fsGroup"} & set(spec["securityContext"])
        assert len(ids) == (0 if "openshift" in chart.values else 3)


def test_containers_are_hardened(chart: Rendered) -> None:
    for workload in chart.of(*WORKLOADS):
        for container in containers(workload):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert {"requests", "limits"} == set(container["resources"])


def test_what_can_be_written(chart: Rendered) -> None:
    for workload in chart.of(*WORKLOADS):
        spec = pod_template(workload)["spec"]
        claims = {c["metadata"]["name"] for c in workload["spec"].get("volumeClaimTemplates", [])}
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert not claims & set(volumes)
        for container in containers(workload):
            mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
            assert {m["name"] for m in mounts.values()} <= claims | set(volumes)
            home = next(e["value"] for e in container["env"] if e["name"] == "HOME")
            for path in ("/tmp", home):
                assert volumes[mounts[path]["name"]]["emptyDir"]["sizeLimit"]


def test_only_members_have_a_token(chart: Rendered) -> None:
    for workload in chart.of(*WORKLOADS):
        spec = pod_template(workload)["spec"]
        member = component(workload) == "broker"
        assert spec["automountServiceAccountToken"] is member
        assert ("serviceAccountName" in spec) is member
    assert all(not each["automountServiceAccountToken"] for each in chart.of("ServiceAccount"))


def test_rights_end_at_the_group(chart: Rendered) -> None:
    """Its Lease, its pods, and events, which Kubernetes cannot limit."""
    for role in chart.of("Role"):
        name = role["metadata"]["name"]
        named, creating, events, pods = role["rules"]
        assert (events["apiGroups"], events["resources"]) == (["events.k8s.io"], ["events"])
        assert events["verbs"] == ["create", "patch"]
        count = chart.one("StatefulSet", name)["spec"]["replicas"]
        assert pods == {
            "apiGroups": [""],
            "resources": ["pods"],
            "resourceNames": [f"{name}-{number}" for number in range(count)],
            "verbs": ["patch"],
        }
        assert named["resourceNames"] == [name]
        assert set(named["verbs"]) == {"get", "update"}
        assert creating["verbs"] == ["create"]
        assert {"leases"} == {*named["resources"], *creating["resources"]}
        assert {"coordination.k8s.io"} == {*named["apiGroups"], *creating["apiGroups"]}
        binding = chart.one("RoleBinding", name)
        assert binding["roleRef"]["name"] == name
        assert [subject["name"] for subject in binding["subjects"]] == [name]
        member = chart.one("StatefulSet", name)
        assert pod_template(member)["spec"]["serviceAccountName"] == name
        assert env(member)["COMETMQ_LEASE"] == f"kubernetes://{NAMESPACE}/{name}"


@pytest.mark.parametrize("option", ["pod_events_enable", "pod_role_label_enable"])
def test_what_is_not_wanted_gets_no_rights(option: str) -> None:
    resource = {"pod_events_enable": "events", "pod_role_label_enable": "pods"}[option]
    objects = template(HELMS[-1], "--set", f"broker.config.{option}=false")
    for role in (found for found in objects if found["kind"] == "Role"):
        rights = [one for rule in role["rules"] for one in rule["resources"]]
        assert resource not in rights
        assert len(rights) == 3


def test_a_member_knows_its_pod(chart: Rendered) -> None:
    for workload in chart.members():
        (member,) = containers(workload)
        given = {e["name"]: e for e in member["env"]}
        name = {"fieldRef": {"fieldPath": "metadata.name"}}
        assert given["COMETMQ_POD_NAME"]["valueFrom"] == name
        uid = {"fieldRef": {"fieldPath": "metadata.uid"}}
        assert given["COMETMQ_POD_UID"]["valueFrom"] == uid


def test_rights_from_elsewhere() -> None:
    chart = rendered("service-monitor")
    assert not chart.of("ServiceAccount", "Role", "RoleBinding")
    for workload in chart.members():
        assert pod_template(workload)["spec"]["serviceAccountName"] == "cometmq-members"
