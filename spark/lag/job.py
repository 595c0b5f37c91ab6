"""Lag of all consumer groups from exported offsets.

    python -m spark.lag.job --snapshots DIR --results DIR [--window 10] [--keep-days N]

Reads the newest snapshots that ``cometmq offsets export`` wrote, writes Parquet tables and
``latest.json`` into the results folder, and prints what they say. docs/lag.md explains the columns.
Exit codes: 0 done, also when a broker group is missing or a file cannot be read, which the answer
says; 1 there is no snapshot, or no Java; 2 the command line is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F

from spark.java_home import JavaMissing
from spark.lag import publish, report
from spark.lag.judge import SEVERITY, severity
from spark.lag.schema import SNAPSHOT, TIMESTAMPS, brokers_frame
from spark.lag.session import open_session
from spark.lag.snapshots import NoSnapshot, Plan, plan
from spark.lag.transforms import Lag, compute

KEEP_DAYS_MAX = 3650
SHOWN_MAX = 200  # rows of a table in the summary; the Parquet files have all


def new_parser() -> argparse.ArgumentParser:
    """The options; docs/reference/options.md is made of them."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m spark.lag.job", None, __doc__, formatter_class=plain
    )
    parser.add_argument("--snapshots", type=Path, required=True, help="folder of the exports")
    parser.add_argument("--results", type=Path, required=True, help="folder of the results")
    parser.add_argument("--window", type=int, default=10, help="snapshots that make the trend")
    parser.add_argument(
        "--keep-days",
        type=float,
        help=f"remove older runs and snapshots, at most {KEEP_DAYS_MAX} (without it: keep all)",
    )
    parser.add_argument("--master", default="local[*]", help="Spark master")
    parser.add_argument(
        "--output", choices=["table", "json"], default="table", help="form of the report"
    )
    return parser


def arguments_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser()
    arguments = parser.parse_args(argv)
    if arguments.window < 1:
        parser.error("--window must be 1 or more")
    if arguments.keep_days is not None and not 0 < arguments.keep_days <= KEEP_DAYS_MAX:
        parser.error(f"--keep-days must be above 0 and at most {KEEP_DAYS_MAX}")
    return arguments


def run(spark: SparkSession, work: Plan, results: Path) -> dict[str, Any]:
    """Read, transform, write; the summary, which is latest.json too."""
    rows = spark.read.schema(SNAPSHOT).parquet(*work.files)
    lag = compute(rows, brokers_frame(spark, work.brokers), complete=work.complete)
    run_id = publish.new_run_id()
    with publish.building(results, run_id) as folder:
        counts = {
            name: _write(table.cache(), folder / name, run_id, work)
            for name, table in lag.tables().items()
        }
        summary = {**_about(work, run_id, results), **_summary(lag, counts)}
        publish.write_json(folder / publish.SUMMARY, summary)
    for table in lag.tables().values():
        table.unpersist()
    publish.point_to(results, summary, now_ms())
    return summary


def now_ms() -> int:
    """The time."""
    return int(datetime.now(UTC).timestamp() * 1000)


def _write(table: DataFrame, path: Path, run_id: str, work: Plan) -> dict[str, int]:
    """Write a table; how many rows it has, in all and by status. Every row says which run it is of,
    and how much of the cluster that run has seen; points in time are timestamps too.
    """
    seen = Observation()
    counts = [F.count(F.lit(1)).alias("rows")]
    if "status" in table.columns:
        counts += [F.count(F.when(F.col("status") == name, 1)).alias(name) for name in SEVERITY]
    times = {
        name: F.timestamp_millis(F.col(source))
        for name, source in TIMESTAMPS.items()
        if source in table.columns
    }
    stamped = table.withColumns(
        {
            **times,
            "run_id": F.lit(run_id),
            "run_snapshot_id": F.lit(work.snapshot_id),
            "completeness": F.lit(work.completeness),
        }
    )
    stamped.observe(seen, *counts).write.parquet(str(path))
    return seen.get


def _about(work: Plan, run_id: str, results: Path) -> dict[str, Any]:
    about = {
        name: value for name, value in asdict(work).items() if name not in ("brokers", "files")
    }
    return {
        **about,
        "run_id": run_id,
        "finished_ms": now_ms(),
        "path": f"{results}/run={run_id}",
    }


def _summary(lag: Lag, counts: dict[str, dict[str, int]]) -> dict[str, Any]:
    """What there is to know without opening a Parquet file: the worst rows of each level."""
    worst = (severity(F.col("status")).desc(), F.col("lag_known_sum").desc_nulls_last())
    found = counts["queues"]
    return {
        "status_counts": {name: found[name] for name in reversed(SEVERITY) if found[name]},
        "rows": {name: its["rows"] for name, its in counts.items()},
        "clusters": _first(lag.clusters, *worst),
        "groups": _first(lag.groups, *worst, F.col("group")),
        "topics": _first(lag.topics, *worst, F.col("group"), F.col("topic")),
        "depths": _first(
            lag.depths, F.col("message_known_count").desc_nulls_last(), F.col("topic")
        ),
    }


def _first(table: DataFrame, *order: Any) -> list[dict[str, Any]]:
    return [row.asDict() for row in table.orderBy(*order).limit(SHOWN_MAX).collect()]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = arguments_of(argv)
    try:
        # Before Spark takes its seconds: there may be nothing to compute.
        work = plan(arguments.snapshots, arguments.window, now_ms())
        spark = open_session(arguments.master)
    except (NoSnapshot, JavaMissing) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    try:
        summary = run(spark, work, arguments.results)
    finally:
        spark.stop()
    if arguments.keep_days is not None:
        before = datetime.now(UTC) - timedelta(days=arguments.keep_days)
        kept = {Path(file).parent.parent for file in work.files}
        publish.remove_old(arguments.results, arguments.snapshots, before, kept)
    print(json.dumps(summary, indent=2) if arguments.output == "json" else report.text(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
