"""Where a late message was, out of the flight recorders of all processes. Pure.

A message passes points, one after the other; the longest step between two of them names the stage.
What else lasted long in the process of that step, at that time, is named beside it; and before all,
that the machine stood still for most of that step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bench.standstills import Standstill, overlap_ns
from cometmq.flight_recorder import Entry, Stage, queue_end

CAUSE_MS_MIN = 2.0
_MESSAGE_STAGES = frozenset({Stage.FLUSH, Stage.ARRIVAL, Stage.HOLD_ANSWERED, Stage.GRPC_WRITE})
_OUTER_STAGES = frozenset({Stage.LOOP_TURN, Stage.TIMER_LATE})  # others lie within them


class Sent(NamedTuple):
    """A message as its producer knows it; times are CLOCK_MONOTONIC's."""

    due_ns: int
    sent_ns: int  # when send() returned
    queue_id: int
    queue_offset: int
    log_offset: int


@dataclass(frozen=True, slots=True)
class Step:
    """From one point of a message's way to the next."""

    name: str
    process: str  # where it was
    begin_ns: int
    end_ns: int

    @property
    def duration_ms(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e6


@dataclass(frozen=True, slots=True)
class Explanation:
    """A late message. ``steps`` are empty when the rings no longer have its time."""

    late_ms: float
    steps: Sequence[Step]
    causes: Sequence[Entry]  # what else was long in the process of the longest step
    standstill_ms: float = 0.0  # of the longest step

    @property
    def stage(self) -> str:
        """What took longest, and the longest cause beside it."""
        if not self.steps:
            return "not recorded"
        longest = max(self.steps, key=lambda step: step.duration_ms)
        if self.standstill_ms > longest.duration_ms / 2:
            return f"{longest.name}: the machine stood still"
        if not self.causes:
            return longest.name
        return f"{longest.name}: {self.causes[0].stage.name.lower()} of the {longest.process}"


class Trace:
    """The entries of all processes, by their roles: producer, broker, pullhold, consumer."""

    def __init__(
        self, entries: Mapping[str, Iterable[Entry]], standstills: Sequence[Standstill] = ()
    ) -> None:
        self._standstills = standstills
        self._entries = {name: sorted(set(some), key=_end_ns) for name, some in entries.items()}
        broker, pullhold = self._of("broker"), self._of("pullhold")
        self._appends = sorted((e.number, e.end_ns) for e in broker if e.stage is Stage.APPEND)
        self._flushes = sorted((e.number, e.end_ns) for e in broker if e.stage is Stage.FLUSH)
        self._arrivals = _by_queue(broker, Stage.ARRIVAL)
        self._answers = _by_queue(pullhold, Stage.HOLD_ANSWERED)

    def _of(self, name: str) -> list[Entry]:
        return self._entries.get(name, [])

    def explain(self, sent: Sent, seen_ns: int) -> Explanation:
        """Why the message was seen so late."""
        late_ms = (seen_ns - sent.due_ns) / 1e6
        steps = self._steps(sent, seen_ns)
        if not steps:
            return Explanation(late_ms, (), ())
        longest = max(steps, key=lambda step: step.duration_ms)
        causes = [
            entry
            for entry in self._of(longest.process)
            if entry.stage not in _MESSAGE_STAGES
            and entry.duration_ns >= CAUSE_MS_MIN * 1e6
            and overlap_ns(entry, longest) > 0
        ]
        # What lies within a turn says more than the turn, if it is most of it.
        most_ns = max((entry.duration_ns for entry in causes), default=0) / 2
        causes.sort(
            key=lambda e: (e.stage in _OUTER_STAGES or e.duration_ns < most_ns, -e.duration_ns)
        )
        stood_ns = max((overlap_ns(one, longest) for one in self._standstills), default=0)
        return Explanation(late_ms, steps, causes, stood_ns / 1e6)

    def _steps(self, sent: Sent, seen_ns: int) -> list[Step]:
        appended = _first(self._appends, sent.log_offset + 1)
        flushed = _first(self._flushes, sent.log_offset + 1)
        shown = _first(self._arrivals.get(sent.queue_id, []), sent.queue_offset + 1)
        answered = _first(self._answers.get(sent.queue_id, []), sent.queue_offset + 1)
        if appended is None or not sent.due_ns <= appended <= seen_ns:
            return []
        points = [
            ("the producer's schedule", "producer", sent.sent_ns),
            ("producer to log", "broker", appended),
            ("sync", "broker", flushed),
            ("sync to arrival", "broker", shown),
            ("arrival to answer", "pullhold", answered),
            ("answer to listener", "consumer", seen_ns),
        ]
        steps, before_ns = [], sent.due_ns
        for name, process, at_ns in points:
            if at_ns is not None and before_ns <= at_ns <= seen_ns:
                steps.append(Step(name, process, before_ns, at_ns))
                before_ns = at_ns
        return steps


def _end_ns(entry: Entry) -> int:
    return entry.end_ns


def _by_queue(entries: Iterable[Entry], stage: Stage) -> dict[int, list[tuple[int, int]]]:
    found: dict[int, list[tuple[int, int]]] = {}
    shift = queue_end(1, 0)
    for entry in entries:
        if entry.stage is stage:
            queue_id, offset = divmod(entry.number, shift)
            found.setdefault(queue_id, []).append((offset, entry.end_ns))
    return {queue_id: sorted(some) for queue_id, some in found.items()}


def _first(ends: Sequence[tuple[int, int]], least: int) -> int | None:
    """When the first entry that reaches ``least`` ended."""
    at = bisect_left(ends, (least, 0))
    return ends[at][1] if at < len(ends) else None


def table(explanations: Sequence[Explanation]) -> str:
    """Late messages by what held them up, and the steps of the latest one of each."""
    counts = Counter(one.stage for one in explanations)
    lines = []
    for stage, count in counts.most_common():
        worst = max((e for e in explanations if e.stage == stage), key=lambda e: e.late_ms)
        steps = ", ".join(f"{step.name} {step.duration_ms:.1f}" for step in worst.steps)
        lines.append(f"{count:6}  {stage}; the latest {worst.late_ms:.1f} ms: {steps or '-'}")
    return "\n".join(lines) or "no late message"
