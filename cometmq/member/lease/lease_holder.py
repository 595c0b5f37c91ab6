"""The writer's hold on its lease: begun before it serves, renewed, its sets changed, given away.

Every write is a compare-and-swap on the version that was read or written last. What became of a
write without an answer is found out by reading; and because a thread, or the API server, may still
be about to carry it out, only a later version that *we* wrote proves that it never will.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from cometmq.clock import Clock
from cometmq.errors import LeaseConflict, LeaseUnavailable
from cometmq.member.lease.stores import Lease, Reading
from cometmq.replication.epoch_history import Epoch
from cometmq.replication.lease import LeaseRecord, ReplicaId, ReplicaIds
from cometmq.replication.lease_state import LeaseState
from cometmq.replication.watermarks import NO_WATERMARKS, HighWatermarks
from cometmq.rpc.tasks import stop_all
from cometmq.telemetry import OutageLogger, fields

log = logging.getLogger(__name__)

RETRY_S = 0.5
DEPOSED = "deposed"  # why a writer becomes a follower when it was


class Deposed(Exception):
    """The lease names another writer."""


class ServedStorage(Protocol):
    """The storage that is written under the lease."""

    shown: HighWatermarks

    def settle(self) -> None: ...


class LeaseHolder:
    """Holds ``lease``, of which ``reading`` shows that it is ours."""

    def __init__(self, lease: Lease, reading: Reading, renew_s: float, clock: Clock) -> None:
        assert reading.record is not None
        self._served: ServedStorage | None = None  # once it is open
        self._lease = lease
        self._state = LeaseState(reading.record, self._shown)
        self._version = reading.version
        self._renew_s = renew_s
        self._clock = clock
        self._one_at_a_time = asyncio.Lock()
        self._released = False
        self.held = True  # for metrics: the last write or reading went well
        self._outage = OutageLogger(
            log, logging.WARNING, "the lease is not written", "the lease is written again"
        )

    # --- what holds -------------------------------------------------------------------------------

    @property
    def record(self) -> LeaseRecord:
        """The lease as far as we know."""
        return self._state.record

    @property
    def settled(self) -> bool:
        """No write is without an answer."""
        return self._state.settled

    def must_acknowledge(self) -> frozenset[ReplicaId]:
        """The members that must have a message before it counts as replicated."""
        return self._state.must_acknowledge()

    def electable_others(self) -> frozenset[ReplicaId]:
        """The other members that may take the lease."""
        return self._state.electable_others()

    def is_valid(self, promised_until_s: Callable[[ReplicaId], float]) -> bool:
        """Whether no other member can be the writer now."""
        return self._state.is_valid(self._clock.boottime_s(), promised_until_s)

    # --- what is written --------------------------------------------------------------------------

    def serve(self, storage: ServedStorage) -> None:
        """From now on each write carries by which marks consumers see messages, and ``storage``
        settles whenever the content of the lease, or what it may be, has changed.
        """
        assert self._served is None, "a lease is held for one storage"
        self._served = storage

    def _changed(self) -> None:
        if self._served is not None:
            self._served.settle()

    def _shown(self) -> HighWatermarks:
        return NO_WATERMARKS if self._served is None else self._served.shown

    async def begin(
        self, own: Sequence[Epoch], address: str, stopping: Callable[[], bool] = lambda: False
    ) -> None:
        """Write that the last of ``own``, the store's epochs, is open. Tries until it is written.
        Raises Deposed, and LeaseUnavailable once ``stopping`` is true.
        """
        assert own, "a store that is written has an epoch"
        async with self._one_at_a_time:
            await self._settle(
                lambda: (
                    self._state.begun(own, address)
                    if self.record.epoch < own[-1][0]
                    else self._state.renewal()  # a reading has shown that it is written
                ),
                stopping,
            )
            assert self.record.epoch >= own[-1][0]

    @asynccontextmanager
    async def renewed(self) -> AsyncIterator[None]:
        """Renew at once, and as long as the block lasts. The next write of the lease shows whether
        it is still ours.
        """
        renewing = asyncio.ensure_future(self._renew())
        try:
            yield
        finally:
            await stop_all([renewing])

    async def _renew(self) -> None:
        async with self._one_at_a_time:
            await self._try(self._state.renewal())
        await self.run()

    async def run(self) -> None:
        """Renew until cancelled; raises Deposed. While the lease cannot be reached the writer still
        writes: it may acknowledge for as long as the promises of its followers last.
        """
        while True:
            await asyncio.sleep(self._renew_s)
            async with self._one_at_a_time:
                if self._released:
                    return
                await self._try(self._state.renewal())

    async def put_sets(self, wanted: Callable[[], tuple[ReplicaIds, ReplicaIds]]) -> None:
        """Try to write the in-sync set and the electable members. :meth:`must_acknowledge` and
        :meth:`electable_others` show the result. Raises Deposed.

        ``wanted`` is called right before the write: while this call waited for its turn, messages
        may have been acknowledged that a member lacks which could have joined before.
        """
        async with self._one_at_a_time:
            if not self._released:
                await self._try(self._state.with_sets(*wanted()))

    async def pass_over(self, epoch: int) -> bool:
        """Try to write that our next epoch is to be above ``epoch``. True: the lease has that, and
        is ours; False: it is not known. Raises Deposed.
        """
        async with self._one_at_a_time:
            if self._released:
                return False
            await self._try(self._state.passed_over(epoch))
            return self.settled and self.record.epoch >= epoch

    async def release(self, transfer_to: int, log_end: int) -> None:
        """Give the lease to another member. The log must be sealed.

        LeaseUnavailable: it was not written, and never will be: the writer may continue. Deposed.
        """
        async with self._one_at_a_time:
            assert not self._released, "a lease is released once"
            released = self._state.release(transfer_to, log_end)
            try:
                await self._write(released)
            except (LeaseConflict, LeaseUnavailable) as error:
                # A renewal that is written makes the release void. If it is our release that we
                # find instead, it was written after all.
                log.warning("no answer to the release", extra=fields(error=error))
                if not await self._settle(self._state.renewal):
                    raise LeaseUnavailable("the lease could not be released") from error
            self._released = True

    async def _settle(
        self, wanted: Callable[[], LeaseRecord], stopping: Callable[[], bool] = lambda: False
    ) -> bool:
        """Write what is wanted, with as many tries as it takes. True: our release was found."""
        while True:
            record = wanted()
            try:
                await self._write(record)
                return False
            except (LeaseConflict, LeaseUnavailable) as error:
                self._outage.failing(error)
                if await self._look():
                    return True
                if stopping():
                    raise LeaseUnavailable("stopped before the lease was written") from error
            await asyncio.sleep(RETRY_S)

    async def _try(self, record: LeaseRecord) -> None:
        try:
            await self._write(record)
        except (LeaseConflict, LeaseUnavailable) as error:
            self.held = False
            self._outage.failing(error)
            await self._look()

    async def _write(self, record: LeaseRecord) -> None:
        assert self._one_at_a_time.locked()
        assert not self._released, "nothing is written after the release"
        assert record.epoch >= self.record.epoch, "the epoch of a lease never steps back"
        self._state.sent(record, self._clock.boottime_s())
        self._changed()
        try:
            self._version = await self._lease.write(record, self._version)
        except LeaseConflict:
            self._state.refused(record)
            raise
        self._state.written(record)
        self.held = True
        self._outage.recovered()
        self._changed()

    async def _look(self) -> bool:
        """Read the lease. True: it has our release. Deposed: it has another holder."""
        assert self._one_at_a_time.locked()
        try:
            reading = await self._lease.read()
        except LeaseUnavailable:
            return False
        if self._state.is_release(reading.record):
            return True
        if not self._state.saw(reading.record, self._clock.boottime_s()):
            raise Deposed(_why(reading.record))
        self._version = reading.version
        self._changed()
        return False


def _why(record: LeaseRecord | None) -> str:
    if record is None:
        return "the lease is gone, and another member may have held it meanwhile"
    if record.released:
        return f"the lease was released to member {record.transfer_to}"
    return f"the lease names member {record.holder_id} in epoch {record.epoch}"
