"""What must hold, looked at whenever something happens that could break it.

The judge sees everything: all disks, true time, what stood in the lease. What may be lost:

- A batch that asked for copies survives every fail-over that no operator forced, as long as one
  replica of the lease's in-sync set is whole (COPIED), or the disk of one is still there
  (REPLICATED_FLUSHED). When all of them lost their power, or their disks, at once, that is counted.
- Whatever was acknowledged, or seen, survives a hand-over and a restart on the same replica id.
- A batch that asked only for the writer's disk survives the restart of its writer on that disk.
- What an operator's order may lose was acknowledged by writers that had begun when it was given.
- All else may be lost by a fail-over; but no position that is taken means another message.
"""

from __future__ import annotations

from typing import NamedTuple

from cometmq.replication.lease import LeaseRecord, Reason, ReplicaId
from cometmq.replication.watermarks import REPLICATED, DurabilityClass
from tests.sim.disk import Record
from tests.sim.group_judge import GroupJudge
from tests.sim.member import Group, Member, Role
from tests.sim.message_judge import MessageJudge
from tests.sim.storage import Batch
from tests.sim.world import Violation, World
from tests.sim.writer import Writer

CLASSES = [DurabilityClass(number) for number in range(8)]


class Forgotten(Exception):
    """The lease is lost, and whoever knew of its last epochs: the group begins again."""


class Acked(NamedTuple):
    batch: Batch
    epoch: int
    disk: str  # name of the writer's, whatever was lost of it since


class Begun(NamedTuple):
    epoch: int
    reason: Reason
    replica_id: ReplicaId


