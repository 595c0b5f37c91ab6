"""The content of a broker group's lease: the writer, the in-sync set, the electable members.

One record for each group, changed by compare-and-swap only. ``election`` decides which member takes
it, ``lease_state`` what its holder writes, ``insync`` which members its two sets name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, NamedTuple

from cometmq.replication.epoch_history import EpochBranch, EpochBranches, is_in_order
from cometmq.replication.watermarks import NO_WATERMARKS, HighWatermarks

# How much faster another member's clock may run: time that is counted on is that much shorter.
CLOCK_DRIFT_MAX = 0.01
# Beside ``shown``: the ``renewals`` of the record that it belongs to. A release that knows neither
# leaves both standing in a Lease of Kubernetes when it writes the rest.
SHOWN_IN = "shown_in"


class ReplicaId(NamedTuple):
    """A member with its store. A store id names an unbroken history: a member that lost a disk, or
    the end of a log, comes back under another replica id.
    """

    member_id: int
    store_id: str


ReplicaIds = tuple[ReplicaId, ...]  # in order of member id, each once


def replica_ids(members: Iterable[ReplicaId]) -> ReplicaIds:
    """Any replica ids, in order."""
    return tuple(sorted(set(members)))


class Reason(Enum):
    """Why a member leads."""

    FIRST = "first"  # the group has never had a writer
    RESTART = "restart"  # it wrote before, and has everything that it wrote
    HANDOVER = "handover"  # the writer before gave its role away
    FAILOVER = "failover"  # the writer before fell silent
    UNCLEAN = "unclean"  # no member has a longer log, but ends of logs were lost
    RECREATED = "recreated"  # the lease was lost, and no member has a longer log
    FORCED = "forced"  # an operator said so

    @property
    def keeps_positions(self) -> bool:
        """Whether every message that a consumer has seen is certainly still where it was."""
        return self in (Reason.FIRST, Reason.RESTART, Reason.HANDOVER)

    @property
    def alone(self) -> bool:
        """Whether nothing is known of what other members have, so that all begin again as
        followers.
        """
        return self in (Reason.UNCLEAN, Reason.RECREATED, Reason.FORCED)


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """The lease of a broker group.

    Invariants: the holder is in sync; every member in sync is electable; a released lease names the
    member that it is released to. Without sets, as the release before this one wrote it, the holder
    is alone in them.
    """

    group: str
    holder_id: int  # member id of the writer
    holder_store_id: str
    holder_address: str  # of its internal port; where followers copy from
    epoch: int  # the highest that was opened under this lease; 0 = none yet
    in_sync: ReplicaIds = ()  # have everything that was acknowledged under replication
    electable: ReplicaIds = ()  # may take over
    reason: str = Reason.FIRST.value  # why the holder took it
    opened: bool = True  # the holder has opened an epoch since it took it
    released: bool = False  # the writer has stopped writing, and …
    transfer_to: int | None = None  # … this member takes over, …
    log_end: int = 0  # … whose log ends here
    duration_s: float = 6.0
    renewals: int = 0  # of the present holder
    epochs: EpochBranches = ()  # that were begun under this lease; none: not known
    # by these consumers have seen messages, of this writer or before
    shown: HighWatermarks = NO_WATERMARKS

    def __post_init__(self) -> None:
        for name in ("in_sync", "electable"):
            members = replica_ids(ReplicaId(*replica_id) for replica_id in getattr(self, name)) or (
                self.holder,
            )
            object.__setattr__(self, name, members)
        object.__setattr__(self, "epochs", tuple(EpochBranch(*branch) for branch in self.epochs))
        object.__setattr__(self, "shown", HighWatermarks(*self.shown))
        assert is_in_order(self.epochs), self
        assert min(self.shown) >= 0, self
        assert self.released == (self.transfer_to is not None), self
        assert self.holder in self.in_sync, self
        assert set(self.in_sync) <= set(self.electable), self
        Reason(self.reason)

    @property
    def holder(self) -> ReplicaId:
        """The writer."""
        return ReplicaId(self.holder_id, self.holder_store_id)

    def fields(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), SHOWN_IN: self.renewals}


# What is there of these has to be understood. Whatever else is there may say anything.
NEEDED = frozenset(LeaseRecord.__dataclass_fields__) - {"shown"}


def record_from(fields: Mapping[str, Any]) -> LeaseRecord:
    """What :meth:`LeaseRecord.fields` gave; fields that are not known here are left out. Raises
    TypeError and ValueError for anything else.
    """
    needed = {key: value for key, value in fields.items() if key in NEEDED}
    if needed.get("reason") == "takeover":  # as earlier releases wrote it
        needed["reason"] = Reason.FAILOVER.value
    try:
        return LeaseRecord(**needed, shown=_shown(fields))
    except AssertionError as error:
        raise ValueError(f"the record contradicts itself: {error}") from error


def _shown(fields: Mapping[str, Any]) -> HighWatermarks:
    """None where that is not said of this record, or not in words that we understand: the same is
    shown a little later then, and no member is kept from leading.
    """
    is_current = fields.get(SHOWN_IN) == fields.get("renewals")
    match fields.get("shown"):
        case [int(), int(), int()] as marks if is_current and min(marks) >= 0:
            return HighWatermarks(*marks)
    return NO_WATERMARKS
