"""One Spark session for all tests of the lag job."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # without pyspark the test modules are skipped by name, and this one loads
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    from spark.lag.session import open_session

    session = open_session("local[2]")
    # Compiling each query takes longer than running it over a handful of rows.
    session.conf.set("spark.sql.codegen.wholeStage", "false")
    session.conf.set("spark.sql.adaptive.enabled", "false")
    yield session
    session.stop()
