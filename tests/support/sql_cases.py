"""SQL92 expressions as trees, their text, and an evaluator too simple to be wrong.

A tree is a tuple: ("and", a, b), ("or", a, b), ("not", a), ("compare", sign, a, b), ("between",
negated, value, low, high), ("in", negated, name, texts), ("search", negated, word, value, text),
("null", negated, value), ("minus", a), ("property", name), ("constant", value).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from random import Random
from typing import Any

Tree = tuple[Any, ...]

NAMES = ("a", "b", "region", "Price_1", "$x", "TAGS")
WORDS = ("", "x", "north", "south", "it's", "TRUE", "false", "ü", "日本", "5", "no rth")
NUMBERS = ("0", "5", "-7", "+5", "007", "5.5", "5.0", "-0.25", "1e3", ".5", "5.", "2147483648")
ODD_NUMBERS = ("9223372036854775807", "9223372036854775808", "0.1", "1e-7", "123456789012345678")
CONSTANTS = (0, 1, 5, 7, 1000, 2147483648, 0.25, 5.0, 5.5, 0.1, 123456789012345678)
SIGNS = ("=", "<>", "<", "<=", ">", ">=")


class NoNumber(Exception):
    """A text that is no number is compared with one: the message does not match."""


# --- drawing --------------------------------------------------------------------------------------


def properties(random: Random) -> dict[str, str]:
    values = [word for word in WORDS + NUMBERS + ODD_NUMBERS if word]
    return {name: random.choice(values) for name in NAMES if random.random() < 0.6}


def condition(random: Random, depth: int = 3) -> Tree:
    """What may stand alone."""
    kind = random.choice(("and", "or", "not", "leaf", "leaf")) if depth else "leaf"
    if kind in ("and", "or"):
        return (kind, condition(random, depth - 1), condition(random, depth - 1))
    if kind == "not":
        return ("not", condition(random, depth - 1))
    return random.choice((_compare, _compare, _between, _in, _search, _null, _bare))(random)


def _property(random: Random) -> Tree:
    return ("property", random.choice(NAMES))


def _number(random: Random) -> Tree:
    constant: Tree = ("constant", random.choice(CONSTANTS))
    return ("minus", constant) if random.random() < 0.2 else constant


def _compare(random: Random) -> Tree:
    sign, left = random.choice(SIGNS), _property(random)
    if sign in ("=", "<>"):
        others = (_number, _property, _word, _boolean)
    else:
        others = (_number, _number, _property, _number)
    right = random.choice(others)(random)
    is_swapped = (random.random() < 0.2 and right[0] != "constant") or right[0] == "minus"
    return ("compare", sign, right, left) if is_swapped else ("compare", sign, left, right)


def _word(random: Random) -> Tree:
    return ("constant", random.choice(WORDS))


def _boolean(random: Random) -> Tree:
    return ("constant", random.random() < 0.5)


def _between(random: Random) -> Tree:
    low, high = sorted(random.choice(CONSTANTS) for _ in range(2))
    bounds = ("constant", low), ("constant", high)
    return ("between", random.random() < 0.3, _property(random), *bounds)


def _in(random: Random) -> Tree:
    texts = tuple(random.choice(WORDS + NUMBERS) for _ in range(random.randint(1, 7)))
    return ("in", random.random() < 0.4, random.choice(NAMES), texts)


def _search(random: Random) -> Tree:
    word = random.choice(("CONTAINS", "STARTSWITH", "ENDSWITH"))
    text = random.choice((*WORDS, "o", "th", "n", "'"))
    return ("search", random.random() < 0.4, word, _property(random), text)


def _null(random: Random) -> Tree:
    return ("null", random.random() < 0.5, _property(random))


def _bare(random: Random) -> Tree:
    return random.choice((_property(random), _boolean(random)))


# --- text -----------------------------------------------------------------------------------------


def text_of(tree: Tree, random: Random) -> str:  # noqa: C901 - a case for each kind
    """An expression that means the tree."""

    def inner(part: Tree) -> str:
        return f"({text_of(part, random)})"

    def word(name: str) -> str:
        return random.choice((name, name.lower(), name.capitalize()))

    negated = f"{word('NOT')} " if tree[0] in ("between", "in", "search") and tree[1] else ""
    blank = random.choice((" ", " ", "\n", " /* a * b */ ", "\t", " -- or 5\n"))
    match tree:
        case ("and" | "or", left, right):
            return f"{inner(left)}{blank}{word(tree[0].upper())}{blank}{inner(right)}"
        case ("not", part):
            return f"{word('NOT')} {inner(part)}"
        case ("compare", sign, left, right):
            return f"{text_of(left, random)}{blank}{sign} {text_of(right, random)}"
        case ("between", _, value, low, high):
            bounds = f"{text_of(low, random)} {word('AND')} {text_of(high, random)}"
            return f"{text_of(value, random)} {negated}{word('BETWEEN')} {bounds}"
        case ("in", _, name, texts):
            return f"{name} {negated}{word('IN')}{blank}({', '.join(map(_quoted, texts))})"
        case ("search", _, name, value, text):
            return f"{text_of(value, random)} {negated}{word(name)} {_quoted(text)}"
        case ("null", is_not, value):
            words = f"{word('IS')} {word('NOT') if is_not else ''} {word('NULL')}"
            return f"{text_of(value, random)} {words}"
        case ("minus", part):
            return f"-{text_of(part, random)}"
        case ("property", name):
            return str(name)
        case ("constant", value):
            return _constant(value)
    raise AssertionError(tree)


def _constant(value: object) -> str:
    if isinstance(value, bool):
        return str(value).upper()
    return _quoted(value) if isinstance(value, str) else repr(value)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


# --- meaning --------------------------------------------------------------------------------------


def matches(tree: Tree, found: Mapping[str, str]) -> bool:
    """Whether a message with these properties matches."""
    try:
        return value_of(tree, found) is True
    except NoNumber:
        return False


def value_of(tree: Tree, found: Mapping[str, str]) -> Any:  # noqa: C901 - likewise
    match tree:
        case ("constant", value):
            return value
        case ("property", name):
            return found.get(name)
        case ("minus", part):
            value = value_of(part, found)
            return None if isinstance(value, str | None) else -value
        case ("not", part):
            value = truth_of(part, found)
            return None if value is None else not value
        case ("and", left, right):
            first = truth_of(left, found)
            # As in RocketMQ, the right side is not looked at once the left one has decided.
            both: list[Any] = [first] if first is False else [first, truth_of(right, found)]
            return False if False in both else None if None in both else True
        case ("or", left, right):
            first = truth_of(left, found)
            both = [first] if first is True else [first, truth_of(right, found)]
            return True if True in both else None if None in both else False
        case ("compare", sign, left, right):
            return _compared(sign, value_of(left, found), value_of(right, found))
        case ("between", negated, value, low, high):
            inside: Tree = ("and", ("compare", ">=", value, low), ("compare", "<=", value, high))
            outside: Tree = ("or", ("compare", "<", value, low), ("compare", ">", value, high))
            return value_of(outside if negated else inside, found)
        case ("in", negated, name, texts):
            value = found.get(name)
            return None if value is None else (value in texts) is not negated
        case ("search", negated, word, value, text):
            inside_of = value_of(value, found)
            if inside_of is None or not text:
                return False
            at = {"CONTAINS": "__contains__", "STARTSWITH": "startswith", "ENDSWITH": "endswith"}
            return getattr(inside_of, at[word])(text) is not negated
        case ("null", negated, value):
            return (value_of(value, found) is None) is not negated
    raise AssertionError(tree)


def truth_of(tree: Tree, found: Mapping[str, str]) -> bool | None:
    """A property where a condition is wanted is FALSE, whatever its text is; NULL when missing."""
    if tree[0] == "property":
        return None if tree[1] not in found else False
    value: bool | None = value_of(tree, found)
    return value


def _compared(sign: str, left: Any, right: Any) -> bool | None:
    if sign == "<>":
        equal = _compared("=", left, right)
        return None if equal is None else not equal
    if sign == "=":
        if left is None or right is None:
            return None if left is None and right is not None else left is right
        if isinstance(left, str) and isinstance(right, str):
            return left == right
        if isinstance(right, bool):
            return (left.lower() == "true") is right
    elif left is None or right is None:
        return None
    first, second = _as_number(left), _as_number(right)
    if isinstance(first, float) or isinstance(second, float):
        first, second = float(first), float(second)
    return {
        "=": first == second,
        "<": first < second,
        "<=": first <= second,
        ">": first > second,
        ">=": first >= second,
    }[sign]


def is_number(text: str) -> bool:
    try:
        _as_number(text)
    except NoNumber:
        return False
    return True


def _as_number(value: Any) -> int | float:
    if not isinstance(value, str):
        return value  # type: ignore[no-any-return]
    if re.fullmatch(r"[+-]?[0-9]{1,19}", value) and -(2**63) <= int(value) < 2**63:
        return int(value)
    if re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", value) is None:
        raise NoNumber
    assert math.isfinite(float(value))
    return float(value)
