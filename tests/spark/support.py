"""Hand-made snapshots: rows with defaults, one minute between two snapshots."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession

from cometmq.admin import offsets
from spark.lag.schema import SNAPSHOT, brokers_frame
from spark.lag.transforms import Lag, compute

T0 = 1_800_000_000_000
MINUTE = 60_000
DEFAULTS: dict[str, Any] = {
    "cluster": "c",
    "broker_group": "g1",
    "broker_epoch": 1,
    "topic": "T",
    "topic_kind": "normal",
    "queue_id": 0,
    "generation": 1,
    "min_offset": 0,
    "max_store_time_ms": None,
    "group": "G",
    "committed_generation": 1,
    "committed_offset": None,
    "committed_store_time_ms": None,
    "member_count": 1,
}


def snapshot_id(number: int) -> str:
    return f"s{number:02d}"


def row(number: int, max_offset: int, committed: int | None, **fields: Any) -> dict[str, Any]:
    """One queue and group in snapshot ``number``."""
    found = {**DEFAULTS, "max_offset": max_offset, "committed_offset": committed, **fields}
    if found["committed_offset"] is None:
        found["committed_generation"] = None
    found.setdefault("snapshot_id", snapshot_id(number))
    found.setdefault("taken_ms", T0 + number * MINUTE)
    return found


@dataclass
class Scene:
    """Rows of some snapshots, and what the job makes of them."""

    spark: SparkSession
    file: Path  # where the rows are put for Spark
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, number: int, max_offset: int, committed: int | None, **fields: Any) -> None:
        self.rows.append(row(number, max_offset, committed, **fields))

    def queue(self, *points: tuple[int, int | None], **fields: Any) -> None:
        """A series of (max offset, committed offset), one for each snapshot from 1 on."""
        for number, (high, committed) in enumerate(points, start=1):
            self.add(number, high, committed, **fields)

    def frame(self) -> DataFrame:
        names = SNAPSHOT.fieldNames()
        offsets.write_rows(self.file, [tuple(r[name] for name in names) for r in self.rows])
        return self.spark.read.schema(SNAPSHOT).parquet(str(self.file))

    def brokers(self) -> list[tuple[str, str, int]]:
        newest = max(r["snapshot_id"] for r in self.rows)
        last: dict[str, str] = {}
        for r in self.rows:
            last[r["broker_group"]] = max(last.get(r["broker_group"], ""), r["snapshot_id"])
        return [(group, found, int(found != newest)) for group, found in last.items()]

    def lag(self, *, complete: bool | None = None) -> Lag:
        brokers = self.brokers()
        whole = not any(stale for _, _, stale in brokers) if complete is None else complete
        return compute(self.frame(), brokers_frame(self.spark, brokers), complete=whole)


def by(table: DataFrame, *keys: str) -> dict[Any, Row]:
    """The rows by the values of some columns; a single one is not wrapped."""
    rows = table.collect()
    found = {tuple(r[key] for key in keys): r for r in rows}
    assert len(found) == len(rows)
    return {key[0] if len(keys) == 1 else key: r for key, r in found.items()}
