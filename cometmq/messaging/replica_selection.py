"""From which member a consumer pulls next: RocketMQ's rule.

Who is so far behind that what it reads has left the writer's memory costs the writer's disk and
page cache; a follower can answer it as well. Near the end everybody reads from the writer, which
has what is new first. A group's settings say which members serve it.

Pure. Both roles ask the same question, each with the followers that it knows: the writer with all
that are connected, a follower with itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cometmq.messaging.groups import GroupSettings

WRITER = 0  # in a group's settings; any other number is a member's
# A follower that lacks more of the log would soon have nothing for who comes to it.
FOLLOWER_BEHIND_BYTES_MAX = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ReadReplica:
    """A follower, and how much of the log it lacks."""

    member_id: int
    behind_bytes: int


def suggest(
    backlog_bytes: int, memory_bytes: int, settings: GroupSettings, copies: Sequence[ReadReplica]
) -> int | None:
    """The member to pull from next; None = the writer.

    ``backlog_bytes``: log behind the last message that the pull looked at. More than
    ``memory_bytes`` is far behind: then the member that the group names for it, or, where that one
    is not to be had, the follower that has most of the log. Else the member that serves the group
    in any case.
    """
    assert backlog_bytes >= 0, backlog_bytes
    near = [copy for copy in copies if copy.behind_bytes <= FOLLOWER_BEHIND_BYTES_MAX]
    if backlog_bytes <= memory_bytes:
        return _named(settings.broker_id, near)
    wanted = settings.broker_id_when_slow
    if wanted == WRITER or not near:
        return None
    named = _named(wanted, near)
    return min(near, key=_distance).member_id if named is None else named


def _named(member_id: int, copies: Sequence[ReadReplica]) -> int | None:
    there = member_id != WRITER and any(copy.member_id == member_id for copy in copies)
    return member_id if there else None


def _distance(copy: ReadReplica) -> tuple[int, int]:
    return copy.behind_bytes, copy.member_id
