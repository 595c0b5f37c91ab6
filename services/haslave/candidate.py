"""A follower's look at the lease: whom does it follow, may it lead? And its word not to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from cometmq.clock import Clock
from cometmq.errors import LeaseConflict, LeaseUnavailable
from cometmq.member.leases import Lease
from cometmq.replication.candidacy import (
    Answers,
    Ask,
    Candidacy,
    Follow,
    Lead,
    Standing,
    Step,
    Write,
)
from cometmq.replication.lease import LeaseRecord
from cometmq.telemetry import fields

log = logging.getLogger(__name__)

# An order to lead is forgotten after so many of the lease's durations.
FORCE_DURATIONS = 20


class PeersPart(Protocol):
    """Who knows the other members."""

    async def ask(self, member_ids: Iterable[int]) -> Answers:
        """How these stand; those that do not answer are missing."""


class Candidate:
    """``standing(promised_until_s, forced)`` tells how the member stands now."""

    def __init__(
        self,
        lease: Lease,
        duration_s: float,
        standing: Callable[[float, bool], Standing],
        peers: PeersPart,
        clock: Clock,
    ) -> None:
        self._lease = lease
        self._duration_s = duration_s
        self._candidacy = Candidacy(duration_s)
        self._standing = standing
        self._peers = peers
        self._clock = clock
        self._promised_until_s = 0.0
        self._forced_until_s = 0.0

    def promise(self, duration_ms: int) -> int:
        """Give the word not to take the lease for so long from now; how long it is really given
        for, 0 = not at all.
        """
        if not self._candidacy.may_promise or self._forced:
            return 0
        until_s = self._clock.boottime_s() + duration_ms / 1000
        self._promised_until_s = max(self._promised_until_s, until_s)
        return duration_ms

    def force(self) -> None:
        """Lead as soon as the lease is abandoned, whatever may be lost. The order is for now: the
        next time that a writer falls silent it does not count.
        """
        log.warning("told to lead, though acknowledged messages may be missing here")
        self._forced_until_s = self._clock.boottime_s() + FORCE_DURATIONS * self._duration_s

    @property
    def _forced(self) -> bool:
        return self._clock.boottime_s() < self._forced_until_s

    async def look(self) -> Lead | Follow | None:
        """Read the lease and take it where that is allowed. None: nothing is known for now."""
        try:
            reading = await self._lease.read()
            step = self._saw(reading.record, None)
            if isinstance(step, Ask):
                answers = await self._peers.ask(step.member_ids)
                # What they said is for the lease as it is now.
                reading = await self._lease.read()
                step = self._saw(reading.record, answers)
            if not isinstance(step, Write):
                return None if isinstance(step, Ask) else step
            log.info("takes the lease", extra=fields(reason=step.record.reason))
            await self._lease.write(step.record, reading.version)
            return step.done
        except LeaseConflict:
            log.info("somebody else has written the lease first")
            return None
        except LeaseUnavailable as error:
            log.warning("the lease is not known", extra=fields(error=error))
            return None

    def _saw(self, record: LeaseRecord | None, answers: Answers | None) -> Step:
        me = self._standing(self._promised_until_s, self._forced)
        return self._candidacy.saw(record, me, self._clock.boottime_s(), answers)
