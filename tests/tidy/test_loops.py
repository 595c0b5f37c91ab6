"""Loops of services: none can keep the event loop, or a call, for ever."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.tidy.test_source import modules, name, parse

# What surely lets others run, whatever the rest of a loop does.
SUSPENDS = {
    "acquire",
    "get",
    "race",
    "read",
    "run_in_executor",
    "sleep",
    "tick",
    "wait",
    "wait_at_most",
    "write",
}
TAKES = {"pop", "popitem", "popleft", "take"}
JUDGED = {
    ("services/broker/delay/tombstones.py", "run"): "each look moves on by one unit at least",
    ("services/broker/replication/replicas.py", "next_frame"): "waits for the log, or returns",
    ("services/haslave/following.py", "_copy"): "each turn waits for a frame",
    ("cometmq/member/read/search.py", "_shown"): "ends after READS_MAX reads",
}


def loops() -> Iterator[tuple[str, str, ast.While]]:
    """Those of coroutine functions, with their modules and functions."""
    for path in modules("services", "cometmq/member", "cometmq/rpc"):
        for function in ast.walk(parse(path)):
            if isinstance(function, ast.AsyncFunctionDef):
                for loop in _own(function):
                    yield name(path), function.name, loop


def _own(function: ast.AsyncFunctionDef) -> Iterator[ast.While]:
    nodes: list[ast.AST] = [*function.body]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.While):
            yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            nodes += ast.iter_child_nodes(node)


def _called(node: ast.AST) -> str:
    if not isinstance(node, ast.Call):
        return ""
    called = node.func
    return called.attr if isinstance(called, ast.Attribute) else ast.unparse(called)


def gets_on_or_waits(loop: ast.While) -> bool:
    nodes = list(ast.walk(loop))
    awaited = {_called(node.value) for node in nodes if isinstance(node, ast.Await)}
    calls = {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}
    if awaited & SUSPENDS or "turns.next" in calls:
        return True
    read = {ast.unparse(node) for node in ast.walk(loop.test)}
    stepped = {ast.unparse(node.target) for node in nodes if isinstance(node, ast.AugAssign)}
    taken = {called.rpartition(".")[0] for called in calls if called.rpartition(".")[2] in TAKES}
    return bool(read & (stepped | taken))


def test_loops_of_services_wait_get_on_or_are_bounded() -> None:
    """A loop that awaits what may answer at once counts its turns (``cometmq/turns.py``), or is
    judged here.
    """
    risky = {(module, function) for module, function, loop in loops() if not gets_on_or_waits(loop)}
    assert risky == set(JUDGED)
