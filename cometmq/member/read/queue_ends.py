"""Whether a queue's readable maximum is its end, for readers that begin there.

After a fail-over or a pause a writer shows less than was acknowledged, and than an earlier writer
has shown. A reader that began there would get old messages (Kafka's KIP-207).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from cometmq.errors import OffsetNotAvailable
from cometmq.model import QueueKey


class Shown(Protocol):
    """The storage of a writer. ``sealed``: it is handing its role over."""

    sealed: bool

    def bounds(self, key: QueueKey) -> tuple[int, int, int]: ...

    def may_acknowledge(self) -> bool: ...


def appended_ends(storage: Shown, queues: Iterable[QueueKey]) -> dict[QueueKey, int]:
    """Each queue's appended maximum. No message behind it was acknowledged or shown so far, if this
    member is the writer: the log has all that earlier writers left.
    """
    return {key: storage.bounds(key)[2] for key in queues}


def are_shown(storage: Shown, ends: Mapping[QueueKey, int]) -> bool:
    """Whether consumers may read all queues up to these offsets."""
    return all(storage.bounds(key)[1] >= end for key, end in ends.items())


def uncertain(storage: Shown, ends: Mapping[QueueKey, int]) -> dict[QueueKey, OffsetNotAvailable]:
    """The queues whose readable maximum may lie below what was acknowledged or shown before
    ``ends`` were read. Another member may have written since the lease of this one ended, or since
    it was handed over, which this one may not have heard.
    """
    if storage.sealed or not storage.may_acknowledge():
        error = OffsetNotAvailable("another member of the broker group may write now")
        return dict.fromkeys(ends, error)
    return {
        key: OffsetNotAvailable(
            f"queue {key[1]} of {key[0]} is shown up to {readable}, and has messages up to {end}"
        )
        for key, end in ends.items()
        if (readable := storage.bounds(key)[1]) < end
    }
