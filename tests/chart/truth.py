"""Starts what a rendered chart says, uses it, stops it, and writes down what happened.

``python -m tests.chart.truth ORDER`` runs in namespaces of its own, as root (test_truth.py sees to
that). ORDER is a JSON file: objects, state folder, domain, notes, whether to run the lag job, and
the file to write the findings to.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from tests.support.kube.chart import Object
from tests.support.kube.pods import Cluster, job_pod, schedule
from tests.support.kube.sandbox import Container, Sandbox, await_true

READY_S_MAX = 60.0
COMMAND_S_MAX = 60.0
JOB_S_MAX = 240.0
LEASES = "/lease"


class Story:
    """One run, from start to stop."""

    def __init__(self, order: Object) -> None:
        self._order = order
        self._state = Path(order["state"])
        self._cluster: Cluster = schedule(tuple(order["objects"]))
        self._lend_leases()
        self._sandbox = Sandbox(self._state, self._cluster, order["domain"])
        self._running: list[Container] = []
        self.findings: dict[str, Any] = {"containers": {}, "commands": [], "job": []}

    def run(self) -> None:
        try:
            self._start()
            for command in self._order["commands"]:
                self._execute(command)
            self._await_available()
            self._scrape()
            if self._order["job"]:
                self._run_job()
        except Exception as error:
            self.findings["failed"] = repr(error)
        finally:
            self._stop()

    def _lend_leases(self) -> None:
        """The Lease of a group becomes a file in a folder that all its members see."""
        folder = self._state / "leases"
        folder.mkdir()
        folder.chmod(0o777)
        for pod in self._cluster.pods:
            for spec in pod.spec["containers"]:
                if any(v["name"] == "COMETMQ_LEASE" for v in spec["env"]):
                    spec["volumeMounts"].append({"name": "lease", "mountPath": LEASES})
                    volume = {"name": "lease", "hostPath": {"path": str(folder)}}
                    pod.spec["volumes"].append(volume)

    # --- start ---

    def _start(self) -> None:
        began_s = time.monotonic()
        for pod in self._cluster.pods:
            lease = f"file://{LEASES}/{pod.owner['metadata']['name']}.json"
            for spec in pod.spec["containers"]:
                container = self._sandbox.start(pod, spec, {"COMETMQ_LEASE": lease})
                self._running.append(container)
                self.findings["containers"][container.name] = {}
        for container in self._running:
            self._await_probe(container, "startupProbe", began_s)
        for container in self._running:
            self._await_probe(container, "readinessProbe", began_s)
        self._await_available()
        for container in self._running:
            self._await_probe(container, "livenessProbe", began_s)

    def _await_probe(self, container: Container, probe: str, began_s: float) -> None:
        timing = container.spec[probe]
        limit_s = READY_S_MAX
        if probe != "readinessProbe":  # failing for that long starts a container anew
            limit_s = float(timing["periodSeconds"] * timing["failureThreshold"])
        await_true(
            lambda: serving(container, probe) or not container.running,
            limit_s,
            f"{container.name}: no {probe}",
        )
        assert container.running, f"{container.name} has ended"
        after_s = round(time.monotonic() - began_s, 1)
        self.findings["containers"][container.name][probe] = after_s

    def _await_available(self) -> None:
        """Ready without a break for as long as the workload asks: what ``rollout status`` waits
        for. A member that becomes the broker is not ready for a moment.
        """
        asked = (c.pod.owner["spec"].get("minReadySeconds", 0) for c in self._running)
        wanted_s = float(max(asked))
        since_s = time.monotonic()

        def available() -> bool:
            nonlocal since_s
            if not all(serving(container, "readinessProbe") for container in self._running):
                since_s = time.monotonic()
            return time.monotonic() - since_s >= wanted_s

        await_true(available, READY_S_MAX, "not ready for long enough")

    # --- use ---

    def _execute(self, line: str) -> None:
        """``kubectl … exec statefulset/NAME -- COMMAND``, as the notes have it."""
        before, _, command = line.partition(" -- ")
        owner = before.rpartition("/")[2]
        container = next(c for c in self._running if c.pod.owner["metadata"]["name"] == owner)
        done = self._sandbox.execute(container, shlex.split(command), COMMAND_S_MAX)
        self.findings["commands"].append(
            {"line": line, "code": done.returncode, "stdout": done.stdout, "stderr": done.stderr}
        )

    def _scrape(self) -> None:
        for container in self._running:
            (port,) = (p for p in container.spec["ports"] if p["name"] == "metrics")
            url = f"http://{container.pod.address}:{port['containerPort']}/metrics"
            with urllib.request.urlopen(url, timeout=10) as answer:
                text = answer.read().decode()
            self.findings["containers"][container.name]["metrics"] = text

    def _run_job(self) -> None:
        (job,) = (o for o in self._order["objects"] if o["kind"] == "CronJob")
        pod = job_pod(job, "10.123.0.250")
        for spec in [*pod.spec["initContainers"], *pod.spec["containers"]]:
            container = self._sandbox.start(pod, spec, {})
            code = container.wait(JOB_S_MAX)
            found = {"name": spec["name"], "code": code, "log": container.log_text()}
            self.findings["job"].append(found)
        claim = self._state / "claims" / next(iter(pod.claims.values()))
        files = sorted(str(p.relative_to(claim)) for p in claim.rglob("*") if p.is_file())
        self.findings["job_files"] = files

    # --- stop ---

    def _stop(self) -> None:
        for container in self._running:
            container.terminate()
        for container in self._running:
            grace_s = float(container.pod.spec["terminationGracePeriodSeconds"])
            found = self.findings["containers"][container.name]
            found["exit"] = container.wait(grace_s)
            found["log"] = container.log_text()[-8_000:]


def serving(container: Container, probe: str) -> bool:
    """Ask as the kubelet does: from outside, at the pod's address."""
    asked = container.spec[probe]
    request = health_pb2.HealthCheckRequest(service=asked["grpc"]["service"])
    options = [("grpc.enable_http_proxy", 0)]
    with grpc.insecure_channel(
        f"{container.pod.address}:{asked['grpc']['port']}", options=options
    ) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                request, timeout=asked["timeoutSeconds"]
            )
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def main() -> None:
    order = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    story = Story(order)
    story.run()
    Path(order["findings"]).write_text(json.dumps(story.findings), encoding="utf-8")


if __name__ == "__main__":
    main()
