from __future__ import annotations

import builtins
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner, Result

pytest.importorskip("pyarrow", reason="pyarrow is missing (extra lag: make setup)")

from pyarrow import parquet

from cometmq.admin import offsets
from cometmq.admin.cli import cli
from cometmq.admin.connection import Connection
from cometmq.clock import SystemClock
from cometmq.errors import ConfigInvalid, PeerUnavailable, RouteNotFound
from cometmq.v1 import broker_pb2 as b
from cometmq.v1 import broker_pb2_grpc
from cometmq.v1 import common_pb2 as c
from cometmq.v1 import namesrv_pb2 as n

NOW_MS = 1_800_000_000_123


class Clock:
    def __init__(self) -> None:
        self.now_ms = NOW_MS

    def wall_ms(self) -> int:
        self.now_ms += 1
        return self.now_ms

    def monotonic_s(self) -> float:
        return 0.0

    boottime_s = monotonic_s


def queue(
    topic: str, queue_id: int, *groups: b.GroupSnapshot, stored_ms: int = 0
) -> b.QueueSnapshot:
    return b.QueueSnapshot(
        queue=c.QueueRef(topic=topic, queue_id=queue_id),
        generation=1,
        min_offset=0,
        max_offset=9,
        max_store_time_ms=stored_ms,
        groups=groups,
    )


def header(group: str) -> b.SnapshotHeader:
    return b.SnapshotHeader(
        cluster="test", broker_group=group, epoch=3, taken_ms=NOW_MS, log_end_offset=77
    )


FIRST = b.GroupSnapshot(
    group="G",
    committed=c.Position(generation=1, offset=0),
    committed_store_time_ms=5,
    member_count=2,
)
NEVER = b.GroupSnapshot(group="H", member_count=1)


class Broker(broker_pb2_grpc.BrokerServiceServicer, broker_pb2_grpc.BrokerAdminServiceServicer):
    """Answers with ``queues``, in pieces of one; ``breaks``: and then fails."""

    def __init__(self, group: str) -> None:
        self.group = group
        self.address = ""
        self.queues: list[b.QueueSnapshot] = [queue("T", 0, FIRST)]
        self.breaks = False

    async def SnapshotOffsets(  # type: ignore[override]
        self, request: b.SnapshotOffsetsRequest, context: Any
    ) -> None:
        await context.write(b.SnapshotOffsetsResponse(header=header(self.group)))
        for found in self.queues:
            await context.write(b.SnapshotOffsetsResponse(queues=[found]))
        if self.breaks:
            await context.abort(grpc.StatusCode.INTERNAL, "the disk is gone")


class Cluster:
    """Two brokers and the name server that knows them."""

    def __init__(self, namesrv: Any, g1: Broker, g2: Broker) -> None:
        self.namesrv = namesrv
        self.g1 = g1
        self.g2 = g2
        namesrv.brokers[:] = [g1, g2]


@pytest.fixture
async def brokers(cluster: Any, serve: Callable[[object], Awaitable[str]]) -> Cluster:
    # They serve only what the export asks for.
    found = [Broker("g1"), Broker("g2")]  # type: ignore[abstract]
    for broker in found:
        broker.address = await serve(broker)
    return Cluster(cluster.namesrv, *found)


def rows(directory: Path, snapshot: offsets.Snapshot, group: str) -> list[dict[str, Any]]:
    [entry] = [found for found in snapshot.exported if found.broker_group == group]
    file = directory / f"snapshot={snapshot.snapshot_id}" / entry.file
    return list(parquet.read_table(file, partitioning=None).to_pylist())


# --- rows -----------------------------------------------------------------------------------------


def test_unknown_becomes_null_and_0_stays_0() -> None:
    names = [name for name, _, _ in offsets.COLUMNS]
    found = [
        dict(zip(names, row, strict=True))
        for row in offsets.rows_of("s", header("g1"), [queue("T", 0, FIRST, NEVER, stored_ms=8)])
    ]
    assert [row["group"] for row in found] == ["G", "H"]
    committed = [(row["committed_generation"], row["committed_offset"]) for row in found]
    assert committed == [(1, 0), (None, None)]
    assert [row["committed_store_time_ms"] for row in found] == [5, None]
    assert [row["max_store_time_ms"] for row in found] == [8, 8]
    assert {(row["cluster"], row["broker_group"], row["broker_epoch"]) for row in found} == {
        ("test", "g1", 3)
    }


