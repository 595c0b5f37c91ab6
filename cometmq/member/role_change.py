"""What one role of a member passes to the next: why, which ports were bound, where a log was handed
over, when roles changed before, the open store, the reporter of the pod, and values of metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cometmq.member.pod.reporter import PodReporter
    from cometmq.store.follower import FollowerStore

WRITER_MODULE = "services.broker"
FOLLOWER_MODULE = "services.haslave"

CHANGES_FREE_MAX = 3  # so many within the window cost no waiting
WINDOW_S = 60.0
DELAY_FIRST_S = 2.0
DELAY_MAX_S = 32.0
CHANGES_KEPT_MAX = 16


@dataclass(frozen=True, slots=True)
class RoleChange:
    """``changed_s`` are times of CLOCK_BOOTTIME, oldest first, this change included."""

    module: str  # of the next role: WRITER_MODULE, FOLLOWER_MODULE
    reason: str  # one word, for the log
    ports: Mapping[str, int] = field(default_factory=dict)  # option name → the port that was bound
    log_end: int | None = None  # where a writer handed its log over; None: none did
    changed_s: tuple[float, ...] = ()
    heard_s: float | None = None  # CLOCK_BOOTTIME of the newest frame of the writer before us
    elections: Mapping[str, int] = field(default_factory=dict)  # by reason, since the process began
    # What is known of other clocks: offset, error and when, as ``clock_comparison.Reading`` has it.
    clocks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    unplanned_ms: int = 0  # when this process last began without a plan; 0: it never did
    store: FollowerStore | None = None  # open, for the writer; None: the next role opens it
    reporter: PodReporter | None = None  # of the process; None: it runs in no pod

    def after(self, before: RoleChange | None, now_s: float) -> RoleChange:
        """This change with its time, and the times of those before it that still count."""
        times = () if before is None else before.changed_s
        kept = [time_s for time_s in times if now_s - WINDOW_S < time_s <= now_s]
        return replace(self, changed_s=(*kept, now_s)[-CHANGES_KEPT_MAX:])

    def close_store(self) -> None:
        """Close the store, unless the next role took it. Blocking."""
        if self.store is not None and self.store.is_open:
            self.store.close()

    def end_reports(self) -> None:
        """The process ends before the next role begins. Blocking."""
        if self.reporter is not None:
            self.reporter.show_role("")
            self.reporter.close()


def recent(change: RoleChange | None, now_s: float) -> int:
    """Role changes within the last minute."""
    times = () if change is None else change.changed_s
    return sum(now_s - WINDOW_S < time_s <= now_s for time_s in times)


def delay_s(change: RoleChange | None, now_s: float) -> float:
    """How long the next role waits before it opens its store: a member that goes to and fro does so
    ever slower.
    """
    surplus = recent(change, now_s) - CHANGES_FREE_MAX
    return min(DELAY_MAX_S, DELAY_FIRST_S * 2.0 ** (surplus - 1)) if surplus > 0 else 0.0
