"""What the state's records tell of queues, while a log is read again."""

from __future__ import annotations

from collections.abc import Callable

from cometmq.format import record
from cometmq.messaging.changes import Change, QueuesCounted, TopicDropped, decode
from cometmq.messaging.state import STATE_TOPIC


class QueueChanges:
    """Watches the log, while the store reads it, for what the state tells of queues: what a topic
    held before it was deleted must not come back, and a queue whose messages are all gone must go
    on counting where it was.
    """

    topics = frozenset({STATE_TOPIC})

    def __init__(self) -> None:
        # The store's, set while it reads.
        self.drop_topic: Callable[[str], None] | None = None
        self.start_queue: Callable[[str, int, int], None] | None = None

    def dispatched(self, topic: str, log_offset: int, data: bytes) -> None:
        """A state record was found in the log."""
        for change in decode(record.decode(data).body):
            self.take(change)

    def take(self, change: Change) -> None:
        """One change of such a record."""
        match change:
            case TopicDropped(topic):
                assert self.drop_topic is not None
                self.drop_topic(topic)
            case QueuesCounted(topic, next_offsets):
                assert self.start_queue is not None
                for queue_id, offset in enumerate(next_offsets):
                    if offset:
                        self.start_queue(topic, queue_id, offset)
