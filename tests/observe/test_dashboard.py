"""The dashboards by themselves: what Grafana would swallow silently."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.kube.dashboards import (
    DASHBOARDS,
    everything,
    load,
    panels,
    questions,
    screens,
    variables,
)
from tests.support.kube.promql import selectors, substituted

BUILT_IN = {"__rate_interval": "1m", "__range": "1h"}
UNITS = {"short", "none", "s", "ms", "bytes", "binBps", "mps", "eps", "reqps", "percentunit"}
COLUMNS = 24

board_by_board = pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
PANELS = [panel for path in DASHBOARDS for panel in panels(load(path))]


def test_there_are_dashboards() -> None:
    assert DASHBOARDS
    assert len({load(path)["uid"] for path in DASHBOARDS}) == len(DASHBOARDS)


@board_by_board
def test_it_keeps_its_place(path: Path) -> None:
    """Links to it, and its own next version, find it by its uid; an id would be a database's."""
    board = load(path)
    assert board["uid"] == path.stem
    assert "id" not in board
    assert {"title", "description", "schemaVersion", "time", "refresh"} <= board.keys()


@board_by_board
def test_panels_have_ids_and_titles_of_their_own(path: Path) -> None:
    every = everything(load(path))
    assert len({panel["id"] for panel in every}) == len(every)
    assert len({panel["title"] for panel in every}) == len(every)


@board_by_board
def test_the_first_screen_says_the_most_and_the_rest_is_collapsed(path: Path) -> None:
    first, *rest = [panel for panel in load(path)["panels"] if panel["type"] == "row"]
    assert not first["collapsed"]
    assert all(row["collapsed"] and row["panels"] for row in rest)
    titles = {panel["title"] for panel in load(path)["panels"]}
    assert titles >= {
        "Who writes, in which epoch", "Messages in and out", "Lag by group and topic",
        "End-to-end latency", "Send latency", "Room used",
    }  # fmt: skip
    assert rest[0]["gridPos"]["y"] <= 23  # rows of 38 pixels: what a laptop shows


@board_by_board
def test_panels_cover_the_grid_once(path: Path) -> None:
    """Grafana moves panels up into holes, and the board looks otherwise than it was made."""
    for screen in screens(load(path)):
        places = [panel["gridPos"] for panel in screen]
        covered = sorted(
            (y, x)
            for place in places
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        )
        rows = range(covered[0][0], covered[-1][0] + 1)
        assert covered == [(y, x) for y in rows for x in range(COLUMNS)]


@board_by_board
def test_the_data_source_is_the_variable_everywhere(path: Path) -> None:
    named = list(_data_sources(load(path)))
    assert len(named) > len(panels(load(path)))
    assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in named)


def _data_sources(node: Any) -> Iterator[Any]:
    """What stands under the key `datasource`, anywhere."""
    if isinstance(node, list):
        for item in node:
            yield from _data_sources(item)
    elif isinstance(node, dict):
        for key, value in node.items():
            if key == "datasource":
                yield value
            else:
                yield from _data_sources(value)


@board_by_board
def test_variables_are_defined_before_they_are_used(path: Path) -> None:
    board = load(path)
    names = ["datasource"]
    assert board["templating"]["list"][0]["name"] == "datasource"
    for variable in variables(board):
        substituted(variable.series, dict.fromkeys(names, "x"))  # KeyError: not known yet
        names.append(variable.name)
    assert {"namespace", "cluster"} <= set(names)
    for question in questions(board):
        substituted(question.expression, {**BUILT_IN, **dict.fromkeys(names, "x")})


@board_by_board
def test_every_selector_is_bound_to_what_was_chosen(path: Path) -> None:
    """Else a panel mixes two installations into one line."""
    for question in questions(load(path)):
        text = substituted(
            question.expression,
            {**BUILT_IN, "namespace": "NS", "cluster": "CL", "topic": "x", "group": "x"},
        )
        for selector in selectors(text):
            bound = {matcher.name: matcher.value for matcher in selector.matchers.matchers}
            # `up` is joined to what was chosen; name servers belong to no cluster.
            assert selector.name == "up" or bound["namespace"] == "NS", question.where
            namesrv = (selector.name or "").startswith("cometmq_namesrv_")
            clustered = "CL" in bound.get("cluster", "")
            assert (
                clustered
                or namesrv
                or bound.get("node_type") == "namesrv"
                or (selector.name == "up")
            ), question.where


def test_a_panel_can_be_read() -> None:
    for panel in PANELS:
        assert panel["description"].endswith("."), panel["title"]
        defaults = panel["fieldConfig"]["defaults"]
        assert defaults["unit"] in UNITS, panel["title"]
        assert defaults["thresholds"]["steps"][0]["value"] is None, panel["title"]
        assert panel["targets"], panel["title"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        for target in panel["targets"]:
            assert target["legendFormat"], panel["title"]


def test_a_legend_names_labels_that_the_query_keeps() -> None:
    """`sum by (topic)` under `{{group}}` shows an empty name for every line."""
    for panel in PANELS:
        for target in panel["targets"]:
            shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            kept = re.match(
                r"(?:histogram_quantile\([\d.]+, )?sum(?: by \(([\w, ]+)\))?", target["expr"]
            )
            if kept:
                assert shown <= set(re.findall(r"\w+", kept.group(1) or "")), target["expr"]


def test_a_legend_does_not_double_after_a_take_over() -> None:
    """Members of a group differ in the instance: a legend without it needs an aggregation."""
    for panel in PANELS:
        for target in panel["targets"]:
            if "{{instance}}" not in target["legendFormat"]:
                assert re.match(r"(histogram_quantile|sum|max|min|count)\b", target["expr"]), (
                    target["expr"]
                )


def test_tiles_show_one_number() -> None:
    for panel in PANELS:
        if panel["type"] == "stat":
            [target] = panel["targets"]
            assert target["instant"], panel["title"]
            assert re.match(r"(sum|count|min|max)( by|\()", target["expr"])
