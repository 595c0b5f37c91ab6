"""Snapshots of all offsets as Parquet files, for the lag job. docs/lag.md has layout and schema.

A snapshot is complete when its manifest lies there: every file is written under a temporary name
and renamed, the manifest last. A broker group that does not answer makes the snapshot incomplete,
not impossible; the manifest names it. Needs the optional extra ``lag`` (pyarrow).
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from dataclasses import fields as dataclass_fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import grpc

from cometmq.admin.connection import POLL_INTERVAL_S, Connection
from cometmq.clock import Clock
from cometmq.errors import CometError, ConfigInvalid, PeerUnavailable, Retry, RouteNotFound
from cometmq.messaging.topics import is_system
from cometmq.model import DLQ_PREFIX, RETRY_PREFIX
from cometmq.rpc.interceptors import error_from
from cometmq.telemetry import fields, logger
from cometmq.v1 import broker_pb2, common_pb2, namesrv_pb2

T = TypeVar("T")

_log = logger(__name__)

SCHEMA_VERSION = 1
MANIFEST = "_manifest.json"  # readers of Parquet folders pass over names that begin with _
PART = "part.parquet"
AHEAD_MS_MAX = 600_000  # a snapshot from further ahead was made by a clock that was wrong
DEADLINE_S = 60.0  # of one broker's snapshot

# Name, Arrow type, whether it may be null; the meaning of each is in docs/lag.md.
COLUMNS = (
    ("snapshot_id", "string", False),
    ("cluster", "string", False),
    ("broker_group", "string", False),
    ("broker_epoch", "int64", False),
    ("taken_ms", "int64", False),
    ("topic", "string", False),
    ("topic_kind", "string", False),
    ("queue_id", "int32", False),
    ("generation", "int64", False),
    ("min_offset", "int64", False),
    ("max_offset", "int64", False),
    ("max_store_time_ms", "int64", True),
    ("group", "string", True),
    ("committed_generation", "int64", True),
    ("committed_offset", "int64", True),
    ("committed_store_time_ms", "int64", True),
    ("member_count", "int32", True),
)
Row = tuple[str | int | None, ...]  # in the order of COLUMNS
_Fetched = tuple[broker_pb2.SnapshotHeader, list[broker_pb2.QueueSnapshot]]


@dataclass(frozen=True, slots=True)
class ExportedGroup:
    """A broker group in a snapshot."""

    broker_group: str
    cluster: str
    broker_epoch: int
    taken_ms: int  # by the broker's clock
    log_end_offset: int
    queue_count: int
    row_count: int
    file: str  # relative to the snapshot's folder


@dataclass(frozen=True, slots=True)
class FailedGroup:
    """A broker group that should be in a snapshot and is not."""

    broker_group: str
    error: str  # name in the catalogue
    message: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a manifest says. ``expected``: the broker groups that are registered now, and those
    that the snapshot before expected; ``completeness``: exported / expected.
    """

    schema_version: int
    snapshot_id: str
    started_ms: int  # by the exporter's clock
    expected: list[str]
    exported: list[ExportedGroup]
    failed: list[FailedGroup]
    completeness: float


def topic_kind(topic: str) -> str:
    """retry, dlq, system (the system's own) or normal."""
    if topic.startswith(RETRY_PREFIX):
        return "retry"
    if topic.startswith(DLQ_PREFIX):
        return "dlq"
    return "system" if is_system(topic) else "normal"


# --- export -------------------------------------------------------------------------------------


