"""Which member may follow a writer, and from which writer a follower copies: the first messages of
a stream. Pure.

A port may be open to more than the group, an address may be another process' by now, a member may
be started with another's number. Each would spoil the log of one side, or make the other count
copies that do not exist.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from cometmq.errors import InvalidRequest, MemberIdTaken, StaleEpoch
from cometmq.replication.epoch_history import Epoch
from cometmq.replication.follower import SILENCE_S_MAX, LogView, Replica, check_epochs
from cometmq.replication.lease import ReplicaId
from cometmq.replication.refusals import Reason, Refusals
from cometmq.replication.versions import Agreed, Release, agree, check_state_kinds

MEMBER_ID_MAX = 1_000  # of the option member_id
STORE_ID_CHARS_MAX = 64


@dataclass(frozen=True, slots=True)
class FollowerIdentity:
    """What a follower says of itself, besides its log."""

    release: Release
    cluster: str
    broker_group: str
    replica_id: ReplicaId


@dataclass(frozen=True, slots=True)
class Handshake:
    """Where followers come in. ``release`` is the writer's. ``others`` are the ids that the option
    ``peers`` gives the other members; None: they are not known.
    """

    release: Release
    cluster: str
    broker_group: str
    member_id: int
    others: Collection[int] | None
    refusals: Refusals

    def check(self, follower: FollowerIdentity) -> Agreed:
        """What the stream goes by. VersionUnsupported, InvalidRequest: this follower is refused."""
        with self.refusals.counting(Reason.VERSION):
            agreed = agree(follower.release, self.release)
        with self.refusals.counting(Reason.CLUSTER):
            if follower.cluster != self.cluster:
                raise InvalidRequest(f"cluster: this is {self.cluster}")
        with self.refusals.counting(Reason.GROUP):
            if follower.broker_group != self.broker_group:
                raise InvalidRequest(f"broker_group: this is {self.broker_group}")
        with self.refusals.counting(Reason.MEMBER):
            self._check_replica_id(follower.replica_id)
        return agreed

    def check_state(self, follower: Release, used: frozenset[str]) -> None:
        """StateTooNew: the follower cannot read the group's state, see ``check_state_kinds``."""
        with self.refusals.counting(Reason.STATE):
            check_state_kinds(follower, used)

    def _check_replica_id(self, replica_id: ReplicaId) -> None:
        if not 0 <= replica_id.member_id <= MEMBER_ID_MAX:
            raise InvalidRequest(f"member_id: must be within 0 and {MEMBER_ID_MAX}")
        if replica_id.member_id == self.member_id:
            raise InvalidRequest(f"member_id: {replica_id.member_id} is the writer itself")
        if self.others is not None and replica_id.member_id not in self.others:
            raise InvalidRequest(f"member_id: {replica_id.member_id} is not among the option peers")
        if len(replica_id.store_id) > STORE_ID_CHARS_MAX:
            raise InvalidRequest(f"store_id: at most {STORE_ID_CHARS_MAX} characters")

    def check_free(self, replica_id: ReplicaId, connected: Iterable[Replica], now_s: float) -> None:
        """MemberIdTaken: another store under this member id is connected and answers frames. A
        second stream of the same store is a reconnect; a silent stream counts as closed.
        """
        with self.refusals.counting(Reason.MEMBER):
            for other in connected:
                same_id = other.member_id == replica_id.member_id
                answers = other.heard_s is not None and now_s - other.heard_s < SILENCE_S_MAX
                if same_id and other.replica_id != replica_id and answers:
                    raise MemberIdTaken(f"member {replica_id.member_id} follows, on another store")

    def checked_log(
        self,
        epochs: Iterable[Epoch],
        log_min: int,
        log_end: int,
        last_offset: int,
        last_crc32: int,
    ) -> LogView:
        """The follower's log, by what it sent. InvalidRequest: no log is like that."""
        with self.refusals.counting(Reason.LOG):
            if not 0 <= log_min <= log_end:
                raise InvalidRequest("log_min_offset: must be within 0 and log_end_offset")
            if not -1 <= last_offset < log_end:
                raise InvalidRequest("last_record_offset: must be -1, or below log_end_offset")
        view = LogView(tuple(epochs), log_min, log_end, last_offset, last_crc32)
        with self.refusals.counting(Reason.EPOCH):
            check_epochs(view.epochs)
            if view.epochs and view.epochs[-1][1] >= log_end:
                raise InvalidRequest("epochs: the last one owns no byte of the log")
        return view


def check_writer(epochs: Sequence[Epoch], own: LogView) -> None:
    """A writer has sent its ``epochs`` to a follower with the log ``own``.

    InvalidRequest: no writer has those. StaleEpoch: a newer one has written a part of this log.
    """
    check_epochs(epochs)
    if not epochs:
        raise InvalidRequest("epochs: a writer has one")
    if epochs[-1][0] < own.epoch:
        newest = epochs[-1][0]
        raise StaleEpoch(f"this log has a part of epoch {own.epoch}, the writer's is {newest}")
