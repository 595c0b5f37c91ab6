"""Metrics of a follower's copy of the log."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cometmq.member.metrics import replication_refused
from services.haslave.following import Following


class FollowerCollector(Collector):
    """Read off at each scrape, in the scraper's thread. The writer has the same metrics of its
    followers; those of a follower are there without a writer, too.
    """

    def __init__(self, following: Following, member_id: int, lost_bytes: Callable[[], int]) -> None:
        self._following = following
        self._lost_bytes = lost_bytes
        self._member = [str(member_id)]

    def describe(self) -> Iterable[Metric]:
        return self.collect()

    def collect(self) -> Iterable[Metric]:
        following = self._following
        copied = CounterMetricFamily(
            "cometmq_replication_bytes", "Bytes of log sent to followers, or copied by one."
        )
        copied.add_metric([], following.bytes_copied)
        connected = GaugeMetricFamily(
            "cometmq_replica_connected", "1 while this follower copies from a writer."
        )
        connected.add_metric([], int(following.connected))
        bytes_behind = GaugeMetricFamily(
            "cometmq_copy_behind_bytes",
            "Bytes of log that this follower did not have by the last frame of the writer.",
            labels=["member"],
        )
        bytes_behind.add_metric(self._member, following.behind_bytes)
        seconds_behind = GaugeMetricFamily(
            "cometmq_copy_behind_seconds",
            "How long ago this follower last had everything.",
            labels=["member"],
        )
        seconds_behind.add_metric(self._member, following.behind_s())
        held = GaugeMetricFamily(
            "cometmq_lease_held", "1 while the lease is ours and was last renewed in time."
        )
        held.add_metric([], 0)
        refused = replication_refused(following.refusals)
        lost = GaugeMetricFamily(
            "cometmq_lost_range_bytes",
            "Log that this member had and its group has not, kept in the folder `lost`.",
        )
        lost.add_metric([], self._lost_bytes())
        return [copied, connected, bytes_behind, seconds_behind, refused, held, lost]
