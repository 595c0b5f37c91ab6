"""Metrics of a member, under RocketMQ 5's names where it has one.

Counters are counted per batch, never per message. What can be read off at scrape time is read then,
by :class:`MemberCollector`; it runs in the scraper's thread and only reads.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cometmq.clock import Clock, SystemClock
from cometmq.errors import DiskFull, FlowControl, StoreFailed
from cometmq.format.record import first_store_time_ms
from cometmq.member.storage.member_storage import BaseStorage, MemberStorage
from cometmq.messaging.quotas import Scope, Way
from cometmq.messaging.state import BrokerState
from cometmq.messaging.topics import is_system
from cometmq.model import BROADCAST_PREFIX, RETRY_PREFIX
from cometmq.replication.refusals import Refusals
from cometmq.rpc.background import failures_of
from cometmq.tallies import Tally, TallyByLabels, histogram
from cometmq.telemetry import DeliveryAge

# Labels of every sample that names its process.
NODE = ("cluster", "node_type", "node_id")
_BUCKETS_S = (
    0.0001,
    0.0002,
    0.0005,
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    0.5,
    1.0,
    5.0,
)
# Followers too, as in RocketMQ: a series survives changes of role; `cometmq_role` has the role.
_NODE_TYPE = "broker"
# Refusals that alerts wait for: their series exist from the start, for the first one is no
# increase of a series that was not there.
_ALARMING = (DiskFull, FlowControl, StoreFailed)


_DISK = (
    ("cometmq_disk_size_bytes", "Size of the volume that the store lies on."),
    ("cometmq_disk_free_bytes", "Bytes of that volume that the process may still use."),
)


def _flag(value: bool) -> str:
    return "true" if value else "false"


def replication_refused(refusals: Refusals) -> CounterMetricFamily:
    """What a writer refused of followers, or a follower of its writer."""
    refused = CounterMetricFamily(
        "cometmq_replication_refused",
        "Streams of replication that were ended for what came on them, by what was wrong.",
        labels=["reason"],
    )
    for reason, count in refusals.counts.items():
        refused.add_metric([reason.value], count)
    return refused


class _Flow:
    """Messages and their record bytes, counted together: by topic, or by topic and group."""

    def __init__(
        self, node: tuple[str, ...], messages: TallyByLabels, record_bytes: TallyByLabels
    ) -> None:
        self._node = node
        self._messages, self._bytes = messages.counts, record_bytes.counts
        self._series: dict[tuple[str, ...], tuple[str, ...]] = {}  # their labels, by our keys

    def count(self, key: tuple[str, ...], messages: int, record_bytes: int) -> None:
        labels = self._series.get(key)
        if labels is None:
            labels = self._series[key] = self._labels(*key)
            self._messages[labels] = self._bytes[labels] = 0
        self._messages[labels] += messages
        self._bytes[labels] += record_bytes

    def forget(self, name: str, place: int = 0) -> None:
        """End the series that have ``name`` there in their key."""
        for key in [key for key in self._series if key[place] == name]:
            labels = self._series.pop(key)
            del self._messages[labels], self._bytes[labels]

    def _labels(self, topic: str, *group: str) -> tuple[str, ...]:
        is_retry = (_flag(topic.startswith(RETRY_PREFIX)),) if group else ()
        return (*self._node, topic, _flag(is_system(topic)), *group, *is_retry)


DELAY_RESULTS = ("delivered", "dropped", "lost")
TIMER_RESULTS = ("delivered", "recalled", "dropped", "lost")


class MemberMetrics:
    """The counters that code has to feed. ``node`` is (cluster, broker group)."""

    def __init__(
        self,
        registry: CollectorRegistry,
        cluster: str,
        broker_group: str,
        clock: Clock | None = None,
    ) -> None:
        self.node = (cluster, _NODE_TYPE, broker_group)
        counter = partial(Counter, registry=registry)
        flow = partial(TallyByLabels, registry=registry)
        seconds = partial(histogram, bounds=_BUCKETS_S, registry=registry)
        topic = (*NODE, "topic", "is_system")
        self._in = _Flow(
            self.node,
            flow("rocketmq_messages_in", "Messages stored.", topic),
            flow("rocketmq_throughput_in", "Record bytes stored.", topic),
        )
        group = (*topic, "consumer_group", "is_retry")
        self._out = _Flow(
            self.node,
            flow("rocketmq_messages_out", "Messages answered to pulls.", group),
            flow("rocketmq_throughput_out", "Record bytes answered to pulls.", group),
        )
        self.arrival_bytes = Tally(
            "cometmq_arrival_bytes", "Record bytes sent along with arrivals.", registry
        )
        self.pulls_suggested = counter(
            "cometmq_pulls_suggested", "Pulls answered with a follower to pull from next."
        )
        self.producer_connections = Gauge(
            "rocketmq_producer_connections", "Open send streams.", NODE, registry=registry
        ).labels(*self.node)
        self.batches_refused = counter(
            "cometmq_batches_refused", "Batches refused, by error.", ["error"]
        )
        for refusal in _ALARMING:
            self.batches_refused.labels(refusal.name())
        throttled = counter(
            "cometmq_calls_throttled",
            "Calls refused because a quota is used up, by what is counted and whose quota it is.",
            ["way", "scope"],
        )
        self._throttled = {
            (way, scope): throttled.labels(way.value, scope.value) for way in Way for scope in Scope
        }
        self._late = counter(
            "cometmq_batches_late",
            "Batches stored, and answered FLUSH_DISK_TIMEOUT or FLUSH_SLAVE_TIMEOUT.",
        )
        self._known = counter(
            "cometmq_messages_known", "Messages that were sent again, and were stored already."
        )
        self._forgotten = counter(
            "cometmq_senders_forgotten",
            "Senders that were forgotten for newer ones: what they send again is stored again.",
        )
        self._replies = counter(
            "cometmq_replies",
            "Replies to requests: handed out as they came (pushed) or when their requester came "
            "back (found), for no requester here (unclaimed), too late for their requester (late).",
            ["outcome"],
        )
        self._append_s = seconds(
            "cometmq_append_seconds", "Time of checking, writing and dispatching one batch."
        )
        self._send_s = seconds(
            "cometmq_send_seconds",
            "Time from a batch's arrival to its acknowledgement, as its topics demand it.",
        )
        sent_back = (*NODE, "topic", "consumer_group")
        self._sent_back = counter(
            "rocketmq_send_back_messages", "Messages that a group sent back.", sent_back
        )
        self._sent_to_dlq = counter(
            "rocketmq_send_to_dlq_messages", "Messages that became dead letters.", sent_back
        )
        self._pop_delivered = counter(
            "cometmq_pop_delivered_messages",
            "Messages that members of groups received, redelivered ones included.",
            sent_back,
        )
        self._pop_delivered_again = counter(
            "cometmq_pop_delivered_again_messages",
            "Messages that members received because an earlier delivery was not acknowledged.",
            sent_back,
        )
        self._pop_acknowledged = counter(
            "cometmq_pop_acknowledged_messages", "Messages that members acknowledged.", sent_back
        )
        self._pop_lost = counter(
            "cometmq_pop_lost_messages",
            "Messages that no member can receive: they are damaged, or retention came first.",
            sent_back,
        )
        self._resets = counter(
            "cometmq_offset_resets", "Queues in which a group was reset.", sent_back
        )
        self._given_back: set[tuple[str, str]] = set()  # topic and group of these series
        self.delay_latency_s = seconds(
            "rocketmq_delay_message_latency",
            "How long after its time a delayed message was delivered: first and last of each run.",
        )
        self.delay_out = counter(
            "cometmq_delay_dequeue",
            "Messages of delay levels whose time has come, by what became of them.",
            ["result"],
        )
        for result in DELAY_RESULTS:
            self.delay_out.labels(result)
        by_topic = (*NODE, "topic")
        self._committed = counter(
            "rocketmq_commit_messages", "Half messages that were committed.", by_topic
        )
        self._rolled_back = counter(
            "rocketmq_rollback_messages", "Half messages that were rolled back.", by_topic
        )
        self._finish_s = seconds(
            "rocketmq_finish_message_latency",
            "Time from a half message to the end of its transaction.",
        )
        self._given_up = counter(
            "cometmq_halves_given_up",
            "Half messages that went to TRANS_CHECK_MAX_TIME_TOPIC: no producer has ended them.",
        )
        self.background_failures = failures_of(registry)
        self.transaction_checks = counter(
            "cometmq_transaction_checks", "Half messages that a producer was asked about."
        )
        self.client_questions = counter(
            "cometmq_client_questions",
            "Questions that running clients were asked, and what became of them.",
            ["kind", "outcome"],
        )
        self.timers_pending = Gauge(
            "rocketmq_timing_messages",
            "Messages that wait for a time of their own.",
            registry=registry,
        )
        self.timer_lateness_s = seconds(
            "cometmq_timer_lateness_seconds",
            "How long after its time a message was delivered: first and last of each batch.",
        )
        self.timers_in = counter(
            "rocketmq_timer_enqueue", "Messages that began to wait for a time of their own."
        )
        self.timers_out = counter(
            "rocketmq_timer_dequeue",
            "Messages whose time has come, by what became of them.",
            ["result"],
        )
        for result in TIMER_RESULTS:
            self.timers_out.labels(result)
        self.timers_rolled = counter(
            "cometmq_timers_rolled", "Waiting messages that were stored again, before retention."
        )
        self.clock_jumps = counter(
            "cometmq_clock_jumps", "Jumps of the wall clock, by direction.", ["direction"]
        )
        for direction in ("forward", "back"):
            self.clock_jumps.labels(direction)
        self.due_clock_behind_s = Gauge(
            "cometmq_due_clock_behind_seconds",
            "How far the time by which messages are due is behind the wall clock.",
            registry=registry,
        )
        self._delivery = DeliveryAge(registry, clock or SystemClock())
        self.flush_s = seconds("cometmq_log_flush_seconds", "Time of one sync of the commit log.")

    @property
    def process_labels(self) -> dict[str, str]:
        """What names this process, on every sample that it serves."""
        return dict(zip(NODE, self.node, strict=True))

    def appended(self, seconds: float) -> None:
        """A batch was checked and written in this time."""
        self._append_s.observe(seconds)

    def acknowledged(self, seconds: float) -> None:
        """A batch was acknowledged this long after it came."""
        self._send_s.observe(seconds)

    def late(self) -> None:
        """A batch was answered with FLUSH_DISK_TIMEOUT or FLUSH_SLAVE_TIMEOUT."""
        self._late.inc()

    def known(self, count: int) -> None:
        """``count`` messages of a batch that was sent again were stored already."""
        self._known.inc(count)

    def sender_forgotten(self) -> None:
        """The table of senders is full: the one that was silent for longest has left."""
        self._forgotten.inc()

    def throttled(self, way: Way, scope: Scope) -> None:
        """A call was refused because a quota is used up."""
        self._throttled[way, scope].inc()

    def replies(self, outcome: str, count: int) -> None:
        """``count`` replies had this outcome: pushed, found, unclaimed or late."""
        if count:
            self._replies.labels(outcome).inc(count)

    def messages_in(self, topic: str, count: int, size_bytes: int) -> None:
        """A run of messages was stored."""
        self._in.count((topic,), count, size_bytes)

    def messages_out(self, topic: str, group: str, count: int, size_bytes: int) -> None:
        """A pull was answered, here or by a pullhold out of an arrival."""
        if count:
            self._out.count((topic, group), count, size_bytes)

    def pull_answered(self, topic: str, group: str, count: int, records: bytes) -> None:
        """A pull was answered here. A reader without a known group does not count."""
        self.messages_out(topic, group, count, len(records))
        if count and group:
            self._delivery.answered(first_store_time_ms(records))

    def sent_back(self, topic: str, group: str) -> None:
        """A message of ``topic`` was sent back and will be redelivered."""
        self._given_back.add((topic, group))
        self._sent_back.labels(*self.node, topic, group).inc()

    def sent_to_dlq(self, topic: str, group: str) -> None:
        """A message of ``topic`` was sent back and is a dead letter."""
        self._given_back.add((topic, group))
        self._sent_to_dlq.labels(*self.node, topic, group).inc()

    def pop_delivered(self, topic: str, group: str, count: int, attempt: int) -> None:
        """A member of a group received messages."""
        if (topic, group) not in self._given_back:
            # From 0 on, else Prometheus sees no increase when the first one is lost.
            self._pop_lost.labels(*self.node, topic, group)
            self._given_back.add((topic, group))
        self._pop_delivered.labels(*self.node, topic, group).inc(count)
        if attempt > 1:
            self._pop_delivered_again.labels(*self.node, topic, group).inc(count)

    def pop_acknowledged(self, topic: str, group: str, count: int) -> None:
        """A member of a group acknowledged messages."""
        self._given_back.add((topic, group))
        self._pop_acknowledged.labels(*self.node, topic, group).inc(count)

    def pop_lost(self, topic: str, group: str) -> None:
        """A message cannot be given to any member."""
        self._given_back.add((topic, group))
        self._pop_lost.labels(*self.node, topic, group).inc()

    def offsets_reset(self, topic: str, group: str, queue_count: int) -> None:
        """An operator has reset the offsets of a group in queues of a topic."""
        self._given_back.add((topic, group))
        self._resets.labels(*self.node, topic, group).inc(queue_count)

    def transactions_ended(
        self, topic: str, count: int, age_s: float, *, is_committed: bool
    ) -> None:
        """``count`` half messages of ``topic`` have ended at this age."""
        ended = self._committed if is_committed else self._rolled_back
        ended.labels(*self.node, topic).inc(count)
        self._finish_s.observe(age_s, count)

    def halves_given_up(self, count: int) -> None:
        """``count`` half messages were given up."""
        self._given_up.inc(count)

    def _forget_given_back(self, place: int, name: str) -> None:
        for key in [key for key in self._given_back if key[place] == name]:
            self._given_back.discard(key)
            for series in (
                self._sent_back,
                self._sent_to_dlq,
                self._pop_delivered,
                self._pop_delivered_again,
                self._pop_acknowledged,
                self._pop_lost,
                self._resets,
            ):
                with suppress(KeyError):  # a message of the two never met this fate
                    series.remove(*self.node, *key)

    def forget_topic(self, topic: str) -> None:
        """A deleted topic's series end, so that churn of topics does not fill the memory."""
        self._in.forget(topic)
        self._out.forget(topic)
        self._forget_given_back(0, topic)
        for series in (self._committed, self._rolled_back):
            with suppress(KeyError):
                series.remove(*self.node, topic)

    def forget_group(self, group: str) -> None:
        """Likewise a deleted consumer group's."""
        self._out.forget(group, 1)
        self._forget_given_back(1, group)


