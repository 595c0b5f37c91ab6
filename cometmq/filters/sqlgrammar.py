"""The grammar of SQL92 filters, and the steps that an expression becomes.

Precedence is RocketMQ's: signs and NOT bind first, so ``NOT a = 5`` is ``(NOT a) = 5``; then ``<``,
BETWEEN, IN and CONTAINS, then ``=`` and IS NULL, then AND, then OR.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import cache
from types import SimpleNamespace
from typing import Any, TypeAlias

from cometmq.errors import FilterInvalid

STEPS_MAX = 256
DEPTH_MAX = 32
_LONG_MAX = 2**63 - 1

Text: TypeAlias = bytes  # in UTF-8


class Op(IntEnum):
    """What a step does with the stack. The numbers are those of ``native/match.c``."""

    PROPERTY = 0  # push the property's text, or NULL
    TEXT = 1  # push
    LONG = 2  # push
    DOUBLE = 3  # push
    BOOLEAN = 4  # push
    NULL = 5  # push
    EQUAL = 6  # the two on top become a truth value, as with all comparisons
    GREATER = 7
    GREATER_OR_EQUAL = 8
    LESS = 9
    LESS_OR_EQUAL = 10
    NOT = 11
    NEGATE = 12
    TRUTH = 13  # a property where a condition is wanted: FALSE, or NULL when it is missing
    IN = 14
    CONTAINS = 15
    STARTSWITH = 16
    ENDSWITH = 17
    NOT_CONTAINS = 18
    NOT_STARTSWITH = 19
    NOT_ENDSWITH = 20
    SKIP_IF_FALSE = 21  # pass over so many steps; the value stays
    SKIP_IF_TRUE = 22
    AND = 23
    OR = 24


Argument: TypeAlias = "Text | int | float | bool | tuple[Text, ...] | None"
Step: TypeAlias = tuple[Op, Argument]

_GRAMMAR = r"""
?start: either
?either: both | either OR both                                     -> either
?both: equality | both AND equality                                -> both
?equality: comparison
    | equality (EQUAL | NOT_EQUAL) comparison                      -> equality
    | equality IS NULL                                             -> is_null
    | equality IS NOT NULL                                         -> is_not_null
?comparison: unary
    | comparison (GREATER | GREATER_OR_EQUAL | LESS | LESS_OR_EQUAL) unary -> relation
    | comparison [NOT] (CONTAINS | STARTSWITH | ENDSWITH) TEXT     -> search
    | comparison [NOT] BETWEEN unary AND unary                     -> between
    | comparison [NOT] IN OPEN TEXT ("," TEXT)* ")"                 -> member
?unary: primary
    | PLUS unary                                                   -> plus
    | MINUS unary                                                  -> minus
    | NOT unary                                                    -> negation
?primary: TEXT                                                     -> text
    | LONG                                                         -> long
    | DOUBLE                                                       -> double
    | (TRUE | FALSE)                                               -> boolean
    | NULL                                                         -> null
    | NAME                                                         -> property
    | OPEN either ")"                                              -> nested

OPEN: "("
EQUAL: "="
NOT_EQUAL: "<>"
GREATER: ">"
GREATER_OR_EQUAL: ">="
LESS: "<"
LESS_OR_EQUAL: "<="
PLUS: "+"
MINUS: "-"
%s
NAME: /[a-z_$][a-z0-9_$]*/i
DOUBLE.2: /([0-9]+\.[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|[0-9]+e[+-]?[0-9]+/i
LONG: /0|[1-9][0-9]*l?/i
TEXT: /'(''|[^'])*'/
BLANKS: /[ \t\n\r\f]+/
LINE_COMMENT.3: /--[^\n\r]*/
BLOCK_COMMENT.3: /\/\*([^*]|\*+[^*\/])*\*+\//
%%ignore BLANKS
%%ignore LINE_COMMENT
%%ignore BLOCK_COMMENT
"""
_WORDS = (
    *("NOT", "AND", "OR", "BETWEEN", "IN", "TRUE", "FALSE", "NULL", "IS"),
    *("CONTAINS", "STARTSWITH", "ENDSWITH"),
)


class _Kind(Enum):
    CONDITION = "condition"
    CONSTANT = "constant"  # number or text
    BOOLEAN = "boolean"  # TRUE, FALSE: a condition and a constant
    NULL = "null"  # likewise
    PROPERTY = "property"
    SIGNED = "signed"  # with a minus in front


_CONDITIONS = frozenset({_Kind.CONDITION, _Kind.BOOLEAN, _Kind.NULL})


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of an expression. ``depth`` counts parentheses, signs and NOTs inside each other."""

    kind: _Kind
    steps: tuple[Step, ...]
    depth: int = 0


