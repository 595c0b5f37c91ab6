"""A broker group at a glance, by what its members tell. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from cometmq.admin.views import GroupStatusView
from cometmq.errors import CometError
from cometmq.v1 import common_pb2, member_pb2, namesrv_pb2

NO_WRITER = "docs/runbooks.md#cometmqgroupwithoutwriter"
Standings = Mapping[int, member_pb2.StandingResponse]


@dataclass(frozen=True, slots=True)
class Told:
    """What is known of a group: whom name servers list, how those stand that answer, by member id,
    and why others refuse to say so.
    """

    group: str
    registered: list[namesrv_pb2.Member]
    standings: Standings
    refusals: Mapping[int, CometError]

    @property
    def writer(self) -> member_pb2.StandingResponse | None:
        """Of two that say they write the older has not heard of its successor yet."""
        writers = [s for s in self.standings.values() if s.role == common_pb2.MEMBER_ROLE_WRITER]
        return max(writers, key=lambda standing: standing.epoch, default=None)

    @property
    def reign(self) -> member_pb2.Reign | None:
        """None also where the writer stands alone on purpose."""
        writer = self.writer
        return writer.reign if writer is not None and writer.HasField("reign") else None

    @property
    def lease(self) -> member_pb2.LeaseView | None:
        """As the writer wrote it, else the newest that was read."""
        writer = self.writer
        telling = self.standings.values() if writer is None else [writer]
        leases = [standing.lease for standing in telling if standing.HasField("lease")]
        return max(leases, key=lambda lease: (lease.epoch, lease.renewals), default=None)

    @property
    def members(self) -> list[int]:
        """Who is registered."""
        return sorted(member.member_id for member in self.registered)

    @property
    def missing(self) -> list[int]:
        """Who should be registered: of the group by the option peers, or named in the lease."""
        writer, lease = self.writer, self.lease
        telling = self.standings.values() if writer is None else [writer]
        named = {number for standing in telling for number in standing.peers}
        if lease is not None:
            named.update(seat.member_id for seat in (*lease.in_sync, *lease.electable))
        return sorted(named.difference(self.members))

    def had(self, seat: member_pb2.MemberSeat) -> bool:
        """The member answers, with what this store became when it lost the end of its log."""
        standing = self.standings.get(seat.member_id)
        return standing is not None and standing.former_store_id == seat.store_id

    def has(self, seat: member_pb2.MemberSeat) -> bool:
        """The member answers, with this store."""
        standing = self.standings.get(seat.member_id)
        return standing is not None and standing.store_id == seat.store_id


def view_of(told: Told) -> GroupStatusView:
    """A group as its members tell."""
    status, advice = _judged(told)
    members = told.members
    view = GroupStatusView(
        broker_group=told.group,
        status=status,
        epoch=max([m.epoch for m in told.registered] + [s.epoch for s in told.standings.values()]),
        members=members,
        missing=told.missing,
        silent=[number for number in members if number not in told.standings],
        troubles=_troubles(told),
        advice=advice,
    )
    return _with_reign(_with_lease(view, told.lease), told)


def _with_lease(view: GroupStatusView, lease: member_pb2.LeaseView | None) -> GroupStatusView:
    if lease is None:
        return view
    return replace(view, in_sync=_numbers(lease.in_sync), electable=_numbers(lease.electable))


def _numbers(seats: Iterable[member_pb2.MemberSeat]) -> list[int]:
    return [seat.member_id for seat in seats]


def _with_reign(view: GroupStatusView, told: Told) -> GroupStatusView:
    writer, reign = told.writer, told.reign
    if writer is None:
        return view
    behind = _behind_bytes_max(writer, told.standings)
    view = replace(view, writer=writer.member_id, behind_bytes_max=behind)
    if reign is None:
        return view
    return replace(
        view,
        reason=reign.reason,
        since_ms=reign.since_ms,
        in_sync=list(reign.in_sync),
        electable=list(reign.electable),
        min_in_sync=reign.min_in_sync,
    )


def _behind_bytes_max(writer: member_pb2.StandingResponse, standings: Standings) -> int | None:
    ends = [s.log_end_offset for s in standings.values() if s is not writer]
    return max(0, writer.log_end_offset - min(ends)) if ends else None


# --- what is amiss, member by member --------------------------------------------------------------


def _troubles(told: Told) -> list[str]:
    numbers = sorted({*told.members, *told.missing})
    found = ((number, _trouble(told, number)) for number in numbers)
    return [f"member {number} {trouble}" for number, trouble in found if trouble]


def _trouble(told: Told, number: int) -> str:
    """Empty: none."""
    if number in told.refusals:
        error = told.refusals[number]
        return f"refuses to answer: {error.name()}, {error.message}"
    if number in told.missing:
        return "is not registered"
    if number not in told.standings:
        return "does not answer"
    lease, reign = told.lease, told.reign
    seats = [] if lease is None else [s for s in lease.in_sync if s.member_id == number]
    if not all(map(told.has, seats)):
        return "has another store than the one that was in sync"
    if reign is not None and number not in reign.in_sync and not _is_alone(reign):
        return "is not in sync"
    return ""


def _is_alone(reign: member_pb2.Reign) -> bool:
    """Nobody is to take over."""
    return reign.in_sync_expected == 1


# --- what to make of it, and to do ----------------------------------------------------------------


def _judged(told: Told) -> tuple[str, str]:
    writer, reign = told.writer, told.reign
    if writer is None:
        return "no writer", _who_may_write(told)
    if reign is None:  # it stands alone on purpose
        return "ok", ""
    if not reign.only_writer:
        return "waiting", "it cannot reach its lease, nor all that could take over"
    if len(reign.in_sync) < reign.min_in_sync:
        return "refusing", "bring followers back, or lower min_in_sync_replicas"
    return _judged_copies(told, reign)


def _judged_copies(told: Told, reign: member_pb2.Reign) -> tuple[str, str]:
    count = len(told.registered)
    if count < 2:
        return "degraded", "it has no follower: with its machine its messages are lost"
    if len(reign.in_sync) < (reign.in_sync_expected or count):
        return (
            "degraded",
            "not all members are in sync: bring back who is away, the others catch up",
        )
    # A seat stays in the lease for seconds after its member, or its disk, has gone.
    if told.lease is not None and not all(map(told.has, told.lease.in_sync)):
        return (
            "degraded",
            "not all who count as in sync are there: until it is ok stop no other member",
        )
    if len(told.standings) < count:
        return "degraded", "not all members answer"
    return "ok", ""


def _who_may_write(told: Told) -> str:
    """docs/format/replication.md, section 4."""
    if told.lease is None:
        who = "no member that answers knows the lease" if told.standings else "no member answers"
        return f"{who}: {NO_WRITER}"
    electable = told.lease.electable
    if able := [seat for seat in electable if told.has(seat)]:
        return f"member {_listed(able)} takes over within seconds; if not, {NO_WRITER} tells why"
    if away := [seat for seat in electable if not told.had(seat)]:
        return (
            f"nobody is there who may take over: bring back member {_listed(away)}, with its disk, "
            f"or see {NO_WRITER}"
        )
    return f"all have lost ends of their logs, the longest leads; if not, {NO_WRITER} tells why"


def _listed(seats: Iterable[member_pb2.MemberSeat]) -> str:
    return " or ".join(map(str, _numbers(seats)))
