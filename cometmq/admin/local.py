"""A cluster of real processes on this machine, for development, demonstrations and tests.

Everything lies in one folder::

    DIR/local.json            what runs: pids and addresses
    DIR/stopped.json          what ran before `down`: the next `up` goes by it
    DIR/<process>/log.txt     its output
    DIR/<process>/ready.json  what it announced when it was ready
    DIR/<process>/store/      a broker's messages; they survive `down`
    DIR/leases/<group>.json   the leases of broker groups with slaves
    DIR/internal-secret       what its processes prove to each other, unless another is given

Processes live on when the caller ends. Ports are chosen by the machine; a process that died, or was
taken down, is started again on the ports it had, so that the others and programs find it.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import socket
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from cometmq import native
from cometmq.admin import processes
from cometmq.admin.local_state import (
    BROKER,
    MEMBER,
    NAMESRV,
    PROCESSES_MAX,
    PULLHOLD,
    SECRET_FILE,
    SECRET_OPTION,
    STATE_FILE,
    STOPPED_FILE,
    LocalCluster,
    LocalProcess,
    Shape,
    announcement,
    group_and_id,
    is_process,
    known,
    save,
    status,
    with_data,
)
from cometmq.admin.processes import POLL_INTERVAL_S, Patience
from cometmq.errors import ClusterRunning, InvalidRequest, ProcessFailed, ShapeConflict
from cometmq.flight_recorder import ENTRIES_VARIABLE

__all__ = [
    "BROKER",
    "MEMBER",
    "NAMESRV",
    "SECRET_FILE",
    "SECRET_OPTION",
    "LocalCluster",
    "LocalProcess",
    "Shape",
    "down",
    "known",
    "left_by_purge",
    "status",
    "up",
]

LEASES = "leases"
# What processes make in their folders, and `down --purge` removes.
FILES_OF_A_PROCESS = (
    "log.txt",
    "ready.json",
    "store",
    *(f"kvConfig.json{end}" for end in ("", ".tmp", ".bak", ".bak.tmp")),
)
# A broker writes its log files full size before it uses them, and takes the room for its index
# files: small ones start fast and are enough.
BROKER_OPTIONS = {
    "mapped_file_size_commit_log": str(64 * 1024 * 1024),
    "max_hash_slot_num": "100000",
    "max_index_num": "400000",
    # The whole cluster stops at once: no member is left that could take over.
    "hand_over_at_stop": "false",
}
_LOG_TAIL_LINES = 15
_NAMES_A_FAULT = ("WARNING", "ERROR", "CRITICAL", "Traceback")


async def up(
    directory: Path,
    *,
    namesrv_count: int | None = None,
    broker_count: int | None = None,
    slave_count: int | None = None,
    pullhold_count: int | None = None,
    options: Mapping[str, str] | None = None,
    own_secret: bool = False,
    step_s: float = 60.0,
    tell: Callable[[str], None] = lambda _text: None,
) -> LocalCluster:
    """Start a local cluster, or what of it does not run; returns when every process is ready. Waits
    as :class:`Patience` does, in steps of ``step_s``. ``tell`` gets what a user should know.

    ``broker_count`` broker groups, each with ``slave_count`` slaves; without slaves a broker has
    no lease. ``options`` are broker options (``{"flush_disk_type": "SYNC_FLUSH"}``) that go
    before BROKER_OPTIONS and the brokers' own defaults. What is not given is as it was when the
    folder's cluster was started; in a folder without one it is as :class:`Shape` has it. With
    ``own_secret`` a cluster that is to have no other, and does not run yet, is given one.

    Raises ClusterRunning when what is given contradicts a cluster that runs in the folder,
    ShapeConflict when messages that lie in the folder would have no broker, ProcessFailed with the
    end of its log when a process dies or is not ready in time; then every process that this call
    started is stopped.
    """
    before = known(directory) or LocalCluster(_resolved(directory), ())
    wished = {
        "namesrvs": namesrv_count,
        "brokers": broker_count,
        "slaves": slave_count,
        "pullholds": pullhold_count,
    }
    counts = {name: count for name, count in wished.items() if count is not None}
    options = dict(options or {})
    if options.get(SECRET_OPTION):  # the next `up` may run in another working directory
        options[SECRET_OPTION] = str(_resolved(Path(options[SECRET_OPTION])))
    shape = replace(before.shape, **counts)
    names = _names(shape)
    had = {process.name: process for process in before.processes}
    if any(process.alive for process in before.processes):
        _refuse_contradictions(before, {**counts, **options})
    if without_broker := sorted(with_data(before.directory) - set(names)):
        raise ShapeConflict(
            f"{before.directory} has the messages of {', '.join(without_broker)}, which would have "
            f"no broker. It was started with {as_given(before)}"
        )
    cluster = replace(
        before,
        options={**before.options, **options},
        shape=shape,
        processes=tuple(had[name] for name in names if name in had and had[name].alive),
    )
    if own_secret and not cluster.processes and SECRET_OPTION not in cluster.options:
        _make_secret(directory, tell)
    started: list[LocalProcess] = []
    try:
        for members in _waves(names):
            missing = [name for name in members if name not in {p.name for p in cluster.processes}]
            wave = [_start(cluster, name, names[name], had.get(name)) for name in missing]
            started += wave
            save(_with(cluster, wave, names))
            ready = await _ready(cluster, wave, step_s, tell)
            cluster = _with(cluster, ready, names)
            save(cluster)
    except BaseException:
        await processes.stop([process.id for process in started], grace_s=5.0)
        # The next `up` ignores what this call changed: its options, processes without ports.
        failed = {process.name: process for process in (status(directory) or before).processes}
        observed = {name: process for name, process in failed.items() if process.address}
        kept = replace(before, processes=tuple({**failed, **had, **observed}.values()))
        # It ignores the shape, too, unless brokers that only this shape has made stores.
        strangers = with_data(directory) - set(_names(before.shape))
        save(replace(kept, shape=shape) if strangers else kept)
        raise
    (directory / STOPPED_FILE).unlink(missing_ok=True)
    return cluster


async def down(directory: Path, *, grace_s: float = 20.0, purge: bool = False) -> int:
    """Stop what runs in the folder: pullholds, then members of broker groups, then name servers.

    Kills what has not stopped after ``grace_s``. ``purge`` removes the data too, but no file that
    a local cluster does not make. Returns how many processes were stopped; nothing running is no
    error. Raises LocalStateInvalid as :func:`status` does; then nothing was stopped or removed.
    """
    cluster = known(directory)
    if cluster is None:
        return 0
    stopped = sum(process.alive for process in cluster.processes)
    for those in (cluster.pullholds, cluster.brokers, cluster.of_kind(NAMESRV)):
        await processes.stop([process.id for process in those], grace_s=grace_s)
    with suppress(FileNotFoundError):
        os.replace(directory / STATE_FILE, directory / STOPPED_FILE)
    if purge:
        names = {process.name for process in cluster.processes} | set(_names(cluster.shape))
        for name in names | with_data(directory):
            _remove(directory / name, FILES_OF_A_PROCESS)
            with suppress(OSError):  # not empty, or not there
                (directory / name).rmdir()
        _remove(directory, (LEASES, SECRET_FILE, STOPPED_FILE))
    return stopped


def left_by_purge(directory: Path) -> list[Path]:
    """The files in folders of processes that no local cluster makes; ``down`` leaves them."""
    folders = [path for path in directory.glob("*") if path.is_dir() and is_process(path.name)]
    return sorted(path for folder in folders for path in folder.iterdir())


def _remove(folder: Path, made: Iterable[str]) -> None:
    """Remove what a local cluster made in ``folder``. Of a symbolic link the target stays."""
    if folder.is_symlink():
        folder.unlink()
        return
    for path in (folder / name for name in made):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(FileNotFoundError, NotADirectoryError):
                path.unlink()


def _resolved(path: Path) -> Path:
    return path.resolve()


def _make_secret(directory: Path, tell: Callable[[str], None]) -> None:
    """Once for a folder: it stays when the cluster is taken down. One that others could read or
    choose is replaced; no process has it now.
    """
    path = directory / SECRET_FILE
    with suppress(FileNotFoundError):
        found = path.lstat()
        is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
        if is_ours and not found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            return
        tell(
            f"{path} was open to other users, or not this user's file: another secret is there now"
        )
    directory.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.unlink(missing_ok=True)
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_urlsafe(32) + "\n")
    draft.replace(path)


def _names(shape: Shape) -> dict[str, str]:
    """The wanted processes: name → kind, in the order of their start."""
    counts = (shape.namesrvs - 1, shape.brokers, shape.slaves, shape.pullholds)
    total = shape.namesrvs + shape.brokers * (1 + shape.slaves) + shape.pullholds
    if min(counts) < 0 or total > PROCESSES_MAX:
        raise InvalidRequest(
            f"a local cluster has 1 or more name servers and at most {PROCESSES_MAX} processes, "
            f"not {shape.namesrvs} name servers, {shape.brokers} brokers with {shape.slaves} "
            f"slaves each, and {shape.pullholds} pullholds"
        )
    names = {f"namesrv-{n}": NAMESRV for n in range(1, shape.namesrvs + 1)}
    groups = [f"g{n}" for n in range(1, shape.brokers + 1)]
    if shape.slaves:
        for member_id in range(shape.slaves + 1):
            names |= {f"{group}-{member_id}": MEMBER for group in groups}
    else:
        names |= dict.fromkeys(groups, BROKER)
    return names | {f"pullhold-{n}": PULLHOLD for n in range(1, shape.pullholds + 1)}


def _waves(names: Mapping[str, str]) -> Iterator[list[str]]:
    """Processes that are started together: a wave needs the addresses of those before. The first
    members of the broker groups come before the slaves, so that they become the writers.
    """

    def of(kind: str, first: bool | None = None) -> list[str]:
        found = [name for name, its in names.items() if its == kind]
        return [n for n in found if first is None or (group_and_id(n, kind)[1] == 0) is first]

    yield of(NAMESRV)
    yield of(BROKER) + of(MEMBER, first=True)
    yield of(MEMBER, first=False)
    yield of(PULLHOLD)


def _with(
    cluster: LocalCluster, more: Iterable[LocalProcess], names: Iterable[str]
) -> LocalCluster:
    """The cluster with more processes, all in the order of ``names``."""
    both = {process.name: process for process in (*cluster.processes, *more)}
    return replace(cluster, processes=tuple(both[name] for name in names if name in both))


def _refuse_contradictions(before: LocalCluster, wished: Mapping[str, object]) -> None:
    had: dict[str, object] = {**asdict(before.shape), **before.options}
    wrong = [
        f"{name} {value}, but with {had.get(name, 'its default')}"
        for name, value in wished.items()
        if had.get(name) != value
    ]
    if wrong:
        raise ClusterRunning(
            f"{before.directory} holds a running cluster that was not started with "
            f"{'; nor with '.join(wrong)}"
        )


def as_given(cluster: LocalCluster) -> str:
    """How a cluster was started, as options of `up`."""
    counts = [f"--{name} {count}" for name, count in asdict(cluster.shape).items()]
    return " ".join(
        [*counts, *(f"--option {name}={value}" for name, value in cluster.options.items())]
    )


def _start(
    cluster: LocalCluster, name: str, kind: str, before: LocalProcess | None
) -> LocalProcess:
    folder = cluster.directory / name
    folder.mkdir(parents=True, exist_ok=True)
    announcement(cluster.directory, name).unlink(missing_ok=True)
    command = _command(cluster, name, kind, before)
    # Services take their options from COMETMQ_… too; what is set here is meant for the command.
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("COMETMQ_") or name in (native.SWITCH, ENTRIES_VARIABLE)
    }
    log = cluster.log(name)
    log_start = log.stat().st_size if log.exists() else 0
    found = processes.spawn(command, log, environment)
    return LocalProcess(
        name,
        kind,
        found.pid,
        found.start_ticks,
        log_start=log_start,
        announcement=announcement(cluster.directory, name),
    )


def _command(cluster: LocalCluster, name: str, kind: str, before: LocalProcess | None) -> list[str]:
    """The command line of a process. -P ignores a folder `services` in the working directory."""
    folder = cluster.directory / name
    # Those that live look for it there; where none does another port will do as well.
    port = _port if any(process.alive for process in cluster.processes) else _free_port
    flags = {
        "listen_host": "127.0.0.1",
        "port": port(before.address if before else ""),
        "metrics_port": _free_port(before.metrics_address if before else ""),
        "announce_file": str(announcement(cluster.directory, name)),
    }
    if kind == NAMESRV:
        flags |= {"kv_config_path": str(folder / "kvConfig.json")}
    else:
        flags |= {"cluster": "local", "namesrv": cluster.namesrv}
    if kind in (BROKER, MEMBER):
        group, member_id = group_and_id(name, kind)
        flags |= {
            "internal_port": port(before.internal_address if before else ""),
            "broker_group": group,
            "member_id": str(member_id),
            "store_path": str(folder / "store"),
            **BROKER_OPTIONS,
            **cluster.options,
        }
    flags.pop(SECRET_OPTION, None)
    if cluster.secret_file:
        flags |= {SECRET_OPTION: str(cluster.secret_file)}
    if kind == MEMBER:
        lease = cluster.directory / LEASES / f"{group_and_id(name, kind)[0]}.json"
        flags.setdefault("lease", lease.as_uri())
    flat = [text for key, value in flags.items() for text in (f"--{key}", value)]
    return [sys.executable, "-P", "-m", f"services.{kind}", *flat]


def _port(address: str) -> str:
    return address.rpartition(":")[2] or "0"


def _free_port(address: str) -> str:
    """The port it had, unless another process has it now."""
    port = _port(address)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", int(port)))
        except OSError:
            return "0"
    return port


async def _ready(
    cluster: LocalCluster,
    wave: Sequence[LocalProcess],
    step_s: float,
    tell: Callable[[str], None],
) -> list[LocalProcess]:
    """The processes with their addresses, once all have announced themselves."""
    waiting, now_s = list(wave), asyncio.get_running_loop().time
    # One that waits for another works as long as that does.
    those = [process.id for process in (*cluster.processes, *wave)]
    patience = Patience(those, step_s, now_s())
    while waiting := _unready(cluster, waiting):
        steps = patience.step_count
        if patience.is_over(now_s()):
            raise _late(cluster, waiting[0], patience)
        if patience.step_count > steps:
            names = ", ".join(process.name for process in waiting)
            tell(f"not ready after {patience.waited_s:g} s, and at work: {names}")
        await asyncio.sleep(POLL_INTERVAL_S)
    announced = [_announced(cluster, process) for process in wave]
    return [process for process in announced if process is not None]


def _unready(cluster: LocalCluster, waiting: Sequence[LocalProcess]) -> list[LocalProcess]:
    """The processes that have not announced themselves. ProcessFailed: one of them is dead."""
    unready = [process for process in waiting if _announced(cluster, process) is None]
    for process in unready:
        if not process.alive:
            raise _failed(cluster, process, "ended before it was ready")
    return unready


def _announced(cluster: LocalCluster, process: LocalProcess) -> LocalProcess | None:
    try:
        said: dict[str, Any] = json.loads(process.announcement.read_text())
    except FileNotFoundError:
        return None
    return replace(
        process,
        address=said["address"],
        internal_address=said.get("internal_address") or "",
        metrics_address=said.get("metrics_address") or "",
    )


def _late(cluster: LocalCluster, process: LocalProcess, patience: Patience) -> ProcessFailed:
    """It was not ready in time. The advice fits what is known: its log, and whether it worked."""
    error = _failed(cluster, process, f"was not ready within {patience.waited_s:g} s")
    if any(word in line for line in _log_lines(cluster, process) for word in _NAMES_A_FAULT):
        return error
    if patience.works:
        return error.advising(
            "It was at work all the time: the machine is too busy, or its disk too slow. End other "
            "work, or start fewer processes, and start again."
        )
    return error.advising(
        "Its log names no fault, and it did nothing for as long: it waits, for its disk or for "
        "another process. Look at what its folder lies on, and start again."
    )


def _failed(cluster: LocalCluster, process: LocalProcess, what: str) -> ProcessFailed:
    lines = _log_lines(cluster, process)
    tail = "\n".join(f"    {line}" for line in lines[-_LOG_TAIL_LINES:])
    log = cluster.log(process.name)
    error = ProcessFailed(f"{process.name} {what}; the end of {log}:\n{tail or '    (empty)'}")
    if lines:
        return error
    return error.advising(
        "It has written nothing, so another program ended it: look for it in the kernel's messages "
        "(dmesg: out of memory), and start again."
    )


def _log_lines(cluster: LocalCluster, process: LocalProcess) -> list[str]:
    """What this start has written."""
    log = cluster.log(process.name).read_bytes()[process.log_start :]
    return log.decode(errors="replace").splitlines()
