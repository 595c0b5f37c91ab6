"""Conditions that messages of a topic wait for."""

from __future__ import annotations

from cometmq.messaging.topics import TopicTable
from cometmq.replication.watermarks import DurabilityClass


def topic_demands(topics: TopicTable, topic: str) -> DurabilityClass:
    """The conditions for a message of the topic to count as stored. TopicNotFound."""
    return DurabilityClass.of(*topics.demands(topic))
