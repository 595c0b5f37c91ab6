"""The copies of the log and the right to write it: followers, those of them in sync, the lease, the
hand-over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from cometmq.errors import StaleEpoch
from cometmq.member.context import MemberContext
from cometmq.member.lease.lease_holder import Deposed, LeaseHolder
from cometmq.member.pod.events import UNRECORDED
from cometmq.member.read.throttle import CatchUpThrottle
from cometmq.member.unplanned_start import EPOCH
from cometmq.model import EPOCH_LEAP_MAX
from cometmq.telemetry import ThrottledLog, fields
from services.broker.replication.handover import HandOver
from services.broker.replication.insync import InSyncSet
from services.broker.replication.metrics import ReplicationCollector
from services.broker.replication.replicas import FollowerTable, Replicas
from services.broker.replication.send_refusals import SendRefusals
from services.broker.writer_core import WriterCore

log = logging.getLogger(__name__)


class Replication:
    """``holder`` is None for a broker without a lease. ``ended`` is called with a reason when
    this process is the writer no longer.
    """

    def __init__(
        self,
        context: MemberContext,
        writer: WriterCore,
        followers: FollowerTable,
        in_sync: InSyncSet,
        holder: LeaseHolder | None,
        ended: Callable[[str], None],
    ) -> None:
        config, clock = context.config, context.clock
        storage, keeper = writer.storage, writer.keeper
        self._storage = storage
        self._holder = holder
        self._ended = ended
        self._unregistered = ThrottledLog(log, logging.ERROR, clock)
        self.replicas = Replicas(
            storage,
            followers,
            CatchUpThrottle(config.copy_bytes_per_s),
            clock,
            writer.core.retention.waits_from,
        )
        self.in_sync = in_sync
        events = context.events if config.has_followers else UNRECORDED
        self.hand_over = HandOver(
            storage, keeper, self.replicas, holder, ended, context.clocks, events
        )
        self._refused = SendRefusals(storage, in_sync, context.events)
        self.collector = ReplicationCollector(self.replicas, self.in_sync, holder)

    def background(self) -> list[Coroutine[Any, Any, None]]:
        """The coroutines that run as long as the broker does."""
        holding = [] if self._holder is None else [self._hold(self._holder)]
        return [*holding, self._refused.watch()]

    async def overtaken(self, error: StaleEpoch) -> None:
        """A name server knows a newer epoch than ours. That alone deposes no writer: it may
        remember a group that no longer exists, or another process may use the group's name. A
        writer that holds the lease begins again in an epoch above. Raises Deposed if another member
        may hold it.
        """
        holder = self._holder
        if holder is None:
            self._unregistered.log(
                "a name server takes another for the writer of this broker group: this one serves"
                " on, but clients that ask there do not find it",
                error=error,
                advice="If another broker uses the same name, stop one of the two. If none does, "
                "the registration was forged: give name servers and members "
                "internal_secret_file. It ends when the other has been silent for "
                "member_silence_max_s.",
            )
            return
        if error.epoch is None:  # a name server of the release before
            raise Deposed(str(error))
        if error.epoch > self._storage.store.epoch + EPOCH_LEAP_MAX:
            log.error("a name server reports an impossible epoch", extra=fields(error=error))
        elif await holder.pass_over(error.epoch):
            log.warning("begins again above the epoch of a name server", extra=fields(error=error))
            self._ended(EPOCH)
        elif not self._storage.authority.may_acknowledge():
            raise Deposed(str(error))

    async def _hold(self, holder: LeaseHolder) -> None:
        """Renew the lease and keep its sets; raises Deposed."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(holder.run())
                tasks.create_task(self.in_sync.run(self.replicas))
        except* Deposed:
            self._storage.depose()
            raise
