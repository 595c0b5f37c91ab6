from __future__ import annotations

from dataclasses import replace

import pytest

from cometmq.replication.election import (
    LAGGARD_WAIT_S,
    OFF_CLOCK_DURATIONS,
    OPENING_DURATIONS,
    Answers,
    Ask,
    Election,
    Follow,
    Lead,
    Peer,
    ReplicaStatus,
    Step,
    Write,
)
from cometmq.replication.epoch_history import EpochBranch
from cometmq.replication.lease import LeaseRecord, Reason, ReplicaId
from cometmq.replication.watermarks import HighWatermarks

DURATION_S = 6.0
W, A, B = ReplicaId(0, "store-0"), ReplicaId(1, "store-1"), ReplicaId(2, "store-2")
HELD = LeaseRecord("g1", 0, "store-0", "host-0:1", 4)
SHARED = replace(HELD, in_sync=(W, A), electable=(W, A, B))
RELEASED = replace(SHARED, released=True, transfer_to=1, log_end=100)


def status(member_id: int = 1, store: str = "", **fields: object) -> ReplicaStatus:
    store = store or f"store-{member_id}"
    me = ReplicaStatus("g1", member_id, store, f"host-{member_id}:1", 4, 100)
    return replace(me, **fields)  # type: ignore[arg-type]


def peer(member_id: int, epoch: int = 4, end: int = 100, *, writes: bool = False) -> Peer:
    return Peer(member_id, f"store-{member_id}", epoch, end, writes)


def after(
    record: LeaseRecord | None, me: ReplicaStatus, waited_s: float, answers: Answers | None = None
) -> Step:
    """What the member does when it has watched the record for so long."""
    election = Election(DURATION_S)
    election.saw(record, me, 1000.0)
    return election.saw(record, me, 1000.0 + waited_s, answers)


def reason(step: Step) -> Reason | None:
    """Why the member may lead; None: it may not."""
    match step:
        case Lead():
            return step.reason
        case Write():
            return step.done.reason
        case _:
            return None


def test_a_member_that_cannot_read_the_groups_state_leads_by_force_alone() -> None:
    for me, expected in (
        (status(1), Reason.FAILOVER),
        (status(1, reads_state=False), None),
        (status(1, reads_state=False, forced=True), Reason.FORCED),
    ):
        assert reason(after(SHARED, me, 60.0)) is expected


# --- the holder comes back ------------------------------------------------------------------------


def test_the_recorded_holder_leads_at_once() -> None:
    assert reason(after(SHARED, status(0), 0.0)) is Reason.RESTART


def test_a_holder_that_died_before_it_opened_an_epoch_leads_for_its_first_reason() -> None:
    taken = replace(SHARED, opened=False, reason=Reason.FAILOVER.value)
    assert reason(after(taken, status(0), 0.0)) is Reason.FAILOVER


def test_a_holder_that_opened_an_epoch_in_secret_tells_of_it_before_the_next() -> None:
    step = after(SHARED, status(0, epoch=5), 0.0)
    assert isinstance(step, Write)
    assert (step.record.epoch, step.record.in_sync) == (5, SHARED.in_sync)
    assert step.done == Lead(Reason.RESTART, step.record)


def test_a_holder_that_was_alone_leads_though_it_has_lost_something() -> None:
    step = after(HELD, status(0, "new", former_store_id="store-0"), 0.0)
    assert reason(step) is Reason.UNCLEAN


def test_others_wait_longer_for_who_has_taken_it_and_opens_its_log() -> None:
    opening = replace(SHARED, opened=False, reason=Reason.FAILOVER.value)
    assert reason(after(opening, status(1), OPENING_DURATIONS * DURATION_S - 0.1)) is None
    step = after(opening, status(1), OPENING_DURATIONS * DURATION_S)
    assert reason(step) is Reason.FAILOVER


def test_a_holder_that_comes_back_says_so_before_it_opens() -> None:
    step = after(SHARED, status(0), 0.0)
    assert isinstance(step, Write)
    assert (step.record.opened, step.record.reason) == (False, "restart")
    assert after(step.record, status(0), 0.0) == Lead(Reason.RESTART, step.record)


# --- the holder falls silent ----------------------------------------------------------------------


def test_a_member_whose_clock_is_off_leaves_the_lease_to_others_but_not_for_ever() -> None:
    off = status(1, clock_is_off=True)
    assert {one.member_id for one in SHARED.electable} == {0, 1, 2}
    assert reason(after(SHARED, off, DURATION_S)) is None
    assert reason(after(SHARED, off, (1 + OFF_CLOCK_DURATIONS) * DURATION_S)) is Reason.FAILOVER
    alone = replace(SHARED, electable=SHARED.in_sync)
    assert {one.member_id for one in alone.electable} == {0, 1}
    assert reason(after(alone, off, DURATION_S)) is Reason.FAILOVER, "no other can"
    assert reason(after(SHARED, status(0, clock_is_off=True), 0.0)) is Reason.RESTART


