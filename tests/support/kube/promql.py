"""Expressions taken apart by a parser, never by patterns."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import promql_parser as promql

_OPERATORS = {
    "MatchOp.Equal": "=",
    "MatchOp.NotEqual": "!=",
    "MatchOp.Re": "=~",
    "MatchOp.NotRe": "!~",
}
# Attributes under which one expression holds others.
_PARTS = ("lhs", "rhs", "expr", "param", "vector_selector")


def selectors(expression: str) -> list[promql.VectorSelector]:
    """Every selector of series in an expression."""
    return list(_selectors(promql.parse(expression)))


def _selectors(node: Any) -> Iterator[promql.VectorSelector]:
    if isinstance(node, promql.VectorSelector):
        yield node
        return
    parts = [getattr(node, name, None) for name in _PARTS]
    for part in [*parts, *getattr(node, "args", ())]:
        if isinstance(part, promql.Expr):
            yield from _selectors(part)


def unshifted(selector: promql.VectorSelector) -> str:
    """The selector without what moves it in time: the series alone."""
    matchers = [f'__name__="{selector.name}"'] if selector.name else []
    for found in selector.matchers.matchers:
        value = found.value.replace("\\", "\\\\").replace('"', '\\"')
        matchers.append(f'{found.name}{_OPERATORS[str(found.op)]}"{value}"')
    return "{" + ", ".join(matchers) + "}"


def substituted(text: str, values: Mapping[str, str]) -> str:
    """``text`` with Grafana's variables replaced, ``$name`` and ``${name}``."""

    def value(match: re.Match[str]) -> str:
        return values[match.group(1) or match.group(2)]

    # `$1` belongs to label_replace().
    return re.sub(r"\$(?:\{([a-zA-Z_]\w*)\}|([a-zA-Z_]\w*))", value, text)
