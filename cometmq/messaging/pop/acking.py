"""Checks of handles: the messages that a member may acknowledge, or keep for longer. Pure."""

from __future__ import annotations

from cometmq.errors import HandleInvalid, InvisibleTimeInvalid
from cometmq.messaging.generations import History
from cometmq.messaging.pop.handles import Handle
from cometmq.messaging.pop.leases import QueueLeases
from cometmq.messaging.pop.masks import lowest
from cometmq.model import Position

INVISIBLE_MS_MIN, INVISIBLE_MS_MAX = 10_000, 12 * 3_600_000


def check_invisible(invisible_ms: int) -> None:
    """Raises InvisibleTimeInvalid."""
    if not INVISIBLE_MS_MIN <= invisible_ms <= INVISIBLE_MS_MAX:
        raise InvisibleTimeInvalid(
            f"an invisible time is {INVISIBLE_MS_MIN} to {INVISIBLE_MS_MAX} ms, not {invisible_ms}"
        )


def held_part(
    queue: QueueLeases | None,
    history: History,
    handle: Handle,
    first: int,
    count: int,
    sent_away: int = 0,
) -> int:
    """The messages that an item names and the handle's member still has, bit 0 for the handle's
    first; 0: all are done. An item with ``count`` 0 names what the member still has.
    ``sent_away``: those that the retry topic or the dead letters get, or have.

    Raises HandleInvalid when others may have any of them: their time was over and they came again,
    their handle was changed, the group was reset, or a crash or the topic's deletion took them.
    """
    named = handle.mask(first, count)
    if queue is None or history.fence(Position(handle.generation, handle.end)) is not None:
        raise HandleInvalid("the messages of this handle are gone, or its group was reset")
    lease = queue.find(handle.number)
    held = 0
    if lease is not None:
        part = lease.part(handle.first, named & ~sent_away)
        assert lease.first >= handle.first
        held = part << (lease.first - handle.first)
    if named & sent_away and (count or not held):
        raise HandleInvalid("some messages of this handle are dead letters, or come again")
    if lease is not None and not count:
        return held
    left = named & ~held
    if left and not queue.is_done(handle.first, left):
        raise HandleInvalid("some messages of this handle came again, or have a newer handle")
    return held


def next_part(queue: QueueLeases, now_ms: int, count: int) -> tuple[int, int, int, int] | None:
    """What is delivered again next, at most ``count`` messages: (lease number, first, mask,
    attempt); None: nothing is visible.
    """
    lease = queue.oldest_visible(now_ms)
    if lease is None:
        return None
    return lease.number, lease.first, lowest(lease.mask, count), lease.attempt + 1
