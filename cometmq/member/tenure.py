"""The writer's hold on its lease: begun before it serves, renewed, given away.

Every write is a compare-and-swap on the version that was read or written last. What became of a
write without an answer is found out by reading; and because a thread, or the API server, may still
be about to carry it out, only a later version that *we* wrote proves that it never will.
"""

from __future__ import annotations

import asyncio
import logging

from cometmq.errors import LeaseConflict, LeaseUnavailable
from cometmq.member.leases import Lease, Reading
from cometmq.replication.lease import LeaseRecord, Tenure
from cometmq.telemetry import fields

log = logging.getLogger(__name__)

RETRY_S = 0.5


class Deposed(Exception):
    """The lease names another writer."""


class LeaseHolder:
    """Holds ``lease``, of which ``reading`` shows that it is ours."""

    def __init__(self, lease: Lease, reading: Reading, renew_s: float) -> None:
        assert reading.record is not None
        self._lease = lease
        self._tenure = Tenure(reading.record)
        self._version = reading.version
        self._renew_s = renew_s
        self._one_at_a_time = asyncio.Lock()
        self._released = False
        self.held = True  # for metrics: the last write or reading went well

    @property
    def record(self) -> LeaseRecord:
        """The lease as far as we know."""
        return self._tenure.record

    async def begin(self, epoch: int, address: str) -> None:
        """Say that this writer's epoch is open. Tries until it is written; raises Deposed."""
        async with self._one_at_a_time:
            await self._settle(self._tenure.begun(epoch, address))

    async def run(self) -> None:
        """Renew until cancelled; raises Deposed. While the lease cannot be reached the writer goes
        on: in this release nobody else may take it.
        """
        while True:
            await asyncio.sleep(self._renew_s)
            async with self._one_at_a_time:
                if self._released:
                    return
                try:
                    await self._write(self._tenure.renewal())
                except (LeaseConflict, LeaseUnavailable) as error:
                    await self._look_after(error)

    async def release(self, transfer_to: int, log_end: int) -> None:
        """Give the lease to another member. The log must be sealed.

        LeaseUnavailable: it was not written, and never will be: the writer may go on. Deposed.
        """
        async with self._one_at_a_time:
            released = self._tenure.release(transfer_to, log_end)
            try:
                await self._write(released)
            except (LeaseConflict, LeaseUnavailable) as error:
                # A renewal that is written makes the release void. If it is our release that we
                # find instead, it was written after all.
                log.warning("no answer to the release", extra=fields(error=error))
                if not await self._settle(self._tenure.renewal()):
                    raise LeaseUnavailable("the lease could not be released") from error
            self._released = True

    async def _settle(self, record: LeaseRecord) -> bool:
        """Write ``record``, whatever it takes. True: our release was found there instead."""
        while True:
            try:
                await self._write(record)
                return False
            except (LeaseConflict, LeaseUnavailable) as error:
                log.warning("the lease is not written", extra=fields(error=error))
                if await self._look():
                    return True
            await asyncio.sleep(RETRY_S)

    async def _write(self, record: LeaseRecord) -> None:
        self._version = await self._lease.write(record, self._version)
        self._tenure.written(record)
        self.held = True

    async def _look_after(self, error: Exception) -> None:
        self.held = False
        log.warning("the lease is not renewed", extra=fields(error=error))
        await self._look()

    async def _look(self) -> bool:
        """Read, to find out who holds it. True: our release stands there; Deposed: another."""
        try:
            reading = await self._lease.read()
        except LeaseUnavailable:
            return False
        if self._tenure.is_release(reading.record):
            return True
        if not self._tenure.holds(reading.record):
            raise Deposed(f"the lease names another writer: {reading.record}")
        self._version = reading.version
        return False
