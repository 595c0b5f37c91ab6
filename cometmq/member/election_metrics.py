"""How often this member came to lead, and how long its group had no writer then: metrics.

Counts survive changes of role: each role has metrics of its own. A started process begins at 0.
"""

from __future__ import annotations

from collections import Counter as Counts

from prometheus_client import CollectorRegistry, Counter, Gauge

from cometmq.member.role_change import RoleChange
from cometmq.replication.lease import Reason


class Elections:
    """``before``: what the role before this one had to say."""

    def __init__(self, registry: CollectorRegistry, before: RoleChange | None) -> None:
        self._before = before
        self._counts = Counts(before.elections if before is not None else {})
        self._won = Counter(
            "cometmq_elections",
            "Times that this member came to lead its group, by the reason that it had.",
            ["reason"],
            registry=registry,
        )
        for reason in Reason:  # an alert waits for some: the first must be an increase
            self._won.labels(reason.value).inc(self._counts[reason.value])
        self._failover_s = Gauge(
            "cometmq_failover_seconds",
            "How long it took until this member was ready as the writer, since what.",
            ["since"],
            registry=registry,
        )

    @property
    def counts(self) -> dict[str, int]:
        """For the next role of this process."""
        return dict(self._counts)

    def won(self, reason: Reason) -> None:
        """The lease says that this member's epoch is open."""
        self._counts[reason.value] += 1
        self._won.labels(reason.value).inc()

    def ready(self, now_s: float) -> None:
        """The writer serves from now on, a time of CLOCK_BOOTTIME."""
        before = self._before
        if before is None:  # it has no lease, or the time of the loss is not known
            return
        if before.changed_s:
            self._failover_s.labels("lease_taken").set(now_s - before.changed_s[-1])
        if before.heard_s is not None:
            self._failover_s.labels("writer_heard").set(now_s - before.heard_s)
