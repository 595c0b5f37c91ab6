"""The Spark session of a small job on one machine."""

from __future__ import annotations

import os

from pyspark.sql import SparkSession

from spark import java_home

SETTINGS = {
    "spark.ui.enabled": "false",  # no port, no threads for a page that no user opens
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.session.timeZone": "UTC",
    # Every reader of Parquet knows microseconds; Spark's own default, INT96, is deprecated.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    # A JVM that lives for half a minute: compiling better costs more than it gives back (100,000
    # queues took 47 s of CPU with both compilers and G1, 33 s so).
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


def open_session(master: str = "local[*]") -> SparkSession:
    """A session in this process's own JVM; stop it at the end. Raises java_home.JavaMissing."""
    java_home.ensure()
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")  # no guessing by the host's name
    builder = SparkSession.builder.appName("cometmq-lag").master(master)
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()
