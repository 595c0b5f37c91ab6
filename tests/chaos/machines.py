"""The machines of a chaos run: what runs at each node of the network, and what can befall it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from pathlib import Path

from tests.support.cluster.network import Network
from tests.support.cluster.proxies import ProxyNetwork
from tests.support.faults.wrong_clock import WrongClock
from tests.support.stores.loop_disk import LoopDisk

AnyNetwork = Network | ProxyNetwork

ROOT = Path(__file__).resolve().parents[2]
DISK_BYTES = 192 * 1024 * 1024
# A machine that restarts has another boot id: the file that tells it is covered by another.
COVER = 'mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@"'
STOP_S = 60.0


class Machine:
    """A node with at most one process. ``log`` has the output of all its lives."""

    def __init__(self, directory: Path, network: AnyNetwork, name: str) -> None:
        self.name = name
        self.network = network
        self.address = network.add(name)
        self.directory = directory / name
        self.directory.mkdir()
        self.log = self.directory / "log.txt"
        self.process: subprocess.Popen[bytes] | None = None

    def spawn(self, *command: str, **environment: str) -> None:
        """Start its process."""
        assert not self.running, self.name
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("COMETMQ_")}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self.network.at(self.name), *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env={**inherited, **environment},
            )
        self.network.runs(self.name, self.process.pid)

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None

    def end(self) -> int:
        """SIGTERM; the exit status."""
        assert self.process is not None, self.name
        self.process.terminate()
        self.process.communicate(timeout=STOP_S)
        status, self.process = self.process.returncode, None
        return status

    def tell(self) -> None:
        """Its process, which reads its standard input, gets the word to end."""
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        if self.running:
            assert self.process is not None
            self.process.send_signal(number)


class Service(Machine, ABC):
    """A machine that runs one of ``services``."""

    @abstractmethod
    def start(self) -> None: ...

    def revive(self) -> None:
        """Start it, unless it runs."""
        if not self.running:
            self.kill()
            self.start()


class Server(Service):
    """A name server or a pullhold. Always the same ports."""

    def __init__(
        self, directory: Path, network: AnyNetwork, name: str, kind: str, **options: object
    ) -> None:
        super().__init__(directory, network, name)
        self._command = service(kind, listen_host=network.listen_host(name), **options)

    def advertise(self) -> None:
        """Let it tell clients the address by which they know it."""
        self._command += ["--advertised_host", self.address]

    def start(self) -> None:
        self.spawn(*self._command)


class Member(Service):
    """A member of the broker group, on a disk of its own if there can be one."""

    port, internal_port = 10911, 10912

    def __init__(
        self, directory: Path, network: AnyNetwork, member_id: int, *, own_disk: bool
    ) -> None:
        super().__init__(directory, network, f"m{member_id}")
        self.member_id = member_id
        self.disk = LoopDisk(self.directory, "ext4", DISK_BYTES) if own_disk else None
        self.store = (self.disk.mount_point if self.disk else self.directory) / "store"
        self.options: dict[str, object] = {}
        self.clock: WrongClock | None = None
        self.environment: dict[str, str] = {}  # of its process
        self._boots = 0
        if self.disk is not None:
            self.disk.mount()

    def start(self) -> None:
        """Be born, as a follower."""
        command = service(
            "haslave",
            listen_host=self.network.listen_host(self.name),
            advertised_host=self.address,
            member_id=self.member_id,
            port=self.port,
            internal_port=self.internal_port,
            store_path=self.store,
            **self.options,
        )
        kubeconfig = str(self.directory.parent / "kubeconfig.json")
        environment = {"KUBECONFIG": kubeconfig, **self.environment}
        self.spawn(*self._on_this_boot(), *command, **environment)

    def have_own_clock(self) -> None:
        """Its clock may be wrong, from its next start on."""
        self.clock = WrongClock(self.directory)
        self.environment |= self.clock.environment

    def _on_this_boot(self) -> list[str]:
        """What to put before a command that is to see this machine's boot id."""
        if not isinstance(self.network, Network):
            return []
        boot_id = self.directory / f"boot-{self._boots}"
        boot_id.write_text(f"{self.member_id:08}-0000-4000-8000-{self._boots:012}\n")
        # Mounts of before must not hold a disk that is taken away here: so slave, not private.
        into = ["unshare", "--mount", "--propagation", "slave"]
        return [*into, "sh", "-c", COVER, str(boot_id)]

    def darken(self) -> None:
        """The power goes: what was not synced is gone. The process is stopped first, because it
        must not answer for a sync that the cut interrupts (:meth:`LoopDisk.shut_down`).
        """
        assert self.disk is not None
        self.signal(signal.SIGSTOP)
        self.disk.shut_down()

    def reboot(self) -> None:
        """The machine goes down with the process on it, and is up again."""
        self.kill()
        if self.disk is not None:
            self.disk.restart()
        self._boots += 1


class Clients(Service):
    """Clients that are killed in the middle of everything. Each life has a name of its own."""

    def __init__(
        self,
        directory: Path,
        network: AnyNetwork,
        name: str,
        module: str = "brief",
        history: str = "jsonl",
    ) -> None:
        """``history``: what the names of its histories end with."""
        super().__init__(directory, network, name)
        self.arguments: list[str] = []  # the name servers and the topics
        self._module = f"tests.chaos.{module}"
        self._history = history
        self._lives = 0

    def start(self) -> None:
        life = f"{self.name}-{self._lives}"
        self._lives += 1
        history = str(self.directory.parent / f"{life}.{self._history}")
        self.spawn(sys.executable, "-m", self._module, life, history, *self.arguments)


def service(kind: str, **options: object) -> list[str]:
    """The command of a service."""
    every = {"metrics_port": 0, **options}
    words = [word for name, value in every.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", f"services.{kind}", *words]


def write_kubeconfig(path: Path, api: str) -> None:
    """So that members take ``api`` for their cluster's."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "chaos", "cluster": {"server": api}}],
        "users": [{"name": "chaos", "user": {}}],
        "contexts": [{"name": "chaos", "context": {"cluster": "chaos", "user": "chaos"}}],
        "current-context": "chaos",
    }
    path.write_text(json.dumps(config))
