"""The bodies of state records as ``docs/format/state.md`` tells them: a part of the independent
reader (:mod:`tests.support.independent.reader`), with the standard library alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from tests.support.independent.record import INT32_MAX, Message, QueueKey, expect

Json = dict[str, Any]

NAME = re.compile(r"[%|a-zA-Z0-9_-]{1,255}")
STATE_QUEUE: QueueKey = ("rmq_sys_cometmq_state", 0)
PART_BYTES_MAX = 256 * 1024
HISTORY_PAIRS_MAX = 16


def _number(low: int, high: int) -> Callable[[object], bool]:
    return lambda value: type(value) is int and low <= value <= high


def _is_name(value: object) -> bool:
    return isinstance(value, str) and NAME.fullmatch(value) is not None


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _is_history(value: object) -> bool:
    """1 to 16 pairs; the first start is 0, generations rise, starts never fall."""
    if not isinstance(value, list) or not 1 <= len(value) <= HISTORY_PAIRS_MAX:
        return False
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        return False
    generations, starts = zip(*value, strict=True)
    if not all(map(_generation, generations)) or not all(map(_offset, starts)):
        return False
    rising = all(low < high for low, high in pairwise(generations))
    return rising and starts[0] == 0 and list(starts) == sorted(starts)


def _is_list_of(check: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _is_map_to(check: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: (
        isinstance(value, dict) and all(map(_is_name, value)) and all(map(check, value.values()))
    )


def _is_commit(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 3:
        return False
    queue_id, generation, offset = value
    return _number(0, INT32_MAX)(queue_id) and _number(0, 2**64 - 1)(generation) and _offset(offset)


_generation = _number(1, 2**64 - 1)
_offset = _number(0, 2**63 - 1)
_count = _number(0, 2**63 - 1)
_SETTINGS = {
    "n": _is_name,
    "r": _number(0, 1024),  # 0, and no permission, only of a topic taken over from RocketMQ
    "w": _number(0, 1024),
    "p": lambda value: type(value) is int and value in (0, 2, 4, 6),
    "f": lambda value: type(value) is int and value in (1, 2),
    "y": lambda value: type(value) is int and value in (2, 3),
}
# Fields that may be left out: an asynchronous topic says no replication mode.
OPTIONAL = {"topic": {"y"}, "topic-copy": {"y"}}
# Kind → field → is it of the right type; fields in the order in which they must stand.
KINDS: Mapping[str, Mapping[str, Callable[[object], bool]]] = {
    "topic": {**_SETTINGS, "g": _generation},
    "topic-reserve": {"n": _is_name, "t": _count},
    "topic-drop": {"n": _is_name},
    "topic-copy": {**_SETTINGS, "h": _is_list_of(_is_history)},
    "queues": {"n": _is_name, "o": _is_list_of(_offset)},
    "raise": {"g": _generation, "s": _is_map_to(_is_list_of(_offset))},
    "counter": {"g": _number(0, 2**64 - 1)},
    "group": {
        "n": _is_name,
        **dict.fromkeys(("c", "m", "b"), _is_bool),
        **dict.fromkeys(("rq", "rt", "i", "s"), _count),
        "y": _is_bool,
    },
    "group-drop": {"n": _is_name},
    "offsets": {"o": _is_map_to(_is_map_to(_is_list_of(_is_commit)))},
    "delays": {"o": _is_list_of(_is_list_of(_offset))},
}
TOPIC_KINDS = frozenset({"topic", "topic-reserve", "topic-drop", "topic-copy"})
COPY_BEGINS = frozenset({"COPY_FIRST", "COPY_ONLY"})
COPY_TAGS = frozenset({"COPY_FIRST", "COPY", "COPY_LAST", "COPY_ONLY"})


def changes_of(record: Message) -> list[Json]:
    """The changes of a state record, each of a known kind with all its fields in their order."""
    place = f"state record at {record.log_offset}"
    expect(record.tag == "CHANGE" or record.tag in COPY_TAGS, place, f"unknown tag {record.tag}")
    body = json.loads(record.body)
    plain = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
    expect(plain == record.body, place, "blanks, line ends or a number in another form")
    expect(list(body) == ["v", "c"] and body["v"] == 1, place, "not version 1")
    changes: list[Json] = body["c"]
    for change in changes:
        kind = str(change.get("k"))
        expect(kind in KINDS, place, f"unknown kind {kind}")
        left_out = OPTIONAL.get(kind, set()) - set(change)
        fields = [name for name in KINDS[kind] if name not in left_out]
        expect(list(change) == ["k", *fields], place, f"fields {list(change)} of {kind}")
        for name in fields:
            expect(KINDS[kind][name](change[name]), place, f"{kind}: {name} is {change[name]!r}")
    small = len(record.body) <= PART_BYTES_MAX or len(changes) == 1
    expect(small, place, f"{len(record.body)} bytes of several changes")
    return changes