async def export(
    connection: Connection,
    directory: Path,
    clock: Clock,
    *,
    forget: Sequence[str] = (),
    patience_s: float = 0.0,
) -> Snapshot:
    """Write one snapshot of all broker groups below ``directory``.

    A broker group without a writer that answers is asked again for ``patience_s``: its writer may
    be changing.

    A group that was expected by the newest snapshot there is expected again, also when no name
    server knows it any more, unless ``forget`` names it. Raises RouteNotFound (no broker is known),
    PeerUnavailable (no name server, or no broker at all answers) and ConfigInvalid (pyarrow is
    missing, the folder cannot be written); then no snapshot was written.
    """
    _arrow()  # a missing package is an error before a broker is asked
    started_ms = clock.wall_ms()
    started = datetime.fromtimestamp(started_ms / 1000, UTC)
    # Ids sort by time; two exports of one millisecond differ, too.
    snapshot_id = f"{started:%Y%m%dT%H%M%S}.{started_ms % 1000:03d}Z-{secrets.token_hex(4)}"
    writers = await _writers(connection)
    before = newest(directory, started_ms)
    expected = sorted({*writers, *(before.expected if before else ())} - set(forget))
    if not expected:
        raise RouteNotFound("no broker is registered at the name server")
    folder = directory / f"snapshot={snapshot_id}"
    give_up_s = clock.monotonic_s() + patience_s

    def ask_again() -> bool:
        return clock.monotonic_s() < give_up_s

    results = await asyncio.gather(
        *(
            _export_group(folder, group, _fetch_from_writer(connection, group, writers, ask_again))
            for group in expected
        )
    )
    exported = [result for result in results if isinstance(result, ExportedGroup)]
    failed = [result for result in results if isinstance(result, FailedGroup)]
    if not exported:
        shutil.rmtree(folder, ignore_errors=True)
        reasons = "; ".join(f"{group.broker_group}: {group.message}" for group in failed)
        raise PeerUnavailable(f"no broker group could be exported: {reasons}")
    share = len(exported) / len(expected)
    manifest = Snapshot(SCHEMA_VERSION, snapshot_id, started_ms, expected, exported, failed, share)
    write_manifest(folder, manifest)
    return manifest


async def _writers(connection: Connection) -> dict[str, namesrv_pb2.Member | None]:
    """The registered broker groups, each with its writer; None: no writer is registered."""
    writers: dict[str, namesrv_pb2.Member | None] = {}
    for status in await connection.members():
        member = status.member
        is_writer = member.role == common_pb2.MEMBER_ROLE_WRITER
        writers[member.broker_group] = member if is_writer else writers.get(member.broker_group)
    return writers


async def _export_group(
    folder: Path, group: str, fetched: Awaitable[_Fetched]
) -> ExportedGroup | FailedGroup:
    try:
        header, queues = await fetched
    except CometError as error:
        return FailedGroup(group, error.name(), error.message)
    # The snapshot's id is the folder's name, and so in every row.
    rows = list(rows_of(folder.name.partition("=")[2], header, queues))
    file = Path(f"broker_group={quote(group, safe='')}") / PART
    write_rows(folder / file, rows)
    return ExportedGroup(
        broker_group=group,
        cluster=header.cluster,
        broker_epoch=header.epoch,
        taken_ms=header.taken_ms,
        log_end_offset=header.log_end_offset,
        queue_count=len(queues),
        row_count=len(rows),
        file=file.as_posix(),
    )


async def _fetch_from_writer(
    connection: Connection,
    group: str,
    writers: Mapping[str, namesrv_pb2.Member | None],
    ask_again: Callable[[], bool],
) -> _Fetched:
    """The snapshot of a broker group's writer. While it may, asks the writer of that moment."""
    while True:
        try:
            member = writers.get(group)
            if member is None:
                raise PeerUnavailable("no writer is registered")
            return await _fetch(connection, member)
        except CometError as error:
            if error.retry is Retry.NEVER or group not in writers or not ask_again():
                raise
        await asyncio.sleep(POLL_INTERVAL_S)
        writers = await _writers(connection)


async def _fetch(connection: Connection, member: namesrv_pb2.Member) -> _Fetched:
    """A broker's whole snapshot; a stream that breaks off gives nothing."""
    header = broker_pb2.SnapshotHeader()
    queues: list[broker_pb2.QueueSnapshot] = []
    request = broker_pb2.SnapshotOffsetsRequest()
    try:
        async for piece in connection.admin(member).SnapshotOffsets(request, timeout=DEADLINE_S):
            if piece.HasField("header"):
                header = piece.header
            queues.extend(piece.queues)
    except grpc.aio.AioRpcError as refused:
        error: CometError = error_from(refused)
    else:
        if header.broker_group != member.broker_group:  # another process has got its port
            raise PeerUnavailable(f"{member.internal_address} is not {member.broker_group}")
        return header, queues
    if isinstance(error, PeerUnavailable):
        raise PeerUnavailable(f"{member.internal_address} does not answer: {error.message}")
    raise error


