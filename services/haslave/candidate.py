"""A follower's look at the lease: whom does it follow, may it lead?"""

from __future__ import annotations

import logging
from collections.abc import Callable

from cometmq.clock import Clock
from cometmq.errors import LeaseConflict, LeaseUnavailable
from cometmq.member.leases import Lease
from cometmq.replication.lease import Candidacy, Follow, Lead, Standing, Write
from cometmq.telemetry import fields

log = logging.getLogger(__name__)


class Candidate:
    """``standing`` tells how the member stands now."""

    def __init__(
        self, lease: Lease, duration_s: float, standing: Callable[[], Standing], clock: Clock
    ) -> None:
        self._lease = lease
        self._candidacy = Candidacy(duration_s)
        self._standing = standing
        self._clock = clock

    async def look(self) -> Lead | Follow | None:
        """Read the lease and take it where that is allowed. None: nothing is known for now."""
        try:
            reading = await self._lease.read()
            step = self._candidacy.saw(reading.record, self._standing(), self._clock.boottime_s())
            if not isinstance(step, Write):
                return step
            await self._lease.write(step.record, reading.version)
            return self._candidacy.written()
        except (LeaseConflict, LeaseUnavailable) as error:
            log.warning("the lease is not known", extra=fields(error=error))
            return None
