"""The SQL92 filter: ``price BETWEEN 5 AND 10 AND region <> 'north'`` over a message's properties.

:func:`compile_expression` checks an expression and makes a :class:`Program` of it: steps for a
machine with a stack. RocketMQ's words mean here what they mean there (docs/compatibility.md names
the differences). A property is a text, or NULL when the message lacks it. AND, OR and NOT have
three values. A text becomes a number where it is compared with one; a text that is no number ends
the evaluation, and the message does not match.

:func:`matches` evaluates a program for records that lie end to end. ``native/match.c`` does the
same without the GIL.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

from cometmq.errors import FilterInvalid
from cometmq.filters import sqlgrammar
from cometmq.filters.sqlgrammar import Argument, Op, Text
from cometmq.format.record import raw_properties
from cometmq.native import accelerator

CHARACTERS_MAX = 2_047
PROGRAMS_MAX = 256  # kept compiled
NUMBER_BYTES_MAX = 64  # a property that is longer is no number
_LONG_BYTES_MAX = 20
_DIGITS_LONG = 18  # that always fit into a long
_LONG_MIN, _LONG_MAX = -(2**63), 2**63 - 1
_LONG = re.compile(rb"[+-]?[0-9]+")
_NUMBER = re.compile(rb"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")

# Operation, argument, value: as native/match.c reads a step, in the machine's order.
_STEP = struct.Struct("=iiq")
_DOUBLE_STEP = struct.Struct("=iid")
_LENGTH = struct.Struct("=I")

_PROPERTY, _NULL = int(Op.PROPERTY), int(Op.NULL)
_EQUAL, _GREATER, _GREATER_OR_EQUAL = int(Op.EQUAL), int(Op.GREATER), int(Op.GREATER_OR_EQUAL)
_LESS, _LESS_OR_EQUAL = int(Op.LESS), int(Op.LESS_OR_EQUAL)
_NOT, _NEGATE, _TRUTH, _IN = int(Op.NOT), int(Op.NEGATE), int(Op.TRUTH), int(Op.IN)
_CONTAINS, _STARTSWITH, _NOT_CONTAINS = (
    int(Op.CONTAINS),
    int(Op.STARTSWITH),
    int(Op.NOT_CONTAINS),
)
_SKIP_IF_FALSE, _SKIP_IF_TRUE = int(Op.SKIP_IF_FALSE), int(Op.SKIP_IF_TRUE)
_AND, _OR = int(Op.AND), int(Op.OR)

_Value = Text | int | float | bool | None


class _NoNumber(Exception):
    """A text that is no number is compared with one."""


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """A compiled expression. ``steps`` are those of plain Python, with bare numbers, since members
    of an enumeration take several times as long; ``code`` and ``texts`` are those of the C
    extension.
    """

    expression: str
    steps: tuple[tuple[int, Argument], ...]
    code: bytes
    texts: bytes


@lru_cache(maxsize=PROGRAMS_MAX)
def _compiled(expression: str) -> Program:
    steps = sqlgrammar.parse(expression)
    texts = bytearray()
    code = b"".join(_encoded(op, argument, texts) for op, argument in steps)
    return Program(expression, tuple(_plain(*step) for step in steps), code, bytes(texts))


def _plain(op: Op, argument: Argument) -> tuple[int, Argument]:
    """Properties are found by the separators around their names."""
    if op is Op.PROPERTY:
        assert isinstance(argument, bytes)
        argument = b"\x02%b\x01" % argument
    return int(op), argument


def compile_expression(expression: str) -> Program:
    """The program of an expression; kept, since callers repeat expressions. Raises FilterInvalid,
    whose message names the place.
    """
    if not isinstance(expression, str):
        raise FilterInvalid(f"an SQL expression is a text like 'price > 5', not {expression!r:.80}")
    if len(expression) > CHARACTERS_MAX:
        raise FilterInvalid(
            f"an SQL expression has at most {CHARACTERS_MAX} characters, not {len(expression)}: "
            f"character {CHARACTERS_MAX + 1} is one too many"
        )
    return _compiled(expression)


def program_of(expression: str, tags: Collection[str]) -> Program | None:
    """The program of a filter that may also name tags, but not both. None: it has no expression.
    Raises FilterInvalid.
    """
    if expression and tags:
        raise FilterInvalid("a filter has tags or an SQL expression, not both")
    return compile_expression(expression) if expression else None


def _encoded(op: Op, argument: Argument, texts: bytearray) -> bytes:
    at = len(texts)
    if isinstance(argument, float):
        return _DOUBLE_STEP.pack(op, 0, argument)
    if isinstance(argument, bytes):
        texts += argument
        return _STEP.pack(op, at, len(argument))
    if isinstance(argument, tuple):
        for text in argument:
            texts += _LENGTH.pack(len(text)) + text
        return _STEP.pack(op, at, len(argument))
    return _STEP.pack(op, 0, int(argument or 0))


def matches(program: Program, records: bytes) -> bytes:
    """For each of the records, which lie end to end, 1 when it matches, else 0. Raises
    BatchMalformed when they do not.
    """
    if accelerator is None:
        return matches_plainly(program, records, 0, len(records))
    verdicts, at = b"", 0
    while at < len(records):
        at, some = accelerator.match(records, at, program.code, program.texts)
        verdicts += some
        if at < len(records):  # plain Python knows rare numbers, and says what is malformed
            verdicts += matches_plainly(program, records, at, at + 1)
            at += int.from_bytes(records[at : at + 4], "big")
    return verdicts


def matches_plainly(program: Program, records: bytes, at: int, stop: int) -> bytes:
    """As :func:`matches`, from ``at`` until a record reaches or passes ``stop``."""
    verdicts = bytearray()
    steps = program.steps
    while at < stop:
        at, properties = raw_properties(records, at)
        verdicts.append(_is_match(steps, properties))
    return bytes(verdicts)


def matches_properties(program: Program, properties: bytes) -> bool:
    """Whether a message with these properties, as a record carries them, matches."""
    return _is_match(program.steps, properties)


def _is_match(steps: tuple[tuple[int, Argument], ...], properties: bytes) -> bool:
    try:
        return _evaluate(steps, b"\x02" + properties) is True
    except _NoNumber:
        return False


def _evaluate(steps: tuple[tuple[int, Argument], ...], framed: bytes) -> _Value:
    """``framed``: the properties behind a separator. Hot: one loop, the commonest steps first."""
    stack: list[_Value] = []
    push, pop = stack.append, stack.pop
    at, end = 0, len(steps)
    while at < end:
        op, argument = steps[at]
        at += 1
        if op == _PROPERTY:
            push(_property(framed, cast(bytes, argument)))
        elif op <= _NULL:
            push(cast(_Value, argument))
        elif op <= _LESS_OR_EQUAL:
            right = pop()
            left = stack[-1]
            stack[-1] = _equal(left, right) if op == _EQUAL else _related(op, left, right)
        elif op == _SKIP_IF_FALSE:
            if stack[-1] is False:
                at += cast(int, argument)
        elif op == _SKIP_IF_TRUE:
            if stack[-1] is True:
                at += cast(int, argument)
        elif op >= _AND:
            right = pop()
            stack[-1] = _joined(op, stack[-1], right)
        else:
            stack[-1] = _changed(op, stack[-1], argument)
    assert len(stack) == 1
    return stack[0]


def _property(framed: bytes, wanted: bytes) -> Text | None:
    """The last value that is not empty, as everywhere; None: the property is missing."""
    before = len(framed)
    while (at := framed.rfind(wanted, 0, before)) >= 0:
        start = at + len(wanted)
        end = framed.find(b"\x02", start)
        if value := framed[start:] if end < 0 else framed[start:end]:
            return value
        before = at
    return None


def _joined(op: int, left: _Value, right: _Value) -> bool | None:
    decisive = op == _OR
    if left is decisive or right is decisive:
        return decisive
    return None if left is None or right is None else not decisive


def _changed(op: int, value: _Value, argument: Argument) -> _Value:
    """The value after a step that takes one and leaves one."""
    if op == _NOT:
        return None if value is None else not value
    if op == _IN:
        return None if value is None else value in cast("tuple[Text, ...]", argument)
    if op == _TRUTH:
        return None if value is None else False
    if op == _NEGATE:
        return -value if isinstance(value, int | float) and not isinstance(value, bool) else None
    return _searched(op, value, cast(bytes, argument))


def _searched(op: int, value: _Value, part: Text) -> bool:
    """Nothing has an empty part, and what is no text neither has a part nor lacks it."""
    if not part or not isinstance(value, bytes):
        return False
    kind = op if op < _NOT_CONTAINS else op - _NOT_CONTAINS + _CONTAINS
    if kind == _CONTAINS:
        found = part in value
    else:
        found = value.startswith(part) if kind == _STARTSWITH else value.endswith(part)
    return found is (kind == op)


def _equal(left: _Value, right: _Value) -> bool | None:
    """NULL on the left alone is NULL; on the right alone it is FALSE, on both sides TRUE. So IS
    NULL is this comparison too.
    """
    if left is None:
        return True if right is None else None
    if right is None:
        return False
    if isinstance(left, bytes) and isinstance(right, bytes):
        return left == right
    if isinstance(left, bool) or isinstance(right, bool):
        first, second = _as_boolean(left), _as_boolean(right)
        return first is not None and first is second
    first_number, second_number = _numbers(left, right)
    return first_number == second_number


def _as_boolean(value: _Value) -> bool | None:
    if isinstance(value, bytes):
        return value.lower() == b"true"
    return value if isinstance(value, bool) else None


def _related(op: int, left: _Value, right: _Value) -> bool | None:
    if left is None or right is None:
        return None
    first, second = _numbers(left, right)
    if op == _GREATER:
        return first > second
    if op == _GREATER_OR_EQUAL:
        return first >= second
    return first < second if op == _LESS else first <= second


def _numbers(left: _Value, right: _Value) -> tuple[int, int] | tuple[float, float]:
    """Both as longs, or as doubles when one of them is."""
    first = _number(left) if isinstance(left, bytes) else left
    second = _number(right) if isinstance(right, bytes) else right
    assert isinstance(first, int | float)
    assert isinstance(second, int | float)
    if type(first) is type(second):
        return first, second
    return float(first), float(second)


def _number(text: Text) -> int | float:
    if len(text) <= _DIGITS_LONG and text.isdigit():
        return int(text)
    if len(text) <= _LONG_BYTES_MAX and _LONG.fullmatch(text) is not None:
        value = int(text)
        return value if _LONG_MIN <= value <= _LONG_MAX else float(value)
    if len(text) > NUMBER_BYTES_MAX or _NUMBER.fullmatch(text) is None:
        raise _NoNumber
    return float(text)
