"""A follower's view of the lease: may it lead? Events in, decisions out, time passed in.

Safety needs no clock: a member in sync has everything that was acknowledged, so whichever of
them takes the lease loses nothing, and compare-and-swap decides between them. Time keeps a writer
that lives from being deposed: a member takes the lease of another only when it has watched it for a
whole duration without a change, and when its own promise not to take it has run out.
docs/format/replication.md, section 4, lists which member may take which lease.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from cometmq.replication.epoch_history import Epoch, merged_branches
from cometmq.replication.lease import LeaseRecord, Reason, ReplicaId, replica_ids
from cometmq.replication.watermarks import NO_WATERMARKS, HighWatermarks

# A member that has taken the lease has so many durations to open its log.
OPENING_DURATIONS = 3
# A member that is electable without being in sync leaves those in sync so much of a start.
LAGGARD_WAIT_S = 1.0
# A member whose clock is off leaves others that may lead so many durations more.
OFF_CLOCK_DURATIONS = 1


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """A member, as far as leading is concerned."""

    group: str
    member_id: int
    store_id: str
    address: str  # of its internal port
    epoch: int  # the highest that its store knows; 0 = it never had a writer
    log_end: int
    former_store_id: str = ""  # of the store before it lost its end; empty: it lost nothing
    promised_until_s: float = 0.0  # it does not take the lease before
    peers: frozenset[int] | None = None  # the group's other members; None: that is not configured
    forced: bool = False  # an operator wants it to lead, whatever may be lost
    epochs: tuple[Epoch, ...] = ()  # of its log
    counted_in: int = 0  # the epoch that its generations say they are counted in
    shown: HighWatermarks = NO_WATERMARKS  # by these a writer has shown what is in its log
    clock_is_off: bool = False  # its machine's: it leaves the lease to others for a while
    # False: the writer's log has state that its release does not know. It leads by force alone.
    reads_state: bool = True

    @property
    def replica_id(self) -> ReplicaId:
        return ReplicaId(self.member_id, self.store_id)

    @property
    def epoch_floor(self) -> int:
        """What it opens is to be above: no generation is given twice, and generations only grow."""
        return max(self.epoch, self.counted_in)

    @property
    def former_replica_id(self) -> ReplicaId | None:
        return ReplicaId(self.member_id, self.former_store_id) if self.former_store_id else None


@dataclass(frozen=True, slots=True)
class Peer:
    """What another member has answered."""

    member_id: int
    store_id: str
    epoch: int
    log_end: int
    writes: bool

    @property
    def replica_id(self) -> ReplicaId:
        return ReplicaId(self.member_id, self.store_id)


Answers = Mapping[int, Peer]  # of those that answered, by member id


@dataclass(frozen=True, slots=True)
class Lead:
    """The lease is ours."""

    reason: Reason
    record: LeaseRecord


@dataclass(frozen=True, slots=True)
class Write:
    """Try to take it: write ``record`` if the version is still that which was read. When that is
    done, lead; when the result is not known, read again.
    """

    record: LeaseRecord
    reason: Reason

    @property
    def done(self) -> Lead:
        return Lead(self.reason, self.record)


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask these members for their status, then look again with their answers."""

    member_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Follow:
    """Another member has the lease, or none. ``address``: of the writer; empty: there is none.
    ``look_again_s``: when this member might take the lease, if nothing changes before; None: never.
    ``why``: for a person, why a missing lease is not taken; empty: another member will write it.
    """

    address: str
    look_again_s: float | None = None
    why: str = ""


Step = Lead | Write | Ask | Follow


