"""Measured rows of several snapshots → one row for each queue and group: its newest numbers, and
how they moved. Pure: DataFrame → DataFrame.

A series is as long as the queue keeps its generation: offsets of different generations are not to
be compared. Rates are slopes of a least-squares line over the series, in messages per second; with
two points that is the plain quotient, with one there is none.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F
from pyspark.sql.window import WindowSpec

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
        .withColumn("_progress", _progress(in_order.rowsBetween(Window.unboundedPreceding, -1)))
    )
    columns = [name for name in measured.columns if name not in SERIES]
    found = rows.groupBy(*SERIES).agg(
        F.max_by(F.struct(*columns, "stale"), "snapshot_id").alias("_last"),
        F.count("lag_count").alias("snapshot_count"),
        _since(F.lit(False)).alias("span_s"),
        F.regr_slope("max_offset", "_seconds").alias("produce_rate"),
        F.regr_slope("_position", "_seconds").alias("consume_rate"),
        F.regr_slope("lag_count", "_seconds").alias("lag_velocity"),
        F.max("_position").alias("highest_position"),
        _since(F.col("_progress")).alias("no_progress_s"),
        _noise().alias("lag_noise"),
    )
    kept = [F.col(f"_last.{name}").alias(name) for name in columns]
    others = [name for name in found.columns if name not in (*SERIES, "_last")]
    flat = found.select(*SERIES, *kept, (F.col("_last.stale") == 1).alias("stale"), *others)
    return _stale_is_unknown(flat).withColumn("drain_eta_s", _drain_eta())


def _progress(earlier: WindowSpec) -> Column:
    """Is the head of the queue another message than in the snapshot before? The group committed,
    or it had caught up until then.
    """
    before = F.last("_position", ignorenulls=True).over(earlier)
    lag_before = F.last("lag_count", ignorenulls=True).over(earlier)
    return (F.col("_position") != before) | (lag_before == 0)


def _since(event: Column) -> Column:
    """Seconds from the last snapshot with the event to the last one; without any, from the first.
    Only snapshots in which the lag is known count.
    """
    known = F.when(F.col("lag_count").isNotNull(), F.col("_seconds"))
    seconds = F.max(known) - F.coalesce(F.max(F.when(event, known)), F.min(known))
    return F.coalesce(seconds, F.lit(0.0))


def _noise() -> Column:
    """Standard deviation of the lag around its line, in messages; null with one point."""
    unexplained = 1 - F.regr_r2("lag_count", "_seconds")
    square = F.regr_syy("lag_count", "_seconds") * unexplained / F.count("lag_count")
    return F.sqrt(F.greatest(square, F.lit(0.0)))


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
    """Seconds until the lag is 0 at the present velocity; null when it does not shrink."""
    drains = (F.col("lag_count") > 0) & (F.col("lag_velocity") < 0)
    return F.when(F.col("lag_count") == 0, 0.0).when(
        drains, F.col("lag_count") / -F.col("lag_velocity")
    )
