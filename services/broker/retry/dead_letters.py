"""Dead letters: sends them to their group again, deletes them."""

from __future__ import annotations

from collections.abc import Sequence

from cometmq.errors import CometError
from cometmq.format.record import Record
from cometmq.member.state.keeper import StateKeeper
from cometmq.messaging import retry
from cometmq.messaging.groups import check_name
from services.broker.retry.resends import Asked, Resender

QUEUE_ID = 0


class DeadLetters:
    """Belongs to the event loop. A dead letter that is sent again goes into its group's retry
    topic, so that no other group gets it.
    """

    def __init__(self, keeper: StateKeeper, resender: Resender) -> None:
        self._keeper = keeper
        self._resender = resender

    async def resend(
        self, group: str, offsets: Sequence[int], asked: Asked
    ) -> list[CometError | None]:
        """Send dead letters again, in the order of their offsets; None for each that was sent.
        Returns when all is safe. Raises GroupNameInvalid, GroupNotFound, TopicNotFound (it has
        none), and what appending raises.
        """
        settings, topic = self._keeper.group(group), retry.dlq_topic(group)
        self._keeper.state.topics.get(topic)
        to = retry.retry_topic(group)
        await self._keeper.create_system_topic(to, retry.queue_count_of(settings))

        def target(dead: Record) -> tuple[str, int, bytes]:
            return to, retry.queue_id_of(settings, dead), retry.resent_properties(dead)

        places = [(QUEUE_ID, offset) for offset in offsets]
        answers = await self._resender.send(topic, group, to, target, places, asked)
        return [answers[place] for place in places]

    async def purge(self, group: str) -> None:
        """Delete all dead letters of a group. Raises GroupNameInvalid, TopicNotFound."""
        check_name(group)
        await self._keeper.drop_topic(retry.dlq_topic(group), by_system=True)
