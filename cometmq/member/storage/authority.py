"""The question that the storage asks before it acknowledges a batch or shows a message: may this
member do so now, and what do the other members have?
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from cometmq.replication.watermarks import Watermarks


class Replicated(NamedTuple):
    """Log offsets up to which every in-sync member has the log: in memory, and on its disk."""

    appended: int
    flushed: int
    is_alone: bool  # this member is the only one in sync


class WriteAuthority(Protocol):
    """The right to write, and the in-sync set."""

    def may_acknowledge(self) -> bool:
        """Whether no other member can be the writer now."""

    def replicated(self, own: Watermarks) -> Replicated | None:
        """What is replicated, by the positions of this member and of its followers. None: too few
        are in sync, so nothing more counts as replicated.
        """

    def check_in_sync(self) -> None:
        """Raise SlaveNotAvailable while too few members are in sync."""

    def check_kinds(self, kinds: frozenset[str]) -> None:
        """Raise VersionUnsupported unless all members of the group read state records of these
        kinds.
        """


class SoleWriter:
    """The authority of a writer without a lease and without followers."""

    def may_acknowledge(self) -> bool:
        return True

    def replicated(self, own: Watermarks) -> Replicated | None:
        return Replicated(own.flushed, own.flushed, is_alone=True)

    def check_in_sync(self) -> None:
        pass

    def check_kinds(self, kinds: frozenset[str]) -> None:
        pass
