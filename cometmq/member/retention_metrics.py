"""Metrics of retention: how full the disk is, what was removed. Read off at each scrape, as of
retention's last look.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cometmq.clock import Clock
from cometmq.member.metrics import NODE, MemberMetrics
from cometmq.member.state.retention import Retention


class RetentionCollector(Collector):
    """It runs in the scraper's thread and only reads."""

    def __init__(self, metrics: MemberMetrics, retention: Retention, clock: Clock) -> None:
        self._node = metrics.node
        self._retention = retention
        self._clock = clock

    def describe(self) -> Iterable[Metric]:
        return [
            *(Metric(name, text, "gauge") for name, text, _ in self._gauges()),
            self._files(),
            self._queue_files(),
        ]

    def collect(self) -> Iterable[Metric]:
        for name, text, value in self._gauges():
            family = GaugeMetricFamily(name, text, labels=NODE)
            family.add_metric(self._node, value)
            yield family
        yield self._files()
        yield self._queue_files()

    def _gauges(self) -> Iterator[tuple[str, str, float]]:
        fill = self._retention.fill
        age_ms = max(0, self._clock.wall_ms() - fill.oldest_ms) if fill.oldest_ms else 0
        yield "rocketmq_storage_message_reserve_time", "Age of the oldest message, in ms.", age_ms
        yield "cometmq_store_bytes", "Bytes on disk of log, queues and index.", fill.store_bytes
        yield (
            "cometmq_store_quota_bytes",
            "Room that the store may take of its volume; 0: all of it.",
            self._retention.rules.quota_bytes,
        )
        yield (
            "cometmq_store_used_ratio",
            "Used part of the volume or of the quota, whichever is fuller.",
            fill.ratio,
        )
        yield (
            "cometmq_sends_refused",
            "1 while sends are refused for want of room.",
            bool(self._retention.refusal),
        )

    def _files(self) -> Metric:
        family = CounterMetricFamily(
            "cometmq_log_files_removed",
            "Log files that retention has removed.",
            labels=(*NODE, "reason"),
        )
        for reason, count in self._retention.removed.log_files.items():
            family.add_metric((*self._node, reason.value), count)
        return family

    def _queue_files(self) -> Metric:
        family = CounterMetricFamily(
            "cometmq_queue_files_removed",
            "Files of consume queues that retention has removed.",
            labels=NODE,
        )
        family.add_metric(self._node, self._retention.removed.queue_files)
        return family
