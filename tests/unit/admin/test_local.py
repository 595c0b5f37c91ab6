from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from cometmq import config
from cometmq.admin import local, processes
from cometmq.admin.local import LocalCluster, LocalProcess
from cometmq.errors import (
    ClusterRunning,
    InvalidRequest,
    LocalStateInvalid,
    ProcessFailed,
    ShapeConflict,
)
from cometmq.member.config import MemberConfig
from cometmq.rpc.secret import read_secrets

# Stands in for a service: announces itself as the real ones do, then waits to be stopped.
PRETENDER = """
import json, os, signal, sys, time
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if flags.get("--killed") == "yes":
    os.kill(os.getpid(), signal.SIGKILL)
print(sys.argv, sorted(os.environ), flush=True)
if flags.get("--broken") == "yes":
    sys.exit("the disk is on fire")
while time.process_time() < float(flags.get("--works_s", 0)):
    pass
port = int(flags["--port"]) or 40000 + os.getpid() % 1000
path = flags["--announce_file"]
said = {"pid": os.getpid(), "address": f"127.0.0.1:{port}", "metrics_address": "127.0.0.1:1"}
if "--internal_port" in flags:
    said["internal_address"] = "127.0.0.1:2"
if flags.get("--mute") != "yes":
    with open(path + ".tmp", "w") as file:
        json.dump(said, file)
    os.rename(path + ".tmp", path)
signal.pause()
"""


@pytest.fixture
async def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Path]:
    """A folder for a cluster of pretenders; nothing of it outlives the test."""
    real = local._command

    def command(*arguments: object) -> list[str]:
        flags = real(*arguments)[4:]  # type: ignore[arg-type]
        return [sys.executable, "-I", "-S", "-c", PRETENDER, *flags]

    monkeypatch.setattr(local, "_command", command)
    yield tmp_path / "cluster"
    await local.down(tmp_path / "cluster", grace_s=5)


def pids(cluster: LocalCluster) -> dict[str, int]:
    return {process.name: process.pid for process in cluster.processes}


async def test_up_status_down(directory: Path) -> None:
    cluster = await local.up(directory, namesrv_count=2, broker_count=1)
    assert [(p.name, p.kind, p.alive) for p in cluster.processes] == [
        ("namesrv-1", "namesrv", True),
        ("namesrv-2", "namesrv", True),
        ("g1", "broker", True),
    ]
    assert cluster.namesrv.count(";") == 1
    assert local.status(directory) == cluster
    assert await local.down(directory) == 3
    assert local.status(directory) is None
    assert not any(process.alive for process in cluster.processes)


