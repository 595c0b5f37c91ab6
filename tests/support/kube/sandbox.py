"""Runs the containers of pods as local processes, near enough to what a kubelet does.

Needs a network, mount and process namespace of its own, which the caller makes (``unshare``) and
whose end is the end of everything in here. Each pod gets a network namespace on one bridge; each
container a tree of its own, the user, groups and capabilities that its pod asks for, and process
number 1.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.support.kube.chart import Object
from tests.support.kube.container_root import Images, Roots, write_etc
from tests.support.kube.pods import NODE_ADDRESS, SUBNET_BITS, Cluster, Pod

SMALL_S = 10.0  # how long making a namespace or a process may take


@dataclass
class Container:
    """A container that runs or has ended."""

    pod: Pod
    spec: Object
    process: subprocess.Popen[bytes]
    log: Path
    environment: dict[str, str]
    main: int = 0  # its process number 1, as seen from here

    @property
    def name(self) -> str:
        return f"{self.pod.name}/{self.spec['name']}"

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def find_main(self) -> bool:
        """unshare has one child: what the container runs."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        words = children.read_text().split() if self.running else ["0"]
        self.main = int(words[0]) if words else 0
        return bool(words)

    def terminate(self) -> None:
        if self.running and self.main:
            os.kill(self.main, signal.SIGTERM)

    def wait(self, limit_s: float) -> int | None:
        """The exit status; None: it still runs after ``limit_s``."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None

    def log_text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")


class Sandbox:
    """Pods on a bridge; all files lie under ``state``."""

    def __init__(self, state: Path, cluster: Cluster, domain: str) -> None:
        self._state = state
        self._cluster = cluster
        self._images = Images.make(state / "trees")
        self._roots = Roots(state, cluster, self._images)
        self._holders: dict[str, int] = {}  # pod → process that holds its network namespace
        self.containers: list[Container] = []
        write_etc(state / "etc", cluster.hosts(domain))
        (state / "logs").mkdir()
        _run("ip", "link", "set", "lo", "up")
        _run("ip", "link", "add", "pods", "type", "bridge")
        _run("ip", "address", "add", f"{NODE_ADDRESS}/{SUBNET_BITS}", "dev", "pods")
        _run("ip", "link", "set", "pods", "up")

    def start(self, pod: Pod, spec: Object, overrides: dict[str, str]) -> Container:
        """Start a container. ``overrides`` replace variables that it has."""
        stage = self._images.stage(spec["image"])
        environment = {**stage.environment, **pod.environment(spec, self._cluster)}
        environment |= {name: overrides[name] for name in overrides.keys() & environment.keys()}
        command = [*spec.get("command", stage.entrypoint), *spec.get("args", [])]
        into = ["nsenter", f"--net=/proc/{self._network(pod)}/ns/net"]
        into += ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation=private"]
        script = ["sh", "-ec", self._roots.script(pod, spec), "sh"]
        log = self._state / "logs" / f"{pod.name}-{spec['name']}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*into, *script, *_identity(pod), *_with(environment), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        container = Container(pod, spec, process, log, environment)
        await_true(container.find_main, SMALL_S, f"{container.name} does not start")
        self.containers.append(container)
        return container

    def execute(
        self, container: Container, command: list[str], limit_s: float
    ) -> subprocess.CompletedProcess[str]:
        """What ``kubectl exec`` does."""
        target = f"--target={container.main}"
        into = ["nsenter", target, "--mount", "--net", "--pid", "--root", "--wd=/"]
        return subprocess.run(
            [*into, *_identity(container.pod), *_with(container.environment), *command],
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )

    def _network(self, pod: Pod) -> int:
        if pod.name not in self._holders:
            self._holders[pod.name] = self._new_network(pod, f"veth{len(self._holders)}")
        return self._holders[pod.name]

    def _new_network(self, pod: Pod, outside: str) -> int:
        holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"]).pid
        namespace, own = f"/proc/{holder}/ns/net", os.readlink("/proc/self/ns/net")
        await_true(lambda: os.readlink(namespace) != own, SMALL_S, "no network namespace")
        peer = ["peer", "name", "eth0", "netns", str(holder)]
        _run("ip", "link", "add", outside, "master", "pods", "type", "veth", *peer)
        _run("ip", "link", "set", outside, "up")
        inside = ["nsenter", f"--net={namespace}", "ip"]
        _run(*inside, "address", "add", f"{pod.address}/{SUBNET_BITS}", "dev", "eth0")
        for device in ("lo", "eth0"):
            _run(*inside, "link", "set", device, "up")
        return holder


def await_true(condition: Callable[[], bool], limit_s: float, otherwise: str) -> None:
    """Poll until ``condition`` holds."""
    end_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError(otherwise)
        time.sleep(0.05)


def _identity(pod: Pod) -> list[str]:
    """User, groups and capabilities of a pod's processes: what all its containers ask for."""
    who = pod.spec["securityContext"]
    ids = [f"--reuid={who['runAsUser']}", f"--regid={who['runAsGroup']}"]
    limits = ["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
    return ["setpriv", *ids, f"--groups={who['fsGroup']}", *limits]


def _with(environment: dict[str, str]) -> list[str]:
    return ["env", "-i", *(f"{name}={value}" for name, value in environment.items())]


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=SMALL_S)
