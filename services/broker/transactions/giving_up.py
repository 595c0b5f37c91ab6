"""Half messages that no producer has ended: they go to the topic of those that are given up."""

from __future__ import annotations

from collections.abc import Sequence

from cometmq.errors import CometError
from cometmq.format.halves import GIVEN_UP_TOPIC, HALF_QUEUE, QUEUE_ID
from cometmq.format.record import Record
from cometmq.format.relay import relay
from cometmq.member.metrics import MemberMetrics
from cometmq.member.read.records import read_each, slices
from cometmq.member.storage.member_storage import MemberStorage
from cometmq.store.log.commitlog import Span
from cometmq.telemetry import fields, logger
from cometmq.turns import Turns
from services.broker.transactions.half_closer import HalfCloser, Made

log = logger(__name__)

SLICE_MAX = 256  # halves that are looked at one by one before others have their turn


class GivingUp:
    """Belongs to the event loop. ``bytes_max``: of records that are appended at once."""

    def __init__(
        self,
        storage: MemberStorage,
        closer: HalfCloser,
        metrics: MemberMetrics,
        bytes_max: int,
    ) -> None:
        self._storage = storage
        self._table = closer.table
        self._closer = closer
        self._metrics = metrics
        self._bytes_max = bytes_max

    async def give_up(self, offsets: Sequence[int], reason: str) -> None:
        """Move open halves to the topic of those that nobody has ended. Raises what appending
        raises.
        """
        named = dict.fromkeys(offsets)
        open_ones = [(offset, half) for offset in named if (half := self._table.find(offset))]
        spans: list[Span] = [half[:2] for _, half in open_ones]
        for part in slices(spans, SLICE_MAX, self._bytes_max):
            places = [(HALF_QUEUE, offset) for offset, _ in open_ones[part]]
            found = await read_each(self._storage.store, spans[part], places)
            made = [
                self._made(offset, half[0], half[2], its)
                for (offset, half), its in zip(open_ones[part], found, strict=True)
                if self._table.find(offset) is not None
            ]
            if made:
                self._storage.check_moving_room(sum([size for _, size in spans[part]]))
                self._closer.append(made)
                self._metrics.halves_given_up(len(made))
                log.warning(
                    "half messages were given up",
                    extra=fields(count=len(made), reason=reason, first=made[0].offset),
                )

    def _made(self, offset: int, log_offset: int, group: str, found: Record | CometError) -> Made:
        relayed = None
        try:
            if isinstance(found, CometError):
                raise found
            relayed = relay(found, GIVEN_UP_TOPIC, QUEUE_ID, self._closer.host)
        except CometError as error:  # it stops no other one
            log.error("a half message is lost", extra=fields(at=log_offset, reason=str(error)))
        return Made(offset, log_offset, group, "", 0, relayed)

    async def leave(self, log_offset: int) -> None:
        """The log before this place is about to go: what is open there is given up first."""
        turns = Turns("giving up of half messages")
        while offsets := self._table.below(log_offset, SLICE_MAX):
            turns.next(offsets)
            await self.give_up(offsets, "the log is cleaned")
