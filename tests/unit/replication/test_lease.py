from __future__ import annotations

import json
from dataclasses import replace

import pytest

from cometmq.replication.epoch_history import EpochBranch
from cometmq.replication.lease import LeaseRecord, Reason, ReplicaId, record_from, replica_ids
from cometmq.replication.watermarks import NO_WATERMARKS, HighWatermarks

HELD = LeaseRecord("g1", 0, "store-0", "host-0:1", 4)


def test_a_record_without_sets_has_its_holder_alone() -> None:
    assert HELD.in_sync == HELD.electable == (HELD.holder,) == ((0, "store-0"),)


def test_a_record_goes_through_json() -> None:
    members = (ReplicaId(0, "store-0"), ReplicaId(1, "store-1"))
    record = replace(HELD, in_sync=members, electable=members, reason=Reason.FAILOVER.value)
    record = replace(record, epochs=(EpochBranch(1, 0, 0), EpochBranch(4, 90, 1)))
    assert record_from(json.loads(json.dumps(record.fields()))) == record


def test_a_record_of_before_knows_of_no_epochs() -> None:
    fields = HELD.fields()
    del fields["epochs"]
    assert record_from(fields).epochs == ()


@pytest.mark.parametrize(
    "change",
    [
        {"shown": [3, "2", 1]},
        {"shown": [3, 2, -1]},
        {"shown": [3, 2, 1, 1]},
        {"shown": None},
        {"shown": {"flushed": 3}},
        {"shown_in": 4},
        {"shown_in": None},
        {"renewals": 6},  # by a release that knows neither
    ],
)
def test_marks_that_are_not_told_of_this_record_are_none(change: dict[str, object]) -> None:
    fields = replace(HELD, shown=HighWatermarks(3, 2, 1), renewals=5).fields()
    assert record_from(fields).shown == (3, 2, 1)
    assert record_from({**fields, **change}).shown == NO_WATERMARKS


def test_a_record_of_before_tells_of_no_marks() -> None:
    fields = HELD.fields()
    del fields["shown"], fields["shown_in"]
    assert record_from(fields) == HELD


def test_the_reason_of_an_earlier_release_is_understood() -> None:
    assert record_from({**HELD.fields(), "reason": "takeover"}).reason == Reason.FAILOVER.value


def test_fields_of_a_later_release_are_left_out() -> None:
    assert record_from({**HELD.fields(), "later": 1}) == HELD


@pytest.mark.parametrize(
    "change",
    [
        {"in_sync": [[1, "store-1"]]},  # without the holder
        {"in_sync": [[0, "store-0"], [1, "store-1"]], "electable": [[0, "store-0"]]},
        {"released": True},  # to nobody
        {"reason": "because"},
        {"in_sync": [[1, 2, 3]]},
        {"epochs": [[2, 0]]},
        {"epochs": [[2, 0, 2]]},
        {"epochs": [[3, 0, 0], [2, 0, 0]]},
    ],
)
def test_a_record_that_contradicts_itself_is_refused(change: dict[str, object]) -> None:
    with pytest.raises((ValueError, TypeError)):
        record_from({**HELD.fields(), **change})


def test_replica_ids_are_in_order_and_unique() -> None:
    one, two = ReplicaId(1, "a"), ReplicaId(2, "b")
    assert replica_ids([two, one, two]) == (one, two)


def test_which_reasons_leave_every_position_what_it_was() -> None:
    kept = {reason for reason in Reason if reason.keeps_positions}
    assert kept == {Reason.FIRST, Reason.RESTART, Reason.HANDOVER}
    assert not any(reason.alone for reason in kept)
