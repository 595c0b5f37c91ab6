"""Real services, a real Prometheus, traffic; then everything that the chart's dashboards and rules
ask is asked, and what the processes serve is compared with docs/metrics.md.
"""

from __future__ import annotations

import math
import re
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.support.cluster.processes import Service
from tests.support.cluster.prometheus import program, promtool
from tests.support.cluster.scene import CLUSTER, NAMESPACE, Scene, playing
from tests.support.kube.dashboards import (
    DASHBOARDS,
    ROOT,
    RULES,
    Question,
    Variable,
    load,
    questions,
    rules,
    variables,
)
from tests.support.kube.promql import selectors, substituted, unshifted
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(150)

WINDOW_S = 10
# What Grafana would fill in: with a choice made, and with All wherever there is one.
CHOSEN = {"namespace": NAMESPACE, "cluster": CLUSTER, "topic": "(Orders|Payments)"}
CHOSEN |= {"group": "(billing|audit)", "__rate_interval": f"{WINDOW_S}s", "__range": "60s"}
EVERYTHING = CHOSEN | {"namespace": ".*", "topic": ".*", "group": ".*"}
# Of kube-state-metrics, which is not here; docs/runbooks.md says that the rule needs it.
FOREIGN = {"kube_cronjob_status_last_successful_time", "kube_cronjob_spec_suspend"}
# A group that reads nothing is part of the scene; how full or busy this machine is, is not ours.
EXPECTED_ALERTS = {
    "CometMQConsumerFallingBehind",
    "CometMQDeadLetters",
    "CometMQDiskFillingUp",
    "CometMQDiskNearlyFull",
    "CometMQEventLoopStalls",
    "CometMQEventLoopStandsStill",
    "CometMQMessagesRemovedEarly",
    "CometMQTimersLate",
}

BOARDS = [load(path) for path in DASHBOARDS]
QUESTIONS = [question for board in BOARDS for question in questions(board)]
VARIABLES = [variable for board in BOARDS for variable in variables(board)]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    program("prometheus")
    with playing(tmp_path_factory.mktemp("scene"), RULES) as scene:
        yield scene


def numbers(series: list[dict[str, Any]]) -> list[float]:
    """All values of a result that are numbers."""
    values = [pair for its in series for pair in its.get("values", [its.get("value")])]
    return [number for _, text in values if math.isfinite(number := float(text))]


# --- dashboards -----------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [CHOSEN, EVERYTHING], ids=["chosen", "everything"])
def test_panels_show_numbers(scene: Scene, values: dict[str, str]) -> None:
    def shows(question: Question) -> bool:
        expression = substituted(question.expression, values)
        if question.instant:
            return bool(numbers(scene.prometheus.now(expression)))
        return bool(numbers(scene.prometheus.over(expression, WINDOW_S)))

    # Of restarts there were none.
    asked = [question for question in QUESTIONS if not question.expression.startswith("changes(")]
    assert not [question for question in asked if not shows(question)]


def unknown(scene: Scene, expression: str) -> list[str]:
    """What an expression selects, and Prometheus does not have. Also behind `or vector(0)`, which
    would hide a name that nobody serves.
    """
    named = [selector for selector in selectors(expression) if selector.name not in FOREIGN]
    asked = [f"count(last_over_time({unshifted(selector)}[1m]))" for selector in named]
    return [text for text in asked if not scene.prometheus.now(text)]


def test_everything_that_panels_select_is_there(scene: Scene) -> None:
    texts = [substituted(question.expression, CHOSEN) for question in QUESTIONS]
    assert not [missing for text in texts for missing in unknown(scene, text)]


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda variable: variable.name)
def test_a_variable_has_values(scene: Scene, variable: Variable) -> None:
    series = substituted(variable.series, CHOSEN)
    found = scene.prometheus.get(f"label/{variable.label}/values", **{"match[]": series})
    assert found
    assert set(found) >= set(re.findall(r"\w+", CHOSEN[variable.name]))


# --- rules ----------------------------------------------------------------------------------------


def test_everything_that_rules_select_is_there(scene: Scene) -> None:
    assert not [missing for rule in rules() for missing in unknown(scene, rule["expr"])]


def test_prometheus_evaluates_every_rule(scene: Scene) -> None:
    groups = scene.prometheus.get("rules")["groups"]
    health = {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}
    assert health == {rule["alert"]: "ok" for rule in rules()}


def waiting(scene: Scene) -> dict[str, dict[str, str]]:
    """Alerts that wait for their time, or fire: the labels of one of each."""
    alerts = scene.prometheus.get("alerts")["alerts"]
    return {alert["labels"]["alertname"]: alert["labels"] for alert in alerts}


