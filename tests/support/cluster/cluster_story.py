"""A local cluster that a test drives by the public command and the SDK, and what was sent to it,
so that its stores can be compared with that afterwards.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cometmq.client import (
    Message,
    Producer,
    ProducerOptions,
    PullConsumer,
    SendReceipt,
)
from tests.support.cluster.command import command_json
from tests.support.independent.index import Shape
from tests.support.independent.reader import Store
from tests.support.independent.record import Message as StoredMessage
from tests.support.independent.state import STATE_QUEUE

COMMAND = Path(sys.executable).with_name("cometmq")
COMMAND_S_MAX = 50
# Nothing is sent twice merely because the machine is busy.
PATIENT = ProducerOptions(answer_timeout_ms=50_000, delivery_timeout_ms=60_000)
INDEX_SHAPE = Shape(slots=100, entries=400)
# Small files, so that the log and the queues have several and the state is copied now and then.
OPTIONS = (
    "mapped_file_size_commit_log=1048576",
    "mapped_file_size_consume_queue=2000",
    f"max_hash_slot_num={INDEX_SHAPE.slots}",
    f"max_index_num={INDEX_SHAPE.entries}",
    "state_copy_interval_bytes=1048576",
    "flush_disk_type=ASYNC_FLUSH",
)

Place = tuple[str, int]  # broker group, log offset


@dataclass(frozen=True)
class Sent:
    """A message as it was sent, and where the receipt says that it is."""

    topic: str
    queue_id: int
    queue_offset: int
    store_time_ms: int
    body: bytes
    tag: str = ""
    keys: tuple[str, ...] = ()
    properties: Mapping[str, str] = field(default_factory=dict)
    flag: int = 0
    unique_id: str | None = None  # None: the command does not tell


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class Cluster:
    """A local cluster in a folder, and what was sent to it."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self._options = (*OPTIONS, *options)
        self.sent: dict[Place, Sent] = {}
        self.namesrv = ""
        self.pids: dict[str, int] = {}

    def command(self, *arguments: str, body: bytes = b"") -> Any:
        """The JSON that ``cometmq`` answers."""
        return command_json(self.folder, *arguments, stdin=body)

    def process(self, *arguments: str) -> Any:
        """The same of a process of its own, as the parent of others."""
        environment = {**os.environ, "COMETMQ_LOCAL_DIR": str(self.folder)}
        environment.pop("COMETMQ_NAMESRV", None)
        done = subprocess.run(
            [COMMAND, *arguments, "--output", "json"],
            env=environment,
            capture_output=True,
            timeout=COMMAND_S_MAX,
        )
        assert done.returncode == 0, done.stderr.decode()
        return json.loads(done.stdout)

    def up(self, *, brokers: int, slaves: int = 0) -> None:
        """Start it, or what of it has died."""
        options = [text for option in self._options for text in ("--option", option)]
        counts = ("--brokers", str(brokers), "--slaves", str(slaves))
        view = self.process("local", "up", *counts, *options)
        self.namesrv = view["namesrv"]
        self.pids = {process["name"]: process["pid"] for process in view["processes"]}

    def down(self) -> None:
        self.process("local", "down")

    def kill(self, name: str) -> None:
        """``kill -9``; returns when the process is no more."""
        process = os.pidfd_open(self.pids[name])
        try:
            os.kill(self.pids[name], signal.SIGKILL)
            gone, _, _ = select.select([process], [], [], COMMAND_S_MAX)
            assert gone, f"{name} does not die"
        finally:
            os.close(process)

    def store(self, name: str) -> Path:
        return self.folder / name / "store"

    def send_by_command(self, topic: str, body: bytes, tag: str, key: str) -> None:
        options = ("--tag", tag, "--key", key, "--property", f"by={key}", "--file", "-")
        view = self.command("message", "send", topic, *options, body=body)
        where, offset = view["message_id"].split("/")
        self.sent[where, int(offset)] = Sent(
            topic,
            view["queue_id"],
            view["queue_offset"],
            view["store_time_ms"],
            body,
            tag,
            (key,),
            {"by": key},
        )

    def send(self, messages: list[Message]) -> None:
        asyncio.run(self._send(messages))

    async def _send(self, messages: list[Message]) -> None:
        async with Producer(self.namesrv, options=PATIENT) as producer:
            futures = [await producer.send(message) for message in messages]
            for message, receipt in zip(messages, await asyncio.gather(*futures), strict=True):
                self._note(message, receipt)

    def _note(self, message: Message, receipt: SendReceipt) -> None:
        where, offset = receipt.message_id.split("/")
        assert where == receipt.queue.broker_group
        self.sent[where, int(offset)] = Sent(
            receipt.queue.topic,
            receipt.queue.queue_id,
            receipt.queue_offset,
            receipt.store_time_ms,
            message.body,
            message.tag,
            tuple(message.keys),
            dict(message.properties),
            message.flag,
            receipt.unique_id,
        )

    def consume(self, topic: str, group: str, count: int) -> None:
        """Reads ``count`` messages of the topic, or some more, and commits them."""
        asyncio.run(self._consume(topic, group, count))

    async def _consume(self, topic: str, group: str, count: int) -> None:
        async with PullConsumer(self.namesrv, group) as consumer:
            await consumer.assign(await consumer.queues(topic))
            seen = 0
            async with asyncio.timeout(COMMAND_S_MAX):
                while seen < count:
                    seen += len(await consumer.poll(timeout_ms=1000))
            await consumer.commit()


@dataclass(frozen=True)
class Kept:
    """Copies of the stores at some moments, and what should be in them by then."""

    folder: Path
    sent: dict[str, dict[Place, Sent]] = field(default_factory=dict)
    started_ms: int = field(default_factory=now_ms)

    def keep(self, moment: str, cluster: Cluster, *names: str) -> None:
        self.sent[moment] = dict(cluster.sent)
        for name in names:
            shutil.copytree(cluster.store(name), self.folder / moment / name)

    def store(self, moment: str, name: str) -> Store:
        return Store(self.folder / moment / name, INDEX_SHAPE)


# --- comparing ------------------------------------------------------------------------------------


def as_sent(message: StoredMessage) -> Sent:
    """A record in the words of its sender."""
    properties = message.properties
    unique_id = properties.pop("UNIQ_KEY", None)
    tag, keys = properties.pop("TAGS", ""), tuple(properties.pop("KEYS", "").split())
    return Sent(
        message.topic,
        message.queue_id,
        message.queue_offset,
        message.store_time_ms,
        message.body,
        tag,
        keys,
        properties,
        message.flag,
        unique_id,
    )


def found_in(store: Store, name: str) -> dict[Place, Sent]:
    """All messages of the store's queues but the system's, each in its place of its queue."""
    found = {}
    for topic, queue_id in store.queues():
        if (topic, queue_id) == STATE_QUEUE:
            continue
        first, end = store.bounds(topic, queue_id)
        messages = list(store.messages(topic, queue_id))
        assert [message.queue_offset for message in messages] == list(range(first, end))
        for message in messages:
            assert (message.topic, message.queue_id) == (topic, queue_id)
            found[name, message.log_offset] = as_sent(message)
    return found


def expect_equal(found: Mapping[Place, Sent], sent: Mapping[Place, Sent]) -> None:
    """Neither more nor less, and every field the same."""
    assert found.keys() == sent.keys()
    for place, wanted in sent.items():
        unique_id = wanted.unique_id or found[place].unique_id
        assert found[place] == replace(wanted, unique_id=unique_id), place
