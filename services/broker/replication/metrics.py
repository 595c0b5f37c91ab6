"""Metrics of a writer about its followers and its lease."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cometmq.member.lease.lease_holder import LeaseHolder
from cometmq.member.metrics import replication_refused
from services.broker.replication.insync import InSyncSet
from services.broker.replication.replicas import Replicas


class ReplicationCollector(Collector):
    """Read off at each scrape, in the scraper's thread. ``holder`` is None without a lease."""

    def __init__(self, replicas: Replicas, in_sync: InSyncSet, holder: LeaseHolder | None) -> None:
        self._replicas = replicas
        self._in_sync = in_sync
        self._holder = holder

    def describe(self) -> Iterable[Metric]:
        return self.collect()

    def collect(self) -> Iterable[Metric]:
        end = self._replicas.storage.store.appended_offset
        now_s = self._replicas.clock.boottime_s()
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
        refused = replication_refused(self._replicas.refusals)
        return [bytes_behind, seconds_behind, sent, refused, held, *self._sets()]

    def _sets(self) -> Iterable[Metric]:
        size = GaugeMetricFamily(
            "cometmq_in_sync_members",
            "Members, the writer included, that have what counts as copied.",
        )
        size.add_metric([], self._in_sync.size)
        least = GaugeMetricFamily(
            "cometmq_in_sync_members_min",
            "Members that must be in sync for sends to topics that wait for copies.",
        )
        least.add_metric([], self._in_sync.size_min)
        expected = GaugeMetricFamily(
            "cometmq_in_sync_members_expected",
            "Members that should be in sync; without a value where it is not known.",
        )
        if self._in_sync.expected:
            expected.add_metric([], self._in_sync.expected)
        electable = GaugeMetricFamily(
            "cometmq_electable_members", "Members, the writer included, that may take over."
        )
        electable.add_metric([], self._in_sync.electable)
        shrinks = CounterMetricFamily(
            "cometmq_in_sync_removals", "Members that were taken out of the in-sync set."
        )
        shrinks.add_metric([], self._in_sync.shrinks)
        only = GaugeMetricFamily(
            "cometmq_writer_valid",
            "1 while no other member can be the writer; 0: acknowledgements wait.",
        )
        only.add_metric([], int(self._replicas.storage.authority.may_acknowledge()))
        return [size, least, expected, electable, shrinks, only]
