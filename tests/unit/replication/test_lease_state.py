from __future__ import annotations

from dataclasses import replace

from cometmq.replication.lease import LeaseRecord, ReplicaId
from cometmq.replication.lease_state import LeaseState
from cometmq.replication.watermarks import HighWatermarks

W, A, B = ReplicaId(0, "store-0"), ReplicaId(1, "store-1"), ReplicaId(2, "store-2")
HELD = LeaseRecord("g1", 0, "store-0", "host-0:1", 4, in_sync=(W, A), electable=(W, A))


def never(replica_id: ReplicaId) -> float:
    return 0.0


def test_a_tenure_knows_its_own() -> None:
    state = LeaseState(HELD)
    assert state.saw(HELD, 0.0)
    assert state.saw(state.renewal(), 0.0)
    assert not state.saw(replace(HELD, holder_id=1, holder_store_id="store-1"), 0.0)
    assert not state.saw(replace(HELD, epoch=5), 0.0), "a later incarnation"


def test_sets_that_somebody_else_wrote_in_our_name_count_at_once() -> None:
    """A process of ours that has ended may have had a write on its way."""
    state = LeaseState(HELD)
    tried = state.with_sets((W,), (W,))
    state.sent(tried, 0.0)
    late = replace(HELD, renewals=7, in_sync=(W, B), electable=(W, A, B))
    assert state.saw(late, 0.0)
    assert state.must_acknowledge() == {W, B}
    assert state.electable_others() == {A, B}
    assert not state.settled, "what we tried may still be done"
    assert state.renewal().renewals > 7
    state.written(tried)
    assert state.must_acknowledge() == {W}


def test_an_old_record_in_our_name_takes_no_epoch_back() -> None:
    state = LeaseState(HELD)
    begun = state.begun([(5, 70)], "host-0:2")
    state.sent(begun, 0.0)
    state.written(begun)
    assert state.saw(replace(HELD, in_sync=(W, B), electable=(W, B)), 1.0)
    assert (state.record.epoch, state.record.holder_address) == (5, "host-0:2")
    assert state.must_acknowledge() == {W, B}


def test_every_record_tells_what_consumers_see() -> None:
    shown = [HighWatermarks()]
    state = LeaseState(replace(HELD, shown=HighWatermarks(9, 4, 4)), lambda: shown[-1])
    assert state.renewal().shown == (9, 4, 4), "of a writer before"
    shown.append(HighWatermarks(12, 3, 5))
    for record in (state.renewal(), state.with_sets((W,), (W,)), state.release(1, 100)):
        assert record.shown == (12, 4, 5)


def test_a_lost_lease_is_written_again_while_no_other_member_can_have_held_it() -> None:
    state = LeaseState(HELD)
    assert not state.saw(None, 0.0), "how old what we read is, nobody knows"
    renewal = state.renewal()
    state.sent(renewal, 10.0)
    state.written(renewal)
    assert state.saw(None, 10.0 + HELD.duration_s - 0.1)
    assert not state.saw(None, 10.0 + HELD.duration_s)
    alone = replace(HELD, in_sync=(W,), electable=(W,))
    assert LeaseState(alone).saw(None, 0.0)


def test_a_tenure_begins_with_its_epoch() -> None:
    state = LeaseState(replace(HELD, opened=False))
    begun = state.begun([(3, 0), (5, 70)], "host-0:2")
    assert (begun.epoch, begun.holder_address, begun.opened) == (5, "host-0:2", True)
    assert begun.epochs == ((5, 70, 3),)
    state.sent(begun, 0.0)
    assert state.saw(begun, 0.0), "the answer may be lost"
    assert state.record == begun


def test_a_writer_that_may_have_released_its_lease_is_not_the_only_one() -> None:
    """It answered lock renewals while its successor wrote."""
    state = LeaseState(HELD)
    renewed = state.renewal()
    state.sent(renewed, 0.0)
    state.written(renewed)
    assert state.is_valid(0.1, never)
    released = state.release(1, 100)
    state.sent(released, 0.2)
    assert not state.is_valid(0.3, never), "it may have been written"
    again = state.renewal()
    state.sent(again, 0.4)
    state.written(again)
    assert state.is_valid(0.5, never), "the release is void"
    state.sent(released, 0.6)
    state.written(released)
    assert not state.is_valid(0.7, never)