class Election:
    """Call :meth:`saw` with each reading of the lease."""

    def __init__(self, duration_s: float) -> None:
        self._duration_s = duration_s
        self._watched: tuple[LeaseRecord | None, float] | None = None  # and since when
        self._last: LeaseRecord | None = None  # that was there, also when it was lost since
        # What was read before we tried to take it; () = we did not.
        self._attempt: tuple[LeaseRecord | None, ...] = ()

    @property
    def may_promise(self) -> bool:
        """Whether we can promise not to take the lease: not while a write of ours, whose outcome we
        do not know, may still make us the holder.
        """
        return not self._attempt

    def saw(
        self,
        record: LeaseRecord | None,
        me: ReplicaStatus,
        now_s: float,
        answers: Answers | None = None,
    ) -> Step:
        """What to do about a reading. ``answers``: of the members of the last :class:`Ask`, made
        since; of those that are missing nothing is known.
        """
        if self._watched is None or self._watched[0] != record:
            self._watched = (record, now_s)
        self._last = record or self._last
        if self._attempt != (record,):
            self._attempt = ()
        if record is None:
            return self._take_unowned(me, now_s, answers)
        assert record.group == me.group, (record.group, me.group)
        if not record.released and record.holder == me.replica_id:
            return self._lead_again(record, me)
        return self._take_over(record, me, now_s, answers)

    # --- a lease that is there --------------------------------------------------------------------

    def _lead_again(self, record: LeaseRecord, me: ReplicaStatus) -> Step:
        reason = Reason.RESTART if record.opened else Reason(record.reason)
        if not record.opened and me.epoch_floor <= record.epoch:
            return Lead(reason, record)
        # The others shall know that we are about to open. And if an epoch was opened that the lease
        # does not know, it has to, before the next one is: a new writer passes over one
        # number only.
        self._attempt = (record,)
        again = replace(
            record,
            epoch=max(me.epoch_floor, record.epoch),
            reason=reason.value,
            opened=False,
            renewals=record.renewals + 1,
        )
        return Write(again, reason)

    def _take_over(
        self, record: LeaseRecord, me: ReplicaStatus, now_s: float, answers: Answers | None
    ) -> Step:
        if record.released and me.log_end == record.log_end and record.transfer_to == me.member_id:
            return self._write(record, me, Reason.HANDOVER)
        if not record.released and record.holder == me.former_replica_id:
            # Our older self is gone: we hold its folder.
            step = self._after_loss(record, me, answers)
            if step is not None or not me.forced:
                return step or Follow("", self._duration_s)
        wait_s = self._wait_s(record, me, now_s)
        step = self._overdue(record, me, answers) if wait_s <= 0 else None
        if step is not None:
            return step
        return Follow("" if record.released else record.holder_address, max(wait_s, 0.0) or None)

    def _wait_s(self, record: LeaseRecord, me: ReplicaStatus, now_s: float) -> float:
        """How long until the lease counts as abandoned."""
        wait_s = max(record.duration_s, self._duration_s)
        if not record.opened:  # its holder changes its role now, and does not renew meanwhile
            wait_s *= OPENING_DURATIONS
        if not record.released and me.replica_id not in record.in_sync:
            wait_s += LAGGARD_WAIT_S
        if me.clock_is_off and _others_may_lead(record, me):
            wait_s += OFF_CLOCK_DURATIONS * max(record.duration_s, self._duration_s)
        return self._left_s(wait_s, me, now_s)

    def _left_s(self, wait_s: float, me: ReplicaStatus, now_s: float) -> float:
        """How long until we have watched it for ``wait_s``, and our promise has run out."""
        assert self._watched is not None
        return max(self._watched[1] + wait_s, me.promised_until_s) - now_s

    def _overdue(
        self, record: LeaseRecord, me: ReplicaStatus, answers: Answers | None
    ) -> Step | None:
        """The lease is abandoned: is it for us?"""
        if record.released and record.holder == me.replica_id and me.log_end == record.log_end:
            # The member that it was released to has not taken it.
            return self._write(record, me, Reason.HANDOVER)
        if me.replica_id in record.electable and me.reads_state:
            return self._write(record, me, Reason.FAILOVER)
        if me.forced:
            return self._by_force(record, me, answers)
        if me.former_replica_id in record.in_sync:
            return self._after_loss(record, me, answers)
        return None

    def _by_force(
        self, record: LeaseRecord, me: ReplicaStatus, answers: Answers | None
    ) -> Step | None:
        """An operator wants it. A writer that the operator did not reach may answer this member."""
        if me.peers and answers is None:
            return Ask(me.peers)
        if any(peer.writes for peer in (answers or {}).values()):
            return None
        return self._write(record, me, Reason.FORCED)

    def _after_loss(
        self, record: LeaseRecord, me: ReplicaStatus, answers: Answers | None
    ) -> Step | None:
        """We were in sync, and lost the end of our log: we lead only if no member has more."""
        others = frozenset(replica_id.member_id for replica_id in record.in_sync) - {me.member_id}
        if others and answers is None:
            return Ask(others)
        found = [answers[member] for member in others if answers and member in answers]
        if len(found) < len(others) or any(
            peer.writes or peer.replica_id in record.electable for peer in found
        ):
            return None
        return self._write(record, me, Reason.UNCLEAN) if _longest(me, found) else None

    # --- a lease that was never written, or that was lost -----------------------------------------

    def _take_unowned(self, me: ReplicaStatus, now_s: float, answers: Answers | None) -> Step:
        # As long as a writer may still live, and write the lease again, not even by force.
        wait_s = self._left_s(self._duration_s, me, now_s) if me.forced else 0.0
        if wait_s > 0:
            return Follow("", wait_s)
        if me.peers and answers is None:
            return Ask(me.peers)
        found = list((answers or {}).values())
        reason = self._reason_unowned(me, found)
        if reason is None:
            look_again_s = None if me.peers is None else self._duration_s
            return Follow("", look_again_s, _why_not(me, found))
        # The members that answer know epochs that existed: none is to be used twice.
        return self._write(None, me, reason, max((peer.epoch for peer in found), default=0))

    def _reason_unowned(self, me: ReplicaStatus, found: list[Peer]) -> Reason | None:
        """Why a lease that is not there is for us; None: it is not. ``found`` have answered."""
        if any(peer.writes for peer in found):
            return None  # the acting writer writes it again
        if me.forced:
            return Reason.FORCED
        if me.peers is not None and not me.peers <= {peer.member_id for peer in found}:
            return None  # a member that is silent may have more
        last_epoch = 0 if self._last is None else self._last.epoch
        if not any((me.epoch, last_epoch, *(peer.epoch for peer in found))):
            return Reason.FIRST
        return Reason.RECREATED if me.peers is not None and _longest(me, found) else None

    def _write(
        self, before: LeaseRecord | None, me: ReplicaStatus, reason: Reason, epoch: int = 0
    ) -> Write:
        self._attempt = (before,)
        epoch = max(epoch, me.epoch_floor)
        record = _taken(before, self._last, me, reason, self._duration_s, epoch)
        return Write(record, reason)


