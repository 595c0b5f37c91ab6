from __future__ import annotations

import pytest

from cometmq.errors import DiskFull, InvalidRequest, StateTooNew, StoreFailed
from cometmq.replication.refusals import REFUSALS, Reason, Refusals


@pytest.mark.parametrize("error", REFUSALS)
def test_what_is_refused_is_counted_and_goes_on(error: type[InvalidRequest]) -> None:
    refusals = Refusals()
    with pytest.raises(error), refusals.counting(Reason.ACK):
        raise error("x")
    assert refusals.counts == {**dict.fromkeys(Reason, 0), Reason.ACK: 1}


def test_unknown_state_has_a_reason_of_its_own() -> None:
    refusals = Refusals()
    with pytest.raises(StateTooNew), refusals.counting(Reason.RECORDS):
        raise StateTooNew("x")
    assert refusals.counts == {**dict.fromkeys(Reason, 0), Reason.STATE: 1}


@pytest.mark.parametrize("error", [DiskFull("x"), StoreFailed("x"), OSError()])
def test_our_own_troubles_are_no_refusals(error: Exception) -> None:
    refusals = Refusals()
    with pytest.raises(type(error)), refusals.counting(Reason.RECORDS):
        raise error
    with refusals.counting(Reason.ACK):
        pass
    assert not any(refusals.counts.values())
