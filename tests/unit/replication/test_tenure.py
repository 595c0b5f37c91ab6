from __future__ import annotations

from dataclasses import replace

from cometmq.replication.lease import LeaseRecord, Seat
from cometmq.replication.tenure import Tenure
from cometmq.replication.watermarks import Marks

W, A, B = Seat(0, "store-0"), Seat(1, "store-1"), Seat(2, "store-2")
HELD = LeaseRecord("g1", 0, "store-0", "host-0:1", 4, in_sync=(W, A), electable=(W, A))


def never(seat: Seat) -> float:
    return 0.0


def test_a_tenure_knows_its_own() -> None:
    tenure = Tenure(HELD)
    assert tenure.saw(HELD, 0.0)
    assert tenure.saw(tenure.renewal(), 0.0)
    assert not tenure.saw(replace(HELD, holder_id=1, holder_store_id="store-1"), 0.0)
    assert not tenure.saw(replace(HELD, epoch=5), 0.0), "a later incarnation"


def test_sets_that_somebody_else_wrote_in_our_name_count_at_once() -> None:
    """A process of ours that has ended may have had a write on its way."""
    tenure = Tenure(HELD)
    tried = tenure.with_sets((W,), (W,))
    tenure.sent(tried, 0.0)
    late = replace(HELD, renewals=7, in_sync=(W, B), electable=(W, A, B))
    assert tenure.saw(late, 0.0)
    assert tenure.bounding() == {W, B}
    assert tenure.rivals() == {A, B}
    assert not tenure.settled, "what we tried may still be done"
    assert tenure.renewal().renewals > 7
    tenure.written(tried)
    assert tenure.bounding() == {W}


def test_an_old_record_in_our_name_takes_no_epoch_back() -> None:
    tenure = Tenure(HELD)
    begun = tenure.begun([(5, 70)], "host-0:2")
    tenure.sent(begun, 0.0)
    tenure.written(begun)
    assert tenure.saw(replace(HELD, in_sync=(W, B), electable=(W, B)), 1.0)
    assert (tenure.record.epoch, tenure.record.holder_address) == (5, "host-0:2")
    assert tenure.bounding() == {W, B}


def test_every_record_tells_what_consumers_see() -> None:
    tenure = Tenure(replace(HELD, shown=Marks(9, 4, 4)))
    assert tenure.renewal().shown == (9, 4, 4), "of a writer before"
    tenure.shown = lambda: Marks(12, 3, 5)
    for record in (tenure.renewal(), tenure.with_sets((W,), (W,)), tenure.release(1, 100)):
        assert record.shown == (12, 4, 5)


def test_a_lost_lease_is_written_anew_while_nobody_else_can_have_held_it() -> None:
    tenure = Tenure(HELD)
    assert not tenure.saw(None, 0.0), "how old what we read is, nobody knows"
    renewal = tenure.renewal()
    tenure.sent(renewal, 10.0)
    tenure.written(renewal)
    assert tenure.saw(None, 10.0 + HELD.duration_s - 0.1)
    assert not tenure.saw(None, 10.0 + HELD.duration_s)
    alone = replace(HELD, in_sync=(W,), electable=(W,))
    assert Tenure(alone).saw(None, 0.0)


def test_a_tenure_begins_with_its_epoch() -> None:
    tenure = Tenure(replace(HELD, opened=False))
    begun = tenure.begun([(3, 0), (5, 70)], "host-0:2")
    assert (begun.epoch, begun.holder_address, begun.opened) == (5, "host-0:2", True)
    assert begun.epochs == ((5, 70, 3),)
    tenure.sent(begun, 0.0)
    assert tenure.saw(begun, 0.0), "the answer may be lost"
    assert tenure.record == begun


def test_a_release_is_known_again() -> None:
    tenure = Tenure(HELD)
    released = tenure.release(1, 100)
    assert (released.released, released.transfer_to, released.log_end) == (True, 1, 100)
    assert tenure.is_release(released)
    assert not tenure.saw(released, 0.0)
    assert not tenure.is_release(HELD)


