"""Who may write: one record for each broker group, changed by compare-and-swap.

Two machines, events in, decisions out, time passed in. :class:`Candidacy` is a follower's: may it
lead? :class:`Tenure` is the writer's: is it still the holder, what does it write next?

In this release a lease changes hands only by a planned hand-over. It is taken

- when there is none, by a member whose store never had a writer (``FIRST``);
- by the member that the record names already, on the store that it names (``RESTART``), at once:
  holding that store's folder is proof that its older self is gone;
- when it is released, by the member that it is released to, whose log ends where the writer's did
  (``HANDOVER``); or, when that one has not come for a whole duration, by the one that released it.

Nobody takes it because time has passed without a renewal: who may, is a matter of in-sync sets,
which will be two more fields of the record (``in_sync`` and ``electable``, docs/ARCHITECTURE.md).

A write without an answer counts as not done until the record is read again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum


class Reason(Enum):
    """Why a member leads."""

    FIRST = "first"
    RESTART = "restart"
    HANDOVER = "handover"


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """What the lease of a broker group says."""

    group: str
    holder_id: int  # member id of the writer
    holder_store_id: str
    holder_address: str  # of its internal port; where followers copy from
    epoch: int  # the highest that was opened under this lease; 0 = none yet
    released: bool = False  # the writer has stopped for good, and …
    transfer_to: int | None = None  # … this member goes on, …
    log_end: int = 0  # … whose log ends here
    duration_s: float = 15.0
    renewals: int = 0  # of the present holder

    def __post_init__(self) -> None:
        assert self.released == (self.transfer_to is not None), self


@dataclass(frozen=True, slots=True)
class Standing:
    """A member that would lead."""

    group: str
    member_id: int
    store_id: str
    address: str  # of its internal port
    epoch: int  # the highest that its store knows; 0 = it never had a writer
    log_end: int  # on its disk


@dataclass(frozen=True, slots=True)
class Lead:
    """The lease is ours."""

    reason: Reason
    record: LeaseRecord


@dataclass(frozen=True, slots=True)
class Write:
    """Try to take it: write ``record`` if the version is still that which was read."""

    record: LeaseRecord


@dataclass(frozen=True, slots=True)
class Follow:
    """It is another's. ``address`` is empty while nobody writes."""

    address: str


Step = Lead | Write | Follow


class Candidacy:
    """A follower's view of the lease. Call :meth:`saw` with each reading, :meth:`written` when a
    :class:`Write` succeeded; when it did not, or nobody knows, just read again.
    """

    def __init__(self, duration_s: float) -> None:
        self._duration_s = duration_s
        self._pending: tuple[LeaseRecord, Reason] | None = None  # written, answer unknown
        self._released: tuple[LeaseRecord, float] | None = None  # seen first at this time

    def saw(self, record: LeaseRecord | None, me: Standing, now_s: float) -> Step:
        """What to do about a reading."""
        if self._pending is not None and record == self._pending[0]:
            return self._lead()
        self._pending = None
        reason = self._may_take(record, me, now_s)
        if reason is None:
            return Follow("" if record is None or record.released else record.holder_address)
        taken = _taken(record, me, self._duration_s)
        self._pending = (taken, reason)
        return Write(taken)

    def written(self) -> Lead:
        """The record of the last :class:`Write` stands."""
        return self._lead()

    def _lead(self) -> Lead:
        assert self._pending is not None, "nothing was to be written"
        record, reason = self._pending
        return Lead(reason, record)

    def _may_take(self, record: LeaseRecord | None, me: Standing, now_s: float) -> Reason | None:
        if record is None:
            return Reason.FIRST if me.epoch == 0 else None
        assert record.group == me.group, (record.group, me.group)
        was_mine = (record.holder_id, record.holder_store_id) == (me.member_id, me.store_id)
        if not record.released:
            return Reason.RESTART if was_mine else None
        if me.log_end != record.log_end:
            return None
        if record.transfer_to == me.member_id or (was_mine and self._unclaimed(record, now_s)):
            return Reason.HANDOVER
        return None

    def _unclaimed(self, record: LeaseRecord, now_s: float) -> bool:
        """The record has been lying there, released, for a whole duration of ours."""
        if self._released is None or self._released[0] != record:
            self._released = (record, now_s)
        return now_s - self._released[1] >= self._duration_s


def _taken(before: LeaseRecord | None, me: Standing, duration_s: float) -> LeaseRecord:
    return LeaseRecord(
        group=me.group,
        holder_id=me.member_id,
        holder_store_id=me.store_id,
        holder_address=me.address,
        epoch=max(me.epoch, 0 if before is None else before.epoch),
        duration_s=duration_s,
        renewals=0 if before is None else before.renewals + 1,
    )


class Tenure:
    """The writer's hold on the lease. ``record`` is what stands there as far as we know."""

    def __init__(self, record: LeaseRecord) -> None:
        assert not record.released, record
        self.record = record
        self._epoch = record.epoch  # the highest that we have tried to write
        self._releasing: LeaseRecord | None = None

    def holds(self, record: LeaseRecord | None) -> bool:
        """Whether a reading leaves us the writer. A lease that is gone does: it is to be written
        anew.
        """
        if record is None:
            return True
        mine = (self.record.holder_id, self.record.holder_store_id)
        same = (record.holder_id, record.holder_store_id) == mine
        return same and not record.released and record.epoch <= self._epoch

    def is_release(self, record: LeaseRecord | None) -> bool:
        """Whether a reading shows that our release was written after all."""
        return record is not None and record == self._releasing

    def renewal(self) -> LeaseRecord:
        """What to write to renew."""
        return replace(self.record, renewals=self.record.renewals + 1)

    def begun(self, epoch: int, address: str) -> LeaseRecord:
        """What to write when the writer has opened its epoch, before it serves."""
        assert epoch > self.record.epoch, (epoch, self.record)
        self._epoch = epoch
        return replace(self.renewal(), epoch=epoch, holder_address=address)

    def release(self, transfer_to: int, log_end: int) -> LeaseRecord:
        """What to write when everything is handed over. Nothing may be written to the log after."""
        assert transfer_to != self.record.holder_id, self.record
        released = replace(self.renewal(), released=True, transfer_to=transfer_to, log_end=log_end)
        self._releasing = released
        return released

    def written(self, record: LeaseRecord) -> None:
        """The record stands."""
        assert record.epoch >= self.record.epoch, (record, self.record)
        self.record = record
