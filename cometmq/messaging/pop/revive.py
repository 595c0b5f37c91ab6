"""RocketMQ 5's record of what groups have received (POP), and not acknowledged: its revive log.

A checkpoint names up to 32 messages of a queue that a member received together, and until when it
may have them. Acknowledgements name single messages of a checkpoint. Both are messages of topics
``rmq_sys_REVIVE_LOG_<cluster>``, which RocketMQ delivers at that time, as timers. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from cometmq.model import QueueKey

REVIVE_PREFIX = "rmq_sys_REVIVE_LOG_"
REVIVE_GROUP = "CID_RMQ_SYS_REVIVE_GROUP"  # under which RocketMQ keeps how far it is
CHECKPOINT, ACK, BATCH_ACK = "ck", "ack", "bAck"  # tags
COUNT_MAX = 32  # messages of a checkpoint: bits of an int


class _Key(NamedTuple):
    """What a checkpoint and its acknowledgements have in common."""

    group: str
    queue: QueueKey
    start: int
    popped_ms: int


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    offsets: frozenset[int]  # that were not acknowledged when it was written
    visible_ms: int


class ReviveLog:
    """Collects both in any order."""

    def __init__(self) -> None:
        self._checkpoints: dict[_Key, _Checkpoint] = {}
        self._acked: dict[_Key, set[int]] = {}

    def add(self, tag: str, body: bytes) -> bool:
        """One message; False: it is none of them, or does not read."""
        try:
            found = json.loads(body)
            queue = (_text(found, "t"), _int(found, "q"))
            key = _Key(_text(found, "c"), queue, _int(found, "so"), _int(found, "pt"))
            if tag == CHECKPOINT:
                visible_ms = key.popped_ms + _int(found, "it")
                if not 0 <= visible_ms < 2**63:
                    raise ValueError("its time cannot be")
                self._checkpoints[key] = _Checkpoint(_offsets(found, key.start), visible_ms)
            elif tag in (ACK, BATCH_ACK):
                acked = [found["ao"]] if tag == ACK else found["aol"]
                self._acked.setdefault(key, set()).update(map(int, acked))
            else:
                return False
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return False
        return True

    def open(self) -> dict[tuple[str, QueueKey], dict[int, int]]:
        """By group and queue: the messages that are not acknowledged, and until when a member may
        have each.
        """
        found: dict[tuple[str, QueueKey], dict[int, int]] = {}
        for key, point in self._checkpoints.items():
            for offset in point.offsets - self._acked.get(key, set()):
                of_queue = found.setdefault((key.group, key.queue), {})
                of_queue[offset] = max(point.visible_ms, of_queue.get(offset, 0))
        return found


def _offsets(found: Mapping[str, Any], start: int) -> frozenset[int]:
    count, done = _int(found, "n"), _int(found, "bm")
    steps = found.get("d") or range(count)
    if not 0 <= count <= COUNT_MAX or len(steps) > COUNT_MAX:
        raise ValueError(f"{count} messages in a checkpoint")
    return frozenset(
        start + int(step) for number, step in enumerate(steps) if not done >> number & 1
    )


def _int(found: Mapping[str, Any], name: str) -> int:
    value = found.get(name, 0)
    if type(value) is not int or value >= 2**63:
        raise ValueError(f"{name} is no number")
    return value


def _text(found: Mapping[str, Any], name: str) -> str:
    value = found[name]
    if not isinstance(value, str):
        raise ValueError(f"{name} is no text")
    return value
