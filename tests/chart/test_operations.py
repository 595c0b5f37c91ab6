"""The pages of docs/how-to can be followed to the letter, as far as shows without a cluster."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
import yaml

from cometmq.admin.cli import cli
from tests.support.kube.chart import ROOT, Object, containers, pod_template, rendered, template

PAGES = "\n".join(
    page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs/how-to").glob("*.md"))
)
BLOCKS = [yaml.safe_load(text) for text in re.findall(r"^```yaml\n(.*?)^```", PAGES, re.M | re.S)]
VALUES = [block for block in BLOCKS if "scrape_configs" not in block]
COMMAND = re.compile(r"(?:^|`)(cometmq [a-z][^`\n#]*)", re.M)


def test_the_pages_have_what_is_checked_here() -> None:
    assert len(VALUES) == len(BLOCKS) - 1 >= 4
    assert len(COMMAND.findall(PAGES)) >= 4


@pytest.mark.parametrize("values", VALUES, ids=lambda values: "-".join(values))
def test_values_render(values: Object, tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    assert template(4, "--values", file)


@pytest.mark.parametrize("line", COMMAND.findall(PAGES))
def test_commands_are_known(line: str) -> None:
    """Each word leads to a command; what follows are options that it has."""
    words = shlex.split(line)[1:]
    command: click.Command | None = cli
    while isinstance(command, click.Group) and words:
        command = command.get_command(click.Context(command), words.pop(0))
    assert command is not None
    known = {name for option in command.params for name in option.opts}
    assert {word for word in words if word.startswith("--")} <= known


def test_a_scrape_by_hand_sees_what_the_monitor_sees() -> None:
    """The relabelling keeps every process, and names it as the chart's monitor does."""
    (block,) = (block for block in BLOCKS if "scrape_configs" in block)
    (scrape,) = block["scrape_configs"]
    name, port, *copied = scrape["relabel_configs"]
    for workload in rendered("defaults").of("StatefulSet", "Deployment"):
        labels = pod_template(workload)["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == name["regex"]
        assert port["regex"] in {p["name"] for c in containers(workload) for p in c["ports"]}
    (monitor,) = rendered("everything").of("PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    (instance,) = endpoint["relabelings"]
    by_hand = {rule["target_label"]: rule["source_labels"] for rule in copied}
    assert by_hand[instance["targetLabel"]] == instance["sourceLabels"]
    assert by_hand.keys() == {"namespace", "pod", "instance"}
