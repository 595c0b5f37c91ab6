"""The result of a round trip and whether it is good. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from examples.roundtrip import logs
from examples.roundtrip.duplicates import Explained
from examples.roundtrip.lagging import Lag
from examples.roundtrip.logs import LogCopy
from examples.roundtrip.metrics import Movement

COMPLAINTS_MAX = 20


@dataclass(frozen=True, slots=True)
class Trip:
    """What became of the messages."""

    file_count: int
    line_count: int
    byte_count: int
    message_count: int  # lines, and one for each empty file
    duplicates: Explained
    strays: int  # messages that belong to no line of the plan
    missing: int
    produce_seconds: float
    consume_seconds: float
    p50_ms: int
    p99_ms: int
    uncommitted: int  # messages that the group has not committed, after its members have left
    # How long the group which changed its writer stored nothing; None: ever since.
    hand_over_ms: int | None
    take_over_ms: int | None

    def complaints(self) -> list[str]:
        found = []
        if self.missing:
            found.append(f"{self.missing:,} messages did not come back")
        if self.strays:
            found.append(f"{self.strays:,} messages came back that nobody sent")
        if self.uncommitted:
            found.append(f"the group left {self.uncommitted:,} messages uncommitted")
        if self.duplicates.unexplained:
            found.append(f"{self.duplicates.unexplained:,} messages came twice for no known reason")
        if self.hand_over_ms is None:
            found.append("the writer after the hand-over stored no message")
        if self.take_over_ms is None:
            found.append("the writer after the take-over stored no message")
        return found

    def rows(self) -> list[tuple[str, str]]:
        """(label, value) of the table."""
        received = self.message_count - self.missing + self.duplicates.count
        return [
            ("files", f"{self.file_count:,}"),
            ("lines", f"{self.line_count:,}"),
            ("bytes", f"{self.byte_count:,}"),
            ("messages", f"{self.message_count:,}"),
            ("duplicates", f"{self.duplicates.count:,}"),
            ("  sent again, stored twice", f"{self.duplicates.sent_again:,}"),
            ("  delivered again", f"{self.duplicates.delivered_again:,}"),
            ("in", f"{_rate(self.message_count, self.produce_seconds):,.0f} messages/s"),
            ("out", f"{_rate(received, self.consume_seconds):,.0f} messages/s"),
            ("end to end, p50", f"{self.p50_ms:,} ms"),
            ("end to end, p99", f"{self.p99_ms:,} ms"),
            ("uncommitted", f"{self.uncommitted:,}"),
            ("nothing stored during the hand-over", _pause(self.hand_over_ms)),
            ("nothing stored during the take-over", _pause(self.take_over_ms)),
        ]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything that the job prints at its end. ``lag`` is None when it was left out."""

    trip: Trip
    lag: Lag | None
    logs: Sequence[LogCopy]
    movements: Sequence[Movement]
    differences: Sequence[str] = ()  # files that did not come back as they were sent

    @property
    def good(self) -> bool:
        return not self.complaints()

    def complaints(self) -> list[str]:
        """A sentence for everything that must not be; at most twenty about files."""
        found = list(self.differences[:COMPLAINTS_MAX])
        if len(self.differences) > COMPLAINTS_MAX:
            found.append(f"… and {len(self.differences) - COMPLAINTS_MAX} more files")
        found += self.trip.complaints()
        found += self.lag.complaints() if self.lag else []
        found += logs.complaints(self.logs)
        return found + [_complaint(movement) for movement in self.movements if not movement.good]


def _complaint(movement: Movement) -> str:
    wanted = movement.wanted
    least = "nothing" if wanted.still else f"at least {max(wanted.least, 1):,.0f}"
    return (
        f"{wanted.metric} rose by {movement.rise:,.0f} ({least} wanted) in "
        f"{movement.moved_processes} of {len(movement.rises)} processes ({wanted.where})"
    )


def _pause(pause_ms: int | None) -> str:
    return "ever since" if pause_ms is None else f"{pause_ms / 1000:.2f} s"


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds else 0.0