class Judge:
    """``group`` is set once all are there."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.group: Group
        self.groups = GroupJudge(self)
        self.messages = MessageJudge(self)
        self.lossy_since = 0  # the newest epoch that began with what was left
        self.begun_epochs: dict[int, Begun] = {}
        self.acked_count = 0
        self._acked: list[Acked] = []
        self._broken: set[ReplicaId] = set()  # lost its power with the store open
        self._gone: set[str] = set()  # names of disks that are no more
        self._were_in_sync: set[ReplicaId] = set()
        self._taken_from: LeaseRecord | None = None  # the lease before its holder's
        self._unserved: dict[
            ReplicaId, Reason
        ] = {}  # why an epoch was opened that nobody has served
        self._ordered: dict[int, int] = {}  # newest epoch when a member was told to lead
        self._given_away = 0  # that one, of the order that was carried out last
        self._lost_lease = False  # an epoch may be known to nobody who is asked
        self._copied_seen: dict[int, tuple[Record, int]] = {}  # by start, and in which epoch
        self._epoch_log: dict[int, dict[int, int]] = {}  # what was seen in an epoch, by start
        self._seen_to: dict[Role, tuple[int, int]] = {}
        self._shown: dict[Role, tuple[int, ...]] = {}
        self._agreed_at: dict[Role, tuple[int, int]] = {}  # epoch, and end of its log then
        self._shown_in: dict[int, tuple[int, ...]] = {}  # by the writer of an epoch
        self._told: dict[int, Record] = {}  # newest message of each queue that somebody knows of

    # --- what the faults tell ---------------------------------------------------------------------

    def power_lost(self, replica_id: ReplicaId) -> None:
        self._broken.add(replica_id)

    def disk_lost(self, replica_id: ReplicaId) -> None:
        self._broken.add(replica_id)
        self._gone.add(_disk_of(replica_id))

    def ordered(self, member: Member) -> None:
        """An operator tells it to lead by force."""
        self._ordered[member.id] = max(self.begun_epochs, default=0)

    def lease_written(self, before: LeaseRecord | None, record: LeaseRecord) -> None:
        self._were_in_sync.update(record.in_sync)
        if before is None or before.holder != record.holder or before.released:
            self._taken_from = before
            self.world.tell("", "lease:", record.holder.store_id, record.reason, record.epoch)

    def lease_deleted(self) -> None:
        self._lost_lease = True

    def is_overtaken(self) -> bool:
        """A lost lease hid an epoch from the writer that it has now: that epoch's member does not
        follow.
        """
        writers = self.group.writers()
        newest = max(member.disk.epoch for member in self.group.members)
        return self._lost_lease and len(writers) == 1 and writers[0].epoch < newest

    # --- epochs -----------------------------------------------------------------------------------

    def opened(self, writer: Writer) -> None:
        """It has an epoch. When it dies before it serves, and leads again, it does so for the
        reason that it had then.
        """
        self._unserved.setdefault(writer.disk.replica_id, writer.reason)
        if writer.reason is Reason.FORCED:
            self._given_away = self._ordered[writer.member.id]

    def begun(self, writer: Writer) -> None:
        """It serves from now on."""
        epoch, replica_id = writer.epoch, writer.disk.replica_id
        newest = max(self.begun_epochs, default=0)
        if epoch <= newest and not writer.is_valid():
            # It stood still between its last look at the lease and this, and acknowledges nothing.
            self.world.counts["served when its lease was over"] += 1
            self._shown_in.setdefault(epoch, (0,) * 8)
            return
        reason = self._unserved.get(replica_id, writer.reason)
        if Reason.FORCED in self._unserved.values():
            reason = Reason.FORCED  # all that is left has come from that one
        self._unserved.clear()
        if epoch <= newest or (newest and reason is Reason.FIRST):
            if not self._is_forgotten(newest, writer):
                raise Violation(f"epoch {epoch} of {replica_id} begins after {newest}")
            raise Forgotten
        lost = self._lost_by(writer, reason)
        self.begun_epochs[epoch] = Begun(epoch, reason, replica_id)
        if reason.alone:
            self.lossy_since = max(self.lossy_since, epoch)
            self._copied_seen = {}
        self._acked = [acked for acked in self._acked if acked not in lost]
        self.world.counts[f"epochs by {reason.value}"] += 1
        self._shown_in[epoch] = (0,) * 8
        self._told = {
            queue: record
            for queue, record in self._told.items()
            if (found := writer.disk.at(record.start)) is not None and found.uid == record.uid
        }
        self._note_readable(writer)
        self.groups.begun(writer)
        self.messages.check_log(writer)

    def _note_readable(self, writer: Writer) -> None:
        """What a writer shows of copied messages before it knows what others have."""
        if writer.epoch < self.lossy_since:
            return
        for queue, demands in enumerate(self.group.rules.demands):
            if demands & REPLICATED:
                found = writer.disk.queues[queue][: writer.readable(queue)]
                self.world.counts["copied messages shown from the start"] += len(found)
                for record in found:
                    self._note_copied(writer, record)

    def _is_forgotten(self, epoch: int, writer: Writer) -> bool:
        """The lease was lost, and nobody who could be asked has heard of that epoch."""
        others = max(m.disk.epoch for m in self.group.members if m is not writer.member)
        asked_nobody = writer.reason in (Reason.FIRST, Reason.FORCED)
        return self._lost_lease and (others < epoch or asked_nobody)

    def _lost_by(self, writer: Writer, reason: Reason) -> set[Acked]:
        lost = set()
        for acked in self._acked:
            first = acked.batch.records[0]
            found = writer.disk.at(first.start)
            if found is None or found.uid != first.uid:
                self._check_may_be_lost(acked, writer, reason)
                lost.add(acked)
        return lost

    def _check_may_be_lost(self, acked: Acked, writer: Writer, reason: Reason) -> None:
        counts, demands = self.world.counts, acked.batch.demands
        what = f"{demands!r} of epoch {acked.epoch} at {acked.batch.records[0].start}"
        if reason is Reason.FORCED:
            if acked.epoch > self._given_away and not self._lost_lease:
                raise Violation(f"{what}, of a writer that came after the order, is lost by force")
            counts["acknowledged and lost: forced"] += 1
            return
        if reason in (Reason.HANDOVER, Reason.RESTART):
            raise Violation(f"{reason.value} of {writer.disk.replica_id} loses {what}")
        own = acked.disk == _disk_of(writer.disk.replica_id) and acked.epoch == self._newest(writer)
        if reason is Reason.UNCLEAN and own and demands & DurabilityClass.FLUSHED:
            raise Violation(f"{writer.disk.replica_id} had flushed and loses {what}")
        if not demands & REPLICATED:
            counts["acknowledged and lost: asked for no copies"] += 1
            return
        keepers = self._keepers(demands)
        if keepers:
            raise Violation(
                f"{reason.value} of {writer.disk.replica_id} loses {what}, kept by {keepers}"
            )
        counts["acknowledged and lost: all in sync at once"] += 1

    def _newest(self, writer: Writer) -> int:
        return max((epoch for epoch in self.begun_epochs if epoch < writer.epoch), default=0)

    def _keepers(self, demands: DurabilityClass) -> list[ReplicaId]:
        """In-sync replicas of the lease before, that what asked for copies cannot be lost with."""
        before = self._taken_from
        members = () if before is None else before.in_sync
        if demands & DurabilityClass.REPLICATED_FLUSHED:
            return [replica_id for replica_id in members if _disk_of(replica_id) not in self._gone]
        return [replica_id for replica_id in members if replica_id not in self._broken]

    def counts_on(self, writer: Writer) -> None:
        """Whom it waits for, and whom it takes for a rival, may be too many, never too few."""
        record = self.group.lease.last
        if record is None or record.holder != writer.disk.replica_id or record.released:
            return
        forgotten = set(record.in_sync) - writer.state.must_acknowledge()
        forgotten |= set(record.electable) - writer.state.electable_others() - {record.holder}
        if forgotten:
            raise Violation(
                f"{writer.disk.replica_id} does not count on {forgotten}, the lease does"
            )

    # --- acknowledged -----------------------------------------------------------------------------

    def acked(self, writer: Writer, batch: Batch) -> None:
        self.acked_count += 1
        if not self._is_alone(writer, "acknowledges"):
            return
        first, demands = batch.records[0], batch.demands
        if demands & DurabilityClass.FLUSHED and writer.disk.flushed < batch.end:
            raise Violation(
                f"{writer.disk.replica_id} acknowledges {batch.end}, which is not flushed"
            )
        if demands & REPLICATED:
            self._check_copies(writer, batch)
        self._acked.append(Acked(batch, writer.epoch, _disk_of(writer.disk.replica_id)))
        for record in batch.records:
            self._note_told(record)
        assert writer.disk.at(first.start) == first

    def _is_alone(self, writer: Writer, what: str) -> bool:
        """False: an operator made another the writer, though this one may have lived."""
        later = [begun for epoch, begun in self.begun_epochs.items() if epoch > writer.epoch]
        if any(begun.reason is Reason.FORCED for begun in later):
            self.world.counts["two writers: forced"] += 1
        elif later:
            raise Violation(
                f"{writer.disk.replica_id} of epoch {writer.epoch} {what} after {later}"
            )
        return not later

    def _check_copies(self, writer: Writer, batch: Batch) -> None:
        """Everybody in sync, as the lease itself says, has it; and they are enough."""
        record = self.group.lease.last
        assert record is not None
        if record.holder != writer.disk.replica_id:
            # It was taken meanwhile, by somebody who was in sync: he has it, or it is lost when he
            # begins, which is looked at then.
            return
        for replica_id in record.in_sync:
            disk = self.group.members[replica_id.member_id].disk
            found = disk.at(batch.records[-1].start)
            if disk.replica_id != replica_id or replica_id in self._broken:
                continue  # it had it, but has lost it since
            if found is None or found.uid != batch.records[-1].uid:
                raise Violation(f"{replica_id} is in sync and has no copy of {batch.end}")
            if batch.demands & DurabilityClass.REPLICATED_FLUSHED and disk.flushed < batch.end:
                raise Violation(f"{replica_id} is in sync and has not flushed {batch.end}")
        if self._copies_of(writer, batch) < self.group.rules.policy.size_min:
            raise Violation(
                f"{writer.disk.replica_id} acknowledges {batch.end} with too few copies"
            )
        if len(record.in_sync) == 1:
            self.world.counts["acknowledged by one alone"] += 1

    def _copies_of(self, writer: Writer, batch: Batch) -> int:
        """Members that have it, or had it and have lost their end, or their disk, since."""
        last = batch.records[-1]
        disks = [member.disk for member in self.group.members]
        counted = writer.state.must_acknowledge() | self._were_in_sync
        lost = self._broken & counted
        having = [d for d in disks if d.at(last.start) == last and d.replica_id not in lost]
        return len(having) + len(lost)

    # --- seen -------------------------------------------------------------------------------------

    def agreed(self, follower: Role, writer_log: list[Record]) -> None:
        """After the handshake a follower has nothing that its writer does not have."""
        ours = follower.disk.records
        if ours != writer_log[: len(ours)]:
            raise Violation(
                f"{follower.disk.replica_id} goes on with another log than its writer's"
            )
        self._agreed_at[follower] = (follower.epoch, follower.disk.end)
        self._seen_to.pop(follower, None)

    def shown(self, role: Role) -> None:
        """What this process shows may have grown."""
        now = tuple(role.visible(demands) for demands in CLASSES)
        before = self._shown.get(role, (0,) * 8)
        if now == before:
            return
        if any(a < b for a, b in zip(now, before, strict=True)):
            raise Violation(f"{role.disk.replica_id} shows less than before: {now} after {before}")
        if isinstance(role, Writer):
            if self._is_alone(role, "shows more"):
                self._note_shown(role)
            self._shown_in[role.epoch] = now
        elif role in self._agreed_at:
            self._check_follower(role, now)
        self._shown[role] = now
        self._note_seen(role, now)

    def _check_follower(self, role: Role, now: tuple[int, ...]) -> None:
        epoch, end = self._agreed_at[role]
        for demands, own, writers in zip(CLASSES, now, self._shown_in[epoch], strict=True):
            if own > max(end, writers):
                raise Violation(
                    f"{role.disk.replica_id} shows {own} of {demands!r} in epoch {epoch}, "
                    f"whose writer shows {writers}"
                )

    def _note_seen(self, role: Role, now: tuple[int, ...]) -> None:
        """Logs are equal up to what two members show."""
        epoch = role.epoch
        seen, replicated = self._seen_to.get(role, (0, 0))
        most = min(max(now), role.disk.end)
        log = self._epoch_log.setdefault(epoch, {})
        for record in role.disk.between(seen, most):
            if log.setdefault(record.start, record.uid) != record.uid:
                raise Violation(f"{role.disk.replica_id} shows another record at {record.start}")
        replicated = now[DurabilityClass.REPLICATED_FLUSHED]
        if self.group.rules.replicated and epoch >= self.lossy_since:
            for record in role.disk.between(replicated, min(replicated, role.disk.end)):
                self._note_copied(role, record)
        self._seen_to[role] = (most, replicated)

    def _note_copied(self, role: Role, record: Record) -> None:
        known = self._copied_seen.setdefault(record.start, (record, role.epoch))
        if known[0].uid != record.uid:
            raise Violation(
                f"{role.disk.replica_id} shows another copied record at {record.start} than before"
            )

    # --- ends of queues ---------------------------------------------------------------------------

    def newest_told(self, queue: int) -> Record | None:
        """The newest message of a queue that was acknowledged or shown, as far as it is left."""
        return self._told.get(queue)

    def _note_told(self, record: Record) -> None:
        before = self._told.get(record.queue)
        if before is None or before.number < record.number:
            self._told[record.queue] = record

    def _note_shown(self, writer: Writer) -> None:
        for queue in range(self.group.rules.topics.count):
            readable = writer.readable(queue)
            if readable:
                self._note_told(writer.disk.queues[queue][readable - 1])

    def end_told(self, writer: Writer, end: int, told: Record | None) -> None:
        """A reader begins at this offset, who knew of a message at the most when it asked."""
        if not self._is_alone(writer, "tells where a queue ends") or told is None:
            return
        found = writer.disk.at(told.start)
        if found is not None and found.uid == told.uid and end < told.number:
            raise Violation(
                f"{writer.disk.replica_id} says that queue {told.queue} ends at {end}: "
                f"{told.number} messages were told of before"
            )

    # --- in the end -------------------------------------------------------------------------------

    def check_converged(self, writer: Writer) -> None:
        """Everything acknowledged is there, and everybody has the same."""
        log = writer.disk.records
        for member in self.group.members:
            if member.disk.records != log:
                raise Violation(
                    f"the log of {member.disk.replica_id} is not that of {writer.disk.replica_id}"
                )
        for acked in self._acked:
            first = acked.batch.records[0]
            found = writer.disk.at(first.start)
            if found is None or found.uid != first.uid:
                raise Violation(f"{acked.batch.demands!r} at {first.start} is lost in the end")


def _disk_of(replica_id: ReplicaId) -> str:
    return replica_id.store_id.split(".")[0]
