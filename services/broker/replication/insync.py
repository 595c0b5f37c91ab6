"""The writer's in-sync set: the members that an acknowledgement waits for, and whether this member
is provably the only writer.

The lease records the set. A member leaves the set in the lease before acknowledgements continue
without it, and joins it before they count on it. :mod:`cometmq.replication.insync` has the rules.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from cometmq.clock import Clock
from cometmq.errors import SlaveNotAvailable, VersionUnsupported
from cometmq.member.config import MemberConfig, PromoteAsync
from cometmq.member.lease.lease_holder import LeaseHolder
from cometmq.member.pod.events import UNRECORDED, EventReason, EventRecorder
from cometmq.member.state.keeper import StateDemands
from cometmq.member.storage.authority import Replicated
from cometmq.replication.insync import (
    Own,
    SetPolicy,
    replicated_positions,
    unchanged_until_s,
    wanted_sets,
)
from cometmq.replication.lease import LeaseRecord, ReplicaId, ReplicaIds
from cometmq.replication.watermarks import REPLICATED, Watermarks
from cometmq.rpc.tasks import wait_at_most
from cometmq.rpc.ticks import TIMER_STEP_S, until_tick_s
from cometmq.telemetry import fields
from cometmq.v1 import member_pb2
from services.broker.replication.replicas import FollowerTable, Replicas

log = logging.getLogger(__name__)

LOOK_S = 0.1  # between two looks for members that lag, at least
REST_S = 5.0  # and at most
RETRY_S = 0.5


def policy_of(config: MemberConfig) -> SetPolicy:
    """The policy that a broker's options ask for."""
    return SetPolicy(
        lag_s_max=config.in_sync_lag_s_max,
        size_min=config.min_in_sync_replicas,
        promote_async=config.promote_async is PromoteAsync.BOUNDED,
        async_lag_bytes_max=config.async_promote_lag_max,
        async_silence_s_max=config.async_promote_silence_max,
        group_size=len(config.peers),
        peers=frozenset(config.peer_addresses() or ()),
    )


