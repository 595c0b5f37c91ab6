"""The secret of the internal ports: who gets it, as what, and that it is made only once."""

from __future__ import annotations

from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest

from cometmq.rpc.secret import read_secrets
from tests.support.kube.chart import (
    CHART,
    HELMS,
    WORKLOADS,
    Rendered,
    component,
    containers,
    label,
    pod_template,
    rendered,
    run_helm,
    template,
)

VARIABLE = "COMETMQ_INTERNAL_SECRET_FILE"
FOLDER = "/etc/cometmq-internal"


def mounted(container: Any) -> bool:
    return any(
        (mount["mountPath"], mount["readOnly"], mount.get("subPath")) == (FOLDER, True, None)
        for mount in container["volumeMounts"]
        if mount["name"] == "internal-secret"
    )


def secret_names(chart: Rendered) -> dict[str, list[str]]:
    """Of each workload the Secrets that it mounts."""
    return {
        label(workload): [
            volume["secret"]["secretName"]
            for volume in pod_template(workload)["spec"]["volumes"]
            if "secret" in volume
        ]
        for workload in chart.of(*WORKLOADS)
    }


@pytest.mark.parametrize(
    ("values", "name", "key"),
    [("defaults", "prod-internal", "secret"), ("everything", "ours", "token")],
)
def test_all_who_call_internal_ports_have_it(values: str, name: str, key: str) -> None:
    chart = rendered(values)
    file = f"{FOLDER}/{key}"
    assert set(map(tuple, secret_names(chart).values())) == {(name,)}
    for workload in chart.of(*WORKLOADS):
        for container in containers(workload):
            told = {e["name"]: e.get("value") for e in container["env"]}.get(VARIABLE)
            match component(workload), container["name"]:
                case (("broker" | "pullhold"), _):
                    assert chart.options(workload)["internal_secret_file"] == file
                    assert mounted(container)
                case ("namesrv", _):
                    assert chart.options(workload)["internal_secret_file"] == file
                    assert told == file, "cometmq is run there"
                    assert mounted(container)
                case (_, "export"):
                    assert told == file
                    assert mounted(container)
                case _, other:
                    assert other == "spark", "it asks no broker"
                    assert not mounted(container)
                    assert told is None


def test_one_is_made_that_the_processes_take(tmp_path: Path) -> None:
    found: list[str] = []
    for major in HELMS:
        secret = rendered("defaults", major).one("Secret", "prod-internal")
        assert secret["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
        (tmp_path / "secret").write_bytes(b64decode(secret["data"]["secret"]))
        found += read_secrets(tmp_path / "secret")
    assert len(set(found)) == len(HELMS)
    assert not rendered("everything").of("Secret"), "an existing one is left alone"


@pytest.mark.parametrize("major", HELMS)
def test_only_an_existing_one_is_the_same_in_every_rendering(major: int) -> None:
    """`helm template` asks no cluster: what it makes is not to be applied twice."""

    def data(*options: str) -> list[Any]:
        return [o["data"] for o in template(major, *options) if o["kind"] == "Secret"]

    assert data() != data()
    assert data("--set", "internalSecret.existingSecret=ours") == []


def test_without_it_nothing_is_left_of_it() -> None:
    objects = template(HELMS[-1], "--set", "internalSecret.enabled=false")
    assert "secret" not in f"{objects}".lower()


@pytest.mark.parametrize("key", ["", "../x", "a b"])
def test_a_key_that_is_no_file_name_is_refused(key: str) -> None:
    done = run_helm(HELMS[-1], "template", CHART, "--set", f"internalSecret.key={key}")
    assert done.returncode != 0
    assert "internalSecret" in done.stderr
