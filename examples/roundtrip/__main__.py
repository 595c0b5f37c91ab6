"""``make run``: exit status 0 if the checker has nothing to complain about."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import shlex
import shutil
import signal
import sys
import sysconfig
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from cometmq.admin import brokers, group_status, local, offsets, ops
from cometmq.admin.connection import Connection, until
from cometmq.admin.local import LocalCluster
from cometmq.admin.views import GroupProgressView, GroupStatusView, LogChecksumView
from cometmq.clock import SystemClock
from cometmq.errors import CometError
from examples.roundtrip import cases, checker
from examples.roundtrip.checker import Report, Scrape, WriterChange
from examples.roundtrip.process import MODULE, Worker, WorkerFailed, ended, now_ms
from examples.roundtrip.worker import text_files

FOLDER = Path(__file__).resolve().parents[2] / "data" / "run"
MARK = "made-by-roundtrip"  # only a folder with this file in it is ever emptied
TOPIC, GROUP = "stdlib_lines", "roundtrip"
QUEUES = 4  # of each broker group
PRODUCER_COUNT, CONSUMER_COUNT = 2, 3
CHANGING = "g1"  # the broker group that hands over, and loses its writer
OPTIONS = {
    "mapped_file_size_commit_log": str(32 * 1024 * 1024),  # so that each log has several files
    "replication_mode": "APPENDED",  # nothing is acknowledged that only one member has
    # A group whose writer dies stores nothing for its lease and a second or two. The default, 6 s,
    # is for machines that also do other things.
    "lease_duration_s": "3",
    "lease_renew_s": "1",
    "trace_topic_enable": "true",
    "transaction_check_interval": "2000",  # a check that died with the writer comes again soon
}
# Shares of the messages that producers send before the hand-over, and before the fail-over: a new
# writer would get no message from fast ones.
PAUSES_AT = (0.45, 0.8)
# Shares of the messages that are acknowledged when
HAND_OVER_AT = 0.25  # … the group hands over,
KILL_AT = 0.5  # … its new writer is killed,
HOLD_AT = 0.85  # … and the consumers are held back, so that there is a backlog.
READY_S_MAX = 30.0
STALL_S_MAX = 60.0  # without an acknowledgement, a commit or a new writer: the run gives up
SPARK_S_MAX = 180.0
POLL_S, PRINT_S = 0.1, 2.0

DONE = "✓ every line came back, byte for byte, and every single message as expected"
KEPT = f"""
The cluster is still up, with all messages in it. Look at it, change the writer of {CHANGING} again
or kill it (`cometmq local up` starts it again), compare the logs, and stop it, keeping the data:

  export COMETMQ_LOCAL_DIR={{cluster}}
  . .venv/bin/activate
  cometmq cluster status
  cometmq group progress {GROUP}
  cometmq message consume {TOPIC} --count 5 --tag toml
  cometmq message trace --topic payments --key payment
  cometmq broker step-down --broker-group {CHANGING}
  cometmq broker checksum
  cometmq local down