@pytest.mark.parametrize(
    ("me", "waited_s", "expected"),
    [
        (status(1), DURATION_S - 0.1, None),
        (status(1), DURATION_S, Reason.FAILOVER),
        (status(1, promised_until_s=1010.0), DURATION_S, None),
        (status(1, promised_until_s=1010.0), 10.0, Reason.FAILOVER),
        (status(2), DURATION_S, None),  # is not in sync
        (status(2), DURATION_S + LAGGARD_WAIT_S, Reason.FAILOVER),
        (status(1, "another"), 1e9, None),
        (status(3), 1e9, None),
    ],
)
def test_who_is_electable_takes_over_when_the_lease_is_abandoned(
    me: ReplicaStatus, waited_s: float, expected: Reason | None
) -> None:
    assert reason(after(SHARED, me, waited_s)) is expected


def test_a_renewal_begins_the_waiting_anew() -> None:
    election, me = Election(DURATION_S), status(1)
    election.saw(SHARED, me, 0.0)
    renewed = replace(SHARED, renewals=1)
    assert election.saw(renewed, me, DURATION_S) == Follow("host-0:1", DURATION_S)


def test_the_holders_duration_counts_when_it_is_longer() -> None:
    longer = replace(SHARED, duration_s=60.0)
    assert reason(after(longer, status(1), DURATION_S)) is None
    assert reason(after(longer, status(1), 60.0)) is Reason.FAILOVER


def test_whoever_takes_over_keeps_those_in_sync_but_the_old_writer() -> None:
    epochs = (EpochBranch(1, 0, 0), EpochBranch(4, 50, 1))
    step = after(replace(SHARED, in_sync=(W, A, B), epochs=epochs), status(1), DURATION_S)
    assert isinstance(step, Write)
    assert step.record.in_sync == step.record.electable == (A, B)
    assert step.record.epochs == epochs
    # The old writer may have opened epoch 5 without having come to say so.
    assert (step.record.holder, step.record.epoch, step.record.opened) == (A, 5, False)


def test_it_is_told_when_to_look_again() -> None:
    assert after(SHARED, status(1), 2.0) == Follow("host-0:1", DURATION_S - 2.0)
    assert after(SHARED, status(3), 1e9) == Follow("host-0:1")


# --- a release ------------------------------------------------------------------------------------


def test_a_released_lease_is_its_new_holders_when_it_has_everything() -> None:
    assert reason(after(RELEASED, status(1), 0.0)) is Reason.HANDOVER
    assert reason(after(RELEASED, status(1, log_end=99), 0.0)) is None
    assert reason(after(RELEASED, status(0), 0.0)) is None


def test_when_nobody_comes_others_may_take_it() -> None:
    assert reason(after(RELEASED, status(0), DURATION_S)) is Reason.HANDOVER
    assert reason(after(RELEASED, status(0, log_end=99), DURATION_S)) is Reason.FAILOVER
    assert reason(after(RELEASED, status(2), DURATION_S)) is Reason.FAILOVER
    assert reason(after(RELEASED, status(3), 1e9)) is None


# --- ends of logs were lost -----------------------------------------------------------------------

LOST = status(1, "new", former_store_id="store-1")


def test_who_has_lost_something_asks_those_who_were_in_sync_with_it() -> None:
    waiting = after(SHARED, LOST, DURATION_S - 0.1)
    assert isinstance(waiting, Follow)
    assert waiting.look_again_s == pytest.approx(1.1)
    assert after(SHARED, LOST, 10.0) == Ask(frozenset({0}))
    assert after(SHARED, status(0, "new", former_store_id="store-0"), 0.0) == Ask(frozenset({1}))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (replace(peer(0), store_id="new too"), Reason.UNCLEAN),  # as long: either will do
        (replace(peer(0, end=101), store_id="new too"), None),
        (replace(peer(0, end=99), store_id="new too"), Reason.UNCLEAN),
        (replace(peer(0, epoch=3, end=900), store_id="new too"), Reason.UNCLEAN),
        (replace(peer(0, epoch=5, end=0), store_id="new too"), None),
        (peer(0, end=99), None),  # it has lost nothing: it shall lead
        (replace(peer(0, end=99, writes=True), store_id="new too"), None),
    ],
)
def test_the_longest_log_leads(answer: Peer, expected: Reason | None) -> None:
    step = after(SHARED, LOST, 10.0, {0: answer})
    assert reason(step) is expected
    if isinstance(step, Write):
        assert step.record.in_sync == (ReplicaId(1, "new"),)