def test_a_release_is_known_again() -> None:
    state = LeaseState(HELD)
    released = state.release(1, 100)
    assert (released.released, released.transfer_to, released.log_end) == (True, 1, 100)
    assert state.is_release(released)
    assert not state.saw(released, 0.0)
    assert not state.is_release(HELD)


# --- writes without an answer ---------------------------------------------------------------------


def test_who_is_added_counts_from_the_attempt_on() -> None:
    state = LeaseState(HELD)
    state.sent(state.with_sets((W, A, B), (W, A, B)), 0.0)
    assert state.must_acknowledge() == {W, A, B}
    assert state.electable_others() == {A, B}


def test_who_is_removed_counts_until_it_is_known() -> None:
    state = LeaseState(HELD)
    smaller = state.with_sets((W,), (W,))
    state.sent(smaller, 0.0)
    assert (set(state.must_acknowledge()), set(state.electable_others()), state.settled) == (
        {W, A},
        {A},
        False,
    )
    state.written(smaller)
    assert (set(state.must_acknowledge()), set(state.electable_others()), state.settled) == (
        {W},
        set(),
        True,
    )


def test_reading_what_we_have_written_settles_it() -> None:
    state = LeaseState(HELD)
    smaller = state.with_sets((W,), (W,))
    state.sent(smaller, 0.0)
    assert state.saw(HELD, 0.0), "it may still be carried out"
    assert state.must_acknowledge() == {W, A}
    assert state.saw(smaller, 0.0)
    assert state.must_acknowledge() == {W}


def test_a_later_write_of_ours_makes_an_earlier_one_void() -> None:
    state = LeaseState(HELD)
    state.sent(state.with_sets((W, A, B), (W, A, B)), 0.0)
    renewal = state.renewal()
    state.sent(renewal, 1.0)
    state.written(renewal)
    assert state.must_acknowledge() == {W, A}


def test_a_refused_write_counts_no_more_but_others_may() -> None:
    state = LeaseState(HELD)
    state.sent(state.with_sets((W, A, B), (W, A, B)), 0.0)
    second = state.renewal()
    state.sent(second, 1.0)
    state.refused(second)
    assert state.must_acknowledge() == {W, A, B}


def test_every_attempt_is_another_record() -> None:
    state = LeaseState(HELD)
    first = state.renewal()
    state.sent(first, 0.0)
    assert state.renewal() != first


# --- validity -------------------------------------------------------------------------------------


def test_a_writer_is_valid_for_a_duration_from_when_it_sent_its_renewal() -> None:
    state = LeaseState(HELD)
    assert not state.is_valid(0.0, never), "how old the reading is nobody knows"
    renewal = state.renewal()
    state.sent(renewal, 10.0)
    assert not state.is_valid(10.0, never)
    state.written(renewal)
    assert state.is_valid(15.93, never)
    assert not state.is_valid(15.94, never), "less what clocks may differ"


def test_promises_of_all_rivals_do_as_well() -> None:
    state = LeaseState(replace(HELD, electable=(W, A, B)))
    promises = {A: 20.0, B: 19.0}
    assert state.is_valid(18.0, promises.__getitem__)
    assert not state.is_valid(19.0, promises.__getitem__)


def test_without_rivals_a_writer_is_always_valid() -> None:
    state = LeaseState(replace(HELD, in_sync=(W,), electable=(W,)))
    assert state.is_valid(1e9, never)
    state.sent(state.with_sets((W,), (W, B)), 0.0)
    assert not state.is_valid(1e9, never)


def test_an_epoch_may_be_passed_over() -> None:
    """Name servers remember one; it stands in the lease before the next is opened."""
    state = LeaseState(HELD)
    passed = state.passed_over(13)
    assert (passed.epoch, passed.holder, passed.opened) == (13, HELD.holder, True)
    state.sent(passed, 0.0)
    assert state.saw(passed, 0.0)
    assert (state.settled, state.record.epoch) == (True, 13)
    assert state.passed_over(7).epoch == 13