def test_a_queue_that_nobody_reads_has_a_row() -> None:
    [row] = offsets.rows_of("s", header("g1"), [queue("T", 4)])
    found = dict(zip([name for name, _, _ in offsets.COLUMNS], row, strict=True))
    assert (found["topic"], found["queue_id"], found["max_offset"]) == ("T", 4, 9)
    assert found["group"] is found["member_count"] is found["max_store_time_ms"] is None


@pytest.mark.parametrize(
    ("topic", "kind"),
    [
        ("T", "normal"), ("%RETRY%G", "retry"), ("%DLQ%G", "dlq"), ("RETRY", "normal"),
        ("SCHEDULE_TOPIC_XXXX", "system"), ("rmq_sys_x", "system"),
    ],
)  # fmt: skip
def test_kinds_of_topics(topic: str, kind: str) -> None:
    assert offsets.topic_kind(topic) == kind


def test_no_row_at_all_is_a_file_too(tmp_path: Path) -> None:
    offsets.write_rows(tmp_path / "part.parquet", [])
    table = parquet.read_table(tmp_path / "part.parquet")
    assert table.num_rows == 0
    assert table.column_names == [name for name, _, _ in offsets.COLUMNS]
    assert [path.name for path in tmp_path.iterdir()] == ["part.parquet"]


# --- export ---------------------------------------------------------------------------------------


async def test_a_snapshot_of_all_brokers(
    brokers: Cluster, connection: Connection, tmp_path: Path
) -> None:
    brokers.g1.queues = [queue("T", 0, FIRST, NEVER), queue("T", 1)]
    found = await offsets.export(connection, tmp_path, Clock())
    assert found.snapshot_id.startswith("20270115T080000.124Z-")
    assert (found.expected, found.failed, found.completeness) == (["g1", "g2"], [], 1.0)
    assert [(e.queue_count, e.row_count, e.log_end_offset) for e in found.exported] == [
        (2, 3, 77),
        (1, 1, 77),
    ]
    assert [row["group"] for row in rows(tmp_path, found, "g1")] == ["G", "H", None]
    assert {row["snapshot_id"] for row in rows(tmp_path, found, "g2")} == {found.snapshot_id}
    assert offsets.newest(tmp_path, 2 * NOW_MS) == found


async def test_a_broker_that_is_away_is_named(
    brokers: Cluster, connection: Connection, tmp_path: Path
) -> None:
    gone = brokers.namesrv.member(brokers.g2)
    gone.broker_group, gone.internal_address = "g3", "127.0.0.1:1"
    brokers.namesrv.ghosts.append(gone)
    found = await offsets.export(connection, tmp_path, Clock())
    assert [entry.broker_group for entry in found.exported] == ["g1", "g2"]
    assert [(entry.broker_group, entry.error) for entry in found.failed] == [
        ("g3", "PEER_UNAVAILABLE")
    ]
    assert found.completeness == pytest.approx(2 / 3)
    folder = tmp_path / f"snapshot={found.snapshot_id}"
    assert sorted(os.listdir(folder)) == [offsets.MANIFEST, "broker_group=g1", "broker_group=g2"]


async def test_what_was_expected_once_is_expected_until_forgotten(
    brokers: Cluster, connection: Connection, tmp_path: Path
) -> None:
    clock = Clock()
    await offsets.export(connection, tmp_path, clock)
    brokers.namesrv.brokers.remove(brokers.g2)  # silent for too long
    missed = await offsets.export(connection, tmp_path, clock)
    assert [(entry.broker_group, entry.message) for entry in missed.failed] == [
        ("g2", "no writer is registered")
    ]
    forgotten = await offsets.export(connection, tmp_path, clock, forget=["g2"])
    assert (forgotten.expected, forgotten.completeness) == (["g1"], 1.0)
    assert (await offsets.export(connection, tmp_path, clock)).expected == ["g1"]