def parse(expression: str) -> tuple[Step, ...]:
    """The steps of an expression; their last value is the truth. Raises FilterInvalid, which names
    the place.
    """
    import lark

    try:
        found: _Part = _parser().parse(expression)
        return _wanted_condition(0, found).steps
    except lark.UnexpectedInput as error:
        is_end = isinstance(error, lark.UnexpectedToken) and error.token.type == "$END"
        start: Any = error.pos_in_stream
        at = len(expression) if is_end else int(start)
        why = "more is wanted" if is_end else "is not understood"
        raise _refusal(expression, at, why) from None
    except _Misfit as misfit:
        raise _refusal(expression, misfit.at, misfit.why) from None


def _refusal(expression: str, at: int, why: str) -> FilterInvalid:
    what = repr(expression[at : at + 30]) if at < len(expression) else "the end comes where"
    return FilterInvalid(f"SQL, character {at + 1}: {what} {why}")


class _Misfit(Exception):
    """A part that does not fit in its place."""

    def __init__(self, at: int, why: str) -> None:
        super().__init__(why)
        self.at = at
        self.why = why


@cache
def _parser() -> Any:
    """Made at the first expression: a process without SQL filters does not load lark."""
    import lark

    words = "\n".join(f"{word}.1: /{word}(?![a-z0-9_$])/i" for word in _WORDS)
    rules = _Rules()
    names = [name for name in dir(rules) if not name.startswith("_")]
    callbacks = SimpleNamespace(**{name: _spread(getattr(rules, name)) for name in names})
    return lark.Lark(_GRAMMAR % words, parser="lalr", lexer="basic", transformer=callbacks)


def _spread(rule: Callable[..., _Part]) -> Callable[[list[Any]], _Part]:
    """Lark gives what an alternative consists of as a list."""
    return lambda parts: rule(*parts)


class _Rules:
    """Makes the parts while the parser reads, from the inside out, so nothing recurses. A method
    for each alternative of the grammar; tokens know where they start.
    """

    def either(self, left: _Part, word: Any, right: _Part) -> _Part:
        return _joined(left, word, right, Op.SKIP_IF_TRUE, Op.OR)

    def both(self, left: _Part, word: Any, right: _Part) -> _Part:
        return _joined(left, word, right, Op.SKIP_IF_FALSE, Op.AND)

    def equality(self, left: _Part, sign: Any, right: _Part) -> _Part:
        _check_equality(left, sign, right)
        ops: tuple[Step, ...] = ((Op.EQUAL, None),)
        if sign.type == "NOT_EQUAL":
            ops += ((Op.NOT, None),)
        return _condition(sign, left.steps + right.steps + ops, left, right)

    def is_null(self, part: _Part, word: Any, _: Any) -> _Part:
        return _condition(word, (*part.steps, (Op.NULL, None), (Op.EQUAL, None)), part)

    def is_not_null(self, part: _Part, word: Any, *_: Any) -> _Part:
        steps = (*part.steps, (Op.NULL, None), (Op.EQUAL, None), (Op.NOT, None))
        return _condition(word, steps, part)

    def relation(self, left: _Part, sign: Any, right: _Part) -> _Part:
        return _related(left, sign, right, Op[sign.type])

    def search(self, part: _Part, negated: Any, word: Any, text: Any) -> _Part:
        op = Op[f"NOT_{word.type}" if negated else word.type]
        return _condition(word, (*part.steps, (op, _text(text))), part)

    def between(
        self, part: _Part, negated: Any, word: Any, low: _Part, _: Any, high: _Part
    ) -> _Part:
        if negated:
            below = _related(part, word, low, Op.LESS)
            above = _related(part, word, high, Op.GREATER)
            return _joined(below, word, above, Op.SKIP_IF_TRUE, Op.OR)
        _check_bounds(word, low, high)
        above = _related(part, word, low, Op.GREATER_OR_EQUAL)
        below = _related(part, word, high, Op.LESS_OR_EQUAL)
        return _joined(above, word, below, Op.SKIP_IF_FALSE, Op.AND)

    def member(self, part: _Part, negated: Any, word: Any, *texts: Any) -> _Part:
        if part.kind is not _Kind.PROPERTY:
            raise _Misfit(word.start_pos, "wants a property on its left")
        texts = texts[1:]  # behind the parenthesis
        steps: tuple[Step, ...] = (*part.steps, (Op.IN, tuple(map(_text, texts))))
        return _condition(word, (*steps, (Op.NOT, None)) if negated else steps, part)

    def plus(self, sign: Any, part: _Part) -> _Part:
        return _deeper(sign.start_pos, part)

    def minus(self, sign: Any, part: _Part) -> _Part:
        part = _deeper(sign.start_pos, part)
        return _Part(_Kind.SIGNED, _counted(sign, (*part.steps, (Op.NEGATE, None))), part.depth)

    def negation(self, word: Any, part: _Part) -> _Part:
        part = _deeper(word.start_pos, part)
        condition = _wanted_condition(word.start_pos, part)
        return _condition(word, (*condition.steps, (Op.NOT, None)), condition)

    def nested(self, sign: Any, part: _Part) -> _Part:
        return _deeper(sign.start_pos, part)

    def text(self, token: Any) -> _Part:
        return _Part(_Kind.CONSTANT, ((Op.TEXT, _text(token)),))

    def long(self, token: Any) -> _Part:
        value = int(token.rstrip("lL")) if len(token) <= 20 else _LONG_MAX + 1
        if value > _LONG_MAX:
            raise _Misfit(token.start_pos, f"is above {_LONG_MAX}")
        return _Part(_Kind.CONSTANT, ((Op.LONG, value),))

    def double(self, token: Any) -> _Part:
        value = float(token)
        if math.isinf(value):
            raise _Misfit(token.start_pos, "is above the largest double")
        return _Part(_Kind.CONSTANT, ((Op.DOUBLE, value),))

    def boolean(self, token: Any) -> _Part:
        return _Part(_Kind.BOOLEAN, ((Op.BOOLEAN, token.type == "TRUE"),))

    def null(self, _: Any) -> _Part:
        return _Part(_Kind.NULL, ((Op.NULL, None),))

    def property(self, token: Any) -> _Part:
        return _Part(_Kind.PROPERTY, ((Op.PROPERTY, str(token).encode()),))


