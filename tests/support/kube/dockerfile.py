"""What an image of ``deploy/docker/Dockerfile`` would hold, read from the file."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Stage:
    """One ``FROM`` and what follows it."""

    base: str
    environment: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)
    entrypoint: list[str] = field(default_factory=list)
    user: str = ""
    sources: list[str] = field(default_factory=list)  # taken from the context
    stages: list[str] = field(default_factory=list)  # stages that files are taken from


def parse(path: Path) -> dict[str, Stage]:
    """Stage by name. Knows just the instructions that the file uses, one assignment an ENV."""
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    for line in path.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            stage = stages[name] = Stage(base)
        elif stage is not None:
            _add(stage, word, rest.strip())
    return stages


def _add(stage: Stage, word: str, rest: str) -> None:
    if word == "ENV":
        name, _, value = rest.partition("=")
        stage.environment[name] = value
    elif word == "LABEL":
        name, _, value = rest.partition("=")
        stage.labels[name] = value
    elif word == "ARG":
        stage.arguments.append(rest.partition("=")[0])
    elif word == "ENTRYPOINT":
        stage.entrypoint = json.loads(rest)
    elif word == "USER":
        stage.user = rest
    elif word == "COPY":
        origin = re.match(r"--from=(\S+)", rest)
        if origin:
            stage.stages.append(origin[1])
        else:
            stage.sources += rest.split()[:-1]


def sources(stages: dict[str, Stage], target: str) -> set[str]:
    """What of the repository gets into the image, over all stages that it is made of."""
    stage = stages.get(target)
    if stage is None:
        return set()
    below = (sources(stages, name) for name in (stage.base, *stage.stages))
    return set(stage.sources).union(*below)
