"""A broker group at a glance, by what its members answer. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from cometmq.admin.views import GroupStatusView
from cometmq.errors import CometError
from cometmq.v1 import common_pb2, member_pb2, namesrv_pb2

NO_WRITER = "docs/runbooks.md#cometmqgroupwithoutwriter"
CLOCK_SKEW = "docs/runbooks.md#cometmqclockskew"
DISK_FULL = "docs/runbooks.md#cometmqdiskfull"
ReplicaStatuses = Mapping[int, member_pb2.DescribeReplicaResponse]


@dataclass(frozen=True, slots=True)
class GroupObservation:
    """What is known of a group: its registered members, the answers by member id, the refusals."""

    group: str
    registered: list[namesrv_pb2.Member]
    statuses: ReplicaStatuses
    refusals: Mapping[int, CometError]

    @property
    def writer(self) -> member_pb2.DescribeReplicaResponse | None:
        """The member with the writer's role; of two, the one with the newer epoch."""
        writers = [s for s in self.statuses.values() if s.role == common_pb2.MEMBER_ROLE_WRITER]
        return max(writers, key=lambda status: status.epoch, default=None)

    @property
    def writer_status(self) -> member_pb2.WriterStatus | None:
        """None also for a writer that has no lease, because its group has no followers."""
        if self.writer is None or not self.writer.HasField("writer_status"):
            return None
        return self.writer.writer_status

    @property
    def lease(self) -> member_pb2.LeaseRecord | None:
        """As the writer wrote it, else the newest that was read."""
        writer = self.writer
        asked = self.statuses.values() if writer is None else [writer]
        leases = [status.lease for status in asked if status.HasField("lease")]
        return max(leases, key=lambda lease: (lease.epoch, lease.renewals), default=None)

    @property
    def members(self) -> list[int]:
        """The registered members."""
        return sorted(member.member_id for member in self.registered)

    @property
    def missing(self) -> list[int]:
        """Members that the option peers or the lease names, and that are not registered."""
        writer, lease = self.writer, self.lease
        asked = self.statuses.values() if writer is None else [writer]
        named = {number for status in asked for number in status.peers}
        if lease is not None:
            named.update(replica_id.member_id for replica_id in (*lease.in_sync, *lease.electable))
        return sorted(named.difference(self.members))

    def had(self, replica_id: member_pb2.ReplicaId) -> bool:
        """The member answers, with what this store became when it lost the end of its log."""
        status = self.statuses.get(replica_id.member_id)
        return status is not None and status.former_store_id == replica_id.store_id

    def has(self, replica_id: member_pb2.ReplicaId) -> bool:
        """The member answers, with this store."""
        status = self.statuses.get(replica_id.member_id)
        return status is not None and status.store_id == replica_id.store_id


def view_of(observed: GroupObservation) -> GroupStatusView:
    """The view of a group: its writer, its in-sync set, what is wrong and what to do."""
    status, advice = _judged(observed)
    members, writer, lease = observed.members, observed.writer, observed.lease
    numbers = sorted({*members, *observed.missing})
    problems = [(n, problem) for n in numbers for problem in _problems(observed, n)]
    view = GroupStatusView(
        broker_group=observed.group,
        status=status,
        epoch=max(
            [m.epoch for m in observed.registered] + [s.epoch for s in observed.statuses.values()]
        ),
        members=members,
        missing=observed.missing,
        silent=[number for number in members if number not in observed.statuses],
        troubles=[f"member {number} {problem}" for number, problem in problems],
        clock_skew_ms_max=_skew_max(observed),
        advice=advice,
    )
    if lease is not None:
        view = replace(view, in_sync=_numbers(lease.in_sync), electable=_numbers(lease.electable))
    if writer is None:
        return view
    ends = [s.log_end_offset for s in observed.statuses.values() if s is not writer]
    behind = max(0, writer.log_end_offset - min(ends)) if ends else None
    view = replace(view, writer=writer.member_id, behind_bytes_max=behind)
    if (writer_status := observed.writer_status) is None:
        return view
    return replace(
        view,
        reason=writer_status.reason,
        since_ms=writer_status.since_ms,
        in_sync=list(writer_status.in_sync),
        electable=list(writer_status.electable),
        min_in_sync=writer_status.min_in_sync,
    )


def _skew_max(observed: GroupObservation) -> int | None:
    """How far the clock is ahead that differs most; None: no member knows."""
    known = [s.clock_skew_ms for s in observed.statuses.values() if s.HasField("clock_skew_ms")]
    return max(known, key=abs, default=None)


