"""Snapshots → everything the job answers. Pure: DataFrames → DataFrames, no reading, no writing."""

from __future__ import annotations

from dataclasses import dataclass, fields

from pyspark.sql import DataFrame

from spark.lag.judge import SPAN_S_MIN, judge, with_members
from spark.lag.measure import dedupe, measure
from spark.lag.rollup import CLUSTER, GROUP, TOPIC, depths, roll_up
from spark.lag.trend import newest, trend

# What only trend and judge need.
_INNER = ("highest_position", "no_progress_s", "lag_noise")


@dataclass(frozen=True, slots=True)
class Lag:
    """One table for each level; docs/lag.md lists their columns."""

    queues: DataFrame
    topics: DataFrame
    groups: DataFrame
    clusters: DataFrame
    depths: DataFrame

    def tables(self) -> dict[str, DataFrame]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def compute(
    rows: DataFrame, brokers: DataFrame, *, complete: bool, span_s_min: float = SPAN_S_MIN
) -> Lag:
    """Lag of the newest snapshot, with the trend of all.

    ``rows``: schema.SNAPSHOT, of one or more snapshots, duplicates allowed; ``brokers``:
    schema.brokers_frame; ``complete``: no broker group is missing in the newest snapshot. The
    queues are cached, because three tables are made of them: unpersist them when all is written.
    """
    trends = trend(measure(dedupe(rows)), brokers)
    judged = judge(with_members(trends, complete=complete), span_s_min)
    queues = judged.drop(*_INNER).cache()
    return Lag(
        queues=queues,
        topics=roll_up(queues, TOPIC),
        groups=roll_up(queues, GROUP),
        clusters=roll_up(queues, CLUSTER),
        depths=depths(newest(rows, brokers)),
    )
