"""Dead letters: reads them, sends them to their group again, deletes them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cometmq.errors import AlreadyResent, CometError
from cometmq.format import record
from cometmq.format.record import Record
from cometmq.format.relay import Relayed, relay
from cometmq.member.read.records import span_of
from cometmq.member.relay import RelayWriter
from cometmq.member.state.keeper import StateKeeper
from cometmq.member.storage.member_storage import MemberStorage
from cometmq.messaging import retry
from cometmq.messaging.changes import DeadLettersResent
from cometmq.messaging.groups import GroupSettings, check_name
from cometmq.messaging.intervals import add_interval, holds_any
from cometmq.messaging.retry import RESENT_INTERVALS_MAX
from cometmq.replication.watermarks import DurabilityClass

ITEMS_MAX = 256  # of a call
QUEUE_ID = 0


class DeadLetters:
    """Belongs to the event loop. A dead letter that is sent again goes into its group's retry
    topic, so that no other group gets it.
    """

    def __init__(self, storage: MemberStorage, keeper: StateKeeper, relays: RelayWriter) -> None:
        self._storage = storage
        self._keeper = keeper
        self._relays = relays

    async def resend(
        self, group: str, offsets: Sequence[int], *, again: bool
    ) -> list[CometError | None]:
        """Send dead letters again, in the order of their offsets; None for each that was sent.
        ``again``: also those that were sent before. Returns when all is safe. Raises
        GroupNameInvalid, GroupNotFound, TopicNotFound (it has none), and what appending raises.
        """
        settings, topic = self._keeper.group(group), retry.dlq_topic(group)
        self._keeper.state.topics.get(topic)
        await self._keeper.create_system_topic(
            retry.retry_topic(group), retry.queue_count_of(settings)
        )
        found = await asyncio.to_thread(self._read, topic, sorted(set(offsets)))
        answers, resent = dict(found), list(self._keeper.state.resent.get(group, ()))
        relayed: list[Relayed] = []
        for offset, one in found.items():
            if isinstance(one, CometError):
                continue
            if holds_any(resent, offset, offset + 1) and not again:
                answers[offset] = AlreadyResent(
                    f"dead letter {offset} of group {group} was sent again before"
                )
                continue
            relayed.append(self._made(settings, one))
            resent = add_interval(resent, offset, offset + 1, RESENT_INTERVALS_MAX)
        if relayed:
            self._relays.append(relayed)
            end = self._keeper.write(DeadLettersResent(group, tuple(resent)))
            demands = DurabilityClass.of(*self._keeper.state.topics.demands(topic))
            await self._storage.stored(end, demands)
        each = [answers[offset] for offset in offsets]
        return [answer if isinstance(answer, CometError) else None for answer in each]

    async def purge(self, group: str) -> None:
        """Delete all dead letters of a group. Raises GroupNameInvalid, TopicNotFound."""
        check_name(group)
        await self._keeper.drop_topic(retry.dlq_topic(group), by_system=True)

    def _read(self, topic: str, offsets: Sequence[int]) -> dict[int, Record | CometError]:
        """In a thread: dead letters may be old."""
        found: dict[int, Record | CometError] = {}
        for offset in offsets:
            try:
                span = span_of(self._storage, (topic, QUEUE_ID), offset)
                found[offset] = record.decode(self._storage.store.read_records([span]))
            except CometError as error:
                found[offset] = error
        return found

    def _made(self, settings: GroupSettings, dead: Record) -> Relayed:
        topic = retry.retry_topic(settings.name)
        queue_id = retry.queue_id_of(settings, dead)
        properties = retry.resent_properties(dead)
        host = self._relays.host
        return relay(dead, topic, queue_id, host, properties=properties, reconsume_times=0)
