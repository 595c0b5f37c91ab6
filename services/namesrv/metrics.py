"""The metrics of a name server. RocketMQ's has none, so the names are ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.namesrv.routes import RouteTable

PROCESS_LABELS = {"node_type": "namesrv"}  # no cluster: one name server may serve several


class NamesrvMetrics:
    """Counters, and gauges that are read at each scrape."""

    def __init__(self, registry: CollectorRegistry, table: RouteTable) -> None:
        self._registry = registry
        registry.register(MemberCensus(table))
        self.gauge("cometmq_namesrv_topics", "Topics that have a route.", lambda: table.topic_count)
        self.members_expired = Counter(
            "cometmq_namesrv_members_expired",
            "Members removed because they were silent.",
            registry=registry,
        )
        self.holds_expired = Counter(
            "cometmq_namesrv_holds_expired",
            "Pullholds removed because they were silent.",
            registry=registry,
        )

    def started(self, *, after_crash: bool, now_ms: int) -> None:
        """The process has started; ``after_crash``: the one before has not ended in order."""
        Gauge(
            "cometmq_unplanned_start_time_seconds",
            "When this process began, if that was after a crash, Unix time; else 0.",
            registry=self._registry,
        ).set(now_ms / 1000 if after_crash else 0.0)

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A value that is read at each scrape, in the scraper's thread."""
        Gauge(name, text, registry=self._registry).set_function(read)


class MemberCensus(Collector):
    """Registered members by group and role; a known group has both roles, also at 0."""

    def __init__(self, table: RouteTable) -> None:
        self._table = table

    def describe(self) -> Iterable[Metric]:
        return [_members()]

    def collect(self) -> Iterable[Metric]:
        family = _members()
        for (cluster, group), counts in self._table.census().items():
            for role, count in counts.items():
                family.add_metric((cluster, group, role.name.lower()), count)
        yield family


def _members() -> GaugeMetricFamily:
    labels = ("cluster", "broker_group", "role")
    return GaugeMetricFamily("cometmq_namesrv_members", "Registered members.", labels=labels)
