"""What the end of a log tells of relayed messages that the state does not know yet.

Progress is written about once a second. After a crash the records behind the newest progress tell
the rest, so nothing that was delivered is delivered again: a relayed record names its source.
"""

from __future__ import annotations

from cometmq.format import delayed
from cometmq.format.delayed import SCHEDULE_TOPIC
from cometmq.format.record import Record
from cometmq.messaging.retry import AttemptTable, attempt_of


class Tail:
    """Takes the relayed records of a log's end, in their order."""

    def __init__(self) -> None:
        # Log offset of the newest delivered message of each level. A level is delivered in order.
        self.delivered: dict[int, int] = {}
        self.attempts = AttemptTable()

    def observe(self, found: Record) -> None:
        """The next relayed record."""
        assert found.prepared_offset, found.log_offset
        level = delayed.level_named(found.properties)
        if found.topic != SCHEDULE_TOPIC and level:
            self.delivered[level] = found.prepared_offset
        attempt = attempt_of(found)
        if attempt is not None:
            self.attempts.add(attempt, found.log_offset + found.size)
