"""Who comes in at the door of a writer, and which writer is followed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cometmq.errors import CometError, InvalidRequest, MemberIdTaken, StaleEpoch, VersionUnsupported
from cometmq.replication.epochs import Epoch
from cometmq.replication.follower import (
    FORMAT_VERSION,
    PROTOCOL_VERSION,
    SILENCE_S_MAX,
    Ack,
    LogView,
    Replica,
)
from cometmq.replication.hello import Door, Introduction, check_writer
from cometmq.replication.lease import Seat
from cometmq.replication.refusals import Reason, Refusals

GOOD = Introduction(PROTOCOL_VERSION, FORMAT_VERSION, "c", "g", Seat(1, "store"))


@pytest.fixture
def door() -> Door:
    return Door("c", "g", 0, {1, 2}, Refusals())


def only(reason: Reason) -> dict[Reason, int]:
    return {**dict.fromkeys(Reason, 0), reason: 1}


def test_a_follower_of_the_group_comes_in(door: Door) -> None:
    door.check(GOOD)
    door.check(replace(GOOD, seat=Seat(2, "")))
    replace(door, others=None).check(replace(GOOD, seat=Seat(1000, "x")))
    assert not any(door.refusals.counts.values())


@pytest.mark.parametrize(
    ("stranger", "error", "reason"),
    [
        (replace(GOOD, protocol_version=0), VersionUnsupported, Reason.VERSION),
        (replace(GOOD, format_version=FORMAT_VERSION + 1), VersionUnsupported, Reason.VERSION),
        (replace(GOOD, cluster="d"), InvalidRequest, Reason.CLUSTER),
        (replace(GOOD, cluster=""), InvalidRequest, Reason.CLUSTER),
        (replace(GOOD, broker_group="G"), InvalidRequest, Reason.GROUP),
        (replace(GOOD, seat=Seat(0, "store")), InvalidRequest, Reason.MEMBER),
        (replace(GOOD, seat=Seat(3, "store")), InvalidRequest, Reason.MEMBER),
        (replace(GOOD, seat=Seat(-1, "store")), InvalidRequest, Reason.MEMBER),
        (replace(GOOD, seat=Seat(1001, "store")), InvalidRequest, Reason.MEMBER),
        (replace(GOOD, seat=Seat(1, "s" * 65)), InvalidRequest, Reason.MEMBER),
    ],
)
def test_a_stranger_does_not(
    door: Door, stranger: Introduction, error: type[CometError], reason: Reason
) -> None:
    with pytest.raises(error):
        door.check(stranger)
    assert door.refusals.counts == only(reason)


@pytest.mark.parametrize(
    ("epochs", "low", "end", "last", "reason"),
    [
        ([], 5, 4, -1, Reason.LOG),
        ([], -1, 4, -1, Reason.LOG),
        ([], 0, 10, 10, Reason.LOG),
        ([], 0, 10, -2, Reason.LOG),
        ([], 0, 0, 0, Reason.LOG),
        ([(1, 0), (1, 5)], 0, 10, 5, Reason.EPOCH),
        ([(2, 0), (1, 5)], 0, 10, 5, Reason.EPOCH),
        ([(1, 5), (2, 5)], 0, 10, 5, Reason.EPOCH),
        ([(0, 0)], 0, 10, 5, Reason.EPOCH),
        ([(1, -1)], 0, 10, 5, Reason.EPOCH),
        ([(1, 0), (2, 10)], 0, 10, 5, Reason.EPOCH),
    ],
)
def test_a_log_that_cannot_be_is_refused(
    door: Door, epochs: list[Epoch], low: int, end: int, last: int, reason: Reason
) -> None:
    with pytest.raises(InvalidRequest):
        door.checked_log(epochs, low, end, last, 0)
    assert door.refusals.counts == only(reason)


@pytest.mark.parametrize(
    ("epochs", "low", "end", "last"),
    [([], 0, 0, -1), ([], 100, 100, -1), ([(1, 0), (3, 9)], 0, 10, 5), ([(1, 0)], 5, 10, -1)],
)
def test_a_log_that_can_be_is_taken(
    door: Door, epochs: list[Epoch], low: int, end: int, last: int
) -> None:
    view = door.checked_log(epochs, low, end, last, 7)
    assert view == LogView(tuple(epochs), low, end, last, 7)


def answering(seat: Seat, at_s: float) -> Replica:
    replica = Replica(seat, 0, at_s)
    replica.framed(int(at_s * 1000), 0)
    replica.acked(Ack(0, 0, int(at_s * 1000), 0), 0)
    return replica


def test_a_member_that_answers_is_not_pushed_out(door: Door) -> None:
    seat, another = Seat(1, "store"), Seat(1, "another store")
    there = [answering(Seat(2, "x"), 50.0), answering(seat, 50.0)]
    door.check_free(seat, there, 51.0)  # it comes again
    door.check_free(another, there[:1], 51.0)
    with pytest.raises(MemberIdTaken, match="member 1"):
        door.check_free(another, there, 51.0)
    assert door.refusals.counts == only(Reason.MEMBER)
    door.check_free(another, there, 50.0 + SILENCE_S_MAX)  # its machine is gone, its disk replaced
    door.check_free(another, [Replica(seat, 0, 50.0)], 51.0)  # whoever that is has said nothing yet


@pytest.mark.parametrize(
    ("epochs", "error"),
    [
        ([], InvalidRequest),
        ([(3, 0), (2, 50)], InvalidRequest),
        ([(1, 0)], StaleEpoch),
    ],
)
def test_a_writer_that_cannot_be_one_is_not_followed(
    epochs: list[Epoch], error: type[CometError]
) -> None:
    own = LogView(((1, 0), (2, 50)), 0, 100, 90, 7)
    check_writer([(1, 0), (2, 50)], own)
    check_writer([(1, 0), (9, 50)], own)
    with pytest.raises(error):
        check_writer(epochs, own)
