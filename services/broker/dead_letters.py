"""Dead letters: reads them, sends them to their group again, deletes them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cometmq.errors import (
    AlreadyResent,
    CometError,
    GroupNotFound,
    MessageNotFound,
    OffsetInvalid,
)
from cometmq.format import queueunit, record
from cometmq.format.record import Record
from cometmq.format.relay import Relayed, relay
from cometmq.member.relay import RelayWriter
from cometmq.member.state.keeper import StateKeeper
from cometmq.member.storage.member_storage import MemberStorage
from cometmq.messaging import retry
from cometmq.messaging.changes import DeadLettersResent
from cometmq.messaging.groups import GroupSettings, check_name
from cometmq.messaging.intervals import add_interval, holds
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

    def is_resent(self, group: str, offset: int) -> bool:
        """Whether the dead letter was sent again."""
        return holds(self._keeper.state.resent.get(group, ()), offset)

    async def resend(
        self, group: str, offsets: Sequence[int], *, again: bool
    ) -> list[CometError | None]:
        """Send dead letters again, in the order of their offsets; None for each that was sent.
        ``again``: also those that were sent before. Returns when all is safe. Raises
        GroupNameInvalid, GroupNotFound, TopicNotFound (it has none), and what appending raises.
        """
        settings, topic = self._settings(group), retry.dlq_topic(group)
        self._keeper.state.topics.get(topic)
        queue_count = max(1, settings.retry_queue_count)
        await self._keeper.create_system_topic(retry.retry_topic(group), queue_count)
        found = await asyncio.to_thread(self._read, topic, sorted(set(offsets)))
        answers, resent = dict(found), list(self._keeper.state.resent.get(group, ()))
        relayed: list[Relayed] = []
        for offset, one in found.items():
            if isinstance(one, Record):
                if holds(resent, offset) and not again:
                    answers[offset] = AlreadyResent(
                        f"dead letter {offset} of group {group} was sent again before"
                    )
                    continue
                relayed.append(self._made(settings, one))
                resent = add_interval(resent, offset, offset + 1, RESENT_INTERVALS_MAX)
        if relayed:
            self._relays.append(relayed)
            end = self._keeper.write_resent(DeadLettersResent(group, tuple(resent)))
            demands = DurabilityClass.of(*self._keeper.state.topics.demands(topic))
            await self._storage.stored(end, demands)
        return [_refusal(answers[offset]) for offset in offsets]

    async def purge(self, group: str) -> None:
        """Delete all dead letters of a group. Raises GroupNameInvalid, TopicNotFound."""
        check_name(group)
        await self._keeper.drop_dead_letters(retry.dlq_topic(group))

    def _settings(self, group: str) -> GroupSettings:
        check_name(group)
        settings = self._keeper.state.groups.get(group)
        if settings is None or group in self._keeper.closing_groups:
            raise GroupNotFound(f"there is no consumer group {group} here")
        return settings

    def _read(self, topic: str, offsets: Sequence[int]) -> dict[int, Record | CometError]:
        """In a thread: dead letters may be old."""
        low, readable, _ = self._storage.bounds((topic, QUEUE_ID))
        store = self._storage.store
        found: dict[int, Record | CometError] = {}
        for offset in offsets:
            try:
                if not 0 <= offset < readable:
                    raise OffsetInvalid(f"the dead letters end at {readable}, {offset} is none")
                if offset < low:
                    raise MessageNotFound(f"the dead letters begin at {low}: {offset} is gone")
                unit = queueunit.unit_at(store.read_units(topic, QUEUE_ID, offset, 1), 0)
                found[offset] = record.decode(store.read_records([unit[:2]]))
            except CometError as error:
                found[offset] = error
        return found

    def _made(self, settings: GroupSettings, dead: Record) -> Relayed:
        topic = retry.retry_topic(settings.name)
        queue_id = dead.queue_offset % max(1, settings.retry_queue_count)
        properties = retry.resent_properties(dead)
        host = self._relays.host
        return relay(dead, topic, queue_id, host, properties=properties, reconsume_times=0)


def _refusal(answer: Record | CometError) -> CometError | None:
    return answer if isinstance(answer, CometError) else None
