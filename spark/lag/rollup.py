"""Queues → topics, groups, clusters. Pure: DataFrame → DataFrame.

One unknown queue makes a sum unknown: ``lag_sum`` is null then, ``lag_known_sum`` is what the known
ones add up to, and other columns count both. Normal, retry, dead-letter and system topics
are never added up with each other.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from spark.lag.judge import severity
from spark.lag.measure import QUEUE

TOPIC = ("cluster", "group", "topic", "topic_kind")
GROUP = ("cluster", "group", "topic_kind")
CLUSTER = ("cluster", "topic_kind")


def roll_up(queues: DataFrame, keys: tuple[str, ...]) -> DataFrame:
    """The rows of each combination of ``keys`` as one."""
    worst = F.struct(severity(F.col("status")), F.coalesce("lag_count", F.lit(-1)))
    name = F.concat_ws("/", "topic", "broker_group", F.col("queue_id").cast("string"))
    return queues.groupBy(*keys).agg(
        F.count("*").alias("queue_count"),
        F.count("lag_count").alias("known_count"),
        _unknown("lag_count").alias("unknown_count"),
        F.sum(F.col("stale").cast("int")).alias("stale_count"),
        _sum("lag_count").alias("lag_sum"),
        F.sum("lag_count").alias("lag_known_sum"),
        F.max("lag_count").alias("lag_max"),
        F.max_by(name, "lag_count").alias("lag_max_queue"),
        F.max("lag_ms").alias("lag_ms_max"),
        F.max_by(name, "lag_ms").alias("lag_ms_max_queue"),
        _unknown("lag_ms").alias("time_unknown_count"),
        F.sum("lost_count").alias("lost_known_sum"),
        _sum("produce_rate").alias("produce_rate"),
        _sum("consume_rate").alias("consume_rate"),
        _sum("lag_velocity").alias("lag_velocity"),
        # All are drained when the last one is; one that does not drain, or is not known, never.
        F.when(_unknown("drain_eta_s") == 0, F.max("drain_eta_s")).alias("drain_eta_s"),
        F.max_by("status", worst).alias("status"),
        F.max_by(name, worst).alias("worst_queue"),
        F.max_by("reason", worst).alias("reason"),
    )


def _unknown(name: str) -> Column:
    return F.sum(F.col(name).isNull().cast("int"))


def _sum(name: str) -> Column:
    return F.when(_unknown(name) == 0, F.sum(name))


def depths(newest: DataFrame) -> DataFrame:
    """How much lies in each topic, whether a group reads it or not: what waits in retry and
    dead-letter topics. A stale broker's queues are counted and not added.
    """
    fresh = F.col("stale") == 0
    latest = F.struct("taken_ms", "max_offset")  # a queue has a row for each group, all alike
    depth = F.when(fresh, F.col("max_offset") - F.col("min_offset"))
    queues = newest.groupBy(*QUEUE, "topic_kind").agg(
        F.max_by(depth, latest).alias("depth"),
        F.max("stale").alias("stale"),
        F.max(F.when(fresh, F.col("max_store_time_ms"))).alias("newest"),
    )
    groups = newest.groupBy("cluster", "topic").agg(F.count_distinct("group").alias("group_count"))
    found = queues.groupBy("cluster", "topic", "topic_kind").agg(
        F.count("*").alias("queue_count"),
        F.sum("stale").alias("stale_count"),
        _sum("depth").alias("message_count"),
        F.sum("depth").alias("message_known_count"),
        F.max("newest").alias("max_store_time_ms"),
    )
    return found.join(groups, ["cluster", "topic"])