class InSyncSet:
    """The :class:`~cometmq.member.storage.authority.WriteAuthority` of a broker. Belongs to the
    event loop. ``holder`` is None for a broker without a lease.

    Invariant: no message counts as replicated that a member lacks which may take the lease, or
    which a lease that may have been written names in sync.
    """

    def __init__(
        self,
        followers: FollowerTable,
        holder: LeaseHolder | None,
        demands: StateDemands,
        policy: SetPolicy,
        clock: Clock,
        events: EventRecorder = UNRECORDED,
    ) -> None:
        assert policy.size_min >= 1, "the writer itself is in sync"
        self.shrinks = 0  # members that were taken out of the set
        self._followers = followers
        self._holder = holder
        self._demands = demands
        self._policy = policy
        self._clock = clock
        self._events = events
        self._since_s = clock.boottime_s()
        self._since_ms = clock.wall_ms()

    # --- what the storage asks ---

    def may_acknowledge(self) -> bool:
        """Whether no other member can be the writer now."""
        return self._holder is None or self._holder.is_valid(self._followers.promised_until_s)

    def replicated(self, own: Watermarks) -> Replicated | None:
        """The positions that every member of the set has reached; None: too few are in sync."""
        asked_for = self._is_asked_for()
        holder = self._holder
        if asked_for and self.size < self._policy.size_min:
            return None
        if holder is None:
            return Replicated(own.flushed, own.flushed, is_alone=True)
        must_acknowledge = holder.must_acknowledge()
        # Without a topic that waits for followers it does not matter which others might lead.
        others = holder.electable_others() if asked_for else ()
        ours = self._own(holder, own)
        found = replicated_positions(must_acknowledge, others, ours, self._followers.by_replica_id)
        return found and Replicated(*found, is_alone=must_acknowledge == {ours.replica_id})

    @property
    def shortage(self) -> str:
        """Why sends to topics that wait for followers are refused; empty: they are not."""
        if self.size >= self._policy.size_min:
            return ""
        return (
            f"{self.size} of the broker group's members {'is' if self.size == 1 else 'are'} "
            f"in sync, {self._policy.size_min} must be (min_in_sync_replicas)"
        )

    def check_in_sync(self) -> None:
        """Raise SlaveNotAvailable while too few members are in sync."""
        if shortage := self.shortage:
            raise SlaveNotAvailable(shortage)

    def check_kinds(self, kinds: frozenset[str]) -> None:
        """Raise VersionUnsupported unless all other members read state records of these kinds:
        those that are configured, may take the lease, or have followed. One that has not followed
        this writer yet has not said what it reads.
        """
        if self._holder is None:
            return
        known = self._followers.state_kinds
        replica_ids = self._holder.must_acknowledge() | self._holder.electable_others()
        members = self._policy.peers | known.keys() | {one.member_id for one in replica_ids}
        for member_id in sorted(members - {self._holder.record.holder.member_id}):
            if member_id not in known:
                raise VersionUnsupported(
                    f"member {member_id} has not followed this writer yet, so it is not known "
                    f"whether it reads changes of kind {', '.join(sorted(kinds))}"
                )
            if unknown := kinds - known[member_id]:
                raise VersionUnsupported(
                    f"member {member_id} runs a release that does not read changes of kind "
                    f"{', '.join(sorted(unknown))}"
                )

    def validate(self, own: Watermarks) -> None:
        """Assert the invariant at the positions ``own``: every member that the lease may name in
        sync has what counts as replicated.
        """
        holder, found = self._holder, self.replicated(own)
        assert found is None or found.flushed <= found.appended <= own.appended
        assert found is None or found.flushed <= own.flushed
        if holder is None:
            return
        in_sync = holder.must_acknowledge()
        assert holder.record.holder in in_sync
        if found is not None and self._is_asked_for():
            assert holder.electable_others() <= in_sync, "a member may write that lacks messages"
        for replica_id in in_sync - {holder.record.holder}:
            replica = self._followers.by_replica_id.get(replica_id)
            if replica is not None:
                assert own.marks.replicated <= replica.appended
                assert own.marks.replicated_flushed <= replica.flushed
                assert found is None or found.appended <= replica.appended
                assert found is None or found.flushed <= replica.flushed
            else:
                assert found is None or found.appended == found.flushed == 0

    def _is_asked_for(self) -> bool:
        """Some topic waits for followers, or a change is on its way that will."""
        return bool(self._demands.now & REPLICATED)

    # --- what is shown of it ---

    @property
    def size(self) -> int:
        """How many have a message before it counts as copied, this member included."""
        return 1 if self._holder is None else len(self._holder.must_acknowledge())

    @property
    def expected(self) -> int:
        """How many should be, this member included; 0: not known."""
        return self._policy.expected(replicated=self._is_asked_for())

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
        """The record of the lease, as far as it is known; None without a lease."""
        return None if self._holder is None else self._holder.record

    def writer_status(self) -> member_pb2.WriterStatus | None:
        """The status for operators; None without a lease."""
        if self._holder is None:
            return None
        record = self._holder.record
        return member_pb2.WriterStatus(
            in_sync=[replica_id.member_id for replica_id in record.in_sync],
            electable=[replica_id.member_id for replica_id in record.electable],
            min_in_sync=self._policy.size_min,
            only_writer=self.may_acknowledge(),
            reason=record.reason,
            since_ms=self._since_ms,
            in_sync_expected=self.expected,
        )

    # --- the sets in the lease ---

    async def run(self, replicas: Replicas) -> None:
        """Keep the sets in the lease as they should be, until cancelled; raises Deposed."""
        if self._holder is None:
            return
        changed, clock = asyncio.Event(), self._clock
        with replicas.changed.subscribed(changed), replicas.storage.moved.subscribed(changed):
            while True:
                changed.clear()
                looked_s = clock.boottime_s()
                pause_s = await self._keep(self._holder, replicas)
                await wait_at_most(changed, pause_s)
                await asyncio.sleep(max(0.0, looked_s + LOOK_S - clock.boottime_s()))

    async def _keep(self, holder: LeaseHolder, replicas: Replicas) -> float:
        """Returns for how long nothing changes unless a follower or the lease does."""
        marks = replicas.storage.watermarks
        replicas.let_go(holder.must_acknowledge() | holder.electable_others())
        before = holder.record
        if holder.settled and self._wanted(holder, marks) == (before.in_sync, before.electable):
            return self._rest_s(holder, marks)
        await holder.put_sets(lambda: self._wanted(holder, marks))
        if not holder.settled:
            return RETRY_S
        assert holder.record.holder in holder.record.in_sync, "the writer is in its own set"
        self._log_change(set(before.in_sync), set(holder.record.in_sync))
        return LOOK_S

    def _rest_s(self, holder: LeaseHolder, marks: Watermarks) -> float:
        now_s, own = self._clock.boottime_s(), self._own(holder, marks)
        until_s = unchanged_until_s(
            holder.record, own, self._followers.by_replica_id, self._policy, now_s
        )
        return min(until_tick_s(REST_S), until_s - now_s + TIMER_STEP_S)

    def _wanted(self, holder: LeaseHolder, marks: Watermarks) -> tuple[ReplicaIds, ReplicaIds]:
        return wanted_sets(
            holder.record,
            self._own(holder, marks),
            self._followers.by_replica_id,
            self._policy,
            self._clock.boottime_s(),
            replicated=self._is_asked_for(),
        )

    def _own(self, holder: LeaseHolder, marks: Watermarks) -> Own:
        return Own(holder.record.holder, marks.appended, marks.flushed, marks.marks, self._since_s)

    def _log_change(self, before: set[ReplicaId], now: set[ReplicaId]) -> None:
        assert before, "the writer is always in sync"
        assert now, "the writer is always in sync"
        self.shrinks += len(before - now)
        left, joined = EventReason.LEFT_IN_SYNC, EventReason.JOINED_IN_SYNC
        lines: list[tuple[Callable[..., None], str, set[ReplicaId], EventReason]] = [
            (log.warning, "no longer in sync", before - now, left),
            (log.info, "in sync", now - before, joined),
        ]
        for write, what, members, event in lines:
            for replica_id in sorted(members):
                write(what, extra=fields(member=replica_id.member_id, size=len(now)))
                note = f"member {replica_id.member_id} is {what}; in sync, the writer included: "
                self._events.record(event, f"{note}{len(now)}")
