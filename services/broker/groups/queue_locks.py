"""Queue locks at the writer: grants, renewals, releases."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cometmq.clock import Clock
from cometmq.errors import CometError, LimitExceeded, QueueLocked, QueueNotFound
from cometmq.member.state.keeper import StateKeeper
from cometmq.member.storage.member_storage import MemberStorage
from cometmq.messaging.changes import QueuesLocked, QueuesUnlocked
from cometmq.messaging.locks import LOCKS_MAX, LockLeases, by_topic
from cometmq.model import QueueKey
from cometmq.names import check_client_id


class QueueLocks:
    """Belongs to the event loop."""

    def __init__(self, keeper: StateKeeper, storage: MemberStorage, clock: Clock) -> None:
        self._keeper = keeper
        self._storage = storage
        self._clock = clock
        opened_s = clock.monotonic_s()
        self._granted_end = 0  # of the log, behind the newest grant
        self._leases = LockLeases(keeper.state.locks, storage.store.epoch, opened_s)

    async def lock(
        self, group: str, client_id: str, keys: Sequence[QueueKey]
    ) -> list[int | CometError]:
        """The lock number of each queue, or why the client does not get it. Returns when the grants
        are as safe as messages of their topics, and while no other member can be the writer: one
        that takes over may give the queues away when it has counted a lease. Raises
        GroupNameInvalid, GroupNotFound, InvalidRequest, LimitExceeded, and what appending raises.
        """
        check_client_id(client_id)
        self._keeper.group(group)
        locks, now_s = self._keeper.state.locks, self._clock.monotonic_s()
        refused: dict[QueueKey, CometError] = self.absent(keys)
        there = [key for key in keys if key not in refused]
        free, held = self._leases.renew(group, client_id, there, now_s)
        refused |= held
        if free:
            if locks.count + len(free) > LOCKS_MAX:
                raise LimitExceeded(f"{LOCKS_MAX} queues are locked here (LOCKS_MAX)")
            run = self._leases.plan_grant(group, client_id, free)
            self._granted_end = self._keeper.write(QueuesLocked(run))
            self._leases.granted(run, now_s)
        # Also for a renewal: the client may ask again because its grant is not answered yet.
        topics = {topic for topic, queue_id in keys if (topic, queue_id) not in refused}
        if topics:
            await self._storage.stored(self._granted_end, self._keeper.demands_of(topics))
        return [refused.get(key) or self._held(group, client_id, key) for key in keys]

    def _held(self, group: str, client_id: str, key: QueueKey) -> int | CometError:
        """The lock number. What the client got may be gone while it was written."""
        grant = self._keeper.state.locks.get(group, key)
        if grant is None or grant.client_id != client_id:
            return QueueLocked(
                f"group {group}, queue {key[1]} of {key[0]}: the lock was lost before it was safe"
            )
        return grant.number

    async def unlock(self, group: str, client_id: str, keys: Sequence[QueueKey]) -> None:
        """Release what the client has of these queues; others stay as they are. Returns when that
        is as safe as messages of the topics. Raises GroupNameInvalid, GroupNotFound,
        InvalidRequest, QueueNotFound, and what appending raises.
        """
        check_client_id(client_id)
        self._keeper.group(group)
        for topic, queue_id in keys:  # one that was deleted meanwhile is no error
            if queue_id < 0:
                raise QueueNotFound(f"{topic} has no queue {queue_id}")
        locks = self._keeper.state.locks
        mine = [
            key
            for key in keys
            if (grant := locks.get(group, key)) is not None and grant.client_id == client_id
        ]
        if mine:
            queues = by_topic(mine)
            end = self._keeper.write(QueuesUnlocked(group, queues))
            await self._storage.stored(end, self._keeper.demands_of(queues))

    def forget_group(self, group: str) -> None:
        """The group was deleted."""
        self._leases.forget_group(group)

    def absent(self, keys: Iterable[QueueKey]) -> dict[QueueKey, CometError]:
        """Queues that no member can read, and why."""
        absent: dict[QueueKey, CometError] = {}
        for key in keys:
            try:
                self._keeper.state.topics.for_read(*key)
                self._keeper.check_open(key[0])
            except CometError as error:
                absent[key] = error
        return absent
