"""The role of a member as a label of its pod: for people, and read by no program of ours. Pure.

A member labels its own pod again now and then, so that what somebody changed, or a late call, does
not stay. A writer takes the label of a writer from the pods of the other members: one that ended
with its node cannot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cometmq.member.pod.events import MERGE, Call, PodRef

LABEL = "cometmq.io/role"
JSON_PATCH = "application/json-patch+json"
AGAIN_S = 60.0  # the label is written again
PAUSE_S_MIN, PAUSE_S_MAX = 1.0, 15.0  # after a call that failed
_DONE = frozenset({200, 404, 422})  # changed, no such pod, or it has another role's label


class RoleLabel:
    """``others``: the names of the other members' pods; ``writer`` is the role that one has."""

    def __init__(self, pod: PodRef, others: Sequence[str], writer: str) -> None:
        self._pod = pod
        self._others = others
        self._writer = writer
        self._role = ""
        self._number = 0  # of the role
        self._pods: list[str] = []  # that are to be asked about, this one first
        self._due_s = 0.0
        self._pause_s = 0.0

    def show(self, role: str, now_s: float) -> None:
        """The member has this role from now on; empty: none."""
        self._number += 1
        self._role, self._due_s, self._pause_s = role, now_s, 0.0
        self._pods = [self._pod.name, *(self._others if role == self._writer else ())]

    def next_call(self, now_s: float) -> tuple[Call, Any] | None:
        """What to ask of the API now, and what to give back to :meth:`answered`; None: nothing."""
        if not self._pods or now_s < self._due_s:
            return None
        about = (self._number, self._pods[0])
        if self._pods[0] == self._pod.name:
            labels = {LABEL: self._role or None}
            return self._patch({"metadata": {"labels": labels}}, MERGE), about
        path = "/metadata/labels/" + LABEL.replace("/", "~1")
        test = {"op": "test", "path": path, "value": self._writer}
        return self._patch([test, {"op": "remove", "path": path}], JSON_PATCH), about

    def wait_s(self, now_s: float) -> float | None:
        """How long there is nothing to ask unless the role changes; None: for ever."""
        return max(0.0, self._due_s - now_s) if self._pods else None

    def answered(self, about: Any, status: int, now_s: float) -> None:
        """The API's status for a call; 0: there was no answer."""
        if about[0] != self._number:
            return  # the role has changed meanwhile
        if status not in _DONE:
            self._pause_s = min(PAUSE_S_MAX, max(PAUSE_S_MIN, 2 * self._pause_s))
            self._due_s = now_s + self._pause_s
            return
        self._pause_s = 0.0
        del self._pods[0]
        if not self._pods and self._role:
            self._pods, self._due_s = [self._pod.name], now_s + AGAIN_S

    def _patch(self, body: Any, content_type: str) -> Call:
        path = f"/api/v1/namespaces/{self._pod.namespace}/pods/{self._pods[0]}"
        return Call("PATCH", path, body, content_type)
