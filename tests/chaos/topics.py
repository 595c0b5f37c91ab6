"""The topics of a chaos run, one of each durability, and what each of them promises."""

from __future__ import annotations

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
        return power_cuts < members or (self.synced and self.copies == FLUSHED)


TOPICS = {
    "loose": Mode(synced=False, copies=ASYNC),
    "synced": Mode(synced=True, copies=ASYNC),
    "copied": Mode(synced=False, copies=APPENDED),
    "certain": Mode(synced=True, copies=FLUSHED),
}


def config_of(topic: str, queues: int) -> common.TopicConfig:
    """What the broker is told of a topic."""
    mode = TOPICS[topic]
    return common.TopicConfig(
        name=topic,
        read_queue_count=queues,
        write_queue_count=queues,
        flush_mode=common.FLUSH_MODE_SYNC if mode.synced else common.FLUSH_MODE_ASYNC,
        replication_mode=mode.copies,
    )
