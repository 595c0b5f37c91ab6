from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cometmq.replication.lease import (
    Candidacy,
    Follow,
    Lead,
    LeaseRecord,
    Reason,
    Standing,
    Tenure,
    Write,
)

DURATION_S = 15.0
HELD = LeaseRecord("g1", 0, "store-0", "host-0:1", 4)
RELEASED = replace(HELD, released=True, transfer_to=1, log_end=100)


def standing(member_id: int = 1, store: str = "", epoch: int = 4, log_end: int = 100) -> Standing:
    store = store or f"store-{member_id}"
    return Standing("g1", member_id, store, f"host-{member_id}:1", epoch, log_end)


def saw(record: LeaseRecord | None, me: Standing, now_s: float = 0.0) -> object:
    return Candidacy(DURATION_S).saw(record, me, now_s)


def reason(record: LeaseRecord | None, me: Standing) -> Reason | None:
    """Why the member may lead; None: it may not."""
    candidacy = Candidacy(DURATION_S)
    step = candidacy.saw(record, me, 0.0)
    return candidacy.written().reason if isinstance(step, Write) else None


def test_the_first_writer_is_a_store_that_never_had_one() -> None:
    assert reason(None, standing(epoch=0, log_end=0)) is Reason.FIRST
    assert reason(None, standing(epoch=1)) is None


def test_the_recorded_holder_leads_at_once() -> None:
    assert reason(HELD, standing(0)) is Reason.RESTART


@pytest.mark.parametrize("me", [standing(1), standing(0, "another"), standing(1, "store-0")])
def test_nobody_else_does(me: Standing) -> None:
    assert saw(HELD, me, 1e9) == Follow("host-0:1")


def test_a_released_lease_is_its_new_holders_when_it_has_everything() -> None:
    assert reason(RELEASED, standing(1)) is Reason.HANDOVER
    assert saw(RELEASED, standing(1, log_end=99)) == Follow("")
    assert saw(RELEASED, standing(2)) == Follow("")
    assert saw(RELEASED, standing(0)) == Follow("")


def test_whoever_released_it_takes_it_back_when_nobody_comes() -> None:
    candidacy, me = Candidacy(DURATION_S), standing(0)
    assert candidacy.saw(RELEASED, me, 1000.0) == Follow("")
    assert candidacy.saw(RELEASED, me, 1000.0 + DURATION_S - 0.1) == Follow("")
    assert isinstance(candidacy.saw(RELEASED, me, 1000.0 + DURATION_S), Write)
    assert candidacy.written().reason is Reason.HANDOVER


def test_a_lease_that_changes_meanwhile_is_waited_for_anew() -> None:
    candidacy, me = Candidacy(DURATION_S), standing(0)
    candidacy.saw(RELEASED, me, 0.0)
    later = replace(RELEASED, renewals=7)
    assert candidacy.saw(later, me, DURATION_S + 1) == Follow("")


def test_a_write_without_an_answer_is_found_out_by_reading() -> None:
    candidacy, me = Candidacy(DURATION_S), standing(1)
    step = candidacy.saw(RELEASED, me, 0.0)
    assert isinstance(step, Write)
    assert candidacy.saw(step.record, me, 1.0) == Lead(Reason.HANDOVER, step.record)
    assert step.record.epoch == 4
    assert not step.record.released


def test_a_tenure_knows_its_own() -> None:
    tenure = Tenure(HELD)
    assert tenure.holds(HELD)
    assert tenure.holds(tenure.renewal())
    assert tenure.holds(None), "a lost lease is written anew"
    assert not tenure.holds(replace(HELD, holder_id=1))
    assert not tenure.holds(replace(HELD, holder_store_id="another"))
    assert not tenure.holds(replace(HELD, epoch=5)), "a later incarnation"


def test_a_tenure_begins_with_its_epoch() -> None:
    tenure = Tenure(HELD)
    begun = tenure.begun(5, "host-0:2")
    assert (begun.epoch, begun.holder_address) == (5, "host-0:2")
    assert tenure.holds(begun), "the answer may be lost"
    tenure.written(begun)
    assert tenure.record == begun


def test_a_release_is_known_again() -> None:
    tenure = Tenure(HELD)
    released = tenure.release(1, 100)
    assert (released.released, released.transfer_to, released.log_end) == (True, 1, 100)
    assert tenure.is_release(released)
    assert not tenure.holds(released)
    assert not tenure.is_release(HELD)


# --- many members, any order of events ----------------------------------------------------------


