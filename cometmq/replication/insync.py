"""Which members are in sync, which are electable, and how far all members in sync are. Pure.

A follower is in step as of a moment when it has acknowledged everything that the writer had then. A
follower that has been in step recently is in sync. Acknowledgements wait for all of them. So one
that falls behind, or announces its stop, is first taken out of the set in the lease; then
acknowledgements continue without it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cometmq.replication.follower import Replica
from cometmq.replication.lease import LeaseRecord, ReplicaId, ReplicaIds, replica_ids
from cometmq.replication.watermarks import HighWatermarks

JOIN_LAG_S_MAX = 1.0  # out of step for longer, a follower is not taken in


@dataclass(frozen=True, slots=True)
class SetPolicy:
    """What the options say."""

    lag_s_max: float = 3.0  # out of step for longer, a member is taken out of the set
    size_min: int = 1  # with fewer in the set nothing counts as copied
    promote_async: bool = True  # where no topic asks for copies, a little may be lost
    async_lag_bytes_max: int = 64 * 1024 * 1024
    async_silence_s_max: float = 5.0
    group_size: int = 0  # members that the group has; 0 = not known
    peers: frozenset[int] = frozenset()  # ids of the others, as far as they are configured

    def is_alone(self, *, replicated: bool) -> bool:
        """No follower is to take over, so the writer waits for none. ``replicated``: some topic
        asks for copies.
        """
        return not replicated and not self.promote_async

    def expected(self, *, replicated: bool) -> int:
        """How many should be in sync; 0 = not known."""
        return 1 if self.is_alone(replicated=replicated) else self.group_size


@dataclass(frozen=True, slots=True)
class Own:
    """The writer itself."""

    replica_id: ReplicaId
    appended: int
    flushed: int
    marks: HighWatermarks
    since_s: float  # it writes


def wanted_sets(
    record: LeaseRecord,
    own: Own,
    replicas: Mapping[ReplicaId, Replica],
    policy: SetPolicy,
    now_s: float,
    *,
    replicated: bool,
) -> tuple[ReplicaIds, ReplicaIds]:
    """In-sync and electable replicas. ``replicated``: some topic asks for copies."""
    if policy.is_alone(replicated=replicated):
        return (own.replica_id,), (own.replica_id,)
    in_sync = {own.replica_id}
    for replica_id in record.in_sync:
        if replica_id != own.replica_id and _stays(replicas.get(replica_id), own, policy, now_s):
            in_sync.add(replica_id)
    taken = {replica_id.member_id for replica_id in in_sync}
    for replica_id, replica in replicas.items():
        if replica_id.member_id not in taken and _joins(replica, own, now_s):
            in_sync.add(replica_id)
    electable = set(in_sync)
    if not replicated:
        near = (
            replica_id
            for replica_id, replica in replicas.items()
            if _near(replica, own, policy, now_s)
        )
        taken = {replica_id.member_id for replica_id in in_sync}
        electable.update(replica_id for replica_id in near if replica_id.member_id not in taken)
    return replica_ids(in_sync), replica_ids(electable)


def unchanged_until_s(
    record: LeaseRecord,
    own: Own,
    replicas: Mapping[ReplicaId, Replica],
    policy: SetPolicy,
    now_s: float,
) -> float:
    """Until when the wanted sets stay as they are if the record has them and no follower sends
    anything; infinity: for ever. Time alone only takes members out.
    """
    ends_s = []
    for replica_id in record.in_sync:
        replica = replicas.get(replica_id)
        since_s = own.since_s if replica is None else replica.in_step_s
        ends_s.append(since_s + policy.lag_s_max)
    heard_s = [one.heard_s for one in replicas.values() if one.heard_s is not None]
    ends_s += [since_s + policy.async_silence_s_max for since_s in heard_s]
    return min((end_s for end_s in ends_s if end_s >= now_s), default=math.inf)


def _stays(replica: Replica | None, own: Own, policy: SetPolicy, now_s: float) -> bool:
    if replica is None:  # not here yet: a new writer's followers have to find it first
        return now_s - own.since_s <= policy.lag_s_max
    in_step = now_s - replica.in_step_s <= policy.lag_s_max
    return in_step and _has(replica, own.marks) and not replica.leaving


def _joins(replica: Replica, own: Own, now_s: float) -> bool:
    # That it has what counts as copied says little: of a new writer nothing does yet, though there
    # is what the writer before has acknowledged. So it must have had all that was there.
    in_step = replica.caught_up and now_s - replica.in_step_s <= JOIN_LAG_S_MAX
    here = replica.connected and not replica.leaving
    return here and in_step and _has(replica, own.marks)


def _has(replica: Replica, marks: HighWatermarks) -> bool:
    """All that counts as copied."""
    return replica.appended >= marks.replicated and replica.flushed >= marks.replicated_flushed


def _near(replica: Replica, own: Own, policy: SetPolicy, now_s: float) -> bool:
    heard = replica.heard_s is not None and now_s - replica.heard_s <= policy.async_silence_s_max
    near = replica.behind_bytes(own.appended) <= policy.async_lag_bytes_max
    return heard and near and not replica.leaving


def replicated_positions(
    must_acknowledge: Iterable[ReplicaId],
    electable_others: Iterable[ReplicaId],
    own: Own,
    replicas: Mapping[ReplicaId, Replica],
) -> tuple[int, int] | None:
    """Up to where every member in sync has the log in its page cache, and on its disk; the writer's
    disk where it is alone. None: not known, because a member that is not in sync could take over.
    """
    must_acknowledge = frozenset(must_acknowledge)
    if not frozenset(electable_others) <= must_acknowledge:
        return None
    others = must_acknowledge - {own.replica_id}
    if not others:
        return own.flushed, own.flushed
    found = [replicas.get(replica_id) for replica_id in others]
    appended = min(0 if replica is None else replica.appended for replica in found)
    flushed = min(0 if replica is None else replica.flushed for replica in found)
    return min(own.appended, appended), min(own.flushed, flushed)
