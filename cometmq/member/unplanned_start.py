"""When a member last began without a plan: a metric. A planned restart closes the store, and an
ordered change of role has its reason; what is left are crashes, and roles that were lost.

The time survives changes of role: a member that crashed takes its role back within a second, before
anybody has read its metrics.
"""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge

from cometmq.clock import Clock
from cometmq.member.lease.lease_holder import DEPOSED
from cometmq.member.role_change import RoleChange
from cometmq.replication.lease import Reason
from cometmq.store.layout import ABORT

# Changes of role that nobody ordered. What follows from one (a log that is cut) is no other.
EPOCH, NOT_HOLDER = "epoch", "not-holder"
UNPLANNED = frozenset(
    {
        DEPOSED,
        EPOCH,
        NOT_HOLDER,
        *(reason.value for reason in (Reason.FAILOVER, Reason.UNCLEAN, Reason.RECREATED)),
    }
)


class UnplannedStart:
    """``before``: what the role before this one had to say."""

    def __init__(
        self, registry: CollectorRegistry, before: RoleChange | None, clock: Clock
    ) -> None:
        self._started_ms = clock.wall_ms()
        self._gauge = Gauge(
            "cometmq_unplanned_start_time_seconds",
            "When this process last began after a crash, or after a change of role that nobody "
            "ordered, Unix time; 0: it never did.",
            registry=registry,
        )
        self._is_open = before is not None and before.store is not None
        self.time_ms = 0  # of the last one in this process, in any role; 0: none
        if before is not None:
            self._note(self._started_ms if before.reason in UNPLANNED else before.unplanned_ms)

    def look(self, store_path: Path) -> None:
        """Call it before the store is opened: was it closed, or is it open? A recovery that is
        killed again and again is seen, too.
        """
        if not self._is_open and (store_path / ABORT).exists():
            self._note(self._started_ms)

    def _note(self, time_ms: int) -> None:
        self.time_ms = time_ms
        self._gauge.set(time_ms / 1000)