def test_without_all_answers_nobody_leads() -> None:
    shared = replace(SHARED, in_sync=(W, A, B))
    found = replace(peer(0, end=1), store_id="new too")
    assert reason(after(shared, LOST, 10.0, {0: found})) is None


# --- no lease -------------------------------------------------------------------------------------

OTHERS = frozenset({0, 2})


def test_the_first_writer_is_a_store_that_never_had_one() -> None:
    assert reason(after(None, status(epoch=0, log_end=0), 0.0)) is Reason.FIRST
    assert reason(after(None, status(), 1e9)) is None


def test_with_peers_a_group_begins_when_none_of_them_ever_had_a_writer() -> None:
    me = status(epoch=0, log_end=0, peers=OTHERS)
    assert after(None, me, 0.0) == Ask(OTHERS)
    none = {0: peer(0, 0, 0), 2: peer(2, 0, 0)}
    assert reason(after(None, me, 0.0, none)) is Reason.FIRST
    assert reason(after(None, me, 0.0, {0: none[0]})) is None
    assert reason(after(None, me, 0.0, {**none, 0: peer(0, 1, 5)})) is None


def test_a_lost_lease_is_the_longest_logs() -> None:
    me = status(peers=OTHERS)
    shorter = {0: peer(0, end=99), 2: peer(2, epoch=3, end=900)}
    step = after(None, me, 0.0, shorter)
    assert reason(step) is Reason.RECREATED
    assert isinstance(step, Write)
    assert step.record.epoch == 4
    assert reason(after(None, me, 0.0, {**shorter, 2: peer(2, writes=True)})) is None
    assert reason(after(None, me, 0.0, {**shorter, 2: peer(2, end=101)})) is None
    assert reason(after(None, me, 0.0, {0: shorter[0]})) is None


def test_who_writes_a_lost_lease_anew_remembers_the_epochs_that_stood_there() -> None:
    seen = (EpochBranch(2, 0, 0), EpochBranch(3, 40, 2), EpochBranch(6, 30, 2))
    me = status(peers=OTHERS, epochs=((2, 0), (4, 50)))
    election = Election(DURATION_S)
    election.saw(replace(SHARED, epoch=6, epochs=seen, renewals=5), me, 0.0)
    election.saw(None, me, 1.0)
    step = election.saw(None, me, 1.0, {0: peer(0), 2: peer(2)})
    assert reason(step) is Reason.RECREATED
    assert isinstance(step, Write)
    assert step.record.epochs == seen, "who lacks a writer that is gone has to hear of it"
    assert step.record.epoch == 7, "its holder may have opened one more"
    assert step.record.in_sync == (A,), "who has everything is not known any more"


def test_who_never_saw_the_lease_records_what_its_store_knows() -> None:
    me = status(peers=OTHERS, epochs=((2, 0), (4, 50)))
    known = (EpochBranch(2, 0, 0), EpochBranch(4, 50, 2))
    for step in (
        after(None, me, 0.0, {0: peer(0), 2: peer(2)}),
        after(None, replace(me, forced=True), DURATION_S, {}),
        after(SHARED, me, DURATION_S),  # as an early release wrote it, without a list
    ):
        assert isinstance(step, Write)
        assert step.record.epochs == known


@pytest.mark.parametrize("peers", [None, OTHERS])
def test_a_newcomer_that_has_seen_a_lease_does_not_begin_the_group(
    peers: frozenset[int] | None,
) -> None:
    """Its writer is about to write it anew; or nobody has anything, and positions are fenced."""
    me = status(3, epoch=0, log_end=0, peers=peers)
    election = Election(DURATION_S)
    election.saw(HELD, me, 0.0)
    step = election.saw(None, me, 1.0, None if peers is None else {n: peer(n, 0, 0) for n in peers})
    assert reason(step) is (None if peers is None else Reason.RECREATED)


def test_an_epoch_is_above_all_that_generations_were_ever_counted_in() -> None:
    """Else two that go on from the same log would give out the same generation."""
    by_the_clock = 1_790_000_000_000 >> 32
    me = status(counted_in=by_the_clock)
    step = after(SHARED, me, DURATION_S)
    assert isinstance(step, Write)
    assert step.record.epoch == by_the_clock
    again = after(HELD, status(0, counted_in=by_the_clock), 0.0)
    assert isinstance(again, Write)
    assert (again.record.epoch, again.reason) == (by_the_clock, Reason.RESTART)
    opening = replace(again.record, opened=False)
    assert after(opening, status(0, counted_in=by_the_clock), 0.0) == Lead(Reason.RESTART, opening)


def test_who_has_counted_further_has_no_longer_log() -> None:
    me = status(peers=OTHERS, counted_in=417)
    longer = {0: peer(0, epoch=5), 2: peer(2)}
    assert reason(after(None, me, 0.0, longer)) is None


