"""A broker and a name server for one run, and the settings that a run's parts have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cometmq.admin import local, ops
from cometmq.admin.connection import Connection
from cometmq.admin.local import LocalCluster
from cometmq.client import ProducerOptions, PushConsumerOptions
from cometmq.format.record import record_size
from cometmq.model import FlushMode

QUEUE_COUNT = 8
BODY_SIZES = (128, 1024)
FLUSH_MODES = (FlushMode.ASYNC, FlushMode.SYNC)
PROPERTIES_BYTES = len("UNIQ_KEY") + 1 + 34 + 1  # all that the producer adds to a bare message


def topic_name(body_bytes: int, flush: FlushMode) -> str:
    return f"bench-{body_bytes}-{flush.name.lower()}"


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one gRPC message carries when the client fills it as far as its options allow."""

    messages: int
    chunk_bytes: int
    window: int  # of them in flight


def record_bytes(body_bytes: int) -> int:
    topic = topic_name(body_bytes, FlushMode.ASYNC)
    return record_size(body_bytes, len(topic), PROPERTIES_BYTES, 0)


def _chunk(record: int, bytes_max: int, count_max: int, window: int) -> Chunk:
    messages = min(count_max, bytes_max // record)
    return Chunk(messages, messages * record, window)


def produce_chunk(body_bytes: int) -> Chunk:
    """A full batch of the producer with its default options."""
    options = ProducerOptions()
    record = record_bytes(body_bytes)
    return _chunk(record, options.batch_bytes_max, options.batch_count_max, options.in_flight_max)


def consume_chunk(body_bytes: int) -> Chunk:
    """A full answer to a pull of the push consumer with its default options; one pull a queue."""
    options = PushConsumerOptions()
    record = record_bytes(body_bytes)
    return _chunk(record, options.pull_bytes_max, options.pull_count_max, QUEUE_COUNT)


@dataclass(frozen=True, slots=True)
class Bench:
    """A running cluster with the topics of the benchmark."""

    cluster: LocalCluster

    @property
    def namesrv(self) -> str:
        return self.cluster.namesrv

    @property
    def broker_pid(self) -> int:
        return self.cluster.brokers[0].pid


@contextmanager
def cluster(
    folder: Path,
    topics: Sequence[tuple[int, FlushMode]],
    *,
    pullholds: int = 0,
    options: Mapping[str, str] | None = None,
) -> Iterator[Bench]:
    """One name server, one broker with these options, the topics and perhaps pull-holds; gone
    afterwards.
    """
    asyncio.run(local.down(folder, purge=True))  # what an interrupted run may have left
    running = asyncio.run(
        local.up(folder, broker_count=1, slave_count=0, pullhold_count=pullholds, options=options)
    )
    try:
        for body_bytes, flush in topics:
            asyncio.run(_create_topic(running.namesrv, topic_name(body_bytes, flush), flush))
        yield Bench(running)
    finally:
        asyncio.run(local.down(folder, purge=True))


async def _create_topic(namesrv: str, name: str, flush: FlushMode) -> None:
    async with Connection(namesrv) as connection:
        await ops.create_topic(
            connection,
            name,
            read_queue_count=QUEUE_COUNT,
            write_queue_count=QUEUE_COUNT,
            flush_mode=flush,
        )
