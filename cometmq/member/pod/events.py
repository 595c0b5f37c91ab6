"""What operators read in ``kubectl get events`` and ``kubectl describe pod`` about a member. Pure.

The objects are those of ``events.k8s.io/v1``. Equal events are one object with a count (a series),
as client-go's recorder makes them; what differs again and again is combined, and writes are paced.
What the API does not take in time is dropped and counted: a member waits for no event.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any, NamedTuple, Protocol

CONTROLLER = "cometmq.io/member"  # who reports
SERIES_S = 360.0  # an event that was silent for longer begins another object
SERIES_MAX = 64  # objects that are known at a time
SIMILAR_MAX = 8  # of one reason; further ones are combined
COMBINED = "(combined from similar events) "
NOTE_LENGTH_MAX = 1024  # bytes; the API's
BURST = 25  # writes at once, and then
WRITE_S = 5.0  # one in so many seconds
PAUSE_S_MIN, PAUSE_S_MAX = 1.0, 15.0  # after a write that failed
GIVE_UP_S = 120.0  # after which an event is dropped that the API has not taken

Body = dict[str, Any]


class _Words(NamedTuple):
    reason: str
    action: str
    is_warning: bool = True


class EventReason(Enum):
    """The reasons of events; docs/how-to/failures.md lists them."""

    WRITER_ELECTED = _Words("WriterElected", "TakeRole", is_warning=False)
    FAILED_OVER = _Words("FailedOver", "TakeRole")
    ELECTION_FAILED = _Words("ElectionFailed", "TakeRole")
    ROLE_HANDED_OVER = _Words("RoleHandedOver", "GiveUpRole", is_warning=False)
    HAND_OVER_FAILED = _Words("HandOverFailed", "GiveUpRole")
    STOPPED_ALONE = _Words("StoppedWithoutSuccessor", "GiveUpRole")
    WRITER_DEPOSED = _Words("WriterDeposed", "GiveUpRole")
    LEFT_IN_SYNC = _Words("InSyncMemberLeft", "ChangeInSyncSet")
    JOINED_IN_SYNC = _Words("InSyncMemberJoined", "ChangeInSyncSet", is_warning=False)
    SENDS_REFUSED = _Words("SendsRefused", "RefuseSends")
    SENDS_TAKEN = _Words("SendsTaken", "TakeSends", is_warning=False)
    NOT_READY = _Words("FollowerNotReady", "ReportReadiness")
    READY = _Words("FollowerReady", "ReportReadiness", is_warning=False)


class EventRecorder(Protocol):
    """Where a member says what has happened to it."""

    def record(self, reason: EventReason, note: str) -> None:
        """Never blocks and never raises. ``note`` is for people; equal notes are counted."""


class _Unrecorded:
    def record(self, reason: EventReason, note: str) -> None:
        """Outside of Kubernetes the log alone has it."""


UNRECORDED: EventRecorder = _Unrecorded()


@dataclass(frozen=True, slots=True)
class PodRef:
    """The pod that a process runs in. ``uid`` may be empty; ``kubectl describe`` needs it."""

    namespace: str
    name: str
    uid: str = ""


class Call(NamedTuple):
    """One call of the API."""

    method: str
    path: str
    body: Any
    content_type: str


MERGE, JSON = "application/merge-patch+json", "application/json"
_TAKEN = frozenset({200, 201})
_IS_THERE, _IS_GONE = 409, 404


@dataclass(slots=True)
class _Series:
    reason: EventReason
    note: str
    name: str  # of the object
    first_ms: int
    last_ms: int
    last_s: float  # monotonic, as the next
    waits_since_s: float  # the first that is not written
    count: int = 1
    written: int = 0  # of count


class EventSeries:
    """The events of one pod. Times are ``wall_ms`` for people and ``now_s``, monotonic, for pauses.

    Invariants: what was recorded was taken by the API, waits, or was dropped; at most
    ``SERIES_MAX`` objects are known.
    """

    def __init__(self, pod: PodRef) -> None:
        self.taken = 0  # events that the API has, repeats included
        self.dropped = 0
        self._pod = pod
        self._path = f"/apis/events.k8s.io/v1/namespaces/{pod.namespace}/events"
        self._series: OrderedDict[tuple[EventReason, str], _Series] = OrderedDict()
        self._tokens, self._tokens_s = float(BURST), 0.0
        self._pause_s, self._again_s = 0.0, 0.0
        self._number = 0

    @property
    def waiting(self) -> int:
        """Events that are not written yet."""
        return sum(one.count - one.written for one in self._series.values())

    def record(self, reason: EventReason, note: str, wall_ms: int, now_s: float) -> None:
        """Something has happened."""
        self._forget_ended(now_s)
        found = self._series.get((reason, note))
        if found is None:
            alike = [one for one in self._series.values() if one.reason is reason]
            if len(alike) >= SIMILAR_MAX:
                found = next((one for one in alike if one.note.startswith(COMBINED)), None)
                note = note if found is not None else COMBINED + note
        if found is not None:
            if found.written == found.count:
                found.waits_since_s = now_s
            found.count += 1
            found.last_ms, found.last_s = wall_ms, now_s
        elif len(self._series) < SERIES_MAX:
            name = self._new_name(wall_ms)
            self._series[reason, note] = _Series(reason, note, name, wall_ms, wall_ms, now_s, now_s)
        else:
            self.dropped += 1
        assert len(self._series) <= SERIES_MAX

    def next_call(self, now_s: float) -> tuple[Call, Any] | None:
        """What to ask of the API now, and what to give back to :meth:`answered`; None: nothing."""
        if now_s < self._again_s or not self._has_token(now_s):
            return None
        for one in self._series.values():
            if one.count > one.written:
                self._tokens -= 1
                return self._call(one), (one, one.count)
        return None

    def wait_s(self, now_s: float) -> float | None:
        """How long there is nothing to ask unless more is recorded; None: for ever."""
        if not self.waiting:
            return None
        missing = 0.0 if self._has_token(now_s) else (1 - self._tokens) * WRITE_S
        return max(0.0, self._again_s - now_s, missing)

    def answered(self, about: Any, status: int, now_s: float) -> None:
        """The API's status for a call; 0: there was no answer."""
        one, count = about
        first = not one.written
        if status in _TAKEN or (status == _IS_THERE and first):  # 409: the answer was lost before
            self.taken += count - one.written
            one.written = count
            one.waits_since_s = now_s
            self._pause_s = 0.0
            return
        if status == _IS_GONE and not first:  # somebody has deleted it
            one.count, one.written = one.count - one.written, 0
            one.name, one.first_ms = self._new_name(one.last_ms), one.last_ms
        self._pause_s = min(PAUSE_S_MAX, max(PAUSE_S_MIN, 2 * self._pause_s))
        self._again_s = now_s + self._pause_s
        self._give_up(now_s)

    def drop_all(self) -> None:
        """The process ends."""
        self.dropped += self.waiting
        self._series.clear()

    # --- inside -----------------------------------------------------------------------------------

    def _give_up(self, now_s: float) -> None:
        for key, one in list(self._series.items()):
            if one.count > one.written and now_s - one.waits_since_s > GIVE_UP_S:
                self.dropped += one.count - one.written
                del self._series[key]

    def _forget_ended(self, now_s: float) -> None:
        for key, one in list(self._series.items()):
            if one.count == one.written and now_s - one.last_s > SERIES_S:
                del self._series[key]

    def _has_token(self, now_s: float) -> bool:
        more = max(0.0, now_s - self._tokens_s) / WRITE_S
        self._tokens, self._tokens_s = min(BURST, self._tokens + more), now_s
        return self._tokens >= 1

    def _new_name(self, wall_ms: int) -> str:
        """As client-go names them: the pod, and a time; no two of a process are equal."""
        self._number += 1
        return f"{self._pod.name}.{wall_ms * 1_000_000 + self._number % 1_000_000:x}"

    def _call(self, one: _Series) -> Call:
        series = {"count": one.count, "lastObservedTime": _micro_time(one.last_ms)}
        if one.written:
            return Call("PATCH", f"{self._path}/{one.name}", {"series": series}, MERGE)
        pod, words = self._pod, one.reason.value
        regarding = {"apiVersion": "v1", "kind": "Pod", "namespace": pod.namespace}
        body = {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"namespace": pod.namespace, "name": one.name},
            "eventTime": _micro_time(one.first_ms),
            "type": "Warning" if words.is_warning else "Normal",
            "reason": words.reason,
            "action": words.action,
            "note": _cut(one.note),
            "regarding": {**regarding, "name": pod.name, **({"uid": pod.uid} if pod.uid else {})},
            "reportingController": CONTROLLER,
            "reportingInstance": pod.name,
        }
        return Call("POST", self._path, body | ({"series": series} if one.count > 1 else {}), JSON)


def _micro_time(wall_ms: int) -> str:
    moment = datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=wall_ms)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _cut(note: str) -> str:
    """At most as long as the API takes it."""
    content = note.encode()
    if len(content) <= NOTE_LENGTH_MAX:
        return note
    return content[: NOTE_LENGTH_MAX - 3].decode(errors="ignore") + "..."