class DiskCollector(Collector):
    """The volume that the store lies on. What a kubelet says of a local volume is about the whole
    disk behind it, and is not there outside of Kubernetes.
    """

    def __init__(self, metrics: MemberMetrics, store_path: Path) -> None:
        self._node = metrics.node
        self._path = store_path

    def describe(self) -> Iterable[Metric]:
        return [GaugeMetricFamily(name, text, labels=NODE) for name, text in _DISK]

    def collect(self) -> Iterable[Metric]:
        try:
            usage = shutil.disk_usage(self._path)
        except OSError:  # before the first opening there is no folder
            return
        for (name, text), value in zip(_DISK, (usage.total, usage.free), strict=True):
            family = GaugeMetricFamily(name, text, labels=NODE)
            family.add_metric(self._node, value)
            yield family


class Connections(Protocol):
    """What counts open consumer streams."""

    def __len__(self) -> int: ...


class InFlight(Protocol):
    """What knows how many bytes wait for their acknowledgement."""

    @property
    def in_flight_bytes(self) -> int: ...


class StoreCollector(Collector):
    """What any member has, read off at each scrape."""

    def __init__(self, metrics: MemberMetrics, storage: BaseStorage, state: BrokerState) -> None:
        self._node = metrics.node
        self._storage = storage
        self._state = state

    def describe(self) -> Iterable[Metric]:
        gauges = [Metric(name, text, "gauge") for name, text, _ in self._values()]
        return [*gauges, *self._counters()]

    def collect(self) -> Iterable[Metric]:
        for name, text, value in self._values():
            family = GaugeMetricFamily(name, text, labels=NODE)
            family.add_metric(self._node, value)
            yield family
        yield from self._counters()

    def _counters(self) -> Iterable[Metric]:
        pulls, pages = self._storage.damaged_pulls, self._storage.store.unreadable_pages
        for name, text, value in (
            ("cometmq_damaged_pulls", "Pulls that met a damaged message.", pulls),
            ("cometmq_store_unreadable_pages", "Pages that the disk could not read.", pages),
        ):
            family = CounterMetricFamily(name, text, labels=NODE)
            family.add_metric(self._node, value)
            yield family

    def _values(self) -> Iterator[tuple[str, str, float]]:
        store = self._storage.store
        end = store.appended_offset
        yield "rocketmq_topic_number", "Topics.", len(self._state.topics)
        yield "rocketmq_consumer_group_number", "Consumer groups.", len(self._state.groups)
        yield "rocketmq_storage_size", "Bytes of log kept.", end - store.min_offset
        yield (
            "rocketmq_storage_flush_behind_bytes",
            "Bytes of log not yet on disk.",
            end - store.flushed_offset,
        )
        yield (
            "rocketmq_storage_dispatch_behind_bytes",
            "Bytes of log not yet in the queues' files.",
            end - store.dispatched_offset,
        )
        index = store.index.status
        yield (
            "cometmq_index_behind_bytes",
            "Bytes of log whose keys are not in the key index; 0 without one.",
            end - index.position if store.index.enabled else 0,
        )
        yield "cometmq_index_files", "Files of the key index.", index.file_count
        yield "cometmq_index_entries", "Keys in the key index.", index.entry_count
        yield (
            "cometmq_index_stalled",
            "1 while the key index does not grow, for want of room or because the log is damaged.",
            bool(index.stalled),
        )
        yield "cometmq_log_min_offset", "Lowest log offset kept.", store.min_offset
        yield "cometmq_log_appended_offset", "End of the log.", end
        yield "cometmq_log_flushed_offset", "The log is on disk up to here.", store.flushed_offset
        yield "cometmq_epoch", "Incarnation of the writer.", store.epoch
        yield (
            "cometmq_store_failed",
            "1 once the disk has failed: the member ends.",
            self._storage.failed,
        )


