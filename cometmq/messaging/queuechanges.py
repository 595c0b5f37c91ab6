"""What the state's records tell of queues, while a log is read again."""

from __future__ import annotations

from typing import Protocol

from cometmq.format import record
from cometmq.messaging.changes import Change, QueuesCounted, TopicDropped, decode
from cometmq.messaging.state import STATE_TOPIC


class QueueEdits(Protocol):
    """The store's queues while it reads its log."""

    def drop_topic(self, topic: str) -> None: ...

    def start_queue(self, topic: str, queue_id: int, offset: int) -> None: ...


class QueueChanges:
    """Watches the log, while the store reads it, for what the state tells of queues: what a topic
    held before it was deleted must not come back, and a queue whose messages are all gone must go
    on counting where it was.
    """

    topics = frozenset({STATE_TOPIC})

    def observe_record(self, topic: str, log_offset: int, data: bytes, queues: QueueEdits) -> None:
        """A state record was found in the log."""
        for change in decode(record.decode(data).body):
            self.apply_change(change, queues)

    def apply_change(self, change: Change, queues: QueueEdits) -> None:
        """One change of such a record."""
        match change:
            case TopicDropped(topic):
                queues.drop_topic(topic)
            case QueuesCounted(topic, next_offsets):
                for queue_id, offset in enumerate(next_offsets):
                    if offset:
                        queues.start_queue(topic, queue_id, offset)
