"""This member's clock beside those of others: how far it is off, and which time most agree on."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cometmq.clock import Clock
from cometmq.member.role_change import RoleChange
from cometmq.messaging.believed_clock import BelievedClock
from cometmq.replication.clock_comparison import ClockComparison
from cometmq.telemetry import OutageLogger

log = logging.getLogger(__name__)

MEMBER = "member "


def member_name(member_id: int) -> str:
    """What the clock of another member is called."""
    return f"{MEMBER}{member_id}"


class Clocks(Collector):
    """Belongs to the event loop; metrics are read off in the scraper's thread. ``skew_s_max``: a
    clock that differs by more from what most clocks show is off. ``before``: the role before this
    one, of the same process.
    """

    def __init__(self, clock: Clock, skew_s_max: float, before: RoleChange | None) -> None:
        self._clock = clock
        self._skew_ms_max = round(skew_s_max * 1000)
        self._comparison = ClockComparison(before.clocks if before is not None else None)
        self._outage = OutageLogger(
            log, logging.ERROR, "the clock of this machine is off", "the clock is right again"
        )

    @property
    def readings(self) -> dict[str, tuple[int, ...]]:
        """For the next role of this process."""
        return {name: tuple(one) for name, one in self._comparison.readings.items()}

    def boot_ms(self) -> int:
        """Milliseconds since the boot."""
        return int(self._clock.boottime_s() * 1000)

    def note(self, name: str, first_ms: int, theirs_ms: int) -> None:
        """Another clock showed ``theirs_ms`` between ``first_ms`` since the boot and now."""
        self._comparison.note(name, first_ms, self.boot_ms() + 1, theirs_ms)
        self._tell()

    def time_ms(self, stored_ms: int = 0) -> int:
        """The wall clock, or what most clocks show while it is off. ``stored_ms``: a time that has
        been; 0: none is known.
        """
        wall_ms, boot_ms = self._clock.wall_ms(), self.boot_ms()
        skew_ms = self._skew_ms(wall_ms, boot_ms, stored_ms)
        return wall_ms if skew_ms is None or not self._is_far(skew_ms) else wall_ms - skew_ms[0]

    @property
    def skew_ms(self) -> int | None:
        """How far this machine's clock is ahead of what most show; None: no other is known."""
        skew_ms = self._skew_ms(self._clock.wall_ms(), self.boot_ms())
        return None if skew_ms is None else skew_ms[0]

    @property
    def is_off(self) -> bool:
        """Whether it is ahead or behind by more than it may."""
        skew_ms = self._skew_ms(self._clock.wall_ms(), self.boot_ms())
        return skew_ms is not None and self._is_far(skew_ms)

    def is_other_off(self, member_id: int) -> bool:
        """The same of another member's clock, as far as it is known."""
        boot_ms, own_ms = self.boot_ms(), self._clock.wall_ms() - self.boot_ms()
        reading = self._comparison.readings.get(member_name(member_id))
        verdict = self._comparison.verdict(own_ms, boot_ms)
        if reading is None or verdict is None:
            return False
        off_ms = abs(reading.offset_ms - verdict.offset_ms)
        return off_ms > self._skew_ms_max + reading.error_ms + verdict.error_ms

    def _skew_ms(self, wall_ms: int, boot_ms: int, stored_ms: int = 0) -> tuple[int, int] | None:
        """Ahead by so much, and how far that may be wrong."""
        verdict = self._comparison.verdict(wall_ms - boot_ms, boot_ms, stored_ms)
        if verdict is None:
            return None
        return wall_ms - boot_ms - verdict.offset_ms, verdict.error_ms

    def _is_far(self, skew_ms: tuple[int, int]) -> bool:
        ahead_ms, error_ms = skew_ms
        return abs(ahead_ms) > self._skew_ms_max + error_ms

    def _tell(self) -> None:
        if not self.is_off:
            return self._outage.recovered()
        self._outage.failing(
            "other clocks show another time, by which messages are due meanwhile",
            seconds_ahead=round((self.skew_ms or 0) / 1000, 1),
            clocks=len(self._comparison.readings),
        )

    # --- metrics ----------------------------------------------------------------------------------

    def describe(self) -> Iterable[Metric]:
        return self.collect()

    def collect(self) -> Iterable[Metric]:
        skew = GaugeMetricFamily(
            "cometmq_clock_skew_seconds",
            "How far this machine's clock is ahead of what most clocks of the cluster show.",
        )
        if (skew_ms := self.skew_ms) is not None:
            skew.add_metric([], skew_ms / 1000)
        others = GaugeMetricFamily(
            "cometmq_member_clock_skew_seconds",
            "How far the clock of another member is ahead of this one's.",
            labels=["member"],
        )
        errors = GaugeMetricFamily(
            "cometmq_member_clock_error_seconds",
            "How far the difference of the two clocks may be wrong.",
            labels=["member"],
        )
        boot_ms, own_ms = self.boot_ms(), self._clock.wall_ms() - self.boot_ms()
        for name, reading in list(self._comparison.readings.items()):
            if name.startswith(MEMBER):
                member = [name.removeprefix(MEMBER)]
                others.add_metric(member, (reading.offset_ms - own_ms) / 1000)
                errors.add_metric(member, reading.error_now_ms(boot_ms) / 1000)
        return [skew, others, errors]


class GuardedClock:
    """A :class:`~cometmq.clock.Clock` whose wall clock is the believed one, by ``clocks``. Belongs
    to one thread. ``stored_ms``: when the newest record of the log was stored; 0: there is none.
    """

    def __init__(self, clock: Clock, clocks: Clocks | None, stored_ms: int = 0) -> None:
        self.believed = BelievedClock(stored_ms)
        self.monotonic_s = clock.monotonic_s
        self.boottime_s = clock.boottime_s
        self._machine_ms = clock.wall_ms
        self._clocks = clocks
        self._stored_ms = stored_ms

    def now_ms(self) -> int:
        """By which messages are due: never before they should be; late for a while after the wall
        clock jumped.
        """
        self._look()
        return self.believed.due_ms

    def wall_ms(self) -> int:
        """From which delays and ages count."""
        self._look()
        return self.believed.now_ms

    def promise(self, delay_ms: int) -> None:
        """A message is stored that waits for so long from :meth:`wall_ms`."""
        if delay_ms > 0:
            self.believed.promise(delay_ms, self._boot_ms())

    def _boot_ms(self) -> int:
        return int(self.boottime_s() * 1000)

    def _look(self) -> int:
        """How far what is due is behind the machine's clock, in ms."""
        machine_ms = self._machine_ms()
        time_ms = machine_ms if self._clocks is None else self._clocks.time_ms(self._stored_ms)
        self.believed.look(time_ms, self._boot_ms())
        return machine_ms - self.believed.due_ms