# --- by force -------------------------------------------------------------------------------------


def test_force_waits_for_the_lease_to_be_abandoned() -> None:
    me = status(3, forced=True)
    assert reason(after(SHARED, me, DURATION_S)) is None
    assert reason(after(SHARED, me, DURATION_S + LAGGARD_WAIT_S)) is Reason.FORCED
    assert reason(after(None, me, DURATION_S - 0.1)) is None
    assert reason(after(None, me, DURATION_S)) is Reason.FORCED


def test_force_without_a_lease_asks_who_can_be_asked() -> None:
    me = status(3, forced=True, peers=OTHERS)
    assert after(None, me, DURATION_S) == Ask(OTHERS)
    step = after(None, me, DURATION_S, {0: peer(0, epoch=9)})
    assert reason(step) is Reason.FORCED
    assert isinstance(step, Write)
    assert step.record.epoch == 9, "no epoch is used twice"
    assert reason(after(None, me, DURATION_S, {0: peer(0, writes=True)})) is None


def test_force_takes_no_lease_from_a_writer_that_answers() -> None:
    me, waited_s = status(3, forced=True, peers=OTHERS), DURATION_S + LAGGARD_WAIT_S
    assert after(SHARED, me, waited_s) == Ask(OTHERS)
    assert reason(after(SHARED, me, waited_s, {0: peer(0, writes=True)})) is None
    assert reason(after(SHARED, me, waited_s, {1: peer(1)})) is Reason.FORCED


def test_the_old_writer_can_be_forced_when_others_never_answer() -> None:
    me = status(0, "new", former_store_id="store-0", forced=True)
    assert after(SHARED, me, 0.0) == Ask(frozenset({1}))
    assert reason(after(SHARED, me, 10.0, {})) is Reason.FORCED


# --- what consumers have seen -------------------------------------------------------------------


def shown(
    record: LeaseRecord | None, me: ReplicaStatus, answers: Answers | None = None
) -> HighWatermarks:
    """By which marks, says the lease that the member writes."""
    step = after(record, me, DURATION_S + LAGGARD_WAIT_S, answers)
    assert isinstance(step, Write), step
    return step.record.shown


def test_a_taker_tells_what_consumers_have_seen_as_far_as_anybody_knows() -> None:
    told = replace(SHARED, shown=HighWatermarks(90, 50, 40))
    assert shown(told, status()) == (90, 50, 40)
    assert shown(told, status(shown=HighWatermarks(60, 60, 30))) == (90, 60, 40)
    assert shown(replace(RELEASED, shown=HighWatermarks(90, 50, 40)), status()) == (90, 50, 40)


def test_what_was_lost_was_not_shown() -> None:
    told = replace(SHARED, shown=HighWatermarks(190, 180, 40), in_sync=(W,))
    me = status(0, "new", former_store_id="store-0")
    assert shown(told, me) == (100, 100, 40)


def test_of_a_log_that_the_lease_does_not_speak_of_it_tells_nothing() -> None:
    told = replace(HELD, shown=HighWatermarks(90, 50, 40))
    me = status(forced=True, shown=HighWatermarks(30, 20, 10))
    assert shown(told, me) == shown(None, me) == (30, 20, 10)


# --- promises -------------------------------------------------------------------------------------


def test_nothing_is_promised_while_a_write_may_still_be_carried_out() -> None:
    election, me = Election(DURATION_S), status(1)
    election.saw(SHARED, me, 0.0)
    promises = [election.may_promise]
    assert isinstance(election.saw(SHARED, me, DURATION_S), Write)
    promises.append(election.may_promise)
    election.saw(replace(SHARED, renewals=1), me, DURATION_S)
    promises.append(election.may_promise)
    assert promises == [True, False, True]


def test_nothing_is_promised_while_a_lost_lease_may_become_ours() -> None:
    election, me = Election(DURATION_S), status(epoch=0)
    assert isinstance(election.saw(None, me, 0.0), Write)
    assert not election.may_promise


def test_nothing_is_promised_while_a_write_is_open_that_we_would_not_try_again() -> None:
    election, me = Election(DURATION_S), status(peers=OTHERS)
    assert isinstance(election.saw(None, me, 0.0, {0: peer(0), 2: peer(2)}), Write)
    assert isinstance(election.saw(None, me, 1.0, {0: peer(0, writes=True), 2: peer(2)}), Follow)
    assert not election.may_promise, "it may still be carried out"


def test_a_write_without_an_answer_is_found_out_by_reading() -> None:
    election, me = Election(DURATION_S), status(1)
    step = election.saw(RELEASED, me, 0.0)
    assert isinstance(step, Write)
    assert election.saw(step.record, me, 1.0) == Lead(Reason.HANDOVER, step.record)
