"""The assignment of queues to members, for clients that ask the broker. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def averagely(queues: Sequence[int], members: Sequence[str], client_id: str) -> list[int]:
    """The queues of one member: RocketMQ's averagely, neighbours together, the first members have
    one more. Empty for a client that is no member.
    """
    if client_id not in members:
        return []
    place = sorted(members).index(client_id)
    each, more = divmod(len(queues), len(members))
    first = place * each + min(place, more)
    return list(queues[first : first + each + (place < more)])
