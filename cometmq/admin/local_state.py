"""What a folder says of its local cluster, and what of it can be proved.

The state file is only a claim: another user, a copied folder or a careless hand may have written
it. What it names is checked before anything is stopped or removed. Each process has a name of its
kind. It is the cluster's own only if its command line names its announcement file in this folder.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from cometmq.admin.processes import ProcessId
from cometmq.errors import LocalStateInvalid

STATE_FILE = "local.json"
STOPPED_FILE = "stopped.json"
SECRET_OPTION = "internal_secret_file"  # the one broker option that all processes get
SECRET_FILE = "internal-secret"
NAMESRV = "namesrv"
BROKER = "broker"  # a group of one member, without a lease
MEMBER = "haslave"  # of a group with slaves: born a follower, one of them becomes the writer
PULLHOLD = "pullhold"
PROCESSES_MAX = 64
STATE_BYTES_MAX = 1024 * 1024
# The names that a process of each kind has.
_NAMES = {
    NAMESRV: re.compile(r"namesrv-[1-9]\d?"),
    BROKER: re.compile(r"g[1-9]\d?"),
    MEMBER: re.compile(r"g[1-9]\d?-\d"),
    PULLHOLD: re.compile(r"pullhold-[1-9]\d?"),
}
_ADDRESS = re.compile(r"(?:[\w.:\[\]-]+:\d{1,5})?", re.ASCII)
_MEMBER_NAME = re.compile(r"g(?P<group>[1-9]\d?)(?:-(?P<member>\d))?")


@dataclass(frozen=True, slots=True)
class LocalProcess:
    """One process of a local cluster. Addresses are empty until it has announced itself."""

    name: str  # namesrv-1, pullhold-1, …; the broker group: g1, …; with slaves its members: g1-0, …
    kind: str  # NAMESRV, BROKER, MEMBER or PULLHOLD
    pid: int
    start_ticks: int
    address: str = ""
    internal_address: str = ""  # members of broker groups only
    metrics_address: str = ""
    log_start: int = 0  # size of its log file when it was started: what earlier runs wrote
    # The file that its command line names. It proves whose the process is, and is derived from
    # the folder: it is never read from a state file.
    announcement: Path = Path()

    @property
    def id(self) -> ProcessId:
        return ProcessId(self.pid, self.start_ticks, str(self.announcement))

    @property
    def alive(self) -> bool:
        return self.id.alive()

    @property
    def broker_group(self) -> str:
        """Which it belongs to; empty for other kinds of processes."""
        return group_and_id(self.name, self.kind)[0]

    @property
    def member_id(self) -> int:
        """Its number within its broker group."""
        return group_and_id(self.name, self.kind)[1]


@dataclass(frozen=True, slots=True)
class Shape:
    """How many processes of each kind a cluster has."""

    namesrvs: int = 1
    brokers: int = 2  # broker groups
    slaves: int = 0  # of each broker group; 0: its broker has no followers
    pullholds: int = 0


@dataclass(frozen=True, slots=True)
class LocalCluster:
    """What runs in a folder."""

    directory: Path
    processes: tuple[LocalProcess, ...]
    options: dict[str, str] = field(default_factory=dict)  # broker options, name → value
    shape: Shape = field(default_factory=Shape)  # that it was started with

    def of_kind(self, kind: str) -> tuple[LocalProcess, ...]:
        return tuple(process for process in self.processes if process.kind == kind)

    @property
    def brokers(self) -> tuple[LocalProcess, ...]:
        """Members of broker groups: brokers without followers, writers, slaves."""
        return tuple(process for process in self.processes if process.broker_group)

    @property
    def broker_groups(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(process.broker_group for process in self.brokers))

    @property
    def pullholds(self) -> tuple[LocalProcess, ...]:
        return self.of_kind(PULLHOLD)

    @property
    def namesrv(self) -> str:
        """The name servers' addresses in the form that every client takes."""
        return ";".join(process.address for process in self.of_kind(NAMESRV))

    @property
    def secret_file(self) -> Path | None:
        """The option of that name, else the folder's own: what its processes, and those who
        operate it, prove to each other. An empty option means none.
        """
        own = self.directory / SECRET_FILE
        given = self.options.get(SECRET_OPTION, str(own) if own.exists() else "")
        return Path(given) if given else None

    def log(self, name: str) -> Path:
        return self.directory / name / "log.txt"


