"""Stores full of messages, written through the engine without a broker: what the benchmarks of
reading and of recovery start from.

``python -m bench.filling FOLDER --die`` ends as a crash would: with SIGKILL, the last
``--unflushed_mib`` neither synced nor noted in the checkpoint.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cometmq.clock import SystemClock
from cometmq.format import ids, properties, record
from cometmq.store.writer import MessageStore, StoreOptions

MIB = 1024 * 1024
HOST = record.host_bytes("127.0.0.1", 10911)
BATCH_COUNT = 256
QUEUES_PER_TOPIC = 4
FLUSH_EVERY_BYTES = 256 * MIB
BODY_SEED = 7


@dataclass(frozen=True, slots=True)
class Content:
    """What a store is filled with: messages of one size, in turn to all queues."""

    total_bytes: int
    queue_count: int
    body_bytes: int = 1024

    def queues(self) -> list[tuple[str, int]]:
        """(topic, queue id) of every queue."""
        places = (divmod(n, QUEUES_PER_TOPIC) for n in range(self.queue_count))
        return [(f"bench-{topic:05d}", queue) for topic, queue in places]


def batches(content: Content) -> Iterator[tuple[bytes, tuple[str, int, int]]]:
    """Batches of records as a producer sends them, every message with a UNIQ_KEY of its own."""
    clock = SystemClock()
    unique = ids.UniqueIds(clock)
    body = random.Random(BODY_SEED).randbytes(content.body_bytes)
    queues, written, turn = content.queues(), 0, 0
    while written < content.total_bytes:
        topic, queue_id = queues[turn % len(queues)]
        records = b"".join(
            record.encode(
                topic.encode(),
                queue_id,
                body,
                properties.encode({properties.UNIQ_KEY: unique.next()}),
                born_time_ms=clock.wall_ms(),
                born_host=HOST,
                store_host=HOST,
            )
            for _ in range(BATCH_COUNT)
        )
        yield records, (topic, queue_id, BATCH_COUNT)
        written += len(records)
        turn += 1


def fill(store: MessageStore, content: Content) -> int:
    """Append ``content``, synced as a broker would; how many messages it were."""
    count = unsynced = 0
    for records, segment in batches(content):
        store.append(records, [segment], born_host=HOST, store_host=HOST)
        count += segment[2]
        unsynced += len(records)
        if unsynced >= FLUSH_EVERY_BYTES:
            sync(store)
            unsynced = 0
    return count


def sync(store: MessageStore) -> None:
    """Everything on the disk, and in the checkpoint."""
    store.flush_log()
    store.flush_queues()


def options(file_mib: int) -> StoreOptions:
    return StoreOptions(commit_log_file_bytes=file_mib * MIB)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.filling", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mib", type=int, default=4096)
    parser.add_argument("--queues", type=int, default=1000)
    parser.add_argument("--file_mib", type=int, default=1024)
    parser.add_argument("--die", action="store_true")
    parser.add_argument("--unflushed_mib", type=int, default=64)
    said = parser.parse_args()
    store = MessageStore.open(said.folder, options(said.file_mib), clock=SystemClock())
    rest_mib = said.unflushed_mib if said.die else 0
    fill(store, Content((said.mib - rest_mib) * MIB, said.queues))
    sync(store)
    if said.die:
        fill(store, Content(rest_mib * MIB, said.queues))
        os.kill(os.getpid(), signal.SIGKILL)
    store.close()


if __name__ == "__main__":
    main()
