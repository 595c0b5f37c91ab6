"""Which followers a writer lets in, and which writer is followed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cometmq.errors import (
    CometError,
    InvalidRequest,
    MemberIdTaken,
    StaleEpoch,
    StateTooNew,
    VersionUnsupported,
)
from cometmq.replication.epoch_history import Epoch
from cometmq.replication.follower import SILENCE_S_MAX, Ack, LogView, Replica
from cometmq.replication.handshake import FollowerIdentity, Handshake, check_writer
from cometmq.replication.lease import ReplicaId
from cometmq.replication.refusals import Reason, Refusals
from cometmq.replication.versions import Release

OURS = Release(3, 4, 1, frozenset({"f"}), frozenset({"a", "b"}))
GOOD = FollowerIdentity(OURS, "c", "g", ReplicaId(1, "store"))


@pytest.fixture
def handshake() -> Handshake:
    return Handshake(OURS, "c", "g", 0, {1, 2}, Refusals())


def only(reason: Reason) -> dict[Reason, int]:
    return {**dict.fromkeys(Reason, 0), reason: 1}


def test_a_follower_of_the_group_comes_in(handshake: Handshake) -> None:
    handshake.check(GOOD)
    handshake.check(replace(GOOD, replica_id=ReplicaId(2, "")))
    replace(handshake, others=None).check(replace(GOOD, replica_id=ReplicaId(1000, "x")))
    assert not any(handshake.refusals.counts.values())


@pytest.mark.parametrize(
    ("stranger", "error", "reason"),
    [
        (
            replace(GOOD, release=replace(OURS, protocol_min=1, protocol_max=2)),
            VersionUnsupported,
            Reason.VERSION,
        ),
        (
            replace(GOOD, release=replace(OURS, format_version=0)),
            VersionUnsupported,
            Reason.VERSION,
        ),
        (replace(GOOD, cluster="d"), InvalidRequest, Reason.CLUSTER),
        (replace(GOOD, cluster=""), InvalidRequest, Reason.CLUSTER),
        (replace(GOOD, broker_group="G"), InvalidRequest, Reason.GROUP),
        (replace(GOOD, replica_id=ReplicaId(0, "store")), InvalidRequest, Reason.MEMBER),
        (replace(GOOD, replica_id=ReplicaId(3, "store")), InvalidRequest, Reason.MEMBER),
        (replace(GOOD, replica_id=ReplicaId(-1, "store")), InvalidRequest, Reason.MEMBER),
        (replace(GOOD, replica_id=ReplicaId(1001, "store")), InvalidRequest, Reason.MEMBER),
        (replace(GOOD, replica_id=ReplicaId(1, "s" * 65)), InvalidRequest, Reason.MEMBER),
    ],
)
def test_a_stranger_does_not(
    handshake: Handshake, stranger: FollowerIdentity, error: type[CometError], reason: Reason
) -> None:
    with pytest.raises(error):
        handshake.check(stranger)
    assert handshake.refusals.counts == only(reason)


def test_a_follower_that_cannot_read_the_groups_state_is_refused_by_the_kinds_names(
    handshake: Handshake,
) -> None:
    handshake.check_state(OURS, frozenset({"a"}))
    with pytest.raises(StateTooNew, match="does not know: c, d"):
        handshake.check_state(OURS, frozenset({"a", "c", "d"}))
    assert handshake.refusals.counts == only(Reason.STATE)


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
    handshake: Handshake, epochs: list[Epoch], low: int, end: int, last: int, reason: Reason
) -> None:
    with pytest.raises(InvalidRequest):
        handshake.checked_log(epochs, low, end, last, 0)
    assert handshake.refusals.counts == only(reason)


@pytest.mark.parametrize(
    ("epochs", "low", "end", "last"),
    [([], 0, 0, -1), ([], 100, 100, -1), ([(1, 0), (3, 9)], 0, 10, 5), ([(1, 0)], 5, 10, -1)],
)
def test_a_log_that_can_be_is_taken(
    handshake: Handshake, epochs: list[Epoch], low: int, end: int, last: int
) -> None:
    view = handshake.checked_log(epochs, low, end, last, 7)
    assert view == LogView(tuple(epochs), low, end, last, 7)


def answering(replica_id: ReplicaId, at_s: float) -> Replica:
    replica = Replica(replica_id, 0, at_s)
    replica.framed(int(at_s * 1000), 0)
    replica.acked(Ack(0, 0, int(at_s * 1000), 0), 0)
    return replica


def test_a_member_that_answers_is_not_pushed_out(handshake: Handshake) -> None:
    replica_id, another = ReplicaId(1, "store"), ReplicaId(1, "another store")
    there = [answering(ReplicaId(2, "x"), 50.0), answering(replica_id, 50.0)]
    handshake.check_free(replica_id, there, 51.0)  # it comes again
    handshake.check_free(another, there[:1], 51.0)
    with pytest.raises(MemberIdTaken, match="member 1"):
        handshake.check_free(another, there, 51.0)
    assert handshake.refusals.counts == only(Reason.MEMBER)
    # Its machine is gone, its disk replaced.
    handshake.check_free(another, there, 50.0 + SILENCE_S_MAX)
    # The other has said nothing yet.
    handshake.check_free(another, [Replica(replica_id, 0, 50.0)], 51.0)


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
