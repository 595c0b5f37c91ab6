"""Metrics of the whole cluster while it works: what had to move, and did it?

A process that changes its role starts another program, and its counters begin at 0. So the cluster
is looked at several times, and a value that has fallen counts from 0, as in Prometheus' ``rate``.
What such a process counts between a look and its change is lost: sums are demanded exactly only of
processes that keep their role.
"""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from prometheus_client.parser import text_string_to_metric_families

from cometmq.admin import local
from cometmq.admin.local import LocalCluster
from examples.roundtrip.workers import WorkerFailed

SCRAPE_S_MAX = 5.0

Totals = dict[str, float]  # sample name → sum over its labels
Scrape = Mapping[str, Totals]  # by process name


@dataclass(frozen=True, slots=True)
class Expectation:
    """A metric, summed over its labels, that has to rise in each of the named processes, and by
    ``least`` in all of them together; or, ``still``, must not move at all.
    """

    metric: str
    where: str  # what the processes are called together
    processes: tuple[str, ...]
    least: float = 0.0
    still: bool = False


@dataclass(frozen=True, slots=True)
class Movement:
    """What became of an expectation: how much the metric rose, process by process."""

    wanted: Expectation
    rises: tuple[float, ...]

    @property
    def rise(self) -> float:
        return sum(self.rises)

    @property
    def moved_processes(self) -> int:
        return sum(rise > 0 for rise in self.rises)

    @property
    def good(self) -> bool:
        if self.wanted.still:
            return not any(self.rises)
        return self.moved_processes == len(self.rises) and self.rise >= self.wanted.least


def totals(exposition: str) -> Totals:
    """Of one process's metrics text."""
    found: Totals = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def scrape_one(address: str) -> Totals:
    """One process's metrics now; OSError when it does not answer."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=SCRAPE_S_MAX) as response:
        text: str = response.read().decode()
    return totals(text)


async def scrape(cluster: LocalCluster) -> Scrape:
    """The metrics of every process, by its name. Errors: WorkerFailed, when one does not answer."""
    found = {}
    for process in cluster.processes:
        try:
            found[process.name] = await asyncio.to_thread(scrape_one, process.metrics_address)
        except OSError as error:
            log = cluster.log(process.name)
            raise WorkerFailed(f"{process.name} does not answer ({error}): see {log}") from None
    return found


def rise(values: Sequence[float]) -> float:
    """From the first value to the last, through falls to 0 in between."""
    return sum(late - early if late >= early else late for early, late in pairwise(values))


def compare(scrapes: Sequence[Scrape], expectations: Iterable[Expectation]) -> list[Movement]:
    """All looks, oldest first. A metric that is not there has the value 0."""
    return [
        Movement(
            wanted,
            tuple(
                rise([scrape[process].get(wanted.metric, 0.0) for scrape in scrapes])
                for process in wanted.processes
            ),
        )
        for wanted in expectations
    ]


def expectations(
    cluster: LocalCluster, changed_group: str, steady_messages: int, body_bytes: int
) -> list[Expectation]:
    """What must have moved since before the topic was created. ``steady_messages`` were stored by
    the groups other than the one that changed its writer, ``body_bytes`` by all of them.
    """
    namesrvs = ("name servers", tuple(p.name for p in cluster.of_kind(local.NAMESRV)))
    members = ("all members", tuple(p.name for p in cluster.brokers))
    changed = (
        f"both of {changed_group}",
        tuple(p.name for p in cluster.brokers if p.broker_group == changed_group),
    )
    others = [p for p in cluster.brokers if p.broker_group != changed_group]
    steady = ("the other writer", tuple(p.name for p in others if p.member_id == 0))
    holds = ("pullhold", tuple(p.name for p in cluster.pullholds))
    kept_bytes = body_bytes * len(members[1]) / len(cluster.broker_groups)
    return [
        Expectation("cometmq_namesrv_topics", *namesrvs),
        Expectation("rocketmq_rpc_latency_count", *namesrvs),
        Expectation("rocketmq_rpc_latency_count", *members),
        Expectation("rocketmq_topic_number", *members),
        Expectation("rocketmq_messages_in_total", *steady, steady_messages),
        Expectation("rocketmq_messages_in_total", *changed),
        Expectation("rocketmq_messages_out_total", *steady, steady_messages),
        Expectation("rocketmq_messages_out_total", *changed),
        Expectation("rocketmq_throughput_in_total", *changed),
        Expectation("rocketmq_throughput_out_total", *changed),
        Expectation("rocketmq_storage_size", *members, kept_bytes),
        Expectation("cometmq_log_flushed_offset", *members, kept_bytes),
        Expectation("cometmq_log_flush_seconds_count", *members),
        Expectation("cometmq_replication_bytes_total", *members, kept_bytes),
        Expectation("cometmq_hold_duration_seconds_count", *holds),
        Expectation("cometmq_hold_wakes_total", *holds),
        Expectation("cometmq_hold_pulls_total", *holds),
        Expectation("cometmq_hold_safety_finds_total", *holds, still=True),
    ]
