"""Columns of a snapshot's files, as ``cometmq offsets export`` writes them (docs/lag.md)."""

from __future__ import annotations

from collections.abc import Iterable

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, IntegerType, LongType, StringType, StructField, StructType

SCHEMA_VERSION = 1

_FIELDS: tuple[tuple[str, DataType, bool], ...] = (
    ("snapshot_id", StringType(), False),
    ("cluster", StringType(), False),
    ("broker_group", StringType(), False),
    ("broker_epoch", LongType(), False),
    ("taken_ms", LongType(), False),  # the broker's clock, when the snapshot began
    ("topic", StringType(), False),
    ("topic_kind", StringType(), False),  # normal, retry, dlq or system
    ("queue_id", IntegerType(), False),
    ("generation", LongType(), False),  # of the queue
    ("min_offset", LongType(), False),
    ("max_offset", LongType(), False),
    ("max_store_time_ms", LongType(), True),  # null: the queue has no readable message
    ("group", StringType(), True),  # null: no group reads this queue
    ("committed_generation", LongType(), True),  # null: the group never committed here
    ("committed_offset", LongType(), True),
    # Null: there is no readable message at the committed offset, or the position belongs to
    # an older generation and does not hold any more.
    ("committed_store_time_ms", LongType(), True),
    ("member_count", IntegerType(), True),  # live members on this broker that read the topic
)
# Columns of the results: a timestamp beside each point in time in milliseconds.
TIMESTAMPS = {
    "taken_time": "taken_ms",
    "max_store_time": "max_store_time_ms",
    "committed_store_time": "committed_store_time_ms",
}
_ARROW: dict[type[DataType], str] = {StringType: "string", LongType: "int64", IntegerType: "int32"}
ARROW_TYPES = {name: _ARROW[type(kind)] for name, kind, _ in _FIELDS}
SNAPSHOT = StructType([StructField(*field) for field in _FIELDS])


def brokers_frame(spark: SparkSession, brokers: Iterable[tuple[str, str, int]]) -> DataFrame:
    """(broker_group, last_snapshot_id, stale) of each broker group: the newest export of it among
    those that the job looks at; stale = 1: it is not in the newest snapshot.

    Made of literals: rows of Python would start Python workers, which this job does without.
    """
    names = ("broker_group", "last_snapshot_id", "stale")
    rows = [
        F.struct(*(F.lit(value).alias(name) for name, value in zip(names, broker, strict=True)))
        for broker in brokers
    ]
    return spark.range(1).select(F.explode(F.array(*rows)).alias("row")).select("row.*")
