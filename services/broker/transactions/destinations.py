"""The queues that committed half messages go to."""

from __future__ import annotations

from typing import NamedTuple

from cometmq.errors import CometError, NoPermission, TopicNotFound
from cometmq.format import halves
from cometmq.member.state.keeper import StateKeeper
from cometmq.model import QueueKey


class Destination(NamedTuple):
    """Where halves with one target go. ``queue`` None: nowhere, and those below ``old_end``
    neither.
    """

    topic: str
    queue: QueueKey | None
    old_end: int

    def takes(self, half_offset: int) -> bool:
        """Whether a half goes there."""
        return self.queue is not None and half_offset >= self.old_end


class Destinations:
    """Of one writer."""

    def __init__(self, keeper: StateKeeper) -> None:
        self._keeper = keeper

    def queue_of(self, topic: str, queue_id: int, half_offset: int | None = None) -> int:
        """The queue that a message goes to: its topic may have fewer by now. ``half_offset``: of
        one that may have been sent to a topic of the same name that was deleted. Raises
        TopicNotFound, NoPermission.
        """
        config = self._keeper.state.topics.get(topic)
        self._keeper.check_open(topic)
        if half_offset is not None and half_offset < self._old_end(topic):
            raise TopicNotFound(
                f"topic {topic} was deleted since the half message was sent, and created again"
            )
        delivery_queue_id = config.delivery_queue_id(queue_id)
        if delivery_queue_id is None:
            raise NoPermission(f"topic {topic} has no queue")
        return delivery_queue_id

    def of_text(self, text: bytes) -> Destination:
        """``text``: as :mod:`cometmq.format.relay_run` finds it."""
        topic, queue_id = halves.target_of_text(text)
        try:
            queue = topic, self.queue_of(topic, queue_id)
        except CometError:  # raised again where each half is looked at
            return Destination(topic, None, 0)
        return Destination(topic, queue, self._old_end(topic))

    def _old_end(self, topic: str) -> int:
        return self._keeper.state.halves.dropped.get(topic, 0)
