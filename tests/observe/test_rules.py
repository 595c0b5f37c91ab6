"""The alert rules by themselves: promtool reads them, plays them firing and not firing, and each is
explained in the runbook.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from cometmq.member.app import OFFSET_EXPORT
from cometmq.v1 import broker_pb2
from tests.support.cluster.prometheus import promtool
from tests.support.kube.dashboards import DASHBOARDS, ROOT, RULES, load, panels, rules
from tests.support.kube.promql import selectors

PLAYED = Path(__file__).with_name("rules_test.yaml")
PLAYED_AT_15S = Path(__file__).with_name("rules_at_15s_test.yaml")
RUNBOOKS = (ROOT / "docs/runbooks.md").read_text(encoding="utf-8")

EVERY = rules()


def test_promtool_reads_the_rules() -> None:
    done = promtool("check", "rules", RULES)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"SUCCESS: {len(EVERY)} rules found" in done.stdout


@pytest.mark.parametrize("played", [PLAYED, PLAYED_AT_15S], ids=lambda path: path.stem)
def test_promtool_plays_the_rules(played: Path) -> None:
    done = promtool("test", "rules", played)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_rule_is_played_firing_and_not_firing() -> None:
    played = {
        (check["alertname"], bool(check.get("exp_alerts")))
        for test in yaml.safe_load(PLAYED.read_text(encoding="utf-8"))["tests"]
        for check in test["alert_rule_test"]
    }
    assert played == {(rule["alert"], fires) for rule in EVERY for fires in (True, False)}


def test_a_rule_says_what_people_need() -> None:
    for rule in EVERY:
        assert rule["labels"]["severity"] in {"critical", "warning"}, rule
        assert re.fullmatch(r"\d+[ms]", rule["for"]), rule
        assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}, rule
        assert "{{" in rule["annotations"]["summary"], f"whose it is: {rule}"
        assert selectors(rule["expr"]), rule


def test_a_rule_has_its_chapter_in_the_runbook() -> None:
    for rule in EVERY:
        anchor = rule["alert"].lower()
        assert rule["annotations"]["runbook_url"] == f"docs/runbooks.md#{anchor}"
        chapter = re.search(rf"^## {rule['alert']}$(.*?)(?=^## |\Z)", RUNBOOKS, re.M | re.S)
        assert chapter, f"{rule['alert']} has no chapter"
        for part in ("**Means.**", "**Look at.**", "**Do.**", f"({rule['labels']['severity']})"):
            assert part in chapter.group(1), rule["alert"]


def test_the_exports_that_a_rule_waits_for_are_counted_from_the_start() -> None:
    """By the name that members count them under."""
    service, method = OFFSET_EXPORT[1:].split("/")
    assert method in broker_pb2.DESCRIPTOR.services_by_name[service.split(".")[-1]].methods_by_name
    (rule,) = (rule for rule in EVERY if rule["alert"] == "CometMQLagExportStale")
    asked = {m.value for s in selectors(rule["expr"]) for m in s.matchers.matchers}
    assert {OFFSET_EXPORT, "OK"} <= asked


def test_the_runbook_has_no_chapter_too_many() -> None:
    chapters = re.findall(r"^## (CometMQ\w+)$", RUNBOOKS, re.M)
    assert chapters == [rule["alert"] for rule in EVERY]


def test_the_panels_that_the_runbook_names_are_there() -> None:
    boards = [load(path) for path in DASHBOARDS]
    titles = {panel["title"] for board in boards for panel in panels(board)}
    titles |= {title.partition(" (")[0] for title in titles} | {board["title"] for board in boards}
    named = set(re.findall(r"(?<!\*)\*([A-Z][^*]+)\*(?!\*)", RUNBOOKS))
    assert len(named) > 10
    assert named <= titles
