"""Measured rows of several snapshots → one row for each queue and group: its newest numbers, and
how they moved. Pure: DataFrame → DataFrame.

A series is as long as the queue keeps its generation: offsets of different generations are not to
be compared. Rates are slopes of a least-squares line over the series, in messages per second; with
two points that is the plain quotient, with one there is none.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from spark.lag.measure import SERIES, STALE, UNKNOWN


def newest(rows: DataFrame, brokers: DataFrame) -> DataFrame:
    """Rows of each broker group's last export. Of a group, queue or topic that is not in it any
    more nothing is left; a stale broker's rows are marked.
    """
    last = rows.join(F.broadcast(brokers), "broker_group")
    return last.where(F.col("snapshot_id") == F.col("last_snapshot_id"))


def trend(measured: DataFrame, brokers: DataFrame) -> DataFrame:
    """One row for each queue and group in its broker's last export."""
    series = Window.partitionBy(*SERIES)
    in_order = series.orderBy("snapshot_id")  # its order is the exporter's clock, which is one
    is_last = F.col("snapshot_id") == F.col("last_snapshot_id")
    position = F.when(F.col("lag_count").isNotNull(), F.col("committed_offset"))
    rows = (
        measured.join(F.broadcast(brokers), "broker_group")
        .withColumn("_generation", F.max(F.when(is_last, F.col("generation"))).over(series))
        .where(F.col("generation") == F.col("_generation"))
        .withColumn("_position", position)
        .withColumn("_seconds", (F.col("taken_ms") - F.min("taken_ms").over(series)) / 1000)
        .withColumn("_step", F.col("lag_count") - F.lag("lag_count").over(in_order))
    )
    columns = [name for name in measured.columns if name not in SERIES]
    found = rows.groupBy(*SERIES).agg(
        F.max_by(F.struct(*columns, "stale"), "snapshot_id").alias("_last"),
        F.count("lag_count").alias("snapshot_count"),
        _span().alias("span_s"),
        F.regr_slope("max_offset", "_seconds").alias("produce_rate"),
        F.regr_slope("_position", "_seconds").alias("consume_rate"),
        F.regr_slope("lag_count", "_seconds").alias("lag_velocity"),
        F.min_by("lag_count", _when_known("snapshot_id")).alias("first_lag_count"),
        F.max("_position").alias("highest_position"),
        (F.max("_position") > F.min("_position")).alias("moved"),
        (F.min("lag_count") == 0).alias("was_caught_up"),
        F.min("_step").alias("lowest_step"),
    )
    kept = [F.col(f"_last.{name}").alias(name) for name in columns]
    others = [name for name in found.columns if name not in (*SERIES, "_last")]
    flat = found.select(*SERIES, *kept, (F.col("_last.stale") == 1).alias("stale"), *others)
    return _stale_is_unknown(flat).withColumn("drain_eta_s", _drain_eta())


def _span() -> Column:
    """Seconds between the first and the last snapshot in which the lag is known."""
    known = _when_known("_seconds")
    return F.coalesce(F.max(known) - F.min(known), F.lit(0.0))


def _when_known(name: str) -> Column:
    return F.when(F.col("lag_count").isNotNull(), F.col(name))


def _stale_is_unknown(rows: DataFrame) -> DataFrame:
    """An old number is kept as raw_lag_count only: it must not pass for today's."""
    rows = rows.withColumn(
        "lag_method", F.when(F.col("stale"), STALE).otherwise(F.col("lag_method"))
    )
    rows = rows.withColumn(
        "time_method", F.when(F.col("stale"), UNKNOWN).otherwise(F.col("time_method"))
    )
    todays = ("lag_count", "lag_ms", "lost_count", "produce_rate", "consume_rate", "lag_velocity")
    for name in todays:
        rows = rows.withColumn(name, F.when(~F.col("stale"), F.col(name)))
    return rows


def _drain_eta() -> Column:
    """Seconds until the lag is 0 if it goes on like this; null when it does not shrink."""
    drains = (F.col("lag_count") > 0) & (F.col("lag_velocity") < 0)
    return F.when(F.col("lag_count") == 0, 0.0).when(
        drains, F.col("lag_count") / -F.col("lag_velocity")
    )