"""


async def run(arguments: argparse.Namespace) -> Report:
    """Everything in order. Errors: WorkerFailed, TimeoutError, and those of the catalogue."""
    folder, root = arguments.folder, arguments.root.resolve()
    files = dict(text_files(root))
    message_count = sum(map(len, files.values()))
    print(f"{len(files):,} text files below {root}: {message_count:,} lines")
    report = Report()
    held_ms, progress, lag = math.inf, None, None
    async with (
        cluster_in(folder / "cluster", arguments.keep) as cluster,
        Connection(cluster.namesrv) as connection,
    ):
        print(f"up: {', '.join(process.name for process in cluster.processes)}")
        await ops.wait_for_brokers(connection, cluster.broker_groups, deadline_s=READY_S_MAX)
        scrapes = [await scrape(cluster)]
        await ops.create_topic(connection, TOPIC, read_queue_count=QUEUES, write_queue_count=QUEUES)
        async with cases.prepared(connection, cluster.namesrv, folder, CHANGING) as running:
            with closing(Traffic(cluster.namesrv, folder, message_count)) as traffic:
                await traffic.start_consumers(cluster)
                traffic.start_producers(root, arguments.rate)

                await traffic.until(HAND_OVER_AT)
                scrapes.append(await scrape(cluster))
                hand_over = await step_down(connection)
                traffic.signal_producers(signal.SIGUSR1)

                running.open()
                await traffic.until(KILL_AT, stored_after_ms=hand_over.to_ms)
                scrapes.append(await scrape(cluster))
                await running.begin()
                fail_over = await kill_writer(connection, cluster, running.killed)
                traffic.signal_producers(signal.SIGUSR1)
                running.go_on(fail_over)

                if not arguments.no_lag:
                    await traffic.until(HOLD_AT)
                    held_ms = now_ms()
                    traffic.signal_consumers(signal.SIGUSR1)
                    await traffic.until(1.0)
                    progress = await export_offsets(connection, folder)
                    traffic.signal_consumers(signal.SIGUSR2)
                cluster = await local.up(folder / "cluster")
                print(f"{CHANGING}: the killed member is back, a follower")
                if progress:
                    lag = await lag_by_spark(folder)
                await traffic.until(1.0)
                await traffic.stop_consumers(connection)
            await running.end(report)
        left = await uncommitted(connection)
        steady = sum(
            queue.message_count
            for queue in await ops.topic_status(connection, TOPIC)
            if queue.broker_group != CHANGING
        )
        views = await checksums(connection, cluster)
        scrapes.append(await scrape(cluster))

    body_bytes = sum(len(line) for lines in files.values() for line in lines)
    checker.check_metrics(report, scrapes, cluster, CHANGING, steady, body_bytes)
    checker.check_logs(report, views, cluster)
    if progress and lag:
        checker.check_lag(report, progress, *lag)
    checker.check_messages(report, files, traffic.spools, hand_over, fail_over, held_ms)
    report.expect(not left, f"the group left {left:,} messages uncommitted")
    return report


def empty(folder: Path) -> None:
    """Stops the cluster that an earlier run has kept in the folder, and removes all of it."""
    if folder.exists() and any(folder.iterdir()):
        if not (folder / MARK).exists():
            raise FileExistsError(f"{folder} holds something else: name another folder")
        asyncio.run(local.down(folder / "cluster"))
        shutil.rmtree(folder)
    (folder / "lag").mkdir(parents=True)
    (folder / MARK).touch()


@asynccontextmanager
async def cluster_in(folder: Path, keep: bool) -> AsyncIterator[LocalCluster]:
    """The cluster. It stops at the end, and after an error even if it is to be kept."""
    cluster = await local.up(
        folder, namesrv_count=2, broker_count=2, slave_count=1, pullhold_count=1, options=OPTIONS
    )
    try:
        yield cluster
    except BaseException:
        keep = False
        raise
    finally:
        if not keep:
            await local.down(folder)


class Traffic:
    """The producers and the consumers. The end of the ``with`` block kills those that still run."""

    def __init__(self, namesrv: str, folder: Path, message_count: int) -> None:
        self.spools = [folder / f"consumer-{number}.spool" for number in range(CONSUMER_COUNT)]
        self._workers: list[Worker] = []  # the consumers, then the producers
        self._names = ("--namesrv", namesrv, "--topic", TOPIC)
        self._folder = folder
        self._message_count = message_count

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()

    async def start_consumers(self, cluster: LocalCluster) -> None:
        """Returns when they wait for messages of every queue at the pull-hold."""
        for number, spool in enumerate(self.spools):
            command = ("consume", *self._names, "--group", GROUP, "--spool", str(spool))
            self._workers.append(Worker(self._folder, f"consumer-{number}", MODULE, *command))
        (pullhold,) = cluster.pullholds
        wanted = QUEUES * len(cluster.broker_groups)

        async def all_held() -> bool:
            holds = (await scrape(cluster))[pullhold.name]["cometmq_holds_waiting"]
            return all(worker.running for worker in self._workers) and holds >= wanted

        if not await until(all_held, READY_S_MAX):
            raise TimeoutError(f"the consumers hold fewer than {wanted} pulls at {pullhold.name}")

    def start_producers(self, root: Path, rate: int) -> None:
        shared = ("--root", str(root), "--of", str(PRODUCER_COUNT), "--rate", str(rate))
        pauses = [str(int(at * self._message_count / PRODUCER_COUNT)) for at in PAUSES_AT]
        pause = ("--pause_after", *pauses)
        for number in range(PRODUCER_COUNT):
            command = ("produce", *self._names, *shared, *pause, "--number", str(number))
            self._workers.append(Worker(self._folder, f"producer-{number}", MODULE, *command))

    async def until(self, share: float, stored_after_ms: int = 0) -> None:
        """Until this share of the messages is acknowledged, and CHANGING has stored one of them
        after ``stored_after_ms``; or until the producers have nothing more to send.

        Errors: WorkerFailed; TimeoutError if no message is acknowledged for a minute.
        """
        latest, changed_s, printed_s = -1, 0.0, time.monotonic()
        while any([worker.running for worker in self._workers][CONSUMER_COUNT:]):
            said = [producer.latest() for producer in self._workers[CONSUMER_COUNT:]]
            acked, now_s = sum(one.get("acked", 0) for one in said), time.monotonic()
            stored_ms = max(one.get("stored_ms", {}).get(CHANGING, 0) for one in said)
            if acked >= share * self._message_count and stored_ms > stored_after_ms:
                return
            if acked != latest:
                latest, changed_s = acked, now_s
            if now_s - changed_s > STALL_S_MAX:
                raise TimeoutError(f"no message was acknowledged for {STALL_S_MAX:.0f} s")
            if now_s - printed_s > PRINT_S:
                printed_s = now_s
                print(f"  {acked:,} of {self._message_count:,} messages acknowledged")
            await asyncio.sleep(POLL_S)

    def signal_consumers(self, number: signal.Signals) -> None:
        for consumer in self._workers[:CONSUMER_COUNT]:
            consumer.signal(number)

    def signal_producers(self, number: signal.Signals) -> None:
        for producer in self._workers[CONSUMER_COUNT:]:
            producer.signal(number)

    async def stop_consumers(self, connection: Connection) -> None:
        """Lets the consumers finish their work and leave the group. If they make no progress for a
        minute the judge gets what there is. Errors: WorkerFailed, TimeoutError.
        """
        left, changed_s = -1, time.monotonic()
        while left and time.monotonic() - changed_s < STALL_S_MAX:
            before, left = left, await uncommitted(connection)
            if left != before:
                changed_s = time.monotonic()
            await asyncio.sleep(POLL_S)
        self.signal_consumers(signal.SIGTERM)
        await ended(self._workers, READY_S_MAX)


async def step_down(connection: Connection) -> WriterChange:
    """What ``cometmq broker step-down`` does."""
    asked_ms = now_ms()
    done = await brokers.step_down(connection, CHANGING)
    print(
        f"{CHANGING}: member {done.from_member} handed over to member {done.to_member} at "
        f"{done.log_end_offset:,} bytes of log; epoch {done.epoch}"
    )
    return WriterChange(CHANGING, asked_ms, now_ms())


async def kill_writer(
    connection: Connection, cluster: LocalCluster, killed: Callable[[], None]
) -> WriterChange:
    """``kill -9`` for the writer once every member is in sync; then calls ``killed``, and returns
    when another member has taken over.
    """
    members = {p.member_id: p for p in cluster.brokers if p.broker_group == CHANGING}
    before = await group_status_when(
        connection, lambda group: len(group.in_sync or ()) == len(members), READY_S_MAX
    )
    assert before.writer is not None
    members[before.writer].id.signal(signal.SIGKILL)
    killed_ms = now_ms()
    killed()
    after = await group_status_when(
        connection, lambda group: group.epoch > before.epoch, STALL_S_MAX
    )
    print(
        f"{CHANGING}: member {before.writer}, the writer, was killed; member {after.writer} took "
        f"over with epoch {after.epoch}"
    )
    return WriterChange(CHANGING, killed_ms, now_ms())


async def group_status_when(
    connection: Connection, reached: Callable[[GroupStatusView], bool], seconds_max: float
) -> GroupStatusView:
    """The status of the group as soon as it has a writer and ``reached`` is true of it."""
    found: list[GroupStatusView] = []

    async def there() -> bool:
        for group in await group_status.describe(connection):
            if group.broker_group == CHANGING and group.writer is not None and reached(group):
                found.append(group)
        return bool(found)

    if not await until(there, seconds_max):
        raise TimeoutError(f"{CHANGING} is not as it should be after {seconds_max:.0f} s")
    return found[0]


async def export_offsets(connection: Connection, folder: Path) -> GroupProgressView:
    """Writes a snapshot of all offsets; the progress of the group at that moment, which was the
    same before and after the export.
    """
    async with asyncio.timeout(READY_S_MAX):
        after = await ops.group_progress(connection, GROUP, topic=TOPIC)
        while True:
            before = after
            snapshot = await offsets.export(connection, folder / "lag" / "snapshots", SystemClock())
            after = await ops.group_progress(connection, GROUP, topic=TOPIC)
            if before.queues == after.queues and not snapshot.failed:
                print(f"offsets exported, the consumers are {after.lag_count:,} messages behind")
                return after
            await asyncio.sleep(POLL_S)


async def lag_by_spark(folder: Path) -> tuple[list[dict[str, Any]], int | None]:
    """The rows and the sum of the group's lag, by the Spark job in a process of its own."""
    import pyarrow.parquet  # of the extra `lag`, which only this step needs

    lag, began_s = folder / "lag", time.monotonic()
    paths = ("--snapshots", str(lag / "snapshots"), "--results", str(lag / "results"))
    spark = Worker(lag, "spark", "spark.lag.job", *paths)
    try:
        await ended([spark], SPARK_S_MAX)
    finally:
        spark.kill()
    print(f"Spark took {time.monotonic() - began_s:.1f} s; its report is in {spark.output}")
    latest = json.loads((lag / "results" / "latest.json").read_bytes())
    rows = pyarrow.parquet.read_table(Path(latest["path"]) / "queues").to_pylist()
    sums = [one["lag_sum"] for one in latest["topics"] if _is_ours(one)]
    return [row for row in rows if _is_ours(row)], sums[0] if sums else None


