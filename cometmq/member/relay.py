"""The only way in which a writer appends messages that no client sent: records made from stored
ones. It appends also while sends are refused for lack of room: consumers have to finish their work.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cometmq.format.relay import OwnRecord
from cometmq.format.relay_run import RelayRun
from cometmq.member.metrics import MemberMetrics
from cometmq.member.state.demands import topic_demands
from cometmq.member.storage.member_storage import MemberStorage, Ticket
from cometmq.messaging.topics import TopicTable
from cometmq.replication.watermarks import DurabilityClass


def batch_bytes_max(log_file_bytes: int, most: int) -> int:
    """Bytes that are appended at once, ``most`` or fewer: a batch lies in one log file, and the end
    of a file stays blank where the next batch does not fit.
    """
    return min(most, log_file_bytes // 4)


class RelayWriter:
    """Appends relayed records as one batch. Belongs to the event loop."""

    def __init__(
        self, storage: MemberStorage, topics: TopicTable, host: bytes, metrics: MemberMetrics
    ) -> None:
        self.host = host
        self._storage = storage
        self._topics = topics
        self._metrics = metrics

    def append(self, relayed: Sequence[OwnRecord]) -> Ticket:
        """The topics are there. Raises DiskFull, BatchTooLarge, BrokerDraining, StoreFailed."""
        demands = self._demands({one.topic for one in relayed})
        ticket = self._storage.append_relayed(relayed, demands, self.host)
        self._count(relayed, ticket.appended.segment_bytes)
        return ticket

    def append_run(self, run: RelayRun, behind: Sequence[OwnRecord] = ()) -> Ticket:
        """The same, of many records at once, and of some for other queues behind them."""
        demands = self._demands({*(t for t, _ in run.queues), *(one.topic for one in behind)})
        ticket = self._storage.append_relay_run(run, demands, self.host, behind)
        sizes = ticket.appended.segment_bytes
        for (topic, _), count, size in zip(run.queues, run.sized(), sizes, strict=False):
            self._metrics.messages_in(topic, count, size)
        self._count(behind, sizes[len(run.queues) :])
        return ticket

    def _count(self, relayed: Sequence[OwnRecord], sizes_bytes: Sequence[int]) -> None:
        by_topic: dict[str, list[int]] = {}
        for one, size_bytes in zip(relayed, sizes_bytes, strict=True):
            by_topic.setdefault(one.topic, []).append(size_bytes)
        for topic, sizes in by_topic.items():
            self._metrics.messages_in(topic, len(sizes), sum(sizes))

    def _demands(self, topics: Iterable[str]) -> dict[str, DurabilityClass]:
        return {topic: topic_demands(self._topics, topic) for topic in topics}
