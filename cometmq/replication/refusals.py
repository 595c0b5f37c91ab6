"""What a member refuses of those that it copies from and that copy from it, counted by reason.

Nothing of what is refused takes effect: it is judged before anything of it is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

from cometmq.errors import (
    InvalidRequest,
    MemberIdTaken,
    ReplicationBroken,
    StaleEpoch,
    StateTooNew,
    VersionUnsupported,
)

# Other errors, such as a full disk's, are not caused by the other side.
REFUSALS = (InvalidRequest, MemberIdTaken, ReplicationBroken, StaleEpoch, VersionUnsupported)


class Reason(Enum):
    """Labels of ``cometmq_replication_refused_total``."""

    VERSION = "version"  # of the protocol or of the format; another size of log files
    STATE = "state"  # kinds of state records that one side does not know
    CLUSTER = "cluster"  # another cluster's
    GROUP = "group"  # another broker group's
    MEMBER = "member"  # a member id that is not the caller's
    ORDER = "order"  # a message that does not come there
    LOG = "log"  # positions that no log has
    EPOCH = "epoch"  # epochs that no member has, or another one than the stream's
    ACK = "ack"  # an acknowledgement that cannot be
    OFFSET = "offset"  # bytes that are not the next ones
    CHECKSUM = "checksum"  # bytes that changed on their way
    RECORDS = "records"  # bytes that are not whole, good records


class Refusals:
    """``counts`` by reason; all are there from the start, for alerts that wait for the first
    one.
    """

    def __init__(self) -> None:
        self.counts = dict.fromkeys(Reason, 0)

    @contextmanager
    def counting(self, reason: Reason) -> Iterator[None]:
        """What is refused in this block is refused for ``reason``; state that is not known, for
        ``STATE``.
        """
        try:
            yield
        except StateTooNew:
            self.counts[Reason.STATE] += 1
            raise
        except REFUSALS:
            self.counts[reason] += 1
            raise
