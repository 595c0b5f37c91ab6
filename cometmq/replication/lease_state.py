"""The writer's hold on the lease: what it writes, what the lease may have of that, and for how long
it is certainly the only writer. Pure: times of CLOCK_BOOTTIME are passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from cometmq.replication.epoch_history import Epoch, with_branches
from cometmq.replication.lease import CLOCK_DRIFT_MAX, LeaseRecord, ReplicaId, ReplicaIds
from cometmq.replication.watermarks import HighWatermarks


class LeaseState:
    """``record`` is the content of the lease as far as is known.

    A write without an answer may have been done, may still be done, or never: until a later one is
    known to be done, or it is read back, all of them count, each at its stricter: a member that one
    of them calls in sync bounds acknowledgements, a member that one of them calls electable may
    take over.
    """

    def __init__(
        self, record: LeaseRecord, shown: Callable[[], HighWatermarks] = HighWatermarks
    ) -> None:
        """``record`` was read. Its age is not known, so it is not valid for any time yet.
        ``shown`` says by which marks consumers see messages now.
        """
        assert not record.released, record
        self.record = record
        self.valid_until_s = 0.0
        self._shown = shown
        self._epoch = record.epoch  # the highest that we have tried to write
        self._attempts: list[tuple[LeaseRecord, float]] = []  # without an answer, and when sent
        self._releasing: LeaseRecord | None = None

    # --- what holds -------------------------------------------------------------------------------

    def must_acknowledge(self) -> frozenset[ReplicaId]:
        """The members that must have a message before it counts as replicated."""
        return frozenset(
            replica_id for record in self._possible_records() for replica_id in record.in_sync
        )

    def electable_others(self) -> frozenset[ReplicaId]:
        """The other members that may take the lease."""
        found = frozenset(
            replica_id for record in self._possible_records() for replica_id in record.electable
        )
        return found - {self.record.holder}

    @property
    def settled(self) -> bool:
        """No write is without an answer."""
        return not self._attempts

    def is_valid(self, now_s: float, promised_until_s: Callable[[ReplicaId], float]) -> bool:
        """Whether no other member can be the writer: the lease was renewed within its duration, or
        every member that might take it has promised not to. Not while it may be released already.
        """
        if any(record.released for record in self._possible_records()):
            return False
        if now_s < self.valid_until_s:
            return True
        return all(promised_until_s(other) > now_s for other in self.electable_others())

    def _possible_records(self) -> Iterator[LeaseRecord]:
        yield self.record
        for record, _ in self._attempts:
            yield record

    # --- what to write ----------------------------------------------------------------------------

    def renewal(self) -> LeaseRecord:
        """What to write to renew."""
        shown = self.record.shown.raised(self._shown())
        # Each record that we try to write differs, so that a reading shows which one was written.
        number = max(record.renewals for record in self._possible_records()) + 1
        return replace(self.record, renewals=number, shown=shown)

    def begun(self, own: Sequence[Epoch], address: str) -> LeaseRecord:
        """What to write when the writer has opened its epoch, before it serves: the last of
        ``own``, the epochs of its store.
        """
        epoch, _ = own[-1]
        assert epoch > self.record.epoch, (epoch, self.record)
        self._epoch = epoch
        return replace(
            self.renewal(),
            epoch=epoch,
            holder_address=address,
            opened=True,
            epochs=with_branches(self.record.epochs, own),
        )

    def with_sets(self, in_sync: ReplicaIds, electable: ReplicaIds) -> LeaseRecord:
        """What to write to change the sets."""
        return replace(self.renewal(), in_sync=in_sync, electable=electable)

    def passed_over(self, epoch: int) -> LeaseRecord:
        """What to write so that the next epoch, of any member, is above ``epoch``."""
        self._epoch = max(self._epoch, epoch)
        return replace(self.renewal(), epoch=max(self.record.epoch, epoch))

    def release(self, transfer_to: int, log_end: int) -> LeaseRecord:
        """What to write when everything is handed over. Nothing may be written to the log after."""
        assert transfer_to != self.record.holder_id, self.record
        released = replace(self.renewal(), released=True, transfer_to=transfer_to, log_end=log_end)
        self._releasing = released
        return released

    # --- results of writes ------------------------------------------------------------------------

    def sent(self, record: LeaseRecord, now_s: float) -> None:
        """``record`` is about to be written; then one of the next two, or nothing is known."""
        assert record.holder == self.record.holder, (record, self.record)
        self._attempts.append((record, now_s))

    def written(self, record: LeaseRecord) -> None:
        """The record was written. Earlier attempts on the same version can no longer succeed."""
        sent_s = next(sent_s for tried, sent_s in self._attempts if tried == record)
        assert record.epoch >= self.record.epoch, (record, self.record)
        self._attempts.clear()
        self.record = record
        if not record.released:
            until_s = sent_s + record.duration_s * (1.0 - CLOCK_DRIFT_MAX)
            self.valid_until_s = max(self.valid_until_s, until_s)

    def refused(self, record: LeaseRecord) -> None:
        """``record`` was certainly not written, and will not be: the version is another now."""
        self._attempts = [(tried, s) for tried, s in self._attempts if tried != record]

    def saw(self, record: LeaseRecord | None, now_s: float) -> bool:
        """Take note of a reading; False: we are the writer no longer. A lease that is gone is to be
        written again, but only as long as no other member can have held it meanwhile.
        """
        if record is None:
            return now_s < self.valid_until_s or not self.electable_others()
        if any(tried == record for tried, _ in self._attempts):
            self.written(record)
            return True
        same = record.holder == self.record.holder
        ours = same and not record.released and record.epoch <= self._epoch
        if ours:
            self._adopt(record)
        return ours

    def _adopt(self, record: LeaseRecord) -> None:
        """The lease is ours, but by none of the writes that wait for an answer: an earlier process
        of this member wrote it, or an operator. The members that it names electable may take over
        from now on.
        """
        newest = record if record.epoch > self.record.epoch else self.record
        self.record = replace(
            newest,
            in_sync=record.in_sync,
            electable=record.electable,
            renewals=max(record.renewals, self.record.renewals),
            shown=record.shown.raised(self.record.shown),
        )

    def is_release(self, record: LeaseRecord | None) -> bool:
        """Whether a reading shows that our release was written after all."""
        return record is not None and record == self._releasing
