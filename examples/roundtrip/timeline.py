"""What is reported of one message: what was expected, what happened, and its line of time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from cometmq.admin.views import TraceEventView
from examples.roundtrip.checker import WriterChange
from examples.roundtrip.process import now_ms


@dataclass
class Outcome:
    """Of one case. ``wanted``: (event, result) of its trace; ``unwanted``: events."""

    name: str
    topic: str
    wanted: Sequence[tuple[str, str]]
    unwanted: Sequence[str] = ()
    expected: str = ""
    happened: str = ""
    unique_id: str = ""  # of its message
    wrong: list[str] = field(default_factory=list)
    events: list[TraceEventView] = field(default_factory=list)
    notes: list[tuple[int, str]] = field(default_factory=list)  # when, and what no trace has

    def expect(self, condition: bool, complaint: str) -> None:
        if not condition:
            self.wrong.append(complaint)

    def note(self, what: str) -> None:
        """It has just happened."""
        self.notes.append((now_ms(), what))

    def missing(self) -> list[str]:
        """Wanted events that the trace does not have, as often as they are missing."""
        there = Counter((event.event, event.result) for event in self.events)
        missing = Counter(self.wanted) - there
        return [f"{event} {result}".strip() for event, result in missing.elements()]

    def expect_events(self) -> None:
        missing = self.missing()
        self.expect(not missing, f"its trace lacks: {', '.join(missing)}")
        more = [event.event for event in self.events if event.event in self.unwanted]
        self.expect(not more, f"its trace must not have: {', '.join(more)}")

    def block(self, change: WriterChange | None) -> str:
        """A few lines for a person."""
        rows = [
            f"{'✗' if self.wrong else '✓'} {self.name}: message {self.unique_id or '–'}",
            f"    expected: {self.expected or '–'}",
            f"    happened: {self.happened or '–'}",
            *(f"    ✗ {complaint}" for complaint in self.wrong),
            *(f"    {row}" for row in time_rows(self.events, self.notes, change)),
        ]
        return "\n".join(rows)


def time_rows(
    events: Sequence[TraceEventView],
    notes: Sequence[tuple[int, str]],
    change: WriterChange | None,
) -> Iterator[str]:
    """The events that have a time, and between them the notes and the change of the writer. The
    first row has the time of day, the others the seconds since then.
    """
    rows = [(event.time_ms, _text(event)) for event in events if event.time_ms is not None]
    rows += [(time_ms, f"({what})") for time_ms, what in notes]
    if change is not None:
        rows.append((change.from_ms, f"--- the writer of {change.broker_group} is killed ---"))
        rows.append((change.to_ms, f"--- {change.broker_group} has a new writer ---"))
    rows.sort(key=lambda row: row[0])
    for time_ms, text in rows:
        since_s = (time_ms - rows[0][0]) / 1000
        shown = f"+{since_s:.3f} s" if since_s else clock_text(time_ms)
        yield f"{shown:>12}  {text}"


def _text(event: TraceEventView) -> str:
    cost = "" if event.cost_ms is None else f"in {event.cost_ms} ms"
    by = f"by {event.group}" if event.group else ""
    facts = ", ".join(filter(None, (by, event.result, cost, event.detail)))
    return f"{event.event:<20}{facts}".rstrip()


def clock_text(time_ms: int) -> str:
    """The local time of day, to the millisecond."""
    return datetime.fromtimestamp(time_ms / 1000).strftime("%H:%M:%S.%f")[:-3]
