"""The judge of a round trip: messages, lag, logs of the members, metrics. Only reads files."""

from __future__ import annotations

import hashlib
import math
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from cometmq.admin.local import NAMESRV, LocalCluster
from cometmq.admin.views import GroupProgressView, LogChecksumView
from examples.roundtrip.worker import Arrival, read_spools

NAMED_MAX = 5  # files that a complaint names
Scrape = Mapping[str, Mapping[str, float]]  # process name → metric → sum over its labels


@dataclass
class Report:
    """What a person reads at the end: a block for each single message, figures, and a sentence for
    everything that must not be.
    """

    cases: list[str] = field(default_factory=list)
    figures: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def expect(self, condition: bool, complaint: str) -> None:
        if not condition:
            self.complaints.append(complaint)


@dataclass(frozen=True, slots=True)
class WriterChange:
    """A hand-over or a fail-over, and the time around it in milliseconds since 1970."""

    broker_group: str
    from_ms: int  # the operator asked for it, or the writer was killed
    to_ms: int  # the new writer was seen


def check_messages(
    report: Report,
    files: Mapping[str, Sequence[bytes]],
    spools: Sequence[Path],
    hand_over: WriterChange,
    fail_over: WriterChange,
    held_ms: float = math.inf,
) -> None:
    """Every line of every file came back unchanged, and what came twice has a known reason.

    Latencies are of messages that came before the consumers were held back, at ``held_ms``.
    """
    seen = {name: bytearray(len(lines)) for name, lines in files.items()}
    doubled: set[tuple[str, int]] = set()
    changed: Counter[str] = Counter()  # lines, by file
    strays = 0
    born_ms: set[int] = set()
    stored_ms: set[int] = set()  # in the group that changed its writer
    latencies_ms = array("Q")
    for one in read_spools(spools):
        lines = files.get(one.file, ())
        if not 0 <= one.line < len(lines):
            strays += 1
            continue
        if one.body.encode("latin-1") != lines[one.line]:
            changed[one.file] += 1
        if seen[one.file][one.line]:
            doubled.add((one.file, one.line))
        seen[one.file][one.line] = 1
        born_ms.add(one.born_ms)
        if one.broker_group == fail_over.broker_group:
            stored_ms.add(one.stored_ms)
        if one.received_ms < held_ms:
            # Two processes of one machine read the same clock, but it may be set back.
            latencies_ms.append(max(one.received_ms - one.born_ms, 0))

    again = explain(doubled, spools, fail_over)
    lost = Counter({name: marks.count(0) for name, marks in seen.items() if not all(marks)})
    for what, counts in (("did not come back", lost), ("came back changed", changed)):
        names = ", ".join(list(counts)[:NAMED_MAX])
        report.expect(not counts, f"{counts.total():,} messages {what}, of {names}")
    report.expect(not strays, f"{strays:,} messages came back that nobody sent")
    report.expect(not again[None], f"{again[None]:,} messages came twice for no known reason")
    sent = sum(map(len, files.values()))
    latencies = sorted(latencies_ms) or [0]
    produced_ms = max(born_ms, default=1) - min(born_ms, default=0) or 1
    report.figures += [
        f"{len(files):,} files, {sent:,} messages",
        f"{again['sent']:,} stored twice: sent again, to the other broker group, because the "
        "killed writer had not answered",
        f"{again['delivered']:,} delivered again: the group's commit was lost with that writer",
        f"{1000 * sent / produced_ms:,.0f} messages/s, end to end "
        f"{latencies[len(latencies) // 2]:,} ms (p50), "
        f"{latencies[len(latencies) * 99 // 100]:,} ms (p99)",
    ]
    for what, change in (("hand-over", hand_over), ("fail-over", fail_over)):
        pause_ms = pause(sorted(stored_ms), change)
        report.expect(pause_ms is not None, f"the writer after the {what} stored no message")
        report.figures.append(f"nothing stored in {change.broker_group} for {pause_ms} ms: {what}")


def explain(
    doubled: set[tuple[str, int]], spools: Sequence[Path], killed: WriterChange
) -> Counter[str | None]:
    """How many arrivals beside the first of their line were sent again or delivered again; None
    counts those without a reason.

    From the same place of a queue a line was delivered again: the group's commit was lost with the
    writer. From another broker group it was sent again: its producer got no answer. Both happen
    when a writer is killed, and at no other time. One broker group never stores a line twice.
    """
    came: dict[tuple[str, int], list[Arrival]] = {line: [] for line in doubled}
    for one in read_spools(spools if doubled else ()):
        if (one.file, one.line) in came:
            came[one.file, one.line].append(one)
    found: Counter[str | None] = Counter()
    for arrivals in came.values():
        first, *rest = sorted(arrivals, key=lambda one: one.received_ms)
        for later in rest:
            older, newer = sorted((first, later), key=lambda one: one.stored_ms)
            if first[-3:] == later[-3:]:  # its place: broker group, queue, queue offset
                why, known = "delivered", later.received_ms >= killed.from_ms
            else:
                is_moved = newer.broker_group != older.broker_group
                why = "sent"
                known = is_moved and older.stored_ms <= killed.from_ms <= newer.stored_ms
            found[why if known and older.broker_group == killed.broker_group else None] += 1
    return found


def pause(stored_ms: Sequence[int], change: WriterChange) -> int | None:
    """The longest time without a store that overlaps the change; None if nothing was stored before
    or nothing after it.
    """
    first, last = bisect_right(stored_ms, change.from_ms) - 1, bisect_right(stored_ms, change.to_ms)
    if first < 0 or last == len(stored_ms):
        return None
    return max(late - early for early, late in pairwise(stored_ms[first : last + 1]))


