"""When a follower counts as ready: health checks, and with them drains, updates and disruption
budgets, then count on it to take over. Pure.

A follower outside of the in-sync set may lack acknowledged messages. A group whose other members
are all like that must not lose its writer in silence. After a bounded time the follower is ready
all the same: an update that mends the cause must be able to go on. A follower that does not know
what the state of the group says is never ready: the update goes the wrong way, and if it went on
the group would have no writer.
"""

from __future__ import annotations

from cometmq.errors import CometError, StateTooNew
from cometmq.replication.lease import LeaseRecord, ReplicaId

CATCH_UP_S = 30.0  # that a start may take


class InSyncReadiness:
    """Call :meth:`saw` with each reading of the lease. ``wait_s``: how long a follower outside of
    the in-sync set is not ready, at most; 0: it is always ready.
    """

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._outside_since_s: float | None = None  # None: in sync, or not known
        self.reason = ""  # why the follower is not ready; empty: it is
        self._was_in_sync = False  # at some time since the start

    @property
    def is_ready(self) -> bool:
        return not self.reason

    def is_remarkable(self, now_s: float) -> bool:
        """Whether operators should hear that it is not ready. A follower that has just started
        catches up: nobody has to know.
        """
        since_s = self._outside_since_s
        is_late = since_s is not None and now_s - since_s >= CATCH_UP_S
        return not self.is_ready and (self._was_in_sync or is_late)

    def saw(
        self,
        record: LeaseRecord | None,
        me: ReplicaId,
        now_s: float,
        misfit: CometError | None = None,
    ) -> bool:
        """Whether :attr:`is_ready` or its reason has changed. ``misfit``: why the releases of the
        writer and this follower do not fit. Without a lease nothing is known, and nothing changes.
        """
        if record is None:
            return False
        before = self.reason
        if me in record.in_sync:
            self._was_in_sync = True
            self._outside_since_s = None
            self.reason = ""
        else:
            if self._outside_since_s is None:
                self._outside_since_s = now_s
            is_over = now_s - self._outside_since_s >= self._wait_s
            if is_over and not isinstance(misfit, StateTooNew):
                self.reason = ""
            else:
                cause = "" if misfit is None else f", it cannot follow the writer: {misfit.message}"
                self.reason = f"this member is not in the in-sync set{cause}"
        return self.reason != before