def test_no_alert_waits_in_a_healthy_cluster(scene: Scene) -> None:
    assert waiting(scene).keys() <= EXPECTED_ALERTS


# --- what is served -------------------------------------------------------------------------------


def scraped(service: Service) -> str:
    with urllib.request.urlopen(f"http://{service.metrics_address}/metrics") as answer:
        return bytes(answer.read()).decode()


def families(service: Service) -> list[Metric]:
    return list(text_string_to_metric_families(scraped(service)))


def test_promtool_finds_no_fault(scene: Scene) -> None:
    for service in scene.services:
        done = promtool("check", "metrics", stdin=scraped(service))
        assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), service.name


def test_every_sample_says_whose_it_is(scene: Scene) -> None:
    wanted = {
        "namesrv": {"node_type"},
        "pullhold": {"node_type", "cluster"},
        "broker": {"node_type", "cluster", "node_id"},
        "haslave": {"node_type", "cluster", "node_id"},
    }
    for service in scene.services:
        for family in families(service):
            for sample in family.samples:
                assert wanted[service.kind] <= sample.labels.keys(), sample


def test_no_label_carries_addresses_or_clients(scene: Scene) -> None:
    allowed = {"le", "error", "generation", "outcome", "reason", "role", "service", "version"}
    allowed |= {"cluster", "node_type", "node_id", "broker_group", "topic", "consumer_group"}
    allowed |= {"is_system", "is_retry", "protocol_type", "request_code", "response_code", "member"}
    allowed |= {"since", "result", "direction", "task", "way", "scope"}
    found = {
        name
        for service in scene.services
        for family in families(service)
        for sample in family.samples
        for name in sample.labels
    }
    assert found <= allowed


# --- docs/metrics.md ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A line of the table of all metrics."""

    kind: str
    labels: frozenset[str]
    served_by: frozenset[str]


def documented() -> dict[str, Row]:
    text = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    cells = r"`(?P<name>\w+)` \| (?P<kind>\w+) \| [^|]+ \| (?P<labels>[^|]*) \| (?P<by>[^|]+) \| .+"
    line = re.compile(rf"^\| {cells} \|$", re.M)
    found = {
        match["name"]: Row(
            match["kind"],
            frozenset(re.findall(r"`(\w+)`", match["labels"])),
            frozenset(re.findall(r"\w+", match["by"])),
        )
        for match in line.finditer(text)
    }
    assert len(found) == len(line.findall(text)), "a name stands there twice"
    return found


def served(scene: Scene) -> dict[str, dict[str, Metric]]:
    """Families by full name, as promtool and queries see it, and program that runs."""
    found: defaultdict[str, dict[str, Metric]] = defaultdict(dict)
    for its in map(families, scene.services):
        [build] = [family for family in its if family.name == "cometmq_build_info"]
        for family in its:
            name = f"{family.name}_total" if family.type == "counter" else family.name
            found[name][build.samples[0].labels["service"]] = family
    return dict(found)


def test_the_table_of_metrics_is_complete_and_true(scene: Scene) -> None:
    rows, found = documented(), served(scene)
    assert rows.keys() == found.keys()
    services = {name: frozenset(its) for name, its in found.items()}
    assert {name: row.served_by for name, row in rows.items()} == services
    kinds = {name: {family.type for family in its.values()} for name, its in found.items()}
    assert {name: {row.kind} for name, row in rows.items()} == kinds


def test_the_table_of_metrics_has_the_labels(scene: Scene) -> None:
    own = {"cluster", "node_type", "node_id", "le"}
    rows = documented()
    for name, by_kind in served(scene).items():
        samples = [sample for family in by_kind.values() for sample in family.samples]
        labels = {label for sample in samples for label in sample.labels} - own
        assert not samples or labels == rows[name].labels - own, name


def test_every_metric_of_ours_that_rules_and_panels_use_is_documented() -> None:
    expressions = [question.expression for question in QUESTIONS]
    expressions = [substituted(text, CHOSEN) for text in expressions]
    expressions += [rule["expr"] for rule in rules()]
    used = {selector.name for text in expressions for selector in selectors(text)}
    plain = {re.sub(r"_(bucket|count|sum)$", "", name or "") for name in used}
    assert plain - documented().keys() - FOREIGN == {"up"}


# --- the end of the scene -------------------------------------------------------------------------


def test_an_alert_waits_once_a_follower_is_killed(scene: Scene) -> None:
    """The last test: the cluster is not healthy any more."""
    scene.processes.kill("g1-1")
    wait_until("the alert", lambda: "CometMQProcessDown" in waiting(scene))
    labels = waiting(scene)["CometMQProcessDown"]
    assert (labels["pod"], labels["node_id"], labels["cluster"]) == ("g1-1", "g1", CLUSTER)
