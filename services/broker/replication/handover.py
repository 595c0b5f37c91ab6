"""The planned hand-over: the log is sealed, the follower gets all of it, the lease is released.

Before the release every step can be undone, and is, when the follower does not catch up. After it
this process never writes to the log again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from cometmq.errors import BrokerDraining, CometError, NoFollower
from cometmq.member.clocks import Clocks
from cometmq.member.lease.lease_holder import DEPOSED, Deposed, LeaseHolder
from cometmq.member.pod.events import UNRECORDED, EventReason, EventRecorder
from cometmq.member.state.keeper import StateKeeper
from cometmq.member.storage.member_storage import MemberStorage
from cometmq.replication.follower import Replica, choose_successor
from cometmq.replication.watermarks import DurabilityClass
from cometmq.rpc.tasks import ShieldedTasks
from cometmq.telemetry import fields
from services.broker.replication.replicas import Replicas

log = logging.getLogger(__name__)

CATCH_UP_S_MAX = 10.0
SILENCE_S_MAX = 3.0  # of a possible successor; a follower answers once a second at least


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The new writer, and where the log ended."""

    member_id: int
    log_end: int


class HandOver:
    """``ended`` is called with a reason when this process is the writer no longer."""

    def __init__(
        self,
        storage: MemberStorage,
        keeper: StateKeeper,
        replicas: Replicas,
        holder: LeaseHolder | None,
        ended: Callable[[str], None],
        clocks: Clocks | None = None,
        events: EventRecorder = UNRECORDED,
    ) -> None:
        self._storage = storage
        self._keeper = keeper
        self._replicas = replicas
        self._holder = holder
        self._ended = ended
        self._clocks = clocks
        self._events = events
        self._shielded = ShieldedTasks()

    @property
    def is_alone_in_sync(self) -> bool:
        """Whether no other member has everything: without this one the group may have no writer."""
        return self._holder is not None and len(self._holder.record.in_sync) == 1

    async def step_down(self, member_id: int | None) -> HandedOver:
        """Hand over to a follower. NoFollower, BrokerDraining (another hand-over is under way),
        LeaseUnavailable, DiskFull: this member is still the writer.
        """
        return await self._shielded.run(self._recorded(member_id))

    async def _recorded(self, member_id: int | None) -> HandedOver:
        try:
            done = await self._step_down(member_id)
        except CometError as error:
            failed = f"the writer keeps its role: {error.name()}, {error.message}"
            self._events.record(EventReason.HAND_OVER_FAILED, failed)
            raise
        handed = f"the role of the writer goes to member {done.member_id}"
        self._events.record(EventReason.ROLE_HANDED_OVER, handed)
        return done

    async def _step_down(self, member_id: int | None) -> HandedOver:
        self._storage.check_open()
        if self._holder is None:
            raise NoFollower("this broker has no followers: it has no lease to hand over")
        end = self._storage.store.appended_offset
        follower = choose_successor(self._answering(), member_id, end, self._off_clocks())
        if follower.member_id in self._off_clocks():
            log.warning("hands over to a member whose clock is off: no other can take over")
        # These are the last committed offsets: a sealed storage refuses commits.
        self._keeper.write_offsets()
        assert not self._storage.sealed, "one hand-over at a time"
        self._storage.sealed = True
        try:
            end = self._storage.store.appended_offset
            log.info("sealed", extra=fields(end=end, successor=follower.member_id))
            await self._wait_for(follower, end)
            assert self._storage.store.appended_offset == end, "a sealed log does not grow"
            assert follower.has_all(end)
            await self._holder.release(follower.member_id, end)
        except Deposed:
            self._ended(DEPOSED)
            raise BrokerDraining("another member is the writer already") from None
        except BaseException:
            self._storage.unseal()
            raise
        # Sends that wait for other followers are sent again: the successor has them.
        self._storage.depose()
        self._ended("handover")
        return HandedOver(follower.member_id, end)

    def _answering(self) -> list[Replica]:
        """Connected followers without the silent ones: the log would stay sealed for the whole wait
        for one of those.
        """
        since_s = self._replicas.clock.boottime_s() - SILENCE_S_MAX
        found = self._replicas.connected()
        return [one for one in found if one.heard_s is None or one.heard_s >= since_s]

    def _off_clocks(self) -> list[int]:
        if self._clocks is None:
            return []
        connected = [replica.member_id for replica in self._replicas.connected()]
        return [member_id for member_id in connected if self._clocks.is_other_off(member_id)]

    async def _wait_for(self, follower: Replica, end: int) -> None:
        try:
            async with asyncio.timeout(CATCH_UP_S_MAX):
                await self._storage.stored(end, DurabilityClass.FLUSHED)
                await self._until_copied(follower, end)
        except TimeoutError:
            raise NoFollower(
                f"member {follower.member_id} was not there within {CATCH_UP_S_MAX:g} s: "
                f"it has {follower.flushed} of {end} bytes on its disk"
            ) from None

    async def _until_copied(self, follower: Replica, end: int) -> None:
        further = asyncio.Event()
        with self._replicas.changed.subscribed(further):
            while not follower.has_all(end):
                if not follower.connected:
                    raise NoFollower(f"member {follower.member_id} is gone")
                await further.wait()
                further.clear()