def _is_ours(row: Mapping[str, Any]) -> bool:
    return (row["group"], row["topic"]) == (GROUP, TOPIC)


async def uncommitted(connection: Connection) -> int:
    """Messages that the group has not committed; all of a queue without any commit."""
    done = await ops.group_progress(connection, GROUP, topic=TOPIC)
    committed = {(row.broker_group, row.queue_id): row.committed_offset for row in done.queues}
    return sum(
        queue.max_offset - (committed.get((queue.broker_group, queue.queue_id)) or queue.min_offset)
        for queue in await ops.topic_status(connection, TOPIC)
    )


async def checksums(connection: Connection, cluster: LocalCluster) -> list[LogChecksumView]:
    """What ``cometmq broker checksum`` shows, once every follower is there and has everything."""

    async def caught_up() -> bool:
        members = await brokers.describe(connection)
        there = len(members) == len(cluster.brokers)
        return there and all(member.behind_bytes == 0 for member in members)

    if not await until(caught_up, READY_S_MAX):
        raise TimeoutError(f"a follower is still behind after {READY_S_MAX:.0f} s")
    return await brokers.compare_logs(connection)


async def scrape(cluster: LocalCluster) -> Scrape:
    """The metrics of every process, summed over their labels. A process that changes its role does
    not answer for a moment.
    """
    found: dict[str, Counter[str]] = {}

    def one(address: str) -> Counter[str]:
        sums: Counter[str] = Counter()
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=5.0) as response:
            for family in text_string_to_metric_families(response.read().decode()):
                for sample in family.samples:
                    sums[sample.name] += sample.value  # type: ignore[assignment]
        return sums

    async def all_answered() -> bool:
        for process in cluster.processes:
            if process.name not in found:
                with suppress(OSError):
                    found[process.name] = await asyncio.to_thread(one, process.metrics_address)
        return len(found) == len(cluster.processes)

    if not await until(all_answered, READY_S_MAX):
        raise TimeoutError(f"only {', '.join(found)} show their metrics")
    return found


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.roundtrip",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    option = parser.add_argument
    option(
        "--root", type=Path, default=sysconfig.get_path("stdlib"), help="whose text files travel"
    )
    option("--folder", type=Path, default=FOLDER, help="where cluster and spools are kept")
    option("--keep", action="store_true", help="leave the cluster up")
    option("--no-lag", action="store_true", help="leave export and Spark job out")
    # Both changes of the writer happen in traffic, on fast machines too.
    option("--rate", type=int, default=25_000, help="messages a second of a producer; 0: no limit")
    arguments = parser.parse_args(argv)
    arguments.folder = arguments.folder.resolve()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the run as Ctrl-C does
    try:
        empty(arguments.folder)
        report = asyncio.run(run(arguments))
    except KeyboardInterrupt:
        print("stopped, the cluster too")
        return 130  # as shells have it
    except (CometError, WorkerFailed, OSError) as error:
        print(f"{type(error).__name__}: {error}")
        return 1
    print("", *report.cases, "", *report.figures, sep="\n")
    complaints = [f"✗ {complaint}" for complaint in report.complaints]
    print(*complaints or [DONE], sep="\n")
    if arguments.keep:
        print(KEPT.format(cluster=shlex.quote(str(arguments.folder / "cluster"))))
    return 1 if report.complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