def _text(token: Any) -> Text:
    try:
        return str(token)[1:-1].replace("''", "'").encode()
    except UnicodeEncodeError:
        raise _Misfit(token.start_pos, "is not text") from None


def _counted(token: Any, steps: tuple[Step, ...]) -> tuple[Step, ...]:
    if len(steps) > STEPS_MAX:
        raise _Misfit(token.start_pos, f"is one step too many: {STEPS_MAX} are allowed")
    return steps


def _condition(token: Any, steps: tuple[Step, ...], *parts: _Part) -> _Part:
    return _Part(_Kind.CONDITION, _counted(token, steps), max(part.depth for part in parts))


def _deeper(at: int, part: _Part) -> _Part:
    if part.depth >= DEPTH_MAX:
        raise _Misfit(at, f"is nested too deep: {DEPTH_MAX} levels are allowed")
    return _Part(part.kind, part.steps, part.depth + 1)


def _wanted_condition(at: int, part: _Part) -> _Part:
    if part.kind is _Kind.PROPERTY:
        return _Part(_Kind.CONDITION, (*part.steps, (Op.TRUTH, None)), part.depth)
    if part.kind in _CONDITIONS:
        return part
    raise _Misfit(at, "wants a condition, not a value")


def _joined(left: _Part, word: Any, right: _Part, skip: Op, op: Op) -> _Part:
    at = word.start_pos
    first, second = _wanted_condition(at, left), _wanted_condition(at, right)
    rest: tuple[Step, ...] = (*second.steps, (op, None))
    return _condition(word, (*first.steps, (skip, len(rest)), *rest), first, second)


def _related(left: _Part, sign: Any, right: _Part, op: Op) -> _Part:
    for part in (left, right):
        is_text = part.kind is _Kind.CONSTANT and part.steps[0][0] is Op.TEXT
        if part.kind in _CONDITIONS or is_text:
            raise _Misfit(sign.start_pos, "compares numbers only")
    return _condition(sign, (*left.steps, *right.steps, (op, None)), left, right)


def _check_equality(left: _Part, sign: Any, right: _Part) -> None:
    if _Kind.NULL in (left.kind, right.kind):
        raise _Misfit(sign.start_pos, "does not compare with NULL: write IS NULL or IS NOT NULL")
    if left.kind is _Kind.BOOLEAN and right.kind is _Kind.CONSTANT:
        raise _Misfit(sign.start_pos, "compares TRUE or FALSE with another constant")


def _check_bounds(word: Any, low: _Part, high: _Part) -> None:
    if low.kind is not _Kind.CONSTANT or high.kind is not _Kind.CONSTANT:
        return
    first, last = low.steps[0][1], high.steps[0][1]
    if isinstance(first, int | float) and isinstance(last, int | float) and first > last:
        raise _Misfit(word.start_pos, f"has bounds the wrong way round: {first} is above {last}")
