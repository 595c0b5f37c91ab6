"""What a writer tells Prometheus about its followers and its lease."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cometmq.member.tenure import LeaseHolder
from services.broker.replicas import Replicas


class ReplicationCollector(Collector):
    """Read off at each scrape, in the scraper's thread. ``holder`` is None without a lease."""

    def __init__(self, replicas: Replicas, holder: LeaseHolder | None) -> None:
        self._replicas = replicas
        self._holder = holder

    def describe(self) -> Iterable[Metric]:
        return self.collect()

    def collect(self) -> Iterable[Metric]:
        end = self._replicas.storage.store.appended_offset
        now_s = self._replicas.clock.monotonic_s()
        bytes_behind = GaugeMetricFamily(
            "cometmq_replica_behind_bytes",
            "Bytes of log that a connected follower does not have yet.",
            labels=["member"],
        )
        seconds_behind = GaugeMetricFamily(
            "cometmq_replica_behind_seconds",
            "How long ago a connected follower last had everything.",
            labels=["member"],
        )
        for replica in self._replicas.connected():
            member = [str(replica.member_id)]
            bytes_behind.add_metric(member, replica.behind_bytes(end))
            seconds_behind.add_metric(member, replica.behind_s(end, now_s))
        sent = CounterMetricFamily(
            "cometmq_replication_bytes", "Bytes of log sent to followers, or copied by one."
        )
        sent.add_metric([], self._replicas.bytes_sent)
        held = GaugeMetricFamily(
            "cometmq_lease_held", "1 while the lease is ours and was last renewed in time."
        )
        if self._holder is not None:  # else nothing is amiss
            held.add_metric([], int(self._holder.held))
        return [bytes_behind, seconds_behind, sent, held]