class MemberCollector(StoreCollector):
    """The same of a writer, and what only it has."""

    def __init__(
        self,
        metrics: MemberMetrics,
        storage: MemberStorage,
        state: BrokerState,
        consumers: Connections,
        in_flight: InFlight,
    ) -> None:
        super().__init__(metrics, storage, state)
        self._consumers = consumers
        self._in_flight = in_flight

    def describe(self) -> Iterable[Metric]:
        return [*super().describe(), _lag_family()]

    def collect(self) -> Iterable[Metric]:
        yield from super().collect()
        yield self._lag()

    def _values(self) -> Iterator[tuple[str, str, float]]:
        yield from super()._values()
        yield "rocketmq_consumer_connections", "Open group memberships.", len(self._consumers)
        yield (
            "rocketmq_half_messages",
            "Half messages whose transactions have not ended.",
            len(self._state.halves),
        )
        yield "rocketmq_broker_permission", "RocketMQ's bits: 4 read, 2 write.", 6
        yield (
            "cometmq_send_in_flight_bytes",
            "Bytes of batches that wait for their acknowledgement.",
            self._in_flight.in_flight_bytes,
        )
        yield (
            "cometmq_pop_in_flight_messages",
            "Messages that members of groups have received, and not acknowledged.",
            self._state.pops.open_count,
        )

    def _lag(self) -> Metric:
        """Per group and topic: readable messages that are not committed. Groups without live
        members count as well.
        """
        lags: dict[tuple[str, str], int] = {}
        for commit in self._state.offsets:
            if commit.group.startswith(BROADCAST_PREFIX):
                continue  # a client, not a group
            low, readable, _ = self._storage.bounds((commit.topic, commit.queue_id))
            behind = max(0, readable - max(low, commit.position.offset))
            key = (commit.group, commit.topic)
            lags[key] = lags.get(key, 0) + behind
        family = _lag_family()
        for (group, topic), behind in lags.items():
            flags = (_flag(topic.startswith(RETRY_PREFIX)), _flag(is_system(topic)))
            family.add_metric((*self._node, topic, group, *flags), behind)
        return family


def _lag_family() -> GaugeMetricFamily:
    labels = (*NODE, "topic", "consumer_group", "is_retry", "is_system")
    return GaugeMetricFamily(
        "rocketmq_consumer_lag_messages", "Messages that a group has not committed.", labels=labels
    )
