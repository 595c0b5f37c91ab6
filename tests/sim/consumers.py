"""Members of consumer groups: they divide the queues by the product's rule and lock them by its
client, call listeners that fail, send back, commit, hear of resets.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from cometmq.client.group.queue_locks import RENEW_S, Lock, QueueLocks
from cometmq.client.group.rebalance import Allocation, allocate
from cometmq.client.reading.progress import Progress, Run
from cometmq.errors import CometError, OffsetReset, PositionFenced, QueueLocked
from cometmq.messaging.locks import LEASE_S
from cometmq.messaging.retry import DEAD, retry_topic
from cometmq.model import Position, QueueRef
from services.broker.retry.retries import SendBackItem
from tests.sim.broker import Members
from tests.sim.clients import UNTOLD, Client, ClientMachine
from tests.sim.disk import Record
from tests.sim.inquirers import MemberAnswers, is_off
from tests.sim.member import Group, Role
from tests.sim.topics import BROKER_GROUP, CONCURRENT, ORDERLY
from tests.sim.writer import Writer

JOIN_S = 1.0
IDLE_S = 0.7
SUSPEND_S = 1.0
PULL_MAX = 8
WINDOW = 12  # messages in work of a queue
TRIES_MAX = 3  # of a listener in order, then the message is dead
LOCAL_RETRY_S = 5.0


class Pulled(NamedTuple):
    """A message, and the uid of the one before it in its queue; 0 = it is the first."""

    record: Record
    before: int

    @property
    def offset(self) -> int:
        return self.record.number - 1


class LockCalls:
    """What the client's locks ask of the broker."""

    def __init__(self, client: Consumer) -> None:
        self._client = client
        self.group = client.consumer_group

    async def lock(
        self, client_id: str, queues: Collection[QueueRef]
    ) -> tuple[dict[QueueRef, int | CometError], float]:
        refs = list(queues)
        keys = [(ref.topic, ref.queue_id) for ref in refs]
        client = self._client
        try:
            answers = await client.at_writer(
                lambda role: role.broker.lock(self.group, client_id, keys)
            )
        except CometError as error:
            return dict.fromkeys(refs, error), LEASE_S
        found = dict(zip(refs, answers, strict=True))
        client.group.judge.groups.granted(client, found)
        return found, LEASE_S

    async def unlock(self, client_id: str, queues: Collection[QueueRef]) -> None:
        keys = [(ref.topic, ref.queue_id) for ref in queues]
        try:
            await self._client.at_writer(
                lambda role: role.broker.unlock(self.group, client_id, keys)
            )
        except CometError:
            return  # the lease ends by itself


class Assigned:
    """A queue that this member reads. ``over``: it is another's, or about to be."""

    def __init__(self, ref: QueueRef, index: int) -> None:
        self.ref = ref
        self.index = index
        self.over = False
        self.reset_number = 0
        self.look = True  # where the group is now
        self.progress = Progress(UNTOLD)
        self.running = 0

    @property
    def key(self) -> tuple[str, int]:
        return self.ref.topic, self.ref.queue_id


