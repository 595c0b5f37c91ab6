"""Holds answered out of an arrival: with what a pull would have got, without asking the broker.

The broker is told afterwards what consumers got, for its counters.
"""

from __future__ import annotations

from cometmq.messaging.inline_messages import InlineMessages
from cometmq.v1 import broker_pb2, common_pb2, member_pb2
from services.pullhold.model import Hold, PullLimits


class InlineBatch:
    """The messages that came with one arrival, as pulls read them."""

    def __init__(self, generation: int, inline_messages: InlineMessages) -> None:
        self._generation = generation
        self._inline_messages = inline_messages
        self._responses: dict[
            tuple[int, PullLimits, frozenset[int]], broker_pb2.PullResponse
        ] = {}  # many groups may wait for the same

    def response(self, hold: Hold) -> broker_pb2.PullResponse | None:
        """What a pull for the hold gets, not to be changed; None: the broker has to say."""
        if hold.limits is None or hold.generation not in (0, self._generation):
            return None
        if hold.offset not in self._inline_messages:
            return None
        wanted = (hold.offset, hold.limits, hold.codes)
        response = self._responses.get(wanted)
        if response is None:
            response = self._responses[wanted] = self._pull(*wanted)
        return response

    def _pull(
        self, offset: int, limits: PullLimits, codes: frozenset[int]
    ) -> broker_pb2.PullResponse:
        records, choice = self._inline_messages.pull(offset, *limits, codes)
        return broker_pb2.PullResponse(
            status=broker_pb2.PullStatus.ValueType(choice.status.value),
            records=records,
            count=choice.count,
            next_position=common_pb2.Position(
                generation=self._generation, offset=choice.next_offset
            ),
            min_offset=self._inline_messages.min_offset,
            max_offset=self._inline_messages.end_offset,
        )


class Deliveries:
    """What groups got, until the broker is told. As many entries as groups that hold."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], tuple[int, int]] = {}  # by topic and group

    def __bool__(self) -> bool:
        """Whether there is something to tell."""
        return bool(self._counts)

    def add(self, hold: Hold, response: broker_pb2.PullResponse) -> None:
        key = (hold.key.topic, hold.request.group)
        count, size_bytes = self._counts.get(key, (0, 0))
        self._counts[key] = (count + response.count, size_bytes + len(response.records))

    def take(self) -> list[member_pb2.InlineDelivery]:
        """What to tell; it is forgotten here."""
        counts, self._counts = self._counts, {}
        return [
            member_pb2.InlineDelivery(
                topic=topic, group=group, message_count=count, record_bytes=size_bytes
            )
            for (topic, group), (count, size_bytes) in counts.items()
        ]