async def test_a_change_of_the_writer_is_waited_for(
    brokers: Cluster, connection: Connection, tmp_path: Path
) -> None:
    brokers.namesrv.brokers.remove(brokers.g2)
    follower = n.Member(broker_group="g2", role=c.MEMBER_ROLE_FOLLOWER, address="h:1")
    brokers.namesrv.ghosts.append(follower)
    asked: list[float] = []

    class Waiting(Clock):
        """The follower writes after it was waited for three times."""

        def monotonic_s(self) -> float:
            asked.append(0.0)
            if len(asked) == 4:
                brokers.namesrv.ghosts.clear()
                brokers.namesrv.brokers.append(brokers.g2)
            return 0.0

        boottime_s = monotonic_s

    found = await offsets.export(connection, tmp_path, Waiting(), patience_s=1.0)
    assert [entry.broker_group for entry in found.exported] == ["g1", "g2"]
    assert len(asked) == 4


async def test_a_group_without_a_writer_is_expected(
    brokers: Cluster, connection: Connection, tmp_path: Path
) -> None:
    brokers.namesrv.brokers.remove(brokers.g2)
    follower = n.Member(broker_group="g2", role=c.MEMBER_ROLE_FOLLOWER, address="h:1")
    brokers.namesrv.ghosts.append(follower)
    found = await offsets.export(connection, tmp_path, Clock())
    assert [entry.broker_group for entry in found.failed] == ["g2"]


async def test_another_process_on_the_port_is_not_believed(
    brokers: Cluster, connection: Connection, tmp_path: Path
) -> None:
    stranger = brokers.namesrv.member(brokers.g2)
    stranger.broker_group = "g3"
    brokers.namesrv.ghosts.append(stranger)
    found = await offsets.export(connection, tmp_path, Clock())
    [failed] = found.failed
    assert failed.broker_group == "g3"
    assert failed.message.endswith("is not g3")


async def test_when_nobody_answers_nothing_is_written(
    brokers: Cluster, connection: Connection, tmp_path: Path
) -> None:
    gone = brokers.namesrv.member(brokers.g2)
    gone.internal_address = "127.0.0.1:1"
    brokers.namesrv.brokers.clear()
    brokers.namesrv.ghosts.append(gone)
    with pytest.raises(PeerUnavailable, match="no broker group could be exported: g2"):
        await offsets.export(connection, tmp_path, Clock())
    assert os.listdir(tmp_path) == []


async def test_no_broker_is_known(brokers: Cluster, connection: Connection, tmp_path: Path) -> None:
    brokers.namesrv.brokers.clear()
    with pytest.raises(RouteNotFound):
        await offsets.export(connection, tmp_path, Clock())


async def test_a_stream_that_breaks_off_gives_nothing(
    brokers: Cluster, connection: Connection, tmp_path: Path
) -> None:
    brokers.g2.breaks = True
    found = await offsets.export(connection, tmp_path, Clock())
    assert [entry.broker_group for entry in found.failed] == ["g2"]


# --- files and command line -----------------------------------------------------------------------


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigInvalid, match="cannot write"):
        offsets.write_rows(tmp_path / "file" / "part.parquet", [])


def test_without_pyarrow_the_way_out_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ModuleNotFoundError("No module named 'pyarrow'", name="pyarrow")
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigInvalid, match=r"needs pyarrow: pip install 'cometmq\[lag\]'"):
        offsets.write_rows(tmp_path / "part.parquet", [])


