"""What a follower does with the lease: it follows the holder, or takes the lease where it may. And
its promise not to take it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from cometmq.clock import Clock
from cometmq.errors import LeaseConflict, LeaseUnavailable
from cometmq.member.lease.stores import Lease
from cometmq.member.pod.events import UNRECORDED, EventReason, EventRecorder
from cometmq.replication.election import (
    Answers,
    Ask,
    Election,
    Follow,
    Lead,
    ReplicaStatus,
    Step,
    Write,
)
from cometmq.replication.lease import LeaseRecord
from cometmq.telemetry import OutageLogger, fields

log = logging.getLogger(__name__)

# An order to lead is forgotten after so many of the lease's durations.
FORCE_DURATIONS = 20


class ForcedElection(NamedTuple):
    """An operator's order to lead, though messages may be lost that were acknowledged by then. A
    writer of the lease may acknowledge more, so the order ends when the lease is written.
    """

    record: LeaseRecord | None
    until_s: float


class PeersPart(Protocol):
    """The other members of the group."""

    async def ask(self, member_ids: Iterable[int]) -> Answers:
        """Their replicas, by member id; a member that does not answer is missing."""


class Elector:
    """``status(promised_until_s, forced)`` is what the member brings into an election now."""

    def __init__(
        self,
        lease: Lease,
        duration_s: float,
        status: Callable[[float, bool], ReplicaStatus],
        peers: PeersPart,
        clock: Clock,
        events: EventRecorder = UNRECORDED,
    ) -> None:
        self.record: LeaseRecord | None = None  # what was read last; None: nothing
        self._lease = lease
        self._duration_s = duration_s
        self._election = Election(duration_s)
        self._status = status
        self._peers = peers
        self._events = events
        self._clock = clock
        self._promised_until_s = 0.0
        self._order: ForcedElection | None = None
        self._outage = OutageLogger(
            log, logging.WARNING, "the lease is not known", "the lease is known again"
        )
        self._unled = OutageLogger(
            log, logging.WARNING, "no lease is there, and this member does not take it", "led again"
        )

    def promise(self, duration_ms: int) -> int:
        """Promise not to take the lease for so long from now. Returns the promised time; 0: there
        is no promise, because this member is being elected or was forced to lead.
        """
        assert duration_ms >= 0, duration_ms
        if not self._election.may_promise or self._forced:
            return 0
        until_s = self._clock.boottime_s() + duration_ms / 1000
        self._promised_until_s = max(self._promised_until_s, until_s)
        assert self._promised_until_s >= until_s, "a promise is never shortened"
        return duration_ms

    async def force(self) -> None:
        """Lead as soon as the lease is abandoned, unless a member writes it before. Raises
        LeaseUnavailable; LeaseConflict: the lease has another holder than at the last look, as may
        happen while the order is on its way.
        """
        known, reading = self.record, await self._lease.read()
        if _holding(reading.record) != _holding(known):
            raise LeaseConflict(
                "the lease has just changed: look which member leads, then repeat the command"
            )
        until_s = self._clock.boottime_s() + FORCE_DURATIONS * self._duration_s
        self._order = ForcedElection(reading.record, until_s)
        log.warning("ordered to lead, though acknowledged messages may be missing here")

    @property
    def _forced(self) -> bool:
        return self._order is not None and self._clock.boottime_s() < self._order.until_s

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
            self._tell_why(step)
            if not isinstance(step, Write):
                return None if isinstance(step, Ask) else step
            before = reading.record
            assert before is None or step.record.epoch >= before.epoch, "no epoch returns"
            log.info("takes the lease", extra=fields(reason=step.record.reason))
            if self._status(0.0, False).clock_is_off:
                log.warning(
                    "this member's clock is off, and no other member has taken the lease",
                    extra=fields(advice="correct the clock, then: cometmq broker step-down"),
                )
            await self._lease.write(step.record, reading.version)
            return step.done
        except LeaseConflict:
            log.info("another member has written the lease first")
            return None
        except LeaseUnavailable as error:
            self._outage.failing(error)
            return None

    def _tell_why(self, step: Step) -> None:
        if not isinstance(step, Follow) or not step.why:
            return self._unled.recovered()
        advice = "name all members in peers, or: cometmq broker elect GROUP MEMBER --force"
        self._unled.failing(step.why, advice=advice)

    def _saw(self, record: LeaseRecord | None, answers: Answers | None) -> Step:
        self._outage.recovered()
        self.record = record
        assert self._promised_until_s >= 0.0
        if self._order is not None and self._order.record != record:
            self._end_order("the lease was written since: the order to lead is void")
        elif self._order is not None and not self._forced:
            self._end_order("the order to lead is over, and this member could not take the lease")
        me = self._status(self._promised_until_s, self._forced)
        return self._election.saw(record, me, self._clock.boottime_s(), answers)

    def _end_order(self, why: str) -> None:
        log.warning(why)
        self._events.record(EventReason.ELECTION_FAILED, why)
        self._order = None


def _holding(record: LeaseRecord | None) -> object:
    """What identifies one holding of the lease, however often it was renewed."""
    return record and (record.holder, record.epoch, record.opened, record.released)