def _others_may_lead(record: LeaseRecord, me: ReplicaStatus) -> bool:
    """Whether a member but this one and the last writer may take the lease."""
    return any(one.member_id not in (me.member_id, record.holder_id) for one in record.electable)


def _why_not(me: ReplicaStatus, found: list[Peer]) -> str:
    """Why a member with messages, or whose peers may have some, does not lead without a lease."""
    if any(peer.writes for peer in found):
        return ""
    if me.peers is None:
        return "the group is not new, and the option peers does not say who else may have messages"
    silent = sorted(me.peers - {peer.member_id for peer in found})
    if silent:
        return f"members {silent} may have more, and do not answer"
    return ""  # another has more of the log: it leads


def _longest(me: ReplicaStatus, peers: Iterable[Peer]) -> bool:
    """No peer has a newer writer's bytes, or more of them. If some have as much, each may try:
    one of them gets the lease.
    """
    return all((me.epoch, me.log_end) >= (peer.epoch, peer.log_end) for peer in peers)


def _taken(
    before: LeaseRecord | None,
    last: LeaseRecord | None,
    me: ReplicaStatus,
    reason: Reason,
    duration_s: float,
    epoch: int,
) -> LeaseRecord:
    """What to write over ``before``; ``last`` is that, or what was there before it was lost."""
    in_sync = {me.replica_id}
    if before is not None and not reason.alone:
        # A member in sync still has all that was acknowledged. Not so the old writer: it may
        # have more, but no send is to wait for it. It comes back as any follower does.
        gone = (me.member_id, before.holder_id)
        in_sync.update(
            replica_id for replica_id in before.in_sync if replica_id.member_id not in gone
        )
    if last is not None and not last.released:
        # The old writer may have opened one more, and not have come to say so.
        epoch = max(epoch, last.epoch + 1)
    return LeaseRecord(
        group=me.group,
        holder_id=me.member_id,
        holder_store_id=me.store_id,
        holder_address=me.address,
        epoch=max(epoch, 0 if last is None else last.epoch),
        in_sync=replica_ids(in_sync),
        electable=replica_ids(in_sync),
        reason=reason.value,
        opened=False,
        duration_s=duration_s,
        renewals=0 if last is None else last.renewals + 1,
        epochs=merged_branches(() if last is None else last.epochs, me.epochs),
        shown=_shown(before, me, reason),
    )


def _shown(before: LeaseRecord | None, me: ReplicaStatus, reason: Reason) -> HighWatermarks:
    """The marks by which consumers have seen messages of our log, as far as is known."""
    if before is None or reason is Reason.FORCED:
        return me.shown  # the lease may speak of another log than ours
    return me.shown.raised(before.shown).within(me.log_end)
