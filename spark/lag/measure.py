"""Rows of snapshots → lag of each row by itself. Pure: DataFrame → DataFrame.

What is not known is null, never 0, and a method beside each number says where it is from.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

QUEUE = ("cluster", "broker_group", "topic", "queue_id")
SERIES = (*QUEUE, "group")  # what a lag belongs to

# lag_method
EXACT = "exact"  # end, minimum and position were read at the same instant
NEVER_COMMITTED = "never_committed"
FENCED = "fenced"  # committed in an older generation; what of it holds is not known
ABOVE_MAX = "above_max"  # the position is above the end of the queue
STALE = "stale"  # the broker group is missing in the newest snapshot
# time_method
STORE_TIME = "store_time"  # store time of the first message that is not done
CAUGHT_UP = "caught_up"  # nothing to wait for
STORED_AFTER = (
    "stored_after_snapshot"  # stored while the snapshot was read: 0, the raw value is < 0
)
UNKNOWN = "unknown"


def dedupe(rows: DataFrame) -> DataFrame:
    """Each queue and group once for each snapshot; of two exports the later one.

    The rows are distributed and sorted as all that follows needs them: once.
    """
    window = Window.partitionBy(*SERIES, "snapshot_id").orderBy(
        F.col("taken_ms").desc(), F.col("max_offset").desc(), F.col("committed_offset").desc()
    )
    return (
        rows.repartition(*SERIES)
        .withColumn("_n", F.row_number().over(window))
        .where("_n = 1")
        .drop("_n")
    )


def measure(rows: DataFrame) -> DataFrame:
    """Rows with a group, and their lag: raw_lag_count, lag_count, lag_method, lost_count,
    raw_lag_ms, lag_ms, time_method.
    """
    committed, low, high = F.col("committed_offset"), F.col("min_offset"), F.col("max_offset")
    exact = F.col("lag_method") == EXACT
    return (
        rows.where(F.col("group").isNotNull())
        .withColumn("lag_method", _lag_method())
        .withColumn("raw_lag_count", high - committed)
        # What retention has removed cannot be waited for any more: it is lost, not lag.
        .withColumn("lag_count", F.when(exact, high - F.greatest(committed, low)))
        .withColumn("lost_count", F.when(exact, F.greatest(low - committed, F.lit(0))))
        .withColumn("raw_lag_ms", F.col("taken_ms") - F.col("committed_store_time_ms"))
        .withColumn("time_method", _time_method())
        .withColumn(
            "lag_ms",
            F.when(F.col("time_method") == STORE_TIME, F.col("raw_lag_ms")).when(
                F.col("time_method").isin(CAUGHT_UP, STORED_AFTER), F.lit(0)
            ),
        )
    )


def _lag_method() -> Column:
    same_generation = F.col("committed_generation") == F.col("generation")
    # The broker sends the time of the message at an older position only while the position holds.
    proven = F.col("committed_store_time_ms").isNotNull()
    return (
        F.when(F.col("committed_offset").isNull(), NEVER_COMMITTED)
        .when(~(same_generation | proven), FENCED)
        .when(F.col("committed_offset") > F.col("max_offset"), ABOVE_MAX)
        .otherwise(EXACT)
    )


def _time_method() -> Column:
    return (
        F.when(F.col("lag_count").isNull(), UNKNOWN)
        .when(F.col("lag_count") == 0, CAUGHT_UP)
        .when(F.col("raw_lag_ms").isNull(), UNKNOWN)  # lost, or not to be read
        .when(F.col("raw_lag_ms") < 0, STORED_AFTER)
        .otherwise(STORE_TIME)
    )
