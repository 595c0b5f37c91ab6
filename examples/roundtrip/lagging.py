"""How far the group is behind, twice: as ``cometmq group progress`` counts, and as the Spark job
computes from exported offsets. Of the same moment both must say the same, queue by queue.
"""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cometmq.admin import offsets, ops
from cometmq.admin.connection import Connection
from cometmq.admin.views import GroupProgressView, QueueProgressView
from cometmq.clock import SystemClock
from examples.roundtrip.stage import Folder
from examples.roundtrip.workers import WorkerFailed

QUIET_S_MAX = 30.0
LOOK_AGAIN_S = 0.5
SPARK_S_MAX = 180.0


class Count(NamedTuple):
    """A queue as one of them sees it; None: unknown."""

    committed_offset: int | None
    max_offset: int
    lag: int | None  # messages


@dataclass(frozen=True, slots=True)
class QueueLag:
    """A queue as both see it; None: one of them does not."""

    queue: str
    progress: Count | None
    spark: Count | None
    waiting_ms: int | None  # how long the first unread message has waited; Spark alone knows

    @property
    def equal(self) -> bool:
        return self.progress == self.spark


@dataclass(frozen=True, slots=True)
class Lag:
    """Both tables of one moment, and their sums."""

    queues: Sequence[QueueLag]
    progress_sum: int
    spark_sum: int | None
    spark_s: float  # how long the Spark job took
    report: Path  # what it printed

    def complaints(self) -> list[str]:
        found = [
            f"{row.queue}: {row.progress} by group progress, {row.spark} by Spark"
            for row in self.queues
            if not row.equal
        ]
        if self.progress_sum != self.spark_sum:
            found.append(f"lag {self.progress_sum} by group progress, {self.spark_sum} by Spark")
        if not self.progress_sum:
            found.append("there was no backlog whose lag could be compared")
        return found


@asynccontextmanager
async def deadline(seconds: float, what: str) -> AsyncIterator[None]:
    """TimeoutError that says what was waited for."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise TimeoutError(f"waited {seconds:.0f} s {what}") from None


async def export(
    connection: Connection, group: str, topic: str, folder: Folder
) -> GroupProgressView:
    """Writes a snapshot of all offsets; the group's progress at the same moment, which means: it
    was the same before and after the export. Errors: TimeoutError when it never rests, and those of
    the catalogue.
    """
    async with deadline(QUIET_S_MAX, "for a moment without commits, to export offsets"):
        after = await ops.group_progress(connection, group, topic=topic)
        while True:
            before = after
            snapshot = await offsets.export(connection, folder.snapshots, SystemClock())
            after = await ops.group_progress(connection, group, topic=topic)
            if before.queues == after.queues and not snapshot.failed:
                return after
            await asyncio.sleep(LOOK_AGAIN_S)


async def compute(folder: Folder, progress: GroupProgressView, topic: str) -> Lag:
    """Lag by Spark beside ``progress``. Errors: WorkerFailed, TimeoutError."""
    clock = asyncio.get_running_loop().time
    started_s = clock()
    report = folder.path / "lag" / "report.txt"
    report.write_bytes(await _spark(folder))
    latest = json.loads((folder.results / "latest.json").read_bytes())
    rows = _table(Path(latest["path"]) / "queues", progress.group, topic)
    sums = [s for s in latest["topics"] if (s["group"], s["topic"]) == (progress.group, topic)]
    return Lag(
        queues=beside(progress.queues, rows),
        progress_sum=progress.lag_count,
        spark_sum=sums[0]["lag_sum"] if sums else None,
        spark_s=clock() - started_s,
        report=report,
    )


def spark_arguments(folder: Folder) -> list[str]:
    """What Python is called with."""
    paths = ["--snapshots", str(folder.snapshots), "--results", str(folder.results)]
    return ["-m", "spark.lag.job", *paths]


async def _spark(folder: Folder) -> bytes:
    """What the Spark job prints; run as a CronJob runs it, in a process of its own."""
    log = folder.path / "spark.log"
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            sys.executable, *spark_arguments(folder), stdout=PIPE, stderr=stderr
        )
    try:
        async with deadline(SPARK_S_MAX, "for the Spark job"):
            said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise WorkerFailed(f"Spark ended with status {process.returncode}:\n{log.read_text()}")
    return said


def _table(folder: Path, group: str, topic: str) -> list[dict[str, Any]]:
    """Spark's rows of the group in the topic."""
    import pyarrow.parquet  # of the extra `lag`, which only this step needs

    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(folder).to_pylist()
    return [row for row in rows if (row["group"], row["topic"]) == (group, topic)]


def beside(
    progress: Sequence[QueueProgressView], rows: Sequence[Mapping[str, Any]]
) -> list[QueueLag]:
    """Both side by side, in order of broker group and queue."""
    left = {(view.broker_group, view.queue_id): view for view in progress}
    right = {(row["broker_group"], row["queue_id"]): row for row in rows}
    return [
        QueueLag(
            queue=f"{key[0]}/{key[1]}",
            progress=_by_progress(left[key]) if key in left else None,
            spark=_by_spark(right[key]) if key in right else None,
            waiting_ms=right[key]["lag_ms"] if key in right else None,
        )
        for key in sorted({*left, *right})
    ]


def _by_progress(view: QueueProgressView) -> Count:
    return Count(view.committed_offset, view.max_offset, view.lag_count)


def _by_spark(row: Mapping[str, Any]) -> Count:
    return Count(row["committed_offset"], row["max_offset"], row["lag_count"])