def _numbers(replica_ids: Iterable[member_pb2.ReplicaId]) -> list[int]:
    return [replica_id.member_id for replica_id in replica_ids]


def _problems(observed: GroupObservation, number: int) -> Iterator[str]:
    if problem := _problem(observed, number):
        yield problem
    status = observed.statuses.get(number)
    if status is not None and status.clock_is_off:
        way = "ahead of" if status.clock_skew_ms > 0 else "behind"
        yield (
            f"has a clock {abs(status.clock_skew_ms) / 1000:,.1f} s {way} what most clocks show: "
            f"{CLOCK_SKEW}"
        )


def _problem(observed: GroupObservation, number: int) -> str:
    """What is wrong with one member; empty: nothing."""
    if number in observed.refusals:
        error = observed.refusals[number]
        return f"refuses to answer: {error.name()}, {error.message}"
    if number in observed.missing:
        return "is not registered"
    if number not in observed.statuses:
        return "does not answer"
    lease, writer_status = observed.lease, observed.writer_status
    replica_ids = [] if lease is None else [s for s in lease.in_sync if s.member_id == number]
    if not all(map(observed.has, replica_ids)):
        return "has another store than the one that was in sync"
    if misfit := observed.statuses[number].cannot_follow:
        return f"cannot follow the writer: {misfit}"
    if refusal := observed.statuses[number].send_refusal:
        is_writer = observed.writer is observed.statuses[number]
        return f"{'refuses sends' if is_writer else 'has no room for sends'}: {refusal}"
    # A group of one expects no follower.
    expects_followers = writer_status is not None and writer_status.in_sync_expected != 1
    if writer_status is not None and expects_followers and number not in writer_status.in_sync:
        return "is not in sync"
    return ""


def _judged(observed: GroupObservation) -> tuple[str, str]:
    """The status of a group, and what its operator does next."""
    writer, writer_status = observed.writer, observed.writer_status
    if writer is None:
        return "no writer", _who_may_write(observed)
    if writer.send_refusal and (writer_status is None or writer_status.only_writer):
        return "degraded", f"it refuses sends: {_who_has_room(observed)}"
    if writer_status is None:  # it has no lease: its group has no followers on purpose
        return "ok", ""
    if not writer_status.only_writer:
        return "waiting", "it cannot reach its lease, nor all that could take over"
    if len(writer_status.in_sync) < writer_status.min_in_sync:
        return "refusing", "bring followers back, or lower min_in_sync_replicas"
    count = len(observed.registered)
    if count < 2:
        return "degraded", "it has no follower: with its machine its messages are lost"
    if len(writer_status.in_sync) < (writer_status.in_sync_expected or count):
        return (
            "degraded",
            "not all members are in sync: bring back the missing ones, the others catch up",
        )
    # A replica id stays in the lease for seconds after its member, or its disk, has gone.
    if observed.lease is not None and not all(map(observed.has, observed.lease.in_sync)):
        return (
            "degraded",
            "a member that counts as in sync is missing: stop no other until the status is ok",
        )
    if len(observed.statuses) < count:
        return "degraded", "not all members answer"
    return "ok", ""


def _who_has_room(observed: GroupObservation) -> str:
    """What helps a writer whose disk is full."""
    writer, writer_status = observed.writer, observed.writer_status
    assert writer is not None
    in_sync = () if writer_status is None else writer_status.in_sync
    for number, status in sorted(observed.statuses.items()):
        if number in in_sync and status is not writer and not status.send_refusal:
            return (
                f"free space on its disk, or, if member {number} keeps its room, "
                f"cometmq broker step-down --broker-group {observed.group} --to {number}"
            )
    return f"free space on its disk: {DISK_FULL}"


def _who_may_write(observed: GroupObservation) -> str:
    """docs/format/replication.md, section 4."""
    if observed.lease is None:
        who = "no member that answers knows the lease" if observed.statuses else "no member answers"
        return f"{who}: {NO_WRITER}"
    electable = observed.lease.electable
    if able := [replica_id for replica_id in electable if observed.has(replica_id)]:
        return f"member {_listed(able)} takes over within seconds; if not, {NO_WRITER} says why"
    if away := [replica_id for replica_id in electable if not observed.had(replica_id)]:
        return (
            f"no electable member answers: bring back member {_listed(away)}, with its disk, "
            f"or see {NO_WRITER}"
        )
    return f"all have lost ends of their logs, the longest leads; if not, {NO_WRITER} says why"


def _listed(replica_ids: Iterable[member_pb2.ReplicaId]) -> str:
    return " or ".join(map(str, _numbers(replica_ids)))