def check_lag(
    report: Report,
    progress: GroupProgressView,
    rows: Iterable[Mapping[str, Any]],
    spark_sum: int | None,
) -> None:
    """The lag of one moment is the same by ``cometmq group progress`` and by the Spark job, queue
    by queue.
    """
    by_progress = {
        (view.broker_group, view.queue_id): (view.committed_offset, view.max_offset, view.lag_count)
        for view in progress.queues
    }
    by_spark = {
        (row["broker_group"], row["queue_id"]): tuple(
            row[name] for name in ("committed_offset", "max_offset", "lag_count")
        )
        for row in rows
    }
    for key in sorted({*by_progress, *by_spark}):
        one, other = by_progress.get(key), by_spark.get(key)
        report.expect(one == other, f"queue {key}: {one} by group progress, {other} by Spark")
    total = progress.lag_count
    report.expect(total == spark_sum, f"lag {total} by group progress, {spark_sum} by Spark")
    report.expect(total > 0, "there was no backlog whose lag could be compared")
    report.figures.append(f"lag of {len(by_progress)} queues, counted twice: {total:,} messages")


def check_logs(report: Report, told: Sequence[LogChecksumView], cluster: LocalCluster) -> None:
    """The logs of a broker group's members are the same, byte for byte: by the members' own
    checksums (``told``), and by their files.
    """
    names = {(p.broker_group, p.member_id): p.name for p in cluster.brokers}
    for group in cluster.broker_groups:
        views = [view for view in told if view.broker_group == group]
        sums = {view.sha256 for view in views}
        for view in views:
            store = cluster.directory / names[group, view.member_id] / "store"
            sums.add(sha256(store / "commitlog", view.from_offset, view.to_offset))
        report.expect(len(views) > 1, f"{group} has no follower whose log could be compared")
        report.expect(len(sums) == 1, f"the logs of {group} differ")
        length = sum(view.to_offset - view.from_offset for view in views[:1])
        report.expect(length > 0, f"the logs of {group} have no byte in common")
        report.figures.append(f"logs of {group}: {length:,} bytes in {len(views)} members")


def sha256(commitlog: Path, from_offset: int, to_offset: int) -> str:
    """Of a range of a log. Its files are named by the offsets of their first bytes."""
    digest = hashlib.sha256()
    for path in sorted(commitlog.iterdir()):
        start = int(path.name)
        digest.update(path.read_bytes()[max(from_offset - start, 0) : max(to_offset - start, 0)])
    return digest.hexdigest()


def check_metrics(
    report: Report,
    scrapes: Sequence[Scrape],
    cluster: LocalCluster,
    changed_group: str,
    steady_messages: int,
    body_bytes: int,
) -> None:
    """What must have moved since before the topic was created, did.

    ``steady_messages`` were stored by the groups other than the one that changed its writer,
    ``body_bytes`` by all of them. A process that changes its role starts another program, whose
    counters begin at 0: a value that has fallen counts from 0. So exact sums are demanded only of
    processes that keep their role.
    """
    namesrvs = [p.name for p in cluster.of_kind(NAMESRV)]
    members = [p.name for p in cluster.brokers]
    changed = [p.name for p in cluster.brokers if p.broker_group == changed_group]
    steady = [p.name for p in cluster.brokers if p.name not in changed and p.member_id == 0]
    holds = [p.name for p in cluster.pullholds]
    copies_bytes = body_bytes * len(members) // len(cluster.broker_groups)
    # In each of these processes each metric rises, and in all of them together by at least so much.
    wanted: list[tuple[list[str], int, tuple[str, ...]]] = [
        (namesrvs, 1, ("cometmq_namesrv_topics", "rocketmq_rpc_latency_count")),
        (members, 1, ("rocketmq_rpc_latency_count", "rocketmq_topic_number")),
        (members, 1, ("cometmq_log_flush_seconds_count",)),
        (members, copies_bytes, ("rocketmq_storage_size", "cometmq_log_flushed_offset")),
        (members, copies_bytes, ("cometmq_replication_bytes_total",)),
        (steady, steady_messages, ("rocketmq_messages_in_total", "rocketmq_messages_out_total")),
        (changed, 1, ("rocketmq_messages_in_total", "rocketmq_throughput_in_total")),
        # The other writer may have been killed before a consumer read from it.
        (changed[:1], 1, ("rocketmq_messages_out_total", "rocketmq_throughput_out_total")),
        (holds, 1, ("cometmq_hold_duration_seconds_count", "cometmq_hold_wakes_total")),
        (holds, 1, ("cometmq_hold_pulls_total",)),
    ]
    rows = [(name, processes, least) for processes, least, names in wanted for name in names]
    for metric, processes, least in rows:
        rises = [rise(scrapes, process, metric) for process in processes]
        what = f"{metric} rose by {sum(rises):,.0f} in {', '.join(processes)}"
        good = min(rises, default=0) > 0 and sum(rises) >= least
        report.expect(good, f"{what}, at least {least:,} was expected and some in each of them")
        report.figures.append(what)
    known = sum(rise(scrapes, process, "cometmq_messages_known_total") for process in members)
    report.figures.append(f"{known:,.0f} messages were sent again, and were stored already")
    late = sum(rise(scrapes, process, "cometmq_hold_safety_finds_total") for process in holds)
    report.expect(not late, f"pull-holds found {late:,.0f} messages that nobody had announced")


def rise(scrapes: Sequence[Scrape], process: str, metric: str) -> float:
    """From the first scrape to the last, through falls to 0; a metric that is not there is 0."""
    values = [scrape[process].get(metric, 0.0) for scrape in scrapes]
    return sum(late - early if late >= early else late for early, late in pairwise(values))