def rows_of(
    snapshot_id: str,
    header: broker_pb2.SnapshotHeader,
    queues: Sequence[broker_pb2.QueueSnapshot],
) -> Iterator[Row]:
    """One row for each queue and group; a queue without groups has one row, with a null group."""
    common = (snapshot_id, header.cluster, header.broker_group, header.epoch, header.taken_ms)
    for queue in queues:
        topic = queue.queue.topic
        head = (
            *common,
            topic,
            topic_kind(topic),
            queue.queue.queue_id,
            queue.generation,
            queue.min_offset,
            queue.max_offset,
            queue.max_store_time_ms or None,
        )
        for group in queue.groups:
            known = group.HasField("committed")  # offset 0 is a position, absence is not
            yield (
                *head,
                group.group,
                group.committed.generation if known else None,
                group.committed.offset if known else None,
                group.committed_store_time_ms or None,
                group.member_count,
            )
        if not queue.groups:
            yield (*head, None, None, None, None, None)


# --- files --------------------------------------------------------------------------------------


def _arrow() -> Any:
    """The pyarrow package, which only this command needs."""
    try:
        import pyarrow.parquet
    except ModuleNotFoundError as missing:
        raise ConfigInvalid(
            f"exporting offsets needs {missing.name}: pip install 'cometmq[lag]'"
        ) from None
    return pyarrow


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """A Parquet file with these rows."""
    arrow = _arrow()
    schema = [arrow.field(name, getattr(arrow, kind)(), null) for name, kind, null in COLUMNS]
    columns = zip(*rows, strict=True) if rows else [()] * len(COLUMNS)
    arrays = [
        arrow.array(column, field.type) for column, field in zip(columns, schema, strict=True)
    ]
    sink = arrow.BufferOutputStream()
    table = arrow.Table.from_arrays(arrays, schema=arrow.schema(schema))
    arrow.parquet.write_table(table, sink, write_page_checksum=True)
    _write(path, sink.getvalue().to_pybytes())


def write_manifest(folder: Path, snapshot: Snapshot) -> None:
    """Finish a snapshot: from here on it is there."""
    _write(folder / MANIFEST, json.dumps(asdict(snapshot), indent=2).encode())


def _write(path: Path, content: bytes) -> None:
    """All or nothing under this name. Raises ConfigInvalid when the folder cannot be written."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise ConfigInvalid(f"cannot write {path}: {error.strerror}") from None


def newest(directory: Path, now_ms: int) -> Snapshot | None:
    """The newest finished snapshot below ``directory`` that this program understands, and that did
    not begin in the future. A manifest that cannot be read is logged, and passed over.
    """
    for path in sorted(directory.glob(f"snapshot=*/{MANIFEST}"), reverse=True):
        try:
            found = _manifest(path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            reason = f"{type(error).__name__}: {error}"
            _log.warning("manifest passed over", extra=fields(file=path, error=reason))
            continue
        if found is not None and found.started_ms <= now_ms + AHEAD_MS_MAX:
            return found
    return None


def _manifest(path: Path) -> Snapshot | None:
    """None: it is of another schema. A later release may have added fields to this one."""
    content = json.loads(path.read_bytes())
    if content["schema_version"] != SCHEMA_VERSION:
        return None
    return Snapshot(
        schema_version=SCHEMA_VERSION,
        snapshot_id=_typed(content["snapshot_id"], str),
        started_ms=_typed(content["started_ms"], int),
        expected=[_typed(group, str) for group in _typed(content["expected"], list)],
        exported=[ExportedGroup(**_known(ExportedGroup, one)) for one in content["exported"]],
        failed=[FailedGroup(**_known(FailedGroup, one)) for one in content["failed"]],
        completeness=float(content["completeness"]),
    )


def _typed(value: Any, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value


def _known(kind: type[ExportedGroup | FailedGroup], found: Mapping[str, Any]) -> dict[str, Any]:
    return {one.name: found[one.name] for one in dataclass_fields(kind)}