def group_and_id(name: str, kind: str) -> tuple[str, int]:
    """Broker group and member id of a process."""
    if kind == BROKER:
        return name, 0
    group, _, member_id = name.rpartition("-")
    return (group, int(member_id)) if kind == MEMBER else ("", 0)


def is_process(name: str) -> bool:
    """True if a process of a local cluster may have this name."""
    return any(pattern.fullmatch(name) for pattern in _NAMES.values())


def announcement(directory: Path, name: str) -> Path:
    """The file in which a process of the folder announces its addresses."""
    return directory / name / "ready.json"


def status(directory: Path) -> LocalCluster | None:
    """The cluster that was started in the folder and not taken down; None when there is none.

    Raises LocalStateInvalid if the state file is not one of this user's local clusters.
    """
    return _load(directory, STATE_FILE)


def known(directory: Path) -> LocalCluster | None:
    """The cluster that was started in the folder, or taken down. Without both files, the smallest
    cluster that has the brokers whose messages lie in the folder. None: the folder has neither.
    """
    found = status(directory) or _load(directory, STOPPED_FILE)
    members = with_data(directory)
    if found is not None or not members:
        return found
    matches = [match for name in members if (match := _MEMBER_NAME.fullmatch(name)) is not None]
    brokers = max(int(match["group"]) for match in matches)
    slaves = max(int(match["member"] or 0) for match in matches)
    return LocalCluster(directory.resolve(), (), shape=Shape(brokers=brokers, slaves=slaves))


def with_data(directory: Path) -> set[str]:
    """The members of broker groups whose messages lie in the folder."""
    names = {store.parent.name for store in directory.glob("g*/store") if store.is_dir()}
    return {name for name in names if _MEMBER_NAME.fullmatch(name)}


def save(cluster: LocalCluster) -> None:
    """Write the state file in one step: a reader sees the old state or the new one."""
    processes = [asdict(process) for process in cluster.processes]
    for process in processes:
        del process["announcement"]
    state = {"shape": asdict(cluster.shape), "options": cluster.options, "processes": processes}
    cluster.directory.mkdir(parents=True, exist_ok=True)
    temporary = cluster.directory / f"{STATE_FILE}.tmp"
    temporary.write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, cluster.directory / STATE_FILE)


def _load(directory: Path, file: str) -> LocalCluster | None:
    path = directory / file
    try:
        with path.open("rb") as opened:
            status = os.fstat(opened.fileno())
            text = opened.read(STATE_BYTES_MAX + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LocalStateInvalid(f"{path} cannot be read: {error.strerror}") from error
    if status.st_uid != os.geteuid():
        raise LocalStateInvalid(f"{path} belongs to user {status.st_uid}, not to {os.geteuid()}")
    try:
        return _checked(directory.resolve(), json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise LocalStateInvalid(f"{path} is not the state of a local cluster: {error}") from error


def _checked(directory: Path, state: Mapping[str, Any]) -> LocalCluster:
    """The cluster that a state file names. ValueError, TypeError, KeyError or AttributeError: a
    local cluster never has such values.
    """
    shape = Shape(**state.get("shape", {}))
    options = state["options"]
    if not all(
        type(count) is int and 0 <= count <= PROCESSES_MAX for count in asdict(shape).values()
    ):
        raise ValueError(f"its shape is {shape}")
    if not all(isinstance(value, str) for value in options.values()):
        raise ValueError(f"its options are {options}")
    processes = tuple(_checked_process(directory, claim) for claim in state["processes"])
    if len(processes) > PROCESSES_MAX:
        raise ValueError(f"it names {len(processes)} processes")
    return LocalCluster(directory, processes, dict(options), shape)


def _checked_process(directory: Path, claim: Mapping[str, Any]) -> LocalProcess:
    process = LocalProcess(**claim)
    name = _NAMES[process.kind]
    if not name.fullmatch(process.name):
        raise ValueError(f"no {process.kind} is called {process.name!r}")
    for number in (process.pid, process.start_ticks, process.log_start):
        if type(number) is not int or number < 0:
            raise ValueError(f"{process.name} has the number {number!r}")
    for address in (process.address, process.internal_address, process.metrics_address):
        if not _ADDRESS.fullmatch(address):
            raise ValueError(f"{process.name} has the address {address!r}")
    return replace(process, announcement=announcement(directory, process.name))
