"""A change of the state is in the log whole or not at all, and once, whatever record of it is
refused; and a record that is read twice changes nothing more.

Each act changes tables as the broker does, over the real store. The log refuses one of its records,
the act is tried again, and then the writer's tables are those of every reader of the log: from its
beginning, from the newest snapshot, and of one that reads each record twice.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path
from typing import Any, get_args

import pytest

from cometmq.errors import BrokerDraining, CometError, DiskFull
from cometmq.format.delayed import SCHEDULE_TOPIC
from cometmq.format.timers import TIMER_TOPIC
from cometmq.member.state.statelog import load
from cometmq.messaging import retry, state, timers
from cometmq.messaging.changes import (
    Change,
    GroupLeft,
    MessagesResent,
    OffsetsReset,
    PopsMoved,
    QueuesLocked,
    QueuesUnlocked,
    SecretAdded,
    decode,
    encode_change,
)
from cometmq.messaging.dedup import Ids
from cometmq.messaging.group_policy import ConsumeMode, GroupPolicy
from cometmq.messaging.groups import GroupSettings
from cometmq.messaging.half_runs import EndedHalf
from cometmq.messaging.handle_secrets import SECRET_BYTES, Secret
from cometmq.messaging.intervals import Interval
from cometmq.messaging.locks import Grant, GrantRun
from cometmq.messaging.offsets import CommittedOffset
from cometmq.messaging.pop import table as pop_table
from cometmq.messaging.pop.leases import Done, Given
from cometmq.messaging.quotas import EACH, Limits, Quota, Scope
from cometmq.messaging.resends import ResentKey
from cometmq.messaging.retry import Attempt
from cometmq.messaging.state import STATE_TOPIC, BrokerState, StateLoader
from cometmq.messaging.timers import Timer
from cometmq.model import MessageType, Position, TopicConfig
from tests.support.cluster.members import Member, living_member
from tests.support.stores.small_stores import append, read_queue

QUEUES = 2
TOPICS = ["T0", "T1"]
GROUPS = ["g0", "g1"]


RECEIVES = GROUPS[0]  # always; the others change their mode
NEW_GROUPS = {
    group: GroupSettings(group, policy=GroupPolicy(mode=ConsumeMode.POP))
    if group == RECEIVES
    else GroupSettings(group)
    for group in GROUPS
}


class World:
    """A member, and the acts. An act without a result has told everything; one that answers a
    function is told by calling that, again and again until it is not refused.
    """

    def __init__(self, member: Member, source: random.Random) -> None:
        self.member = member
        self.state = member.state
        self.keeper = member.keeper
        self.source = source
        self.numbers = count(1)
        self.whole = StateLoader(BrokerState())  # readers from the log's beginning
        self.twice = StateLoader(BrokerState())
        self.fed = 0  # records
        self.told: set[tuple[str, object, int]] = set()  # numbers of leases

    async def prepare(self) -> None:
        for topic in (SCHEDULE_TOPIC, TIMER_TOPIC):
            await self.keeper.create_system_topic(topic, QUEUES)
            append(self.member.store, (topic, 0, [b"waits"] * 9))
        for topic in TOPICS:
            await self.member.put(topic, QUEUES)
            append(self.member.store, *((topic, n, [b"m"] * 20) for n in range(QUEUES)))
        for group in GROUPS:
            await self.keeper.put_group(NEW_GROUPS[group])

    def keys(self) -> list[tuple[str, int]]:
        return [(t, n) for t in TOPICS if t in self.state.topics for n in range(QUEUES)]

    # --- acts -------------------------------------------------------------------------------------

    def topic(self) -> Callable[[], Awaitable[object]]:
        """A new topic of a name that messages wait for, with all that a topic may have."""
        name = self.source.choice(TOPICS)
        number = next(self.numbers)
        self.state.halves.add(self.state.halves.end, (number, 1, "p"), 0.0)
        config = TopicConfig(
            name,
            QUEUES,
            QUEUES,
            reserve_time_ms=1_000 * number,
            message_type=self.source.choice(list(MessageType)),
            is_ordered=number % 2 > 0,
        )

        async def again() -> None:
            if name in self.state.topics:
                await self.keeper.drop_topic(name)
            await self.keeper.put_topic(config)

        return again

    def quota(self) -> Callable[[], Awaitable[object]]:
        quota = Quota(messages_per_s=next(self.numbers))
        topic = next(iter(self.keys()))[0]
        return lambda: self.keeper.put_quota(topic, quota)

    def limits(self) -> Callable[[], Awaitable[object]]:
        quota = Quota(messages_per_s=next(self.numbers))
        topic = next(iter(self.keys()))[0]
        scope, name = self.source.choice([(Scope.TOPIC, topic), (Scope.ADDRESS, EACH)])
        limits = self.source.choice([Limits(quota), Limits(read=quota), Limits(quota, Quota())])
        return lambda: self.keeper.put_limits(scope, name, lambda _: limits)

    def drop(self) -> Callable[[], Awaitable[object]]:
        name = self.source.choice(TOPICS)

        async def again() -> None:
            if name in self.state.topics:
                await self.keeper.drop_topic(name)
            await self.member.put(name, QUEUES)

        return again

    def group(self) -> Callable[[], Awaitable[object]]:
        number, name = next(self.numbers), self.source.choice(GROUPS)
        modes = [ConsumeMode.POP] if name == RECEIVES else [ConsumeMode.POP, ConsumeMode.PULL]
        policy = GroupPolicy(consume_timeout_min=number, mode=self.source.choice(modes))
        settings = GroupSettings(name, retry_times_max=number, policy=policy)
        return lambda: self.keeper.put_group(settings)

    def drop_group(self) -> Callable[[], Awaitable[object]]:
        name = self.source.choice(GROUPS)
        self.commits()
        self.leases()

        async def again() -> None:
            if name in self.state.groups:
                await self.keeper.drop_group(name)
            await self.keeper.put_group(NEW_GROUPS[name])

        return again

    def commits(self) -> Callable[[], None]:
        for key in self.keys():
            for group in GROUPS:
                history = self.state.generations.of(*key)
                position = Position(history.current, self.source.randrange(20))
                self.state.offsets.commit(group, key, position, history, 20)
                self.state.pulled(group, key)
        return self.keeper.write_offsets

    def reset(self) -> Callable[[], None]:
        group, number = self.source.choice(GROUPS), self.state.resets.next_number(1)
        self.commits()
        self.leases()

        def again() -> None:
            commits = tuple(
                CommittedOffset(group, *key, Position(self.state.pop_generation(key), 1))
                for key in self.keys()
            )
            self.keeper.write_doings()
            self.keeper.write(OffsetsReset(number, commits))

        return again

    def leave(self) -> Callable[[], None]:
        group, topic = self.source.choice(GROUPS), self.keys()[0][0]
        self.commits()
        self.leases()
        self.progress()

        def again() -> None:
            self.keeper.write_doings()
            self.keeper.write(GroupLeft(group, topic))

        return again

    def leases(self) -> Callable[[], None]:
        pops = self.state.pops
        for group in filter(self.state.receives, GROUPS):
            for key in self.keys():
                queue = pops.open(group, key, 0)
                for _ in range(2):
                    number, first = pops.next_number(1), queue.next_offset
                    pops.give(group, key, Given(number, 0, first, 0b1011, 10**13, 1))
                oldest = next(iter(queue))  # its first message is received again
                given = Given(pops.next_number(1), oldest.number, oldest.first, 1, 10**13, 2)
                pops.give(group, key, given)
                for lease in list(queue)[:-3]:
                    pops.finish(group, key, Done(lease.number, lease.first, 1))
                for lease in list(queue)[:-3]:
                    pops.finish(group, key, Done(lease.number))
        return self.keeper.write_pops

    def progress(self) -> Callable[[], None]:
        """What is written about once a second."""
        end, table = self.member.store.appended_offset, self.state.timers
        for number in range(3):
            ids = Ids(b"%026X" % number, 10 * next(self.numbers), 3)
            self.state.streams.add(ids, end + number, 1.0)
            attempt = Attempt(self.source.choice(GROUPS), next(self.numbers), 1)
            self.state.attempts.add(attempt, end, 1.0)
            table.skip(Timer(10**13 + number, table.read + number))
        halves = self.state.halves
        for _ in range(3):
            halves.add(halves.end, (end, 1, "p"), 0.0, checks=self.source.randrange(3))
        for offset, _, _ in halves.open_halves(0, len(halves) - 2):
            halves.close(offset, EndedHalf(offset, "p", "T0", 0, 0, end))
        level = self.member.delays.levels[1]
        level.delivered(int(level.offset < 9))
        table.arrived([], table.read + 1)
        now_s = self.source.choice([2.0, 2.0, 2_000.0])  # what was idle for so long is forgotten
        return lambda: self.keeper.write_progress(now_s)

    def resent(self) -> Callable[[], None]:
        key = ResentKey(self.keys()[0][0], 0, self.source.choice(GROUPS))
        first = 10 * next(self.numbers)
        mark = MessagesResent(key, (Interval(first, first + 1), Interval(first + 3, first + 5)))
        return lambda: void(self.keeper.write(mark))

    def locks(self) -> Callable[[], None]:
        topic = self.keys()[0][0]
        grant = Grant("c", self.state.locks.last_number + 1)
        run = GrantRun("g0", grant, {topic: tuple(range(QUEUES))})

        def again() -> None:
            self.keeper.write(QueuesLocked(run))
            self.keeper.write(QueuesUnlocked("g0", {topic: (1,)}))

        return again

    def start(self) -> Callable[[], None]:
        """What a start after a crash changes."""
        secret = Secret(next(self.numbers), self.source.randbytes(SECRET_BYTES))
        raised = self.state.plan_raise(lambda _topic, _queue: 15)
        left: list[Any] = [*raised, SecretAdded(secret)]

        def again() -> None:
            while left:
                self.keeper.write(left[0])
                del left[0]

        return again

    def snapshot(self) -> Callable[[], None]:
        self.commits()
        self.leases()
        self.progress()
        return self.keeper.write_snapshot

    # --- what the log tells -----------------------------------------------------------------------

    def compare(self) -> None:
        """The writer, and readers of its log."""
        self.keeper.write_doings()
        self.state.validate()
        mine = entries(self.state)
        for found in read_queue(self.member.store, STATE_TOPIC, 0, self.fed):
            self.whole.feed(found.tag, found.body)
            self.whole.state.validate()  # a next writer may have the log up to here
            for _ in range(2):
                self.twice.feed(found.tag, found.body)
            if found.tag == state.CHANGE:
                self.told_once(found.body)
            self.fed += 1
        assert entries(self.whole.state) == mine
        assert entries(self.twice.state) == mine
        assert entries(load(self.member.store, BrokerState)) == mine

    def told_once(self, body: bytes) -> None:
        """No record repeats a lease of an earlier one: a retry begins where it was refused."""
        for change in decode(body):
            for moved in change.queues if isinstance(change, PopsMoved) else ():
                told = {(moved.group, moved.key, given.number) for given in moved.given}
                assert not told & self.told
                self.told |= told


def void(_: object) -> None:
    """No coroutine."""


def entries(of: BrokerState) -> list[bytes]:
    """The tables, in an order of their own."""
    return sorted(encode_change(change) for change in of.as_changes())


ACTS = [
    World.topic,
    World.quota,
    World.limits,
    World.drop,
    World.group,
    World.drop_group,
    World.commits,
    World.reset,
    World.leave,
    World.leases,
    World.progress,
    World.resent,
    World.locks,
    World.start,
    World.snapshot,
]


class Refusing:
    """The log refuses one record, and takes the next again."""

    def __init__(self, member: Member) -> None:
        self.left = -1  # records until then; below 0: it refuses none
        self.error: type[CometError] = DiskFull
        self._append = member.storage.append
        member.storage.append = self  # type: ignore[method-assign]

    def __call__(self, *args: Any, **named: Any) -> Any:
        self.left -= 1
        if self.left == -1:
            raise self.error("refused")
        return self._append(*args, **named)


async def play(again: Callable[[], Any], refusing: Refusing, left: int) -> bool:
    """Whether a record was refused: then the act was tried again."""
    refusing.left = left
    try:
        if inspect.isawaitable(answer := again()):
            await answer
    except (DiskFull, BrokerDraining):
        if inspect.isawaitable(answer := again()):
            await answer
        return True
    refusing.left = -1
    return False


@pytest.fixture(autouse=True)
def small_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """One entry in each."""
    monkeypatch.setattr(state, "RECORD_BYTES_MAX", 200)
    monkeypatch.setattr(state, "STREAM_BYTES", 200)
    monkeypatch.setattr(state, "ATTEMPTS_PER_CHANGE", 1)
    monkeypatch.setattr(retry, "ATTEMPTS_KNOWN_MAX", 5)
    monkeypatch.setattr(timers, "SKIPS_PER_CHANGE", 1)
    monkeypatch.setattr(pop_table, "CHANGE_BYTES", 40)


@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__)
async def test_whatever_record_is_refused_all_tables_are_equal(
    tmp_path: Path, act: Callable[[World], Callable[[], Any]]
) -> None:
    """The writer's, and those of all readers: each record of each change is refused in its turn."""
    async with living_member(tmp_path) as member:
        world, refusing = World(member, random.Random(1)), Refusing(member)
        await world.prepare()
        for left in count():
            refusing.error = DiskFull if left % 2 else BrokerDraining
            was_refused = await play(act(world), refusing, left)
            world.compare()
            if not was_refused:
                break
        assert left > 0, "the act has a record"


@pytest.mark.parametrize("seed", range(12))
async def test_whatever_is_done_and_refused_all_tables_are_equal(tmp_path: Path, seed: int) -> None:
    source = random.Random(seed)
    async with living_member(tmp_path) as member:
        world, refusing = World(member, source), Refusing(member)
        await world.prepare()
        for _ in range(12):
            await play(source.choice(ACTS)(world), refusing, source.randrange(30))
            world.compare()


async def test_the_acts_make_all_kinds_of_changes(tmp_path: Path) -> None:
    async with living_member(tmp_path) as member:
        world, refusing = World(member, random.Random(1)), Refusing(member)
        await world.prepare()
        for act in ACTS:
            await play(act(world), refusing, -1)
        records = read_queue(member.store, STATE_TOPIC, 0)
        made = {type(change) for found in records for change in decode(found.body)}
        assert made == set(get_args(Change))