def test_an_unfinished_snapshot_is_not_the_newest(tmp_path: Path) -> None:
    finished = manifest("a")
    offsets.write_manifest(tmp_path / "snapshot=a", finished)
    (tmp_path / "snapshot=b").mkdir()
    (tmp_path / "snapshot=c").mkdir()
    newer = {"schema_version": offsets.SCHEMA_VERSION + 1}
    (tmp_path / "snapshot=c" / offsets.MANIFEST).write_text(json.dumps(newer))
    assert offsets.newest(tmp_path, NOW_MS) == finished
    assert offsets.newest(tmp_path / "nothing", NOW_MS) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"schema_version": 1, "snaps',
        b"\xff",
        b"[" * 99_999,
        b"7",
        b'{"schema_version": 1}',
        b'{"schema_version": 1, "snapshot_id": "b", "started_ms": "x", "expected": [], '
        b'"exported": [], "failed": [], "completeness": 1}',
        b'{"schema_version": 1, "snapshot_id": "b", "started_ms": 1, "expected": [7], '
        b'"exported": [{}], "failed": [], "completeness": 1}',
        None,
    ],
)
def test_a_manifest_that_cannot_be_read_is_named_and_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes | None
) -> None:
    finished = manifest("a")
    offsets.write_manifest(tmp_path / "snapshot=a", finished)
    bad = tmp_path / "snapshot=b" / offsets.MANIFEST
    bad.parent.mkdir()
    if content is None:
        bad.mkdir()
    else:
        bad.write_bytes(content)
    assert offsets.newest(tmp_path, NOW_MS) == finished
    assert str(bad) in caplog.text


def test_a_manifest_may_have_fields_of_a_later_release(tmp_path: Path) -> None:
    offsets.write_manifest(tmp_path / "snapshot=a", manifest("a"))
    path = tmp_path / "snapshot=a" / offsets.MANIFEST
    content = json.loads(path.read_text())
    content["exported"][0]["later"] = content["later"] = 1
    path.write_text(json.dumps(content))
    assert offsets.newest(tmp_path, NOW_MS) == manifest("a")


def test_a_snapshot_from_the_future_is_not_the_newest(tmp_path: Path) -> None:
    """The clock of an exporter was wrong. Its snapshot would be the newest for years."""
    offsets.write_manifest(tmp_path / "snapshot=a", manifest("a", started_ms=NOW_MS))
    ahead = manifest("b", started_ms=NOW_MS + offsets.AHEAD_MS_MAX + 1)
    offsets.write_manifest(tmp_path / "snapshot=b", ahead)
    newest = offsets.newest(tmp_path, NOW_MS)
    assert newest is not None
    assert newest.snapshot_id == "a"


def manifest(snapshot_id: str, *, failed: bool = False, started_ms: int = 0) -> offsets.Snapshot:
    away = [offsets.FailedGroup("g2", "PEER_UNAVAILABLE", "silent")] if failed else []
    exported = [offsets.ExportedGroup("g1", "test", 3, 1, 77, 2, 1_234, "part.parquet")]
    expected = ["g1", "g2"] if failed else ["g1"]
    return offsets.Snapshot(
        offsets.SCHEMA_VERSION, snapshot_id, started_ms, expected, exported, away, 1 / len(expected)
    )


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["offsets", "export", "--namesrv", "127.0.0.1:1", *arguments])


def test_the_folder_must_be_named() -> None:
    assert run().exit_code == 2


def test_no_name_server_is_exit_code_1(tmp_path: Path) -> None:
    result = run("--output", str(tmp_path), "--form", "json")
    assert result.exit_code == 1
    assert json.loads(result.stderr)["error"]["name"] == "PEER_UNAVAILABLE"


def test_a_young_complete_snapshot_is_enough(tmp_path: Path) -> None:
    young = manifest("a", started_ms=SystemClock().wall_ms())
    offsets.write_manifest(tmp_path / "snapshot=a", young)
    result = run("--output", str(tmp_path), "--at-most-once-per", "60", "--form", "json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["snapshot_id"] == "a"
    assert "nothing to do" in result.stderr


@pytest.mark.parametrize("snapshot", [manifest("a", failed=True, started_ms=10**14), manifest("a")])
def test_an_incomplete_or_old_one_is_not(tmp_path: Path, snapshot: offsets.Snapshot) -> None:
    offsets.write_manifest(tmp_path / "snapshot=a", snapshot)
    assert run("--output", str(tmp_path), "--at-most-once-per", "60").exit_code == 1


def test_the_answer_names_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def export(*_: Any, **__: Any) -> offsets.Snapshot:
        return manifest("a", failed=True)

    monkeypatch.setattr(offsets, "export", export)
    result = run("--output", str(tmp_path))
    assert result.exit_code == 0
    assert "g2 is missing: PEER_UNAVAILABLE silent" in result.stderr
    assert "1 of 2 broker groups" in result.stdout
    assert "1,234 rows" in result.stdout
