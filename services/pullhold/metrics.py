"""The metrics of a pull-hold. RocketMQ has no such process, so the names are ours."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge

from cometmq.clock import Clock
from cometmq.errors import LimitExceeded
from cometmq.tallies import Spreads, Tally
from cometmq.telemetry import DeliveryAge

_DURATION_BUCKETS_S = (0.001, 0.005, 0.02, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 15.0, 20.0, 60.0)

FOUND, NOT_FOUND, ERROR = "found", "not_found", "error"


class HoldMetrics:
    """Counters, and gauges that are read at each scrape."""

    def __init__(self, registry: CollectorRegistry, clock: Clock) -> None:
        self._registry = registry
        self.durations = Spreads(
            "cometmq_hold_duration_seconds",
            "How long pulls were held, by what they were answered with.",
            _DURATION_BUCKETS_S,
            registry,
            "outcome",
            (FOUND, NOT_FOUND, ERROR),
        ).by_value
        self.wakes = Tally("cometmq_hold_wakes", "Holds that an arrival woke.", registry)
        self.pulls = Tally("cometmq_hold_pulls", "Pulls at brokers for woken holds.", registry)
        self.direct = Tally(
            "cometmq_hold_direct", "Holds answered out of an arrival, without a pull.", registry
        )
        self.delivery = DeliveryAge(registry, clock)
        self.safety_finds = Counter(
            "cometmq_hold_safety_finds",
            "Queues with messages of which no arrival came: always 0.",
            registry=registry,
        )
        self.refused = Counter(
            "cometmq_holds_refused", "Holds refused, by error.", ["error"], registry=registry
        )
        # For an alert: the first refusal is no increase of a series that did not exist.
        self.refused.labels(LimitExceeded.name())
        self.watch_streams = Gauge(
            "cometmq_hold_watch_streams", "Brokers that report arrivals now.", registry=registry
        )

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A value that is read at each scrape, in the scraper's thread."""
        Gauge(name, text, registry=self._registry).set_function(read)