class Consumer(Client):
    """One life of a member."""

    consumer_group = CONCURRENT

    def __init__(self, group: Group, machine: ClientMachine, allocation: Allocation) -> None:
        super().__init__(group, machine)
        self.assigned: dict[QueueRef, Assigned] = {}
        self._allocation = allocation
        self._newest_reset = 0
        names = self._topics()
        self._indexes = {
            QueueRef(topic, queue_id, BROKER_GROUP): index
            for (topic, queue_id), index in group.indexes.items()
            if topic in names
        }

    def _topics(self) -> set[str]:
        users = {topic for topic, _ in self.group.rules.topics.keys()[: self._user_count]}
        return users | {retry_topic(self.consumer_group)}

    @property
    def _user_count(self) -> int:
        return self.group.rules.topics.count

    def start(self) -> None:
        self.group.member_names.append(self.name)
        self.spawn(self._belong())
        self.spawn(MemberAnswers(self, is_off=is_off(self.name)).run())

    async def _belong(self) -> None:
        while not self.over:
            try:
                await self._join()
            except CometError:
                self.world.counts["members that heard nothing"] += 1
            await self.sleep(JOIN_S)
        for queue in list(self.assigned.values()):
            await self._give_up(queue)
        try:
            await self.at_writer(self._leave)
        except CometError:
            return

    async def _leave(self, role: Writer) -> None:
        role.broker.leave(self.consumer_group, self.name)

    async def _join(self) -> None:
        held = list(self.assigned)

        async def join(role: Writer) -> tuple[Members, int]:
            return role.broker.join(self.consumer_group, self.name, held)

        members, newest = await self.at_writer(join)
        if newest > self._newest_reset:
            self._newest_reset = newest
            for queue in self.assigned.values():
                queue.look = True
        mine = set(
            allocate(self._allocation, self.name, list(members), list(self._indexes), members)
        )
        for queue in [queue for ref, queue in self.assigned.items() if ref not in mine]:
            await self._give_up(queue)
        await self._take({ref for ref in mine if ref not in self.assigned})

    async def _take(self, refs: set[QueueRef]) -> None:
        for ref in sorted(refs):
            self._begin(ref)

    def _begin(self, ref: QueueRef) -> None:
        self.world.counts["queues taken"] += 1
        queue = self.assigned[ref] = Assigned(ref, self._indexes[ref])
        self.spawn(self._read(queue))

    async def _give_up(self, queue: Assigned) -> None:
        """Let the calls that run come to their end, and commit."""
        queue.over = True
        while queue.running:
            await self.sleep(0.1)
        if not queue.look:
            await self._commit(queue)
        self._forget(queue)

    def _forget(self, queue: Assigned) -> None:
        if self.assigned.get(queue.ref) is queue:
            del self.assigned[queue.ref]

    # --- reading ----------------------------------------------------------------------------------

    def goes_on(self, queue: Assigned) -> bool:
        return not queue.over

    def lock_number(self, queue: Assigned) -> int:
        return 0

    async def _read(self, queue: Assigned) -> None:
        while self.goes_on(queue):
            try:
                if queue.look:
                    await self._look(queue)
                run, messages = await self._pull(queue)
            except PositionFenced as error:
                queue.progress.rewind(Position(*(error.fence or (0, 0))))
                continue
            except QueueLocked:
                self._lost(queue)
                return
            except CometError:
                await self.sleep(IDLE_S)
                continue
            if run is not None and not queue.look:
                await self._work(queue, run, messages)
            else:
                await self.sleep(self.world.between(0.5, 1.5) * IDLE_S)
            if not queue.look and not queue.over:
                await self._commit(queue)

    def _lost(self, queue: Assigned) -> None:
        queue.over = True
        self._forget(queue)

    async def _look(self, queue: Assigned) -> None:
        """Where the group is."""

        async def committed(role: Writer) -> tuple[Position | None, int]:
            return role.broker.committed(self.consumer_group, queue.key)

        position, number = await self.at_writer(committed)
        queue.look = False
        queue.reset_number = number
        queue.progress.restart(position or UNTOLD)

    async def _pull(self, queue: Assigned) -> tuple[Run | None, list[Pulled]]:
        group, rng = self.group, self.world.rng
        serving = [m for m in group.members if m.process and m.process.serving]
        if not serving or queue.progress.count >= WINDOW:
            return None, []
        position, number = queue.progress.next_position, self.lock_number(queue)

        async def pull(role: Role) -> tuple[list[Pulled], Position]:
            history = role.history(queue.index)
            if history is None:
                return [], position
            if number:
                role.locks.check_pull(self.consumer_group, queue.key, number)
            check = history.validate if role.writes else history.validate_at_copy
            at = check(position)
            units, readable = role.disk.queues[queue.index], role.readable(queue.index)
            some = units[at.offset : min(readable, at.offset + PULL_MAX)]
            messages = [
                Pulled(one, units[one.number - 2].uid if one.number > 1 else 0) for one in some
            ]
            return messages, Position(at.generation, at.offset + len(some))

        answer: tuple[list[Pulled], Position] = await self.ask(rng.choice(serving), pull)
        found, after = answer
        if position != queue.progress.next_position or not found:
            return None, []  # it goes on elsewhere meanwhile
        return queue.progress.add([one.offset for one in found], after, 0), found

    async def _work(self, queue: Assigned, run: Run, messages: list[Pulled]) -> None:
        """Each message by itself, at the same time."""
        for place, message in enumerate(messages):
            queue.running += 1
            self.spawn(self._call(queue, run, place, message))

    async def _call(self, queue: Assigned, run: Run, place: int, message: Pulled) -> None:
        try:
            while self.goes_on(queue):
                await self.sleep(self.world.between(0.01, 1.0) * self.group.work_s)
                if self.world.rng.random() >= self.group.failing:
                    self.group.judge.groups.done(self.consumer_group, message.record)
                    queue.progress.finish(run, place, place + 1)
                    return
                if await self._send_back(queue, message, run.generation, 0):
                    queue.progress.finish(run, place, place + 1)
                    return
                await self.sleep(LOCAL_RETRY_S)
        finally:
            queue.running -= 1

    async def _send_back(
        self, queue: Assigned, message: Pulled, generation: int, level: int
    ) -> bool:
        """Whether the broker has taken it back, for all that we know."""
        item = SendBackItem(*queue.key, Position(generation, message.offset), level)
        for _ in range(2):
            try:
                [answer] = await self.at_writer(
                    lambda role: role.broker.send_back(self.consumer_group, [item])
                )
            except CometError:
                self.world.counts["send-backs without an answer"] += 1
                await self.sleep(self.world.between(0.1, 1.0))
                continue
            if isinstance(answer, CometError):
                self.world.counts["send-backs refused"] += 1
                return False
            self.world.counts["dead letters" if not answer.delay_level else "send-backs"] += 1
            return True
        return False

    async def _commit(self, queue: Assigned) -> None:
        position, number = queue.progress.committable, self.lock_number(queue)
        reset_number = queue.reset_number

        async def commit(role: Writer) -> Position:
            return await role.broker.commit(
                self.consumer_group, queue.key, position, number, reset_number
            )

        try:
            await self.at_writer(commit)
        except OffsetReset:
            queue.look = True
        except QueueLocked:
            self._lost(queue)
        except CometError:
            return  # a fence shows at the next pull


