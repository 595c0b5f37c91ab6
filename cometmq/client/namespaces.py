"""Namespaces: tenants of one cluster whose topics and groups have the same names. RocketMQ's rule:
on the wire and in the store topic T of namespace N is ``N%T``, and a group's retry topic
``%RETRY%N%group``. The rest of the client, and the application, know the names without it. Pure.
"""

from __future__ import annotations

from typing import TypeVar

from cometmq.errors import CometError
from cometmq.model import DLQ_PREFIX, RETRY_PREFIX
from cometmq.names import SYSTEM_GROUP_PREFIX, SYSTEM_TOPIC_PREFIX

_PREFIXES = (RETRY_PREFIX, DLQ_PREFIX)
# RocketMQ's own topics and groups are in no namespace.
_SYSTEM_TOPICS = frozenset(
    (
        "TBW102",
        "SCHEDULE_TOPIC_XXXX",
        "BenchmarkTest",
        "RMQ_SYS_TRANS_HALF_TOPIC",
        "RMQ_SYS_TRANS_OP_HALF_TOPIC",
        "RMQ_SYS_TRACE_TOPIC",
        "TRANS_CHECK_MAX_TIME_TOPIC",
        "SELF_TEST_TOPIC",
        "OFFSET_MOVED_EVENT",
    )
)
_SYSTEM_STARTS = (SYSTEM_TOPIC_PREFIX, SYSTEM_GROUP_PREFIX)

Answer = TypeVar("Answer")


class Namespace:
    """``name`` empty: none, and all names are what they are."""

    __slots__ = ("_start", "name")

    def __init__(self, name: str = "") -> None:
        self.name = name
        self._start = f"{name}%" if name else ""

    def wire(self, name: str) -> str:
        """The name of a topic or group as brokers know it; one that has the namespace keeps it."""
        if not self._start or name in _SYSTEM_TOPICS or name.startswith(_SYSTEM_STARTS):
            return name
        prefix, rest = _split(name)
        return name if rest.startswith(self._start) else f"{prefix}{self._start}{rest}"

    def shown(self, name: str) -> str:
        """The name as the application knows it."""
        if not self._start:
            return name
        prefix, rest = _split(name)
        return prefix + rest.removeprefix(self._start)

    def strip(self, answer: Answer) -> Answer:
        """An answer; if it is an error, its text without the namespace."""
        if self._start and isinstance(answer, CometError) and self._start in answer.message:
            answer.message = answer.message.replace(self._start, "")
            answer.args = (answer.message,)
        return answer


def _split(name: str) -> tuple[str, str]:
    prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
    return prefix, name[len(prefix) :]
