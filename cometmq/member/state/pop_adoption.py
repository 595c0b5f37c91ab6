"""The adoption of what groups have received from RocketMQ 5 (POP), and not acknowledged:
docs/compatibility.md. Blocking; reads RocketMQ's revive log once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace

from cometmq.format.delayed import target_of
from cometmq.format.record import Record
from cometmq.member.state.timer_adoption import records_of
from cometmq.messaging.changes import GroupPolicyPut, OffsetsCommitted, PopsMoved
from cometmq.messaging.group_policy import ConsumeMode
from cometmq.messaging.offsets import CommittedOffset
from cometmq.messaging.pop.leases import Given
from cometmq.messaging.pop.revive import CHECKPOINT, REVIVE_GROUP, REVIVE_PREFIX, ReviveLog
from cometmq.messaging.pop.table import QueueMoved
from cometmq.messaging.state import BrokerState
from cometmq.model import Position, QueueKey
from cometmq.store.base import BaseStore
from cometmq.telemetry import fields

log = logging.getLogger(__name__)

# Acknowledgements of a checkpoint may lie before it: RocketMQ delivers what is late at once.
_ACKS_BEFORE = 4_096
_LEASE_WIDTH_MAX = 1_024
_ATTEMPT = 1  # each was delivered once, as far as is known


class PopAdoption:
    """Reads RocketMQ's revive log, then changes the state. Call :meth:`takes` first."""

    def __init__(self, store: BaseStore, state: BrokerState) -> None:
        self._store = store
        self._state = state
        self._log = ReviveLog()

    def takes(self, found: Record) -> bool:
        """A message that waits for its time: whether it is on its way to the revive log."""
        target = target_of(found.raw_properties)
        is_revive = target is not None and target[0].startswith(REVIVE_PREFIX)
        return is_revive and self._log.add(found.tag, found.body)

    def read(self) -> None:
        """What RocketMQ has not looked at of its revive log; from now on it has."""
        for key in [key for key in self._store.queues() if key[0].startswith(REVIVE_PREFIX)]:
            low, end = self._store.queue_bounds(*key)
            committed = self._state.offsets.get(REVIVE_GROUP, key)
            # RocketMQ commits the last one that it has looked at.
            first = low if committed is None else max(low, min(committed.offset + 1, end))
            for found in records_of(self._store, key, max(low, first - _ACKS_BEFORE), end):
                if found.queue_offset >= first or found.tag != CHECKPOINT:
                    self._log.add(found.tag, found.body)
            generation = self._state.pop_generation(key)
            if low < end and generation:
                commit = CommittedOffset(REVIVE_GROUP, *key, Position(generation, end - 1))
                self._state.apply(OffsetsCommitted((commit,)))

    def settle(self, epoch: int) -> int:
        """The groups have in leases what they have received, and receive here too: their mode is
        POP. How many messages that are.
        """
        count = 0
        for (group, key), visible in sorted(self._log.open().items()):
            low, end = self._store.queue_bounds(*key)
            there = {offset: ms for offset, ms in visible.items() if low <= offset < end}
            if there and group in self._state.groups and self._state.pop_generation(key):
                self._lease(group, key, there, epoch)
                count += len(there)
            elif there:
                log.warning(
                    "received messages of a group or topic that is gone",
                    extra=fields(group=group, topic=key[0], count=len(there)),
                )
        return count

    def _lease(self, group: str, key: QueueKey, visible: Mapping[int, int], epoch: int) -> None:
        state = self._state
        committed = state.offsets.get(group, key)
        next_offset = max(committed.offset if committed else 0, max(visible) + 1)
        policy = state.groups[group].policy
        if policy.mode is not ConsumeMode.POP:
            state.apply(GroupPolicyPut(group, replace(policy, mode=ConsumeMode.POP)))
        state.pops.forget(group, key)
        given = tuple(
            Given(state.pops.next_number(epoch), 0, first, mask, visible_ms, _ATTEMPT)
            for first, mask, visible_ms in _runs(visible)
        )
        generation = state.pop_generation(key)
        # RocketMQ has committed what it gave away; here that is the first one that is not done.
        floor = Position(generation, min(visible))
        state.offsets.reset(CommittedOffset(group, *key, floor))
        state.apply(PopsMoved((QueueMoved(group, key, generation, next_offset, given),)))


def _runs(visible: Mapping[int, int]) -> Iterator[tuple[int, int, int]]:
    """(first, mask, visible_ms) of messages near each other that come back at the same time."""
    found: dict[tuple[int, int], int] = {}
    first_of: dict[int, int] = {}  # by time
    for offset, visible_ms in sorted(visible.items()):
        first = first_of.get(visible_ms)
        if first is None or offset - first >= _LEASE_WIDTH_MAX:
            first = first_of[visible_ms] = offset
        found[first, visible_ms] = found.get((first, visible_ms), 0) | 1 << (offset - first)
    for (first, visible_ms), mask in sorted(found.items()):
        yield first, mask, visible_ms
