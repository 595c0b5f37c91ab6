"""The images: plain enough for every builder, and what the chart takes them for."""

from __future__ import annotations

import re

import pytest

from tests.support.kube.chart import ROOT, containers, default_values, rendered
from tests.support.kube.dockerfile import parse, sources

DOCKERFILE = ROOT / "deploy/docker/Dockerfile"
TARGETS = ("service", "lag")
STAGES = parse(DOCKERFILE)


def test_plain_enough() -> None:
    text = DOCKERFILE.read_text(encoding="utf-8")
    assert not re.search(r"^RUN.*<<", text, re.M)
    assert not re.search(r"^COPY.*--link", text, re.M)
    assert not re.search(r"^FROM (?!\$\{BASE\}|build)", text, re.M)


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_names_its_base_which_may_be_a_digest(target: str) -> None:
    stage = STAGES[target]
    assert stage.base == "${BASE}"
    assert stage.labels == {"org.opencontainers.image.base.name": "${BASE}"}
    assert "BASE" in stage.arguments, "an argument before FROM is known in a stage that names it"


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_copied_exists_and_is_sent_to_the_builder(target: str) -> None:
    sent = {
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line.startswith("!")
    }
    copied = sources(STAGES, target)
    assert {"cometmq", "services"} <= copied <= sent
    assert all((ROOT / name).exists() for name in sent)


def test_only_the_lag_image_has_spark() -> None:
    assert "spark" in sources(STAGES, "lag")
    assert "spark" not in sources(STAGES, "service")


@pytest.mark.parametrize("target", TARGETS)
def test_the_user_is_the_charts(target: str) -> None:
    security = default_values()["security"]
    assert STAGES[target].user == f"{security['runAsUser']}:{security['runAsGroup']}"


@pytest.mark.parametrize("target", TARGETS)
def test_the_entry_point_takes_the_charts_arguments(target: str) -> None:
    assert STAGES[target].entrypoint == ["python"]
    using = [
        container
        for workload in rendered("defaults").of("StatefulSet", "Deployment", "CronJob")
        for container in containers(workload)
        if container["image"].startswith(f"cometmq/{target}:")
    ]
    assert using
    assert all(container["args"][0] == "-m" for container in using)
    assert not any("command" in container for container in using)


def test_home_is_where_the_chart_puts_it() -> None:
    text = DOCKERFILE.read_text(encoding="utf-8")
    homes = set(re.findall(r"--home-dir (\S+)", text))
    (home,) = homes
    for workload in rendered("defaults").of("StatefulSet", "Deployment", "CronJob"):
        for container in containers(workload):
            assert {"name": "HOME", "value": home} in container["env"]