async def test_brokers_are_told_where_the_name_servers_are(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMETMQ_FOR_THE_COMMAND_ONLY", "1")
    cluster = await local.up(directory, broker_count=1, options={"a_b": "c"})
    command = cluster.log("g1").read_text()
    assert cluster.namesrv in command
    assert "'--a_b', 'c'" in command
    assert "'PATH'" in command
    assert "COMETMQ_" not in command


async def test_groups_with_slaves_and_pullholds(directory: Path) -> None:
    cluster = await local.up(directory, broker_count=2, slave_count=1, pullhold_count=1)
    assert [(p.name, p.kind, p.broker_group, p.member_id) for p in cluster.processes] == [
        ("namesrv-1", "namesrv", "", 0),
        ("g1-0", "haslave", "g1", 0),
        ("g2-0", "haslave", "g2", 0),
        ("g1-1", "haslave", "g1", 1),
        ("g2-1", "haslave", "g2", 1),
        ("pullhold-1", "pullhold", "", 0),
    ]
    assert cluster.broker_groups == ("g1", "g2")
    assert len(cluster.brokers) == 4
    first, slave, pullhold = (cluster.log(n).read_text() for n in ("g1-0", "g1-1", "pullhold-1"))
    lease = (cluster.directory / "leases" / "g1.json").as_uri()
    for log in (first, slave):
        assert f"'--lease', '{lease}'" in log
        assert "'--broker_group', 'g1'" in log
    assert "'--member_id', '1'" in slave
    assert f"'--namesrv', '{cluster.namesrv}'" in pullhold
    assert "store_path" not in pullhold
    with pytest.raises(ClusterRunning, match="slaves 0, but with 1"):
        await local.up(directory, slave_count=0)


async def test_up_again_starts_only_what_died_on_its_port(directory: Path) -> None:
    before = await local.up(directory)
    before.brokers[0].id.signal(signal.SIGKILL)
    await processes.stop([before.brokers[0].id], grace_s=5)
    after = await local.up(directory)
    changed = {name for name, pid in pids(after).items() if pids(before)[name] != pid}
    assert changed == {"g1"}
    assert after.brokers[0].address == before.brokers[0].address
    assert [p.name for p in after.processes] == [p.name for p in before.processes]


async def test_another_shape_is_refused_while_one_runs(directory: Path) -> None:
    await local.up(directory, broker_count=1, options={"c": "d"})
    with pytest.raises(ClusterRunning, match="not started with brokers 2, but with 1"):
        await local.up(directory, broker_count=2)
    with pytest.raises(ClusterRunning, match="pullholds 1, but with 0; nor with a b, but with its"):
        await local.up(directory, pullhold_count=1, options={"a": "b"})
    with pytest.raises(ClusterRunning, match="c e, but with d"):
        await local.up(directory, options={"c": "e"})


async def test_up_again_goes_by_what_the_cluster_was_started_with(directory: Path) -> None:
    options = {"a": "b", "c": "d"}
    before = await local.up(directory, broker_count=1, slave_count=1, options=options)
    again = await local.up(directory)
    assert again == before
    assert again == await local.up(directory, slave_count=1, options={"c": "d"})
    await processes.stop([process.id for process in again.processes], grace_s=5)
    dead = await local.up(directory, options={"c": "e"})
    assert list(pids(dead)) == list(pids(before))
    assert dead.options == {"a": "b", "c": "e"}


async def test_what_has_failed_is_not_gone_by(directory: Path) -> None:
    with pytest.raises(ProcessFailed):
        await local.up(directory, broker_count=1, options={"broken": "yes"})
    cluster = await local.up(directory)
    assert cluster.options == {}
    assert cluster.broker_groups == ("g1", "g2")


@pytest.mark.parametrize("wrong", [{"broken": "yes"}, {"mute": "yes"}])
async def test_after_a_start_that_failed_all_come_up_on_the_ports_they_had(
    directory: Path, wrong: dict[str, str]
) -> None:
    before = await local.up(directory, broker_count=2, slave_count=1, pullhold_count=1)
    await local.down(directory)
    with pytest.raises(ProcessFailed):
        await local.up(directory, options=wrong, step_s=0.5)
    failed = local.status(directory)
    assert failed is not None
    assert not any(process.alive for process in failed.processes)
    after = await local.up(directory)
    assert {p.name: p.address for p in after.processes} == {
        p.name: p.address for p in before.processes
    }


@pytest.mark.parametrize("had", [{}, {"broker_count": 1}])
async def test_stores_that_a_failed_start_made_do_not_forbid_the_next(
    directory: Path, monkeypatch: pytest.MonkeyPatch, had: dict[str, int]
) -> None:
    real = local._ready

    async def stores_only(
        cluster: LocalCluster, wave: Sequence[LocalProcess], *waiting: Any
    ) -> list[LocalProcess]:
        if wave[0].kind == "namesrv":
            return await real(cluster, wave, *waiting)
        with_data(directory)
        raise ProcessFailed("its index has another size")

    if had:
        await local.up(directory, **had)  # type: ignore[arg-type]
        with_data(directory)
        await local.down(directory)
    monkeypatch.setattr(local, "_ready", stores_only)
    with pytest.raises(ProcessFailed):
        await local.up(directory, broker_count=3, options={"a": "b"})
    monkeypatch.setattr(local, "_ready", real)
    cluster = await local.up(directory)
    assert cluster.broker_groups == ("g1", "g2", "g3")
    assert cluster.options == {}


async def test_a_process_that_dies_is_told_with_its_log(directory: Path) -> None:
    with pytest.raises(ProcessFailed, match="the disk is on fire"):
        await local.up(directory, broker_count=1, options={"broken": "yes"})
    known = local.status(directory)
    assert known is not None
    assert not any(process.alive for process in known.processes)


async def test_the_log_of_earlier_runs_is_not_told_again(directory: Path) -> None:
    await local.up(directory, broker_count=1, options={"said": "aforetime"})
    await local.down(directory)
    with pytest.raises(ProcessFailed) as failed:
        await local.up(directory, broker_count=1, options={"said": "now", "broken": "yes"})
    assert "broken" in str(failed.value)
    assert "aforetime" not in str(failed.value)


@pytest.mark.parametrize(
    ("said", "advice"),
    [("nothing", "it waits, for its disk"), ("ERROR no room", "correct what it names")],
)
async def test_a_process_that_does_nothing_is_stopped_and_the_advice_fits_its_log(
    directory: Path, said: str, advice: str
) -> None:
    options = {"mute": "yes", "said": said}
    with pytest.raises(ProcessFailed, match="not ready within") as failed:
        await local.up(directory, broker_count=1, options=options, step_s=0.5)
    assert advice in failed.value.advice
    known = local.status(directory)
    assert known is not None
    assert not any(process.alive for process in known.processes)


async def test_a_process_that_works_is_waited_for(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However busy the machine is: here for five steps."""
    monkeypatch.setattr(processes, "STEPS_MAX", 1_000)
    told: list[str] = []
    options = {"works_s": "1.0"}
    cluster = await local.up(
        directory, broker_count=1, options=options, step_s=0.2, tell=told.append
    )
    assert all(process.alive for process in cluster.processes)
    assert [text.partition(": ")[2] for text in told][:3] == ["g1", "g1", "g1"]


async def test_a_process_that_works_for_ever_is_not_waited_for(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "STEPS_MAX", 3)
    with pytest.raises(ProcessFailed, match=r"not ready within 0\.6 s") as failed:
        await local.up(directory, broker_count=1, options={"works_s": "60"}, step_s=0.2)
    assert "the machine is too busy" in failed.value.advice


async def test_a_process_that_was_killed_is_not_told_to_correct_its_log(directory: Path) -> None:
    with pytest.raises(ProcessFailed, match="ended before") as failed:
        await local.up(directory, broker_count=1, options={"killed": "yes"})
    assert "out of memory" in failed.value.advice


async def test_down_keeps_data_unless_told_otherwise(directory: Path) -> None:
    await local.up(directory, broker_count=1)
    await local.down(directory)
    assert (directory / "g1" / "log.txt").exists()
    await local.up(directory, broker_count=1)
    await local.down(directory, purge=True)
    assert not (directory / "g1").exists()


def with_data(directory: Path) -> Path:
    """Every member of the folder has a store, as real ones make it."""
    for folder in directory.glob("g*"):
        (folder / "store").mkdir(exist_ok=True)
    return directory


def left_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


async def test_after_down_it_comes_up_as_it_was(directory: Path) -> None:
    options = {"a": "b"}
    before = await local.up(directory, broker_count=1, slave_count=1, options=options)
    with_data(directory)
    await local.down(directory)
    assert local.status(directory) is None
    after = await local.up(directory)
    assert (after.shape, after.options) == (before.shape, options)
    assert [p.address for p in after.processes] == [p.address for p in before.processes]
    assert not (directory / "stopped.json").exists()


@pytest.mark.parametrize(
    "other", [{"slave_count": 0}, {"broker_count": 1}, {"slave_count": 0, "broker_count": 3}]
)
@pytest.mark.parametrize("how", ["down", "dead", "forgotten"])
async def test_no_cluster_starts_beside_the_messages(
    directory: Path, how: str, other: dict[str, int]
) -> None:
    before = await local.up(directory, broker_count=2, slave_count=1)
    with_data(directory)
    await local.down(directory)
    if how == "dead":  # the machine was switched off
        (directory / "stopped.json").rename(directory / "local.json")
    if how == "forgotten":  # a release before removed the file
        (directory / "stopped.json").unlink()
    with pytest.raises(ShapeConflict, match=r"messages of g.*with .*--brokers 2 --slaves 1") as no:
        await local.up(directory, **other)  # type: ignore[arg-type]
    assert "without these options" in str(no.value)
    assert "--dir" in str(no.value)
    again = await local.up(directory)
    assert [p.name for p in again.processes] == [p.name for p in before.processes]
    await local.down(directory, purge=True)
    assert left_in(directory) == []
    other_shape = await local.up(directory, **other)  # type: ignore[arg-type]
    assert other_shape.shape != before.shape


async def test_what_was_taken_down_can_be_purged_later(directory: Path) -> None:
    await local.up(directory, broker_count=1)
    with_data(directory)
    await local.down(directory)
    assert await local.down(directory, purge=True) == 0
    assert left_in(directory) == []


async def test_more_brokers_leave_nobody_out(directory: Path) -> None:
    await local.up(directory, broker_count=1)
    with_data(directory)
    await local.down(directory)
    grown = await local.up(directory, broker_count=2, namesrv_count=2)
    assert grown.broker_groups == ("g1", "g2")


def test_a_port_that_somebody_else_has_now_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert local._free_port(address) == "0"
        process = LocalProcess("g1", "broker", 1, 1, address, metrics_address=address)
        command = local._command(LocalCluster(Path("/data"), ()), "g1", "broker", process)
        flags = dict(zip(command[4::2], command[5::2], strict=True))
        assert (flags["--port"], flags["--metrics_port"]) == ("0", "0")
    assert local._free_port(address) == address.rpartition(":")[2]
    assert local._free_port("") == "0"


async def test_down_of_nothing_is_no_error(tmp_path: Path) -> None:
    assert await local.down(tmp_path) == 0


@pytest.mark.parametrize(("namesrvs", "brokers"), [(0, 1), (1, -1), (1, 64)])
async def test_impossible_shapes_are_refused(tmp_path: Path, namesrvs: int, brokers: int) -> None:
    with pytest.raises(InvalidRequest):
        await local.up(tmp_path, namesrv_count=namesrvs, broker_count=brokers)


def test_the_real_command_line() -> None:
    process = LocalProcess("g1", "broker", 1, 1, "127.0.0.1:70", "127.0.0.1:71", "127.0.0.1:72")
    cluster = LocalCluster(Path("/data"), (), {"flush_disk_type": "SYNC_FLUSH"})
    command = local._command(cluster, "g1", "broker", process)
    assert command[1:4] == ["-P", "-m", "services.broker"]
    flags = dict(zip(command[4::2], command[5::2], strict=True))
    assert flags["--port"] == "70"
    assert flags["--internal_port"] == "71"
    assert flags["--metrics_port"] == "72"
    assert flags["--store_path"] == "/data/g1/store"
    assert flags["--flush_disk_type"] == "SYNC_FLUSH"


@pytest.mark.parametrize(
    ("kind", "name", "options", "expected"),
    [
        ("broker", "g1", {}, ("SYNC", "ASYNC")),
        ("haslave", "g1-0", {}, ("SYNC", "APPENDED")),
        ("haslave", "g1-1", {"flush_disk_type": "ASYNC_FLUSH"}, ("ASYNC", "APPENDED")),
    ],
)
def test_new_topics_of_a_local_cluster_are_safe(
    tmp_path: Path, kind: str, name: str, options: dict[str, str], expected: tuple[str, str]
) -> None:
    cluster = LocalCluster(tmp_path, (), options)
    flags = local._command(cluster, name, kind, None)[4:]
    new = config.load(MemberConfig, argv=flags, environ={}).new_topic
    assert (new.flush_mode.name, new.replication_mode.name) == expected


async def test_the_secret_is_known_to_all(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = {"internal_secret_file": "secret"}
    cluster = await local.up(directory, broker_count=1, pullhold_count=1, options=options)
    assert cluster.secret_file == tmp_path / "secret", "also for who stands elsewhere"
    for process in cluster.processes:
        assert str(tmp_path / "secret") in cluster.log(process.name).read_text()
    assert not (directory / local.SECRET_FILE).exists()


async def test_a_cluster_has_a_secret_of_its_own(directory: Path) -> None:
    """Made once, told to all, kept with the data, readable by nobody else."""
    cluster = await local.up(directory, broker_count=1, pullhold_count=1, own_secret=True)
    file = cluster.secret_file
    assert file == cluster.directory / local.SECRET_FILE
    (secret,) = read_secrets(file)
    assert file.stat().st_mode & 0o077 == 0
    for process in cluster.processes:
        assert str(file) in cluster.log(process.name).read_text()
        assert secret not in cluster.log(process.name).read_text()
    await local.down(directory)
    again = await local.up(directory, own_secret=True)
    assert again.secret_file == file
    assert read_secrets(file) == (secret,)
    await local.down(directory, purge=True)
    assert not file.exists()


@pytest.mark.parametrize("mode", [0o666, 0o644, 0o660, None])
async def test_a_secret_that_others_knew_or_chose_is_not_used(
    directory: Path, mode: int | None
) -> None:
    """None: a link to a file elsewhere."""
    theirs, told = "a-secret-that-others-know", list[str]()
    directory.mkdir()  # noqa: ASYNC240
    file = directory / local.SECRET_FILE
    if mode is None:
        (directory / "elsewhere").write_text(theirs)
        file.symlink_to(directory / "elsewhere")
    else:
        file.write_text(theirs)
        file.chmod(mode)
    cluster = await local.up(directory, own_secret=True, tell=told.append)
    assert cluster.secret_file == file
    assert theirs not in read_secrets(file)
    assert file.lstat().st_mode & 0o077 == 0
    assert [str(file) in text for text in told] == [True]


async def test_a_cluster_that_runs_without_a_secret_gets_none(directory: Path) -> None:
    """Half of its processes would not speak with the other half."""
    await local.up(directory, broker_count=1)
    assert (await local.up(directory, own_secret=True)).secret_file is None
    await local.down(directory)
    options = {local.SECRET_OPTION: ""}
    wanted_none = await local.up(directory, options=options, own_secret=True)
    assert wanted_none.secret_file is None


CLAIM = {"kind": "broker", "pid": 2**22 + 1, "start_ticks": 1, "address": "127.0.0.1:1"}


def claim(directory: Path, **process: object) -> None:
    """A state file as another hand may write it."""
    directory.mkdir(exist_ok=True)
    state = {"shape": {}, "options": {}, "processes": [{"name": "g1", **CLAIM, **process}]}
    (directory / "local.json").write_text(json.dumps(state))


@pytest.mark.parametrize(
    "process",
    [
        {"name": "../../keep"},
        {"name": "/keep"},
        {"name": "keep"},
        {"name": "g1/../../keep"},
        {"name": "namesrv-1"},
        {"kind": "keep"},
        {"pid": "1"},
        {"pid": -1},
        {"address": "$(touch keep):1"},
        {"address": 1},
        {"more": 1},
    ],
)
async def test_a_state_that_no_local_cluster_has_is_refused(
    tmp_path: Path, process: dict[str, object]
) -> None:
    directory = tmp_path / "a" / "b"
    directory.parent.mkdir()
    (tmp_path / "keep").mkdir()
    claim(directory, **process)
    for call in (local.down(directory, purge=True), local.up(directory)):
        with pytest.raises(LocalStateInvalid, match=r"local\.json is not the state of a local"):
            await call
    assert (tmp_path / "keep").is_dir()
    assert left_in(directory) == ["local.json"]


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", "\xff", "[" * 99_999, '"' + "x" * 2**20])
def test_any_bytes_are_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "local.json").write_text(text, encoding="latin-1")
    with pytest.raises(LocalStateInvalid, match="not the state of a local cluster"):
        local.status(tmp_path)


async def test_a_process_of_somebody_else_is_left_alone(directory: Path, tmp_path: Path) -> None:
    """Its pid and its start time are right, but it is not this folder's process."""
    other = await local.up(tmp_path / "other", broker_count=1)
    foreign = other.brokers[0]
    claim(directory, pid=foreign.pid, start_ticks=foreign.start_ticks)
    assert await local.down(directory) == 0
    assert foreign.alive
    await local.down(tmp_path / "other")


@pytest.mark.skipif(os.geteuid() != 0, reason="root is missing")
def test_a_state_of_another_user_is_not_believed(tmp_path: Path) -> None:
    claim(tmp_path)
    os.chown(tmp_path / "local.json", 12345, -1)
    with pytest.raises(LocalStateInvalid, match="belongs to user 12345"):
        local.status(tmp_path)


async def test_purge_removes_what_the_cluster_made_and_nothing_else(
    directory: Path, tmp_path: Path
) -> None:
    await local.up(directory, broker_count=2)
    with_data(directory)
    await local.down(directory)
    mine = [directory / "g1" / "notes", directory / "graphs" / "store" / "picture"]
    for path in mine:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    volume = tmp_path / "volume"
    (directory / "g2" / "store").rename(volume)
    (volume / "picture").touch()
    (directory / "g2" / "store").symlink_to(volume)
    await local.down(directory, purge=True)
    assert left_in(directory) == ["g1", "graphs"]
    assert left_in(directory / "g1") == ["notes"]
    assert local.left_by_purge(directory) == mine[:1]
    assert all(path.exists() for path in (*mine, volume / "picture"))
