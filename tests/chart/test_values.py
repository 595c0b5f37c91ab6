"""Every value is explained and known to the schema; what is not known is refused."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from scripts.chart_schema import CHART_OWNED, CONFIGS, SCHEMA, updated
from tests.support.kube.chart import (
    CHART,
    HELMS,
    default_values,
    properties,
    run_helm,
    values_schema,
    walk,
)

REFUSED = {
    "an unknown value": ("--set", "brokers.port=1"),
    "a misspelt value": ("--set", "namesrv.replica=2"),
    "a misspelt value, deep": ("--set", "broker.probes.startup.period=2"),
    "a misspelt option": ("--set", "broker.config.flush_disk_tipe=SYNC_FLUSH"),
    "an option of the chart's own": ("--set", "broker.config.store_path=/tmp"),
    "an option of another service": ("--set", "namesrv.config.flush_disk_type=SYNC_FLUSH"),
    "an option out of range": ("--set", "broker.config.default_topic_queue_nums=0"),
    "an option of the wrong type": ("--set-string", "broker.config.topics_max=many"),
    "a misspelt option of a group": ("--set", "broker.groups[0].config.flush=1"),
    "a word that is none": ("--set", "broker.config.flush_disk_type=NO_FLUSH"),
    "no group": ("--set-json", "broker.groups=[]"),
    "a group without a name": ("--set-json", 'broker.groups=[{"slaves":1}]'),
    "a group's name in capitals": ("--set", "broker.groups[0].name=A"),
    "too many slaves": ("--set", "broker.groups[0].slaves=10"),
    "half a slave": ("--set", "broker.groups[0].slaves=0.5"),
    "an unknown value of a group": ("--set", "broker.groups[0].replicas=2"),
    "no name server": ("--set", "namesrv.replicas=0"),
    "a port that is none": ("--set", "broker.port=65536"),
    "an affinity that is none": ("--set", "broker.antiAffinity=hard"),
    "a storage type that is none": ("--set", "broker.storage.type=hostPath"),
    "a size that is none": ("--set", "broker.storage.size=20GB"),
    "a user who is root": ("--set", "security.runAsUser=0"),
    "a grace below the drain": ("--set", "broker.closeSeconds=0"),
    "a digest that is none": ("--set", "image.digest=latest"),
    "a volume without a node": ("--set-json", 'localStorage.volumes=[{"name":"a","path":"/a"}]'),
    "a relative path": (
        "--set-json",
        'localStorage.volumes=[{"name":"a","node":"n","path":"a"}]',
    ),
    "a schedule that is none": ("--set", "lag.schedule=hourly"),
    "a monitor that is none": ("--set", "metrics.monitor.kind=Probe"),
    "a label that is a number": ("--set-json", 'commonLabels={"a":1}'),
    "nobody's service account": ("--set", "broker.rbac.create=false"),
    "a name too long for its pods": ("--set", f"fullnameOverride={'a' * 44}"),
}
KEY = re.compile(r"( *)(- )?([A-Za-z][\w-]*):(?: |$)")


# The schema refuses, and both Helms ask it: each value is given to one of them, in turn.
@pytest.mark.parametrize(("what", "major"), [*zip(REFUSED, itertools.cycle(HELMS), strict=False)])
def test_refused(what: str, major: int) -> None:
    done = run_helm(major, "template", "prod", CHART, *REFUSED[what])
    assert done.returncode != 0
    assert "values don't meet the specifications of the schema" in done.stderr, done.stderr


@pytest.mark.parametrize("major", HELMS)
def test_names_that_do_not_fit_are_refused(major: int) -> None:
    longest = ("--set", f"fullnameOverride={'a' * 43}")
    done = run_helm(major, "template", "prod", CHART, *longest)
    assert done.returncode == 0
    done = run_helm(major, "template", "prod", CHART, *longest, "--set", "broker.groups[0].name=ab")
    assert "more than 52 characters" in done.stderr


@pytest.mark.parametrize(("floor", "fits"), [(2, True), (3, False)])
def test_more_members_in_sync_than_there_are_are_refused(floor: int, fits: bool) -> None:
    change = f"broker.config.min_in_sync_replicas={floor}"
    done = run_helm(HELMS[-1], "template", "prod", CHART, "--set", change)
    assert (done.returncode == 0) is fits
    assert ("the group has 2 members" in done.stderr) is not fits


def test_a_parent_chart_may_have_global_values() -> None:
    done = run_helm(HELMS[0], "template", "prod", CHART, "--set", "global.region=here")
    assert done.returncode == 0, done.stderr


def test_every_value_has_a_comment() -> None:
    lines = (CHART / "values.yaml").read_text(encoding="utf-8").splitlines()
    bare = [
        f"{number}: {line}"
        for number, (above, line) in enumerate(zip(["", *lines], lines, strict=False), start=1)
        if KEY.match(line)
        and not re.match(r" *# \S", above)
        and not line.lstrip().startswith("- ")  # an item: its list has the comment
    ]
    assert not bare


def test_every_default_is_in_the_schema() -> None:
    root = values_schema()
    unknown = []
    for path, _ in walk(default_values()):
        known = _known_at(path[:-1], root)
        if known is not None and path[-1] not in known:
            unknown.append(".".join(path))
    assert not unknown


def test_every_property_of_the_schema_has_a_default() -> None:
    root = values_schema()
    missing = list(_without_default(root, default_values(), root, ()))
    assert not missing


def test_the_schema_has_the_options_of_today() -> None:
    text = SCHEMA.read_text(encoding="utf-8")
    assert updated(text) == text, "python -m scripts.chart_schema brings it up to date"


@pytest.mark.parametrize("name", CONFIGS)
def test_options_are_left_to_users(name: str) -> None:
    options = set(values_schema()["$defs"][name]["properties"])
    assert options
    assert not options & CHART_OWNED


def _known_at(path: tuple[str, ...], root: Any) -> Any:
    """The keys that the schema knows at ``path``; None: it leaves them free."""
    schema = root
    for key in path:
        known = properties(schema, root)
        if known is None:
            return None
        schema = known[key]
        schema = schema.get("items", schema)
    return properties(schema, root)


def _without_default(schema: Any, defaults: Any, root: Any, path: tuple[str, ...]) -> Any:
    known = properties(schema, root)
    # `config` maps and amounts of resources are complete without a word from the chart.
    if known is None or not isinstance(defaults, dict) or path[-1:] in FREE:
        return
    for key, inner in known.items():
        if key not in defaults:
            yield ".".join((*path, key))
        else:
            yield from _without_default(inner, defaults[key], root, (*path, key))


FREE = {("config",), ("requests",), ("limits",)}
