"""The writer's in-sync set: who is waited for, whether this member is certainly the only writer.

The set stands in the lease. It is made smaller before acknowledgements go on without a member, and
larger before they count on one; rules are in :mod:`cometmq.replication.insync`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from cometmq.clock import Clock
from cometmq.errors import SlaveNotAvailable
from cometmq.member.config import MemberConfig, PromoteAsync
from cometmq.member.lease.lease_holder import LeaseHolder
from cometmq.member.storage.member_storage import MemberStorage
from cometmq.replication.insync import Own, SetPolicy, replicated_positions, wanted_sets
from cometmq.replication.lease import LeaseRecord, ReplicaId, ReplicaIds
from cometmq.telemetry import fields
from cometmq.v1 import member_pb2
from services.broker.replicas import Replicas

log = logging.getLogger(__name__)

LOOK_S = 0.1  # so often it is seen who has fallen out of step
RETRY_S = 0.5


def policy_of(config: MemberConfig) -> SetPolicy:
    """What a broker's options ask for."""
    return SetPolicy(
        lag_s_max=config.in_sync_lag_s_max,
        size_min=config.min_in_sync_replicas,
        promote_async=config.promote_async is PromoteAsync.BOUNDED,
        async_lag_bytes_max=config.async_promote_lag_max,
        async_silence_s_max=config.async_promote_silence_max,
        group_size=len(config.peers),
    )


class InSyncSet:
    """Belongs to the event loop. ``holder`` is None for a broker that stands alone.
    ``replicated``: some topic waits for copies, or a change is on its way that will.
    """

    def __init__(
        self,
        storage: MemberStorage,
        replicas: Replicas,
        holder: LeaseHolder | None,
        replicated: Callable[[], bool],
        policy: SetPolicy,
        clock: Clock,
    ) -> None:
        self.shrinks = 0  # members that were taken out of the set
        self._storage = storage
        self._replicas = replicas
        self._holder = holder
        self._replicated = replicated
        self._policy = policy
        self._clock = clock
        self._since_s = clock.boottime_s()
        self._since_ms = clock.wall_ms()
        if holder is not None:
            storage.is_only_writer = lambda: holder.is_valid(replicas.promised_until_s)
            storage.count_copies = self._count
            holder.on_change = self.refresh
            holder.tell_shown(lambda: storage.shown)
            replicas.on_ack = self.refresh
            self.refresh()

    @property
    def size(self) -> int:
        """How many have a message before it counts as copied, this member included."""
        return 1 if self._holder is None else len(self._holder.must_acknowledge())

    @property
    def expected(self) -> int:
        """How many should be, this member included; 0: nobody knows."""
        return self._policy.expected(replicated=self._replicated())

    @property
    def electable(self) -> int:
        """How many may write after this one fell silent, this member included."""
        return 1 if self._holder is None else 1 + len(self._holder.electable_others())

    @property
    def size_min(self) -> int:
        """With fewer in sync, sends to topics that wait for copies are refused."""
        return self._policy.size_min

    @property
    def record(self) -> LeaseRecord | None:
        """What stands in the lease, as far as is known; None without one."""
        return None if self._holder is None else self._holder.record

    def check_copies(self) -> None:
        """Raises SlaveNotAvailable while too few members are in sync."""
        if self.size < self._policy.size_min:
            raise SlaveNotAvailable(
                f"{self.size} of the broker group's members {'is' if self.size == 1 else 'are'} "
                f"in sync, {self._policy.size_min} must be (min_in_sync_replicas)"
            )

    def writer_status(self) -> member_pb2.WriterStatus | None:
        """What is to be told of it; None without a lease."""
        if self._holder is None:
            return None
        record = self._holder.record
        return member_pb2.WriterStatus(
            in_sync=[replica_id.member_id for replica_id in record.in_sync],
            electable=[replica_id.member_id for replica_id in record.electable],
            min_in_sync=self._policy.size_min,
            only_writer=self._storage.is_only_writer(),
            reason=record.reason,
            since_ms=self._since_ms,
            in_sync_expected=self.expected,
        )

    def refresh(self) -> None:
        """Something is known that may let acknowledgements go on."""
        self._count()
        self._storage.settle()

    def _count(self) -> None:
        replicated = self._replicated()
        if replicated and self.size < self._policy.size_min:
            self._storage.hold_copies()
        elif self._holder is not None:
            self._count_copies(self._holder, replicated)

    def _count_copies(self, holder: LeaseHolder, replicated: bool) -> None:
        must_acknowledge = holder.must_acknowledge()
        own = self._own(holder)
        # Where nobody waits for copies, it is no matter who else might lead, nor how many have it.
        electable_others = holder.electable_others() if replicated else ()
        positions = replicated_positions(
            must_acknowledge, electable_others, own, self._replicas.by_replica_id
        )
        if positions is None:
            self._storage.hold_copies()
        else:
            self._storage.advance_replicated(*positions, alone=must_acknowledge == {own.replica_id})

    def _own(self, holder: LeaseHolder) -> Own:
        marks = self._storage.watermarks
        return Own(holder.record.holder, marks.appended, marks.flushed, marks.marks, self._since_s)

    async def run(self) -> None:
        """Keep the sets in the lease as they should be, until cancelled; raises Deposed."""
        if self._holder is None:
            return
        while True:  # time alone puts a member out of step: there is no event to wait for
            pause_s = await self._keep(self._holder)
            await asyncio.sleep(pause_s)

    async def _keep(self, holder: LeaseHolder) -> float:
        self._replicas.let_go(holder.must_acknowledge() | holder.electable_others())
        before = holder.record
        wanted = self._wanted(holder)
        if holder.settled and wanted == (before.in_sync, before.electable):
            return LOOK_S
        await holder.put_sets(lambda: self._wanted(holder))
        if not holder.settled:
            return RETRY_S
        self._tell(set(before.in_sync), set(holder.record.in_sync))
        return LOOK_S

    def _wanted(self, holder: LeaseHolder) -> tuple[ReplicaIds, ReplicaIds]:
        return wanted_sets(
            holder.record,
            self._own(holder),
            self._replicas.by_replica_id,
            self._policy,
            self._clock.boottime_s(),
            replicated=self._replicated(),
        )

    def _tell(self, before: set[ReplicaId], now: set[ReplicaId]) -> None:
        self.shrinks += len(before - now)
        told: list[tuple[Callable[..., None], str, set[ReplicaId]]] = [
            (log.warning, "no longer in sync", before - now),
            (log.info, "in sync", now - before),
        ]
        for write, what, members in told:
            for replica_id in sorted(members):
                write(what, extra=fields(member=replica_id.member_id, size=len(now)))