# --- writes without an answer ---------------------------------------------------------------------


def test_who_is_added_counts_from_the_attempt_on() -> None:
    tenure = Tenure(HELD)
    tenure.sent(tenure.with_sets((W, A, B), (W, A, B)), 0.0)
    assert tenure.bounding() == {W, A, B}
    assert tenure.rivals() == {A, B}


def test_who_is_removed_counts_until_it_is_known() -> None:
    tenure = Tenure(HELD)
    smaller = tenure.with_sets((W,), (W,))
    tenure.sent(smaller, 0.0)
    assert (set(tenure.bounding()), set(tenure.rivals()), tenure.settled) == ({W, A}, {A}, False)
    tenure.written(smaller)
    assert (set(tenure.bounding()), set(tenure.rivals()), tenure.settled) == ({W}, set(), True)


def test_reading_what_we_have_written_settles_it() -> None:
    tenure = Tenure(HELD)
    smaller = tenure.with_sets((W,), (W,))
    tenure.sent(smaller, 0.0)
    assert tenure.saw(HELD, 0.0), "it may still be carried out"
    assert tenure.bounding() == {W, A}
    assert tenure.saw(smaller, 0.0)
    assert tenure.bounding() == {W}


def test_a_later_write_of_ours_makes_an_earlier_one_void() -> None:
    tenure = Tenure(HELD)
    tenure.sent(tenure.with_sets((W, A, B), (W, A, B)), 0.0)
    renewal = tenure.renewal()
    tenure.sent(renewal, 1.0)
    tenure.written(renewal)
    assert tenure.bounding() == {W, A}


def test_a_refused_write_counts_no_more_but_others_may() -> None:
    tenure = Tenure(HELD)
    tenure.sent(tenure.with_sets((W, A, B), (W, A, B)), 0.0)
    second = tenure.renewal()
    tenure.sent(second, 1.0)
    tenure.refused(second)
    assert tenure.bounding() == {W, A, B}


def test_every_attempt_is_another_record() -> None:
    tenure = Tenure(HELD)
    first = tenure.renewal()
    tenure.sent(first, 0.0)
    assert tenure.renewal() != first


# --- validity -------------------------------------------------------------------------------------


def test_a_writer_is_valid_for_a_duration_from_when_it_sent_its_renewal() -> None:
    tenure = Tenure(HELD)
    assert not tenure.is_valid(0.0, never), "how old the reading is nobody knows"
    renewal = tenure.renewal()
    tenure.sent(renewal, 10.0)
    assert not tenure.is_valid(10.0, never)
    tenure.written(renewal)
    assert tenure.is_valid(15.93, never)
    assert not tenure.is_valid(15.94, never), "less what clocks may differ"


def test_promises_of_all_rivals_do_as_well() -> None:
    tenure = Tenure(replace(HELD, electable=(W, A, B)))
    promises = {A: 20.0, B: 19.0}
    assert tenure.is_valid(18.0, promises.__getitem__)
    assert not tenure.is_valid(19.0, promises.__getitem__)


def test_without_rivals_a_writer_is_always_valid() -> None:
    tenure = Tenure(replace(HELD, in_sync=(W,), electable=(W,)))
    assert tenure.is_valid(1e9, never)
    tenure.sent(tenure.with_sets((W,), (W, B)), 0.0)
    assert not tenure.is_valid(1e9, never)


def test_an_epoch_may_be_passed_over() -> None:
    """Name servers remember one; it stands in the lease before the next is opened."""
    tenure = Tenure(HELD)
    passed = tenure.passed_over(13)
    assert (passed.epoch, passed.holder, passed.opened) == (13, HELD.holder, True)
    tenure.sent(passed, 0.0)
    assert tenure.saw(passed, 0.0)
    assert (tenure.settled, tenure.record.epoch) == (True, 13)
    assert tenure.passed_over(7).epoch == 13
