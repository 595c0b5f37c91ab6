"""The topics of a chaos run, one of each durability, and what each of them promises."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cometmq.v1 import common_pb2 as common

ASYNC, APPENDED, FLUSHED = (
    common.REPLICATION_MODE_ASYNC,
    common.REPLICATION_MODE_APPENDED,
    common.REPLICATION_MODE_FLUSHED,
)


@dataclass(frozen=True)
class Mode:
    """When a message of a topic is acknowledged, and seen by readers."""

    synced: bool  # it is on the writer's disk
    copies: common.ReplicationMode.ValueType  # in-sync members have it in their memory, on disk

    def keeps(self, *, took_over: bool, power_cuts: int, members: int) -> bool:
        """Whether all that was acknowledged or seen survives. ``took_over``: a member took over
        unplanned. ``power_cuts``: so many members lost at once what they had not synced.
        """
        if self.copies == ASYNC:
            return not took_over and (self.synced or not power_cuts)
        return power_cuts < members or self.synced or self.copies == FLUSHED


GROUP = "g1"  # of the brokers
QUEUES = 2  # a topic
FLEETING = "fleeting"  # may be deleted and made anew in a run
# Of messages that come later: with a time of their own, committed, received for a time.
DUE, SETTLED, RECEIVED = "due", "settled", "received"
ASKED = "asked"  # of messages that operators let clients consume

TOPICS = {
    "loose": Mode(synced=False, copies=ASYNC),
    "synced": Mode(synced=True, copies=ASYNC),
    "copied": Mode(synced=False, copies=APPENDED),
    "landed": Mode(synced=True, copies=APPENDED),
    "certain": Mode(synced=True, copies=FLUSHED),
    FLEETING: Mode(synced=True, copies=FLUSHED),
}
# These keep what was acknowledged, whatever happens.
LATER_TOPICS = dict.fromkeys((DUE, SETTLED, RECEIVED, ASKED), Mode(synced=True, copies=FLUSHED))


def queues_of(topics: Iterable[str]) -> list[tuple[str, int]]:
    return [(topic, number) for topic in topics for number in range(QUEUES)]


def config_of(topic: str) -> common.TopicConfig:
    """What the broker is told of a topic."""
    mode = (TOPICS | LATER_TOPICS)[topic]
    return common.TopicConfig(
        name=topic,
        read_queue_count=QUEUES,
        write_queue_count=QUEUES,
        flush_mode=common.FLUSH_MODE_SYNC if mode.synced else common.FLUSH_MODE_ASYNC,
        replication_mode=mode.copies,
    )
