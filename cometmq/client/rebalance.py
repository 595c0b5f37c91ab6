"""Which member of a consumer group reads which queues. Every member computes the same answer from
the same lists.

RocketMQ's default rule (average allocation): queues and members are sorted; each member gets one
contiguous range, and the first ``len(queues) % len(members)`` members get one queue more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from cometmq.model import QueueRef


def allocate_average(
    client_id: str, members: Collection[str], queues: Collection[QueueRef]
) -> list[QueueRef]:
    """The queues of ``client_id``, in order. Who is not among the members gets nothing."""
    ordered = sorted(set(members))
    if client_id not in ordered:
        return []
    index = ordered.index(client_id)
    share, rest = divmod(len(set(queues)), len(ordered))
    start = index * share + min(index, rest)
    return sorted(set(queues))[start : start + share + (index < rest)]


def allocate_topics(
    client_id: str,
    queues_by_topic: Mapping[str, Collection[QueueRef]],
    members_by_topic: Mapping[str, Iterable[str]],
) -> set[QueueRef]:
    """The queues of ``client_id`` over all its topics: each topic is divided among the members that
    read it.
    """
    mine: set[QueueRef] = set()
    for topic, queues in queues_by_topic.items():
        mine.update(allocate_average(client_id, list(members_by_topic.get(topic, ())), queues))
    return mine