@dataclass
class Cell:
    """A compare-and-swap register."""

    record: LeaseRecord | None = None
    version: int = 0

    def write(self, record: LeaseRecord, version: int) -> bool:
        if version != self.version:
            return False
        self.record, self.version = record, version + 1
        return True


@dataclass
class Candidate:
    """A process of a member; ``store`` outlives it."""

    member_id: int
    store: Store
    candidacy: Candidacy = field(default_factory=lambda: Candidacy(DURATION_S))
    read: tuple[LeaseRecord | None, int] = (None, 0)
    wanted: LeaseRecord | None = None
    wanted_over: int = 0  # version of the reading that it was decided on
    tenure: Tenure | None = None  # it leads

    def standing(self) -> Standing:
        store = self.store
        return Standing("g1", self.member_id, store.id, "", store.epoch, store.log_end)


@dataclass
class Store:
    id: str
    epoch: int = 0
    log_end: int = 0


class Members(RuleBasedStateMachine):
    """Three members. Whoever leads writes; whoever follows copies, or not."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = Cell()
        self.now_s = 0.0
        self.stores = [Store(f"store-{n}") for n in range(3)]
        self.candidates: list[Candidate] = []
        self.reigns: list[tuple[int, int]] = []  # epoch, where it began

    @initialize()
    def start(self) -> None:
        self.candidates = [Candidate(n, store) for n, store in enumerate(self.stores)]

    any_member = st.integers(0, 2)

    @rule(n=any_member)
    def read(self, n: int) -> None:
        member = self.candidates[n]
        member.read = (self.cell.record, self.cell.version)

    @rule(n=any_member)
    def decide(self, n: int) -> None:
        member = self.candidates[n]
        if member.tenure is not None:
            return
        step = member.candidacy.saw(member.read[0], member.standing(), self.now_s)
        member.wanted = step.record if isinstance(step, Write) else None
        member.wanted_over = member.read[1]  # what is read later does not count
        if isinstance(step, Lead):
            self.lead(member, step)

    @rule(n=any_member, answered=st.booleans())
    def swap(self, n: int, answered: bool) -> None:
        """Without an answer the member goes on as if nothing was known."""
        member = self.candidates[n]
        if member.wanted is None or member.tenure is not None:
            return
        done = self.cell.write(member.wanted, member.wanted_over)
        member.wanted = None
        if done and answered:
            self.lead(member, member.candidacy.written())

    def lead(self, member: Candidate, lead: Lead) -> None:
        """Open an epoch, write, and say so in the lease; all of it at once."""
        record = self.cell.record
        if record is None or (record.holder_id, record.released) != (member.member_id, False):
            # A process that was told late that it leads looks at the lease before it opens.
            return
        member.tenure = Tenure(record)
        member.store.epoch = max(record.epoch, member.store.epoch) + 1
        self.reigns.append((member.store.epoch, member.store.log_end))
        begun = member.tenure.begun(member.store.epoch, "")
        assert self.cell.write(begun, self.cell.version)
        member.tenure.written(begun)

    @rule(n=any_member)
    def write_log(self, n: int) -> None:
        if self.candidates[n].tenure is not None:
            self.stores[n].log_end += 10

    @rule(n=any_member)
    def copy(self, n: int) -> None:
        member = self.candidates[n]
        writers = [c for c in self.candidates if c.tenure is not None and c is not member]
        if member.tenure is None and writers:
            member.store.log_end = writers[0].store.log_end
            member.store.epoch = writers[0].store.epoch

    @rule(n=any_member, to=any_member)
    def hand_over(self, n: int, to: int) -> None:
        member = self.candidates[n]
        if member.tenure is None or n == to:
            return
        if self.stores[to].log_end != self.stores[n].log_end:
            return
        released = member.tenure.release(to, self.stores[n].log_end)
        assert self.cell.write(released, self.cell.version)
        self.candidates[n] = Candidate(n, self.stores[n])

    @rule(n=any_member)
    def restart(self, n: int) -> None:
        self.candidates[n] = Candidate(n, self.stores[n])

    @rule(seconds=st.floats(0.1, 20.0))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @invariant()
    def never_two_writers(self) -> None:
        leading = [c for c in self.candidates if c.tenure is not None]
        assert len(leading) <= 1
        for member in leading:
            assert self.cell.record is not None
            assert self.cell.record.holder_id == member.member_id

    @invariant()
    def every_epoch_is_used_once_and_the_log_never_gets_shorter(self) -> None:
        for before, after in zip(self.reigns, self.reigns[1:], strict=False):
            assert before[0] < after[0]
            assert before[1] <= after[1]


TestMembers = Members.TestCase
