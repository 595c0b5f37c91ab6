"""The chart tells the truth: what it renders is started as it stands there, and works.

Every container of the rendered chart becomes a local process, in a network, mount and process
namespace of its own, with the command, arguments, environment, configuration, user and read-only
tree that the chart and the Dockerfile give it. One thing differs: the Lease is a file, told by one
environment variable. The kernel removes all of it when the run ends.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.kube.chart import CHART, HELMS, ROOT, VALUES, run_helm

# Named like the chart, the release makes Kubernetes' own variables look like options of ours.
RELEASE, NAMESPACE, DOMAIN = "cometmq", "queues", "cluster.local"
NAMESPACES = ["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
RUN_S_MAX = 420
OWN_DEVICE = re.compile(r"pods|veth\d{1,2}")

pytestmark = pytest.mark.timeout(RUN_S_MAX + 60)


def unshare() -> list[str]:
    """The command that makes namespaces; a named skip where that is not allowed."""
    if os.geteuid() != 0:
        pytest.skip("root is missing: namespaces cannot be made")
    tools = ("unshare", "nsenter", "setpriv", "ip", "mount")
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} (util-linux, iproute2) is missing")
    command = ["unshare", *NAMESPACES, "--propagation", "private"]
    attempt = [*command, "ip", "link", "add", "x", "type", "bridge"]
    if subprocess.run(attempt, check=False, capture_output=True).returncode:
        pytest.skip("namespaces with bridges are missing: this machine allows none")
    return command


def order(state: Path, *, job: bool) -> Path:
    """What tests.chart.truth is to do, as a file."""
    values = VALUES / "truth.yaml"
    place: list[str | Path] = [RELEASE, CHART, "--namespace", NAMESPACE, "--values", values]
    done = run_helm(HELMS[-1], "template", *place)
    assert done.returncode == 0, done.stderr
    notes = run_helm(HELMS[-1], "install", *place, "--dry-run=client")
    assert notes.returncode == 0, notes.stderr
    commands = re.findall(r"^ +(kubectl .* exec statefulset/.* -- .*)$", notes.stdout, re.M)
    in_pod = commands[0].partition(" -- ")[0] + " --"
    roundtrip = shlex.quote((ROOT / "tests/chart/sdk_roundtrip.py").read_text())
    commands += [
        f"{in_pod} cometmq topic create sdk",
        f"{in_pod} python -c {roundtrip} sdk",
        f"{in_pod} cometmq cluster members --output json",
        f"{in_pod} cometmq broker step-down --broker-group a",
        f"{in_pod} cometmq cluster members --output json",
        f"{in_pod} python -c {roundtrip} sdk",
    ]
    found = {
        "objects": [each for each in yaml.safe_load_all(done.stdout) if each],
        "commands": commands,
        "domain": DOMAIN,
        "job": job,
        "state": str(state / "state"),
        "findings": str(state / "findings.json"),
    }
    (state / "state").mkdir()
    file = state / "order.json"
    file.write_text(json.dumps(found))
    return file


def traces(state: Path) -> list[str]:
    """What a run has left behind: network devices by the names that it gives them, mounts of its
    files. What else comes and goes on this machine meanwhile is not its own.
    """
    devices = [name for name in os.listdir("/sys/class/net") if OWN_DEVICE.fullmatch(name)]
    mounts = Path("/proc/mounts").read_text().splitlines()
    return devices + [mount for mount in mounts if str(state) in mount]


def tell(state: Path, *, job: bool) -> dict[str, Any]:
    """Run the story; its findings. Nothing of it stays but the files under ``state``."""
    command = [*unshare(), sys.executable, "-m", "tests.chart.truth", str(order(state, job=job))]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_S_MAX, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    findings: dict[str, Any] = json.loads((state / "findings.json").read_text())
    shutil.rmtree(state / "state")
    return findings


def check(findings: dict[str, Any]) -> None:
    """Everything became ready, did what the notes say, and went away in good order."""
    for name, found in findings["containers"].items():
        print(f"--- {name}\n{found.get('log', '')}")  # shown when the test fails
    assert "failed" not in findings, findings["failed"]
    for name, found in findings["containers"].items():
        assert "cometmq_build_info" in found["metrics"], name
        assert found["exit"] == 0, name
    for command in findings["commands"]:
        assert command["code"] == 0, command


def total(name: str, metrics: str) -> float:
    """The sum of a metric over its labels."""
    return sum(map(float, re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", metrics, re.M)))


def writers(shown: str) -> dict[str, int]:
    """Broker group → its writing member, of ``cluster --output json``."""
    members = json.loads(shown)
    return {m["broker_group"]: m["member_id"] for m in members if m["role"] == "writer"}


def test_it_runs_as_rendered(tmp_path: Path) -> None:
    assert not traces(tmp_path)
    findings = tell(tmp_path, job=False)
    check(findings)
    assert set(findings["containers"]) == {
        *(f"cometmq-namesrv-{n}/namesrv" for n in range(2)),
        *(f"cometmq-broker-a-{n}/member" for n in range(2)),
        "cometmq-broker-b-0/member",
        "cometmq-pullhold-0/pullhold",
    }
    said = [command["stdout"] for command in findings["commands"]]
    assert "Hello, comet" in said[3]
    assert said[5].splitlines() == [f"message {number}" for number in range(10)]
    before_step, after_step = writers(said[6]), writers(said[8])
    assert len(before_step) == 2
    assert {group for group in before_step if before_step[group] != after_step[group]} == {"a"}
    assert said[9] == said[5]
    metrics = {name: found["metrics"] for name, found in findings["containers"].items()}
    for number in range(2):  # one name stands for both, and members register with each
        known = metrics[f"cometmq-namesrv-{number}/namesrv"]
        assert total("cometmq_namesrv_members", known) == 3
    parked = metrics["cometmq-pullhold-0/pullhold"]
    assert total("cometmq_hold_wakes_total", parked) > 0, "the SDK did not park"
    assert not traces(tmp_path)


@pytest.mark.slow  # starts Spark
def test_the_lag_job_runs_as_rendered(tmp_path: Path) -> None:
    pytest.importorskip("pyspark", reason="pyspark is missing")
    findings = tell(tmp_path, job=True)
    check(findings)
    assert [(step["name"], step["code"]) for step in findings["job"]] == [
        ("export", 0),
        ("spark", 0),
    ], findings["job"]
    assert any(file.startswith("snapshots/") for file in findings["job_files"])
    assert any(file.startswith("lag/") for file in findings["job_files"])
