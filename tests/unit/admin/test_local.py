from __future__ import annotations

import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cometmq.admin import local, processes
from cometmq.admin.local import LocalCluster, LocalProcess
from cometmq.errors import ClusterRunning, InvalidRequest, ProcessFailed

# Stands in for a service: announces itself as the real ones do, then waits to be stopped.
PRETENDER = """
import json, os, signal, sys
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
print(sys.argv, sorted(os.environ), flush=True)
if flags.get("--broken") == "yes":
    sys.exit("the disk is on fire")
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


async def test_a_process_that_dies_is_told_with_its_log(directory: Path) -> None:
    with pytest.raises(ProcessFailed, match="the disk is on fire"):
        await local.up(directory, broker_count=1, options={"broken": "yes"})
    known = local.status(directory)
    assert known is not None
    assert not any(process.alive for process in known.processes)


async def test_the_log_of_earlier_runs_is_not_told_again(directory: Path) -> None:
    await local.up(directory, broker_count=1, options={"aforetime": "1"})
    await local.down(directory)
    with pytest.raises(ProcessFailed) as failed:
        await local.up(directory, broker_count=1, options={"broken": "yes"})
    assert "broken" in str(failed.value)
    assert "aforetime" not in str(failed.value)


async def test_a_process_that_is_never_ready_is_stopped(directory: Path) -> None:
    with pytest.raises(ProcessFailed, match="not ready within"):
        await local.up(directory, broker_count=1, options={"mute": "yes"}, deadline_s=0.5)


async def test_down_keeps_data_unless_told_otherwise(directory: Path) -> None:
    await local.up(directory, broker_count=1)
    await local.down(directory)
    assert (directory / "g1" / "log.txt").exists()
    await local.up(directory, broker_count=1)
    await local.down(directory, purge=True)
    assert not (directory / "g1").exists()


async def test_down_of_nothing_is_no_error(tmp_path: Path) -> None:
    assert await local.down(tmp_path) == 0


@pytest.mark.parametrize(("namesrvs", "brokers"), [(0, 1), (1, -1), (1, 64)])
async def test_impossible_shapes_are_refused(tmp_path: Path, namesrvs: int, brokers: int) -> None:
    with pytest.raises(InvalidRequest):
        await local.up(tmp_path, namesrv_count=namesrvs, broker_count=brokers)


def test_the_real_command_line() -> None:
    process = LocalProcess("g1", "broker", 1, 1, "127.0.0.1:70", "127.0.0.1:71")
    cluster = LocalCluster(Path("/data"), (), {"flush_disk_type": "SYNC_FLUSH"})
    command = local._command(cluster, "g1", "broker", process)
    assert command[1:4] == ["-P", "-m", "services.broker"]
    flags = dict(zip(command[4::2], command[5::2], strict=True))
    assert flags["--port"] == "70"
    assert flags["--internal_port"] == "71"
    assert flags["--store_path"] == "/data/g1/store"
    assert flags["--flush_disk_type"] == "SYNC_FLUSH"


async def test_the_secret_is_known_to_brokers_and_pullholds(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = {"internal_secret_file": "secret"}
    cluster = await local.up(directory, broker_count=1, pullhold_count=1, options=options)
    assert cluster.secret_file == tmp_path / "secret", "also for who stands elsewhere"
    for process in cluster.processes:
        knows = str(tmp_path / "secret") in cluster.log(process.name).read_text()
        assert knows == (process.kind != local.NAMESRV)
