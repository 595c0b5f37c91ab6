"""Pods start, are probed, told their options and stopped in a way that the processes know."""

from __future__ import annotations

from pathlib import Path

from cometmq.config import ServiceConfig, load
from cometmq.member.config import MemberConfig
from services.namesrv.config import NamesrvConfig
from services.pullhold.config import PullholdConfig
from tests.support.kube.chart import (
    HELMS,
    NAMESPACE,
    SERVERS,
    Object,
    Rendered,
    component,
    containers,
    env,
    label,
    pod_template,
    rendered,
    template,
)

CONFIGS: dict[str, type[ServiceConfig]] = {
    "namesrv": NamesrvConfig,
    "broker": MemberConfig,
    "pullhold": PullholdConfig,
}


def test_probes(chart: Rendered) -> None:
    asked = {"startupProbe": "", "readinessProbe": "ready", "livenessProbe": ""}
    for workload in chart.of(*SERVERS):
        for container in containers(workload):
            port = chart.options(workload)["port"]
            for name, service in asked.items():
                assert container[name]["grpc"] == {"port": port, "service": service}
                timing = {"periodSeconds", "timeoutSeconds", "failureThreshold"}
                assert timing < set(container[name])


def test_drain_ends_before_the_kill(chart: Rendered) -> None:
    for workload in chart.of(*SERVERS):
        grace = pod_template(workload)["spec"]["terminationGracePeriodSeconds"]
        assert grace >= chart.options(workload)["drain_grace_s"] + 5


def environment(workload: Object) -> dict[str, str]:
    """The options of a pod's environment; what Kubernetes fills in gets a likely value."""
    filled = {"COMETMQ_MEMBER_ID": "0", "COMETMQ_ADVERTISED_HOST": "10.0.0.1"}
    given = env(workload)
    return {name: value or filled.get(name, "") for name, value in given.items()}


def test_the_processes_understand_their_options(chart: Rendered, tmp_path: Path) -> None:
    for workload in chart.of(*SERVERS):
        file = tmp_path / f"{workload['metadata']['name']}.yaml"
        file.write_text(chart.config_text(workload))
        (container,) = containers(workload)
        *_, flag, mounted = container["args"]
        assert (flag, mounted) == ("--config", "/etc/cometmq/config.yaml")
        config: ServiceConfig = load(
            CONFIGS[component(workload)],
            argv=["--config", str(file)],
            environ=environment(workload),
        )
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert vars(config)["port"] == ports["grpc"]
        assert config.metrics_port == ports["metrics"]


def test_members_are_born_as_followers(chart: Rendered) -> None:
    assert chart.members()
    for group in chart.members():
        (container,) = containers(group)
        assert container["args"][:2] == ["-m", "services.haslave"]
        index = "metadata.labels['apps.kubernetes.io/pod-index']"
        (number,) = (e for e in container["env"] if e["name"] == "COMETMQ_MEMBER_ID")
        assert number["valueFrom"]["fieldRef"]["fieldPath"] == index
        name, service = group["metadata"]["name"], group["spec"]["serviceName"]
        host = env(group)["COMETMQ_ADVERTISED_HOST"]
        assert host is not None
        assert host.startswith(f"$(POD_NAME).{service}.{NAMESPACE}.svc.")
        assert name == f"{chart.prefix}-broker-{chart.options(group)['broker_group']}"


def test_options_that_change_start_pods_anew() -> None:
    changed = template(HELMS[-1], "--set", "broker.config.flush_disk_type=SYNC_FLUSH")
    for workload in rendered("defaults").of(*SERVERS):
        (same,) = (thing for thing in changed if label(thing) == label(workload))
        before, after = (pod_template(w)["metadata"]["annotations"] for w in (workload, same))
        key = "checksum/config"
        assert (before[key] != after[key]) == (component(workload) == "broker")
