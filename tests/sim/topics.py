"""The topics of a simulated group: some of users, one queue each, and those that the broker makes
for delayed, retried and dead messages, and for transactions. A queue has an index on the disks, and
a key in the tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cometmq.format.delayed import SCHEDULE_TOPIC
from cometmq.format.halves import GIVEN_UP_TOPIC, HALF_TOPIC, OP_TOPIC
from cometmq.format.timers import TIMER_TOPIC
from cometmq.messaging.changes import Change, GroupPut, TopicSnapshot
from cometmq.messaging.generations import History
from cometmq.messaging.group_policy import ConsumeMode, GroupPolicy
from cometmq.messaging.groups import GroupSettings
from cometmq.messaging.retry import dlq_topic, retry_topic
from cometmq.messaging.state import BrokerState
from cometmq.model import FlushMode, QueueKey, ReplicationMode, TopicConfig
from cometmq.replication.watermarks import DurabilityClass

ORDERLY, CONCURRENT = "orderly", "concurrent"  # the consumer groups
RECEIVING = "receiving"  # it receives (POP), the others pull
PULLING = (ORDERLY, CONCURRENT)
GROUPS = (*PULLING, RECEIVING)
SYSTEM_TOPICS = (TIMER_TOPIC, HALF_TOPIC, OP_TOPIC, GIVEN_UP_TOPIC)  # with one queue each
RETRY_TIMES_MAX = 2  # so that the last try comes after 40 s
LEVELS = 4  # of delay: 1 s to 30 s
BROKER_GROUP = "g"

_MODES = {
    DurabilityClass.of(flush, replication): (flush, replication)
    for flush in FlushMode
    for replication in ReplicationMode
}


@dataclass(frozen=True)
class Topics:
    """``demands``: of each user topic."""

    demands: tuple[DurabilityClass, ...]

    @property
    def count(self) -> int:
        """How many queues users have."""
        return len(self.demands)

    def configs(self) -> list[TopicConfig]:
        """All topics, in the order of their queues."""
        users = [
            TopicConfig(f"T{number}", 1, 1, flush_mode=flush, replication_mode=replication)
            for number, (flush, replication) in enumerate(map(_MODES.__getitem__, self.demands))
        ]
        retries = [TopicConfig(retry_topic(group), 1, 1) for group in GROUPS]
        dead = [TopicConfig(dlq_topic(group), 1, 1) for group in GROUPS]
        system = [TopicConfig(name, 1, 1) for name in SYSTEM_TOPICS]
        return [*users, TopicConfig(SCHEDULE_TOPIC, LEVELS, LEVELS), *retries, *dead, *system]

    def keys(self) -> list[QueueKey]:
        """The key of each queue, by index."""
        return [
            (config.name, number)
            for config in self.configs()
            for number in range(config.read_queue_count)
        ]

    def all_demands(self) -> list[DurabilityClass]:
        """What the messages of each queue ask for, by index: the broker's own for all that any
        user's asks for.
        """
        table = self.new_state((History(((1, 0),)),) * len(self.keys())).topics
        return [DurabilityClass.of(*table.demands(topic)) for topic, _ in self.keys()]

    def new_state(self, histories: Sequence[History]) -> BrokerState:
        """A state without anything that clients have done. ``histories``: by index."""
        state = BrokerState()
        at = 0
        for config in self.configs():
            count = config.read_queue_count
            state.apply(TopicSnapshot(config, tuple(histories[at : at + count])))
            at += count
        for group in GROUPS:
            mode = ConsumeMode.POP if group == RECEIVING else ConsumeMode.PULL
            settings = GroupSettings(
                group, retry_times_max=RETRY_TIMES_MAX, policy=GroupPolicy(mode=mode)
            )
            changes: list[Change] = [GroupPut(settings), *state.plan_policy(settings, 1)]
            for change in changes:
                state.apply(change)
        return state

    def put_histories(self, state: BrokerState, histories: Sequence[History]) -> None:
        """Give the queues of a state these histories, by index."""
        at = 0
        for config in self.configs():
            count = config.read_queue_count
            state.generations.put(config.name, histories[at : at + count])
            at += count
