"""A writer with messages that wait for a time of their own, over a simulated disk. Its parts are
the real ones; they do their work when a test says so, one after the other, also where a broker uses
threads.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from copy import deepcopy
from functools import partial
from pathlib import Path, PurePath
from typing import Any, TypeVar
from unittest import mock

from prometheus_client import CollectorRegistry

from cometmq.errors import DiskFull, Shortage, StoreDamaged
from cometmq.format import timers
from cometmq.format.batch import BatchLimits
from cometmq.format.timers import TIMER_QUEUE, TimerForm
from cometmq.member.metrics import MemberMetrics
from cometmq.member.relay import RelayWriter
from cometmq.member.state.opening import open_writer
from cometmq.member.state.retention import Retention
from cometmq.model import TopicConfig
from cometmq.store.layout import TIMERS
from cometmq.store.retention import RetentionRules
from cometmq.store.writer import MessageStore
from services.broker.delay.believed_time import BelievedTime
from services.broker.delay.timers import TimerService
from services.broker.sending.produce import Claim, ProduceHandler, ProducePolicy
from tests.support.cluster.broker import config_for, encoded
from tests.support.cluster.members import NEVER, Member
from tests.support.stores.disk_model import DiskModel, FileNode, FolderNode
from tests.support.stores.simulated_files import Fault, SimulatedFiles
from tests.support.stores.small_stores import HOST, WallClock, read_queue

TOPIC = "T"
HOUR_MS = 3_600_000
RESERVED_MS = 72 * HOUR_MS
PROGRESS_SHARE = 0.5  # of the rounds begin with what the state tells of it
STEPS_MAX = 300  # of one delivery: else it goes round in circles
OPTIONS = {
    "mapped_file_size_commit_log": 16 * 1024,
    "mapped_file_size_consume_queue": 20 * 50,
    "max_hash_slot_num": 4,
    "max_index_num": 8,
}
POLICY = ProducePolicy(1 << 30, False, TopicConfig(""), 30.0, 30.0)
# By command, whatever the hour.
RULES = RetentionRules(reserved_ms=HOUR_MS, delete_hours=frozenset())

T = TypeVar("T")


class World:
    """What outlives a process: the disk, the time, and what was sent. ``root`` is a real folder,
    for the lock alone. ``unsure``: messages that need not outlive the process; ``doubtful``: those
    that may not have.
    """

    def __init__(self, root: Path, rng: random.Random) -> None:
        self.root = root
        self.disk = DiskModel(rng)
        self.clock = WallClock()
        self.boots = 1
        self.sent: dict[bytes, int] = {}  # when each is due, by its body
        self.unsure: set[bytes] = set()
        self.doubtful: set[bytes] = set()
        self.number = 0

    def copy(self, rng: random.Random) -> World:
        """The same, which goes another way from here."""
        other = World(self.root, rng)
        other.disk = deepcopy(self.disk)
        other.disk.rng = rng
        other.clock = WallClock(self.clock.now_ms)
        other.boots, other.number = self.boots, self.number
        other.sent = dict(self.sent)
        other.unsure, other.doubtful = set(self.unsure), set(self.doubtful)
        return other

    def index_files(self) -> dict[str, FileNode]:
        """The files of the timer index, by name."""
        folder = self.disk.find(PurePath(TIMERS))
        if not isinstance(folder, FolderNode):
            return {}
        nodes = sorted(folder.seen.items())
        return {name: node for name, node in nodes if isinstance(node, FileNode)}

    def end(self, life: Life, *, power_cut: bool) -> None:
        life.end()
        self.doubtful |= self.unsure
        self.unsure.clear()
        if power_cut:
            self.disk.cut()
            self.boots += 1

    async def check_all_come(self) -> None:
        """A later process delivers all, each once, none early; so does the next one, when the power
        goes right after.
        """
        self.clock.now_ms += 100 * HOUR_MS
        life = Life(self)
        await life.deliver()
        life.check()
        self.end(life, power_cut=True)
        life = Life(self)
        await life.deliver()
        life.check()
        self.end(life, power_cut=False)


class AtOnce(TimerService):
    """``lacks_room``: the last work of its thread found none."""

    lacks_room = False

    async def _in_thread(self, work: Callable[[], T]) -> T:
        self.lacks_room = False
        try:
            return work()
        except Shortage:
            self.lacks_room = True
            raise


class RemovesAtOnce(Retention):
    async def _in_thread(self, work: Callable[[], T]) -> T:
        return work()


class Life:
    """One process. Raises at its calls what the disk does."""

    def __init__(self, world: World, fault: Fault | None = None, epoch_floor: int = 0) -> None:
        self.world = world
        boot = f"boot-{world.boots}"
        files = SimulatedFiles(world.root, world.disk, boot=boot, fault=fault)
        config, clock = config_for(world.root, store_path=world.root, **OPTIONS), world.clock
        with mock.patch.object(MessageStore, "open", partial(MessageStore.open, files=files)):
            opened = open_writer(config, BatchLimits(), HOST, clock, epoch_floor=epoch_floor)
        self.member = member = Member(opened, NEVER)
        self.store = member.store
        metrics = MemberMetrics(CollectorRegistry(), "c", "g")
        relays = RelayWriter(member.storage, member.state.topics, HOST, metrics)
        parts = member.storage, member.keeper
        time = BelievedTime(clock, metrics, opened.stored_ms)
        self.timers = AtOnce(*parts, relays, metrics, clock, time, RESERVED_MS)
        self._produce = ProduceHandler(*parts, POLICY, HOST, metrics, clock)
        self.retention = RemovesAtOnce(member.storage, member.state, RULES, clock, pause_s=0.0)
        self.retention.before_removal = self._make_way
        # Nobody else syncs.
        vars(member.storage)["is_safe"] = self._is_safe

    def end(self) -> None:
        """As by a crash."""
        self.timers.close()
        self.retention.close()
        self.member.reader.close()
        self.member.storage.end_threads()
        self.store.abandon()

    def close(self) -> None:
        """In order."""
        self.member.keeper.write_progress(0.0)
        self.sync()
        self.timers.close()
        self.retention.close()
        self.member.reader.close()
        self.member.storage.close()

    def sync(self) -> None:
        self.member.storage._flushed(self.store.flush_log())
        self.world.unsure.clear()

    async def _make_way(self, log_offset: int) -> None:
        await self.timers.roll_before(log_offset)
        self.member.keeper.write_progress(0.0)

    async def _is_safe(self, *_: object) -> bool:
        self.sync()
        return True

    async def _until_done(self, work: Coroutine[Any, Any, object]) -> None:
        """Sync as often as it waits for that."""
        task = asyncio.create_task(work)
        await asyncio.sleep(0)
        try:
            while not task.done():
                self.sync()
                await asyncio.sleep(0)
        finally:
            task.cancel()
            await asyncio.wait([task])
        await task

    async def put_topic(self) -> None:
        await self._until_done(self.member.put(TOPIC))

    async def send(self, count: int, in_ms: int) -> None:
        """So many messages, which are due a second after each other from then on, in any order."""
        world = self.world
        prefix, data, dues_ms = timers.prefix(TOPIC, 0), b"", {}
        seconds = world.disk.rng.sample(range(count), count)
        for second in seconds:
            body = b"%d" % world.number
            world.number += 1
            due_ms = dues_ms[body] = world.clock.now_ms + in_ms + 1_000 * second
            properties = timers.with_time(prefix, due_ms) + b"UNIQ_KEY\x01m%b\x02" % body
            data += encoded(*TIMER_QUEUE, body, properties=properties)
        world.sent |= dues_ms
        world.doubtful |= dues_ms.keys()
        try:
            claim = Claim(TOPIC, 0, count, timer=TimerForm.AT)
            await self._until_done(self._produce.take(data, [claim], HOST))
        except DiskFull:  # then none of them is there
            for body in dues_ms:
                del world.sent[body]
            raise
        world.doubtful -= dues_ms.keys()
        world.unsure |= dues_ms.keys()

    async def work(self) -> bool:
        """One round of the timers' task; False: there is nothing to do now. Raises Shortage."""
        self.sync()
        if self.world.disk.rng.random() < PROGRESS_SHARE:
            self.member.keeper.write_progress(0.0)
            self.sync()
        try:
            is_over = await self.timers.turn() != 0.0
            job = await self.timers._next_job()
            if job is not None:
                await self.timers._run_job(job)
        except StoreDamaged as error:
            self.timers._forget_index(error)
            return True
        return not is_over or (job is not None and not self.timers.lacks_room)

    async def deliver(self) -> None:
        """Until nothing is left to do. Raises Shortage."""
        for _ in range(STEPS_MAX):
            if not await self.work():
                self.sync()
                return
        raise AssertionError("the timers never come to rest")

    async def clean(self) -> None:
        """Remove all log files that are old enough. Raises Shortage."""
        for _ in range(2):  # the state is told behind them
            self.member.keeper.write_snapshot()
            self.sync()
        await self.retention.clean()

    def check(self) -> None:
        """The topic has all messages whose time has come, each once, and none came early."""
        found = read_queue(self.store, TOPIC, 0)
        counts = Counter(one.body for one in found)
        sent, doubtful = self.world.sent, self.world.unsure | self.world.doubtful
        assert max(counts.values(), default=1) == 1, "each comes once"
        assert counts.keys() <= sent.keys(), "what was refused does not come"
        assert sent.keys() - counts.keys() <= doubtful, "none is lost"
        assert all(one.store_time_ms >= sent[one.body] for one in found), "none is early"
        assert not len(self.timers.index)


async def prepared(root: Path, rng: random.Random, batches: int, count: int, in_ms: int) -> World:
    """A store that was left in order with so many batches of messages that wait."""
    world = World(root, rng)
    life = Life(world)
    await life.put_topic()
    for _ in range(batches):
        await life.send(count, in_ms)
        await life.deliver()
    life.close()
    return world
