"""A release after this one: a copy of the tree that speaks one protocol version more and one less,
and writes a new kind of state with each topic whose name begins with ``noted``.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from scripts.releases import ROOT, Program

KIND = "note"

# Added to the ends of modules.
ADDED = {
    "cometmq/replication/versions.py": """
PROTOCOL_MIN, PROTOCOL_MAX = 4, 5
FEATURES |= {"notes"}
""",
    "cometmq/messaging/changes.py": """
@dataclass(frozen=True, slots=True)
class Noted:
    topic: str


_KINDS[Noted] = _BY_NAME["note"] = _Kind(
    "note", frozenset("n"), lambda c: {"n": c.topic}, lambda f: Noted(_str(f["n"]))
)
KINDS |= {"note"}
""",
    "cometmq/messaging/state.py": """
from cometmq.messaging.changes import Noted

_apply, _plan_extras = BrokerState.apply, BrokerState.plan_extras


def apply(self, change):
    if not isinstance(change, Noted):
        _apply(self, change)


def plan_extras(self, config):
    more = [Noted(config.name)] if config.name.startswith("noted") else []
    return [*_plan_extras(self, config), *more]


BrokerState.apply, BrokerState.plan_extras = apply, plan_extras
""",
}


def make(tree: Path) -> Program:
    """The program, in the new folder ``tree``."""
    for package in ("cometmq", "services"):
        left_out = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, tree / package, ignore=left_out)
    for name, code in ADDED.items():
        with (tree / name).open("a") as module:
            module.write(code)
    return Program("next", tree, Path(sys.executable))
