"""The conductor: everything that happens, in order."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from cometmq.admin import ops
from cometmq.admin.connection import Connection, until
from cometmq.admin.local import LocalCluster
from cometmq.admin.views import GroupProgressView, QueueProgressView, QueueView
from examples.roundtrip import comparing, handover, lagging, logs, metrics, sources, takeover
from examples.roundtrip.handover import HandOver
from examples.roundtrip.lagging import Lag
from examples.roundtrip.outcome import Outcome, Trip
from examples.roundtrip.sources import SourceFile
from examples.roundtrip.stage import LEASE_S, Folder, cluster_in
from examples.roundtrip.takeover import Failover
from examples.roundtrip.traffic import PRODUCER_COUNT, Traffic

TOPIC = "stdlib_lines"
GROUP = "roundtrip"
QUEUES_PER_BROKER = 4
CHANGING = "g1"  # the broker group that is handed over, and loses its writer
# Shares of the messages that are stored when
HAND_OVER_AT = 0.25  # … the group is handed over,
KILL_AT = 0.5  # … its new writer is killed,
HOLD_AT = 0.85  # … and consumers are held back, so that there is a backlog.
READY_S_MAX = 30.0


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the command line says."""

    root: Path  # whose text files travel
    folder: Folder
    rate: int = 0  # messages a second that each producer sends at most; 0 = no limit
    keep: bool = False  # leave the cluster up
    lag: bool = True  # export offsets and run the Spark job


async def run(wishes: Wishes, console: Console) -> Outcome:
    """The whole job. Errors: FileExistsError, WorkerFailed, TimeoutError, and those of the
    catalogue.
    """
    folder, root = wishes.folder, wishes.root
    await folder.renew()
    files = sources.plan(root, PRODUCER_COUNT)
    sources.save_plan(files, folder.plan)
    console.print(f"{len(files):,} text files below {root}")
    stage = cluster_in(folder, wishes.keep)
    async with stage as cluster, Connection(cluster.namesrv) as connection:
        console.print(f"up: {', '.join(process.name for process in cluster.processes)}")
        scrapes = [await metrics.scrape(cluster)]
        await create_topic(connection, cluster)
        async with Traffic(cluster.namesrv, TOPIC, GROUP, files, folder, console) as traffic:
            await parked(cluster)
            await traffic.produce(root, wishes.rate)

            await traffic.until(lambda: traffic.share_stored >= HAND_OVER_AT)
            scrapes.append(await metrics.scrape(cluster))
            change = await traffic.beside(handover.hand_over(connection, CHANGING))
            console.print(f"{CHANGING}: {change.text}")

            await traffic.until(
                lambda: (
                    traffic.share_stored >= KILL_AT
                    and traffic.tally.stored_after(CHANGING, change.answered_ms)
                )
            )
            scrapes.append(await metrics.scrape(cluster))
            loss = await traffic.beside(
                takeover.kill_writer(connection, cluster, CHANGING, LEASE_S)
            )
            console.print(f"{CHANGING}: {loss.text}")

            progress = await backlog(traffic, connection, folder, console) if wishes.lag else None
            cluster = await traffic.beside(takeover.bring_back(folder.cluster))
            console.print(f"{CHANGING}: member {loss.killed_member} is back, a slave")
            lag = await count_lag(traffic, folder, progress, console) if progress else None
            await traffic.finish()
        done = await ops.group_progress(connection, GROUP, topic=TOPIC)
        queues = await ops.topic_status(connection, TOPIC)
        told = await logs.compare(connection)
        scrapes.append(await metrics.scrape(cluster))
    trip = trip_of(files, traffic, change, loss, uncommitted(queues, done.queues))
    steady = sum(queue.message_count for queue in queues if queue.broker_group != CHANGING)
    wanted = metrics.expectations(cluster, CHANGING, steady, trip.byte_count)
    return Outcome(
        trip=trip,
        lag=lag,
        logs=await asyncio.to_thread(logs.read_again, cluster, told),
        movements=metrics.compare(scrapes, wanted),
        differences=comparing.compare(files, root, folder.copies),
    )


async def backlog(
    traffic: Traffic, connection: Connection, folder: Folder, console: Console
) -> GroupProgressView:
    """Holds the consumers back until something is left to be read and everything stands still; how
    far they are then, with the offsets exported. They go on.
    """
    await traffic.until(lambda: traffic.share_stored >= HOLD_AT)
    traffic.hold()
    await traffic.until(lambda: traffic.all_stored)
    progress = await lagging.export(connection, GROUP, TOPIC, folder)
    console.print(
        f"offsets exported, while the consumers are {progress.lag_count:,} messages behind"
    )
    traffic.go_on()
    return progress


async def count_lag(
    traffic: Traffic, folder: Folder, progress: GroupProgressView, console: Console
) -> Lag:
    """Has the backlog counted while the consumers work through it."""
    lag = await traffic.beside(lagging.compute(folder, progress, TOPIC))
    console.print(f"Spark took {lag.spark_s:.1f} s beside them; its report is in {lag.report}")
    return lag


async def create_topic(connection: Connection, cluster: LocalCluster) -> None:
    """On all broker groups, as soon as they have registered."""
    await ops.wait_for_brokers(connection, cluster.broker_groups, deadline_s=READY_S_MAX)
    count = QUEUES_PER_BROKER
    await ops.create_topic(connection, TOPIC, read_queue_count=count, write_queue_count=count)


async def parked(cluster: LocalCluster) -> None:
    """Until the consumers wait for messages of every queue at the pullhold. TimeoutError."""
    (pullhold,) = cluster.pullholds
    wanted = QUEUES_PER_BROKER * len(cluster.broker_groups)

    async def all_held() -> bool:
        found = await metrics.scrape(cluster)
        return found[pullhold.name]["cometmq_holds_waiting"] >= wanted

    if not await until(all_held, READY_S_MAX):
        raise TimeoutError(f"the consumers hold less than {wanted} pulls at {pullhold.name}")


def uncommitted(queues: Iterable[QueueView], progress: Iterable[QueueProgressView]) -> int:
    """Messages that the group has not committed; 0 once every member has left in order. In a
    queue without any commit these are all messages.
    """
    committed = {(row.broker_group, row.queue_id): row.committed_offset for row in progress}
    lag = 0
    for queue in queues:
        done = committed.get((queue.broker_group, queue.queue_id))
        lag += queue.max_offset - (queue.min_offset if done is None else done)
    return lag


def trip_of(
    files: Sequence[SourceFile], traffic: Traffic, change: HandOver, loss: Failover, lag: int
) -> Trip:
    """What became of the messages."""
    placer, tally = traffic.placer, traffic.tally
    return Trip(
        file_count=len(files),
        line_count=sum(file.line_count for file in files),
        byte_count=sum(file.byte_count for file in files),
        message_count=placer.expected,
        duplicates=traffic.sightings.explained(CHANGING, loss.killed_ms),
        strays=placer.strays,
        missing=placer.expected - placer.placed,
        produce_seconds=traffic.produce_seconds,
        consume_seconds=traffic.consume_seconds,
        p50_ms=tally.latency_ms(0.5),
        p99_ms=tally.latency_ms(0.99),
        uncommitted=lag,
        hand_over_ms=change.pause_ms(tally),
        take_over_ms=loss.pause_ms(tally),
    )
