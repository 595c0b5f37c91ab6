"""Holds answered out of an arrival: they get what a pull would get, without a call to the broker.

The pull-hold reports to the broker afterwards what consumers got, for the broker's counters.
"""

from __future__ import annotations

from cometmq.filters import sql
from cometmq.flight_recorder import recorder
from cometmq.messaging.inline_messages import InlineMessages
from cometmq.v1 import broker_pb2, common_pb2, member_pb2
from services.pullhold.answers import Reply
from services.pullhold.model import Hold, PullLimits


class InlineBatch:
    """The messages that came with one arrival, as pulls read them."""

    def __init__(self, generation: int, inline_messages: InlineMessages) -> None:
        self.begun_ns = recorder.now_ns()  # when it came
        self._generation = generation
        self._inline_messages = inline_messages
        self._replies: dict[
            tuple[int, PullLimits, frozenset[int], sql.Program | None], Reply
        ] = {}  # many groups may wait for the same

    def reply(self, hold: Hold) -> Reply | None:
        """What a pull for the hold gets; None: only the broker can answer."""
        if hold.limits is None or hold.generation not in (0, self._generation):
            return None
        if hold.offset not in self._inline_messages:
            return None
        wanted = (hold.offset, hold.limits, hold.codes, hold.program)
        reply = self._replies.get(wanted)
        if reply is None:
            records, choice = self._inline_messages.pull(
                hold.offset, *hold.limits, hold.codes, hold.program
            )
            position = common_pb2.Position(generation=self._generation, offset=choice.next_offset)
            reply = self._replies[wanted] = Reply(
                broker_pb2.PullResponse(
                    status=broker_pb2.PullStatus.ValueType(choice.status.value),
                    records=records,
                    count=choice.count,
                    next_position=position,
                    min_offset=self._inline_messages.min_offset,
                    max_offset=self._inline_messages.end_offset,
                )
            )
        return reply


class Deliveries:
    """What groups got since the last report to the broker. One entry for each group that holds."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], tuple[int, int]] = {}  # by topic and group

    def __bool__(self) -> bool:
        """Whether there is something to report."""
        return bool(self._counts)

    def add(self, hold: Hold, response: broker_pb2.PullResponse) -> None:
        key = (hold.key.topic, hold.request.group)
        count, size_bytes = self._counts.get(key, (0, 0))
        self._counts[key] = (count + response.count, size_bytes + len(response.records))

    def take(self) -> list[member_pb2.InlineDelivery]:
        """Takes out what to report."""
        counts, self._counts = self._counts, {}
        return [
            member_pb2.InlineDelivery(
                topic=topic, group=group, message_count=count, record_bytes=size_bytes
            )
            for (topic, group), (count, size_bytes) in counts.items()
        ]