class OrderlyConsumer(Consumer):
    """Calls its listener for one message of a queue at a time, and only under the queue's lock."""

    consumer_group = ORDERLY

    def __init__(self, group: Group, machine: ClientMachine, allocation: Allocation) -> None:
        super().__init__(group, machine, allocation)
        group.judge.groups.consumers.append(self)
        self.locks = QueueLocks(LockCalls(self), self.name, self._locks_lost, self.clock)
        self._under: dict[QueueRef, Lock] = {}  # the lock of each queue

    def _topics(self) -> set[str]:
        """It retries in place."""
        return super()._topics() - {retry_topic(self.consumer_group)}

    def start(self) -> None:
        super().start()
        self.spawn(self._renew())

    def believes(self, ref: QueueRef) -> bool:
        """Whether it takes itself for the owner."""
        lock = self._under.get(ref)
        return lock is not None and lock.is_held

    async def _renew(self) -> None:
        while True:
            await self.sleep(RENEW_S)
            await self.locks.renew_all()

    def _locks_lost(self, refs: Iterable[QueueRef]) -> None:
        for ref in refs:
            self.world.counts["locks lost"] += 1
            if ref in self.assigned:
                self._lost(self.assigned[ref])

    async def _take(self, refs: set[QueueRef]) -> None:
        if refs:
            for ref in sorted(await self.locks.lock(sorted(refs))):
                self._under[ref] = self.locks.get(ref)
                self._begin(ref)

    async def _give_up(self, queue: Assigned) -> None:
        await super()._give_up(queue)
        if self.locks.holds(queue.ref):
            await self.locks.unlock([queue.ref])

    def _lost(self, queue: Assigned) -> None:
        super()._lost(queue)
        self.locks.abandon([queue.ref])

    def goes_on(self, queue: Assigned) -> bool:
        return not queue.over and self._under[queue.ref].is_held

    def lock_number(self, queue: Assigned) -> int:
        return self._under[queue.ref].number

    async def _read(self, queue: Assigned) -> None:
        await super()._read(queue)
        if not queue.over:  # the lease was over before it was renewed
            self.world.counts["leases that ended"] += 1
            self._lost(queue)

    async def _work(self, queue: Assigned, run: Run, messages: list[Pulled]) -> None:
        """One after the other."""
        for place, message in enumerate(messages):
            queue.running += 1
            try:
                if not await self._in_order(queue, message, run.generation):
                    return
                queue.progress.finish(run, place, place + 1)
            finally:
                queue.running -= 1

    async def _in_order(self, queue: Assigned, message: Pulled, generation: int) -> bool:
        """False: it is another's now, or the group was reset."""
        judge, lock = self.group.judge.groups, self._under[queue.ref]
        tries = 0
        while self.goes_on(queue) and not queue.look:
            judge.begins(self, queue.ref, message.record, message.before, lock.number)
            await self.sleep(self.world.between(0.01, 1.0) * self.group.work_s)
            if self.world.rng.random() >= self.group.failing:
                judge.done(self.consumer_group, message.record)
                return True
            tries += 1
            is_last = tries >= TRIES_MAX and self.goes_on(queue)
            if is_last and await self._send_back(queue, message, generation, DEAD):
                judge.done(self.consumer_group, message.record)
                return True
            await self.sleep(SUSPEND_S)
        return False
