"""A network of nodes that tests can cut: each node a network namespace of its own, all on one
bridge.

The caller's own network namespace must be one that nobody else uses (``unshare --net``): the bridge
is in there, and the kernel removes all of it with the last process. Nodes are the caller's children
and end with it.

A cut is silent, as when a cable is pulled: what a node sends to another is put into frames for an
address that nobody has. So it goes one way, holds for connections that are open, and needs nothing
but ``ip``. Losing packets at random needs ``nft`` or ``iptables``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

PREFIX = "10.77.0"
BITS = 24
HUB = f"{PREFIX}.1"  # the caller, who is cut off from nobody
NOWHERE = "02:00:00:00:00:00"
SMALL_S = 10.0


class Network:
    """Nodes by name. Use as a context manager: at its end the nodes are gone."""

    def __init__(self) -> None:
        self.addresses: dict[str, str] = {"hub": HUB}
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._cuts: Counter[tuple[str, str]] = Counter()  # how many want it
        self._losing: Counter[str] = Counter()

    def __enter__(self) -> Network:
        _run("ip", "link", "set", "lo", "up")
        _run("ip", "link", "add", "hub", "type", "bridge")
        _run("ip", "address", "add", f"{HUB}/{BITS}", "dev", "hub")
        _run("ip", "link", "set", "hub", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for holder in self._holders.values():
            holder.kill()
            holder.wait()
        _run("ip", "link", "delete", "hub")

    def add(self, name: str) -> str:
        """A new node; its address."""
        number = len(self.addresses)
        address = self.addresses[name] = f"{PREFIX}.{number + 10}"
        holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        self._holders[name] = holder
        namespace, own = f"/proc/{holder.pid}/ns/net", os.readlink("/proc/self/ns/net")
        _await(lambda: os.readlink(namespace) != own)
        peer = ["peer", "name", "eth0", "netns", str(holder.pid)]
        _run("ip", "link", "add", f"veth{number}", "master", "hub", "type", "veth", *peer)
        _run("ip", "link", "set", f"veth{number}", "up")
        self.run(name, "ip", "address", "add", f"{address}/{BITS}", "dev", "eth0")
        for device in ("lo", "eth0"):
            self.run(name, "ip", "link", "set", device, "up")
        return address

    def add_address(self, name: str) -> str:
        """Another address of the caller's own, which can be cut off as a node can."""
        address = self.addresses[name] = f"{PREFIX}.{len(self.addresses) + 10}"
        _run("ip", "address", "add", f"{address}/{BITS}", "dev", "hub")
        return address

    def listen_host(self, name: str) -> str:
        """Where a node's process listens."""
        return self.addresses[name]

    def forward(self, name: str, port: int) -> str:
        """Where others reach this port of a node: nothing is between."""
        assert port
        return self.addresses[name]

    def runs(self, name: str, pid: int) -> None:
        """This process is the node's: so its network namespace says."""

    def at(self, name: str) -> list[str]:
        """What to put before a command that is to run at a node."""
        return ["nsenter", f"--net=/proc/{self._holders[name].pid}/ns/net"]

    def run(self, name: str, *command: str) -> None:
        _run(*self.at(name), *command)

    @contextmanager
    def cut(self, sources: list[str], targets: list[str]) -> Iterator[None]:
        """Nothing that a source sends reaches a target. Cuts may overlap."""
        links = [(a, b) for a in sources for b in targets if a != b and a in self._holders]
        for link in links:
            self._cuts[link] += 1
            self._neighbour(*link, "replace", "lladdr", NOWHERE, "nud", "permanent")
        try:
            yield
        finally:
            for link in links:
                self._cuts[link] -= 1
                if not self._cuts[link]:
                    self._neighbour(*link, "delete")

    @contextmanager
    def parted(self, some: list[str], others: list[str]) -> Iterator[None]:
        """Nothing passes between the two sides, either way."""
        with self.cut(some, others), self.cut(others, some):
            yield

    @contextmanager
    def losing(self, name: str, percent: int) -> Iterator[None]:
        """So many of a hundred packets to a node are lost, and of those from it."""
        self._losing[name] += 1
        if self._losing[name] == 1:
            for command in _loss(percent):
                self.run(name, *command)
        try:
            yield
        finally:
            self._losing[name] -= 1
            if not self._losing[name]:
                for command in _no_loss():
                    self.run(name, *command)

    def _neighbour(self, source: str, target: str, verb: str, *more: str) -> None:
        address = self.addresses[target]
        self.run(source, "ip", "neighbour", verb, address, *more, "dev", "eth0")


def why_no_loss() -> str:
    """Why packets cannot be lost at random; empty when they can."""
    return why_not() or (
        "" if shutil.which("nft") or shutil.which("iptables") else "nft and iptables are missing"
    )


def _loss(percent: int) -> Iterator[list[str]]:
    if shutil.which("nft") is None:
        rule = ["-m", "statistic", "--mode", "random", "--probability", f"{percent / 100}"]
        for chain in ("INPUT", "OUTPUT"):
            yield ["iptables", "-A", chain, *rule, "-j", "DROP"]
        return
    yield ["nft", "add table ip faults"]
    for hook in ("input", "output"):
        yield ["nft", f"add chain ip faults {hook} {{ type filter hook {hook} priority 0; }}"]
        yield ["nft", f"add rule ip faults {hook} numgen random mod 1000 < {percent * 10} drop"]


def _no_loss() -> Iterator[list[str]]:
    if shutil.which("nft") is None:
        yield from (["iptables", "-F", chain] for chain in ("INPUT", "OUTPUT"))
    else:
        yield ["nft", "delete table ip faults"]


@cache
def why_not() -> str:
    """Why such a network cannot be made here; empty when it can. ``TEST_NETWORK=proxies`` says that
    it shall not.
    """
    if os.environ.get("TEST_NETWORK") == "proxies":
        return "TEST_NETWORK=proxies"
    if os.geteuid() != 0:
        return "root is missing"
    tools = ("unshare", "nsenter", "ip")
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        return f"{', '.join(missing)} (util-linux, iproute2) is missing"
    attempt = ["unshare", "--net", "ip", "link", "add", "x", "type", "bridge"]
    if subprocess.run(attempt, check=False, capture_output=True).returncode:
        return "this machine allows no network namespaces"
    return ""


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=SMALL_S, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


def _await(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + SMALL_S
    while not condition():
        assert time.monotonic() < end_s, "no network namespace"
        time.sleep(0.005)
