"""The tag filter: ``"TagA || TagB"``, or ``"*"`` for every message.

A consume queue holds only the hash of a message's tag, so a filter is applied twice: the broker
compares hashes (:func:`matches_code`, may let a stranger with the same hash through), the consumer
compares tags (:func:`matches`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from cometmq.errors import FilterInvalid
from cometmq.format.taghash import tags_code

EVERYTHING = "*"
TAGS_COUNT_MAX = 256
TAG_BYTES_MAX = 256
_SEPARATOR = "||"
# What an SQL92 expression or a list of another form has, and hardly a tag.
_NO_TAG = re.compile(r"[<>=()'\"&,;]|\s(?:and|or|not|is|in|like|between)\s", re.IGNORECASE)
_CODE_MASK = 0xFFFFFFFF  # RocketMQ compares the low 32 bits


def parse(expression: str) -> frozenset[str]:
    """The tags that an expression names; empty = every message (``"*"`` and ``""``).

    As in RocketMQ, blanks around a tag do not count and empty alternatives are left out; unlike
    there, ``*`` cannot be one of several tags, nor can a text that looks like SQL92 or a list with
    commas: as a tag it would match nothing, in silence. Raises FilterInvalid.
    """
    if not isinstance(expression, str):
        raise FilterInvalid(f"an expression is a text like 'a || b', not {expression!r}")
    expression = expression.strip()
    if expression in ("", EVERYTHING):
        return frozenset()
    tags = [tag for part in expression.split(_SEPARATOR) if (tag := part.strip())]
    if not tags:
        raise FilterInvalid(f"the filter {expression[:100]!r} names no tag")
    if EVERYTHING in tags:
        raise FilterInvalid("'*' means every message and cannot be one of several tags")
    for tag in tags:
        if _NO_TAG.search(tag):
            raise FilterInvalid(
                f"{tag[:100]!r} is no tag: an expression is tags with '||' between, like 'a || b'; "
                "SQL92 is given as sql=. Tags that do look like this are named one by one"
            )
    return check(tags)


def check(tags: Iterable[str]) -> frozenset[str]:
    """The set of the tags given one by one, e.g. in a request; empty = every message. Raises
    FilterInvalid."""
    found = frozenset(tags)
    if len(found) > TAGS_COUNT_MAX:
        raise FilterInvalid(f"the filter names {len(found)} tags, {TAGS_COUNT_MAX} are allowed")
    for tag in found:
        _check_tag(tag)
    return found


def _check_tag(tag: str) -> None:
    try:
        size = len(tag.encode())
    except UnicodeEncodeError:
        raise FilterInvalid(f"the tag {tag[:100]!r} is not text") from None
    if not 0 < size <= TAG_BYTES_MAX:
        raise FilterInvalid(f"a tag has 1 to {TAG_BYTES_MAX} bytes, not {size}")
    if "|" in tag or any(c < " " or c == "\x7f" for c in tag):
        raise FilterInvalid(f"the tag {tag!r} holds '|' or a control character")


def codes(tags: Iterable[str]) -> frozenset[int]:
    """The low 32 bits of each tag's hash, unsigned; empty = every message. A consume-queue unit
    whose tags code is one of them may belong to a wanted message.
    """
    return frozenset(tags_code(tag.encode()) & _CODE_MASK for tag in tags)


def matches(tag: str, tags: frozenset[str]) -> bool:
    """Whether a message with this tag ("" = none) is wanted."""
    return not tags or tag in tags
