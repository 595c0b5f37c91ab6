"""The clients: what all of them have, producers that send again what was not answered, and readers
that follow their positions.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

from cometmq.errors import (
    BatchOutsideWindow,
    CometError,
    NotWriter,
    PeerUnavailable,
    PositionFenced,
)
from cometmq.format import delayed, record, timers
from cometmq.format.delayed import SCHEDULE_TOPIC
from cometmq.format.timers import TIMER_QUEUE, TimerForm
from cometmq.model import Position
from services.broker.sending.produce import Accepted, Claim
from tests.sim.member import Group, Member, MemberClock, Role
from tests.sim.network import FIRST_CLIENT
from tests.sim.storage import HOST
from tests.sim.world import Machine, Process, Violation, Wait
from tests.sim.writer import Writer

READ_MAX = 30  # messages at once
UNTOLD = Position(0, 0)
ANSWER_S_MAX = 3.0
RESEND_S = 20.0
CLOCK_WRONG_MAX = 0.01  # share by which a client's clock runs too fast or too slow
DELAYED_SHARE = 0.1
DELAY_LEVELS = (1, 2)  # that producers ask for
TIMED_SHARE = 0.15  # messages with a time of their own
TIMED_S = (-1.0, 15.0)  # from now, when they are due
RECALLED_SHARE = 0.4  # of these

T = TypeVar("T")


class ClientMachine(Machine):
    """What one client runs on, life after life."""

    def __init__(self, group: Group, number: int) -> None:
        super().__init__(group.world)
        self.number = number
        self.node = FIRST_CLIENT + number
        self.clock = MemberClock(
            group.world, 1 + group.world.between(-CLOCK_WRONG_MAX, CLOCK_WRONG_MAX)
        )
        self.lives = 0


class Client(Process):
    """One life of a client. ``over``: it is to come to its end."""

    over = False

    def __init__(self, group: Group, machine: ClientMachine) -> None:
        super().__init__(machine)
        machine.lives += 1
        self.group = group
        self.node = machine.node
        self.clock = machine.clock
        self.name = f"c{machine.number}.{machine.lives}"

    def start(self) -> None:
        raise NotImplementedError

    def tell(self, what: str, *details: object) -> None:
        self.world.tell(self.name, what, *details)

    def writer(self) -> Member:
        """One that says it writes; it may be wrong. Raises PeerUnavailable."""
        writers = self.group.writers()
        if not writers:
            raise PeerUnavailable("nobody writes")
        return self.world.rng.choice(writers).member

    async def at_writer(self, work: Callable[[Writer], Coroutine[Any, Any, T]]) -> T:
        """Ask the writer. Raises what it answers; PeerUnavailable: nobody knows what was done."""

        async def checked(role: Role) -> T:
            if not isinstance(role, Writer):
                raise NotWriter("it follows")
            return await work(role)

        answer: T = await self.ask(self.writer(), checked)
        return answer

    def ask(self, member: Member, work: Callable[[Role], Coroutine[Any, Any, T]]) -> Wait[T]:
        network, mine = self.group.network, self.node

        def start(done: Callable[[T], None], failed: Callable[[Exception], None]) -> None:
            over = False

            def end(action: Callable[[], None]) -> None:
                nonlocal over
                if not over:
                    over = True
                    action()

            def answer(action: Callable[[], None]) -> None:
                network.send((member.id, mine), lambda: self.call(lambda: end(action)))

            async def serve(role: Role) -> None:
                try:
                    value = await work(role)
                except CometError as error:
                    refused = error
                    answer(lambda: failed(refused))
                else:
                    answer(lambda: done(value))

            def arrived() -> None:
                role = member.process
                if role is None or not role.serving:
                    answer(lambda: failed(PeerUnavailable("nothing listens")))
                else:
                    role.call(lambda: role.spawn(serve(role)))

            network.send((mine, member.id), arrived)
            no_answer = PeerUnavailable("no answer")
            self.after(ANSWER_S_MAX, lambda: end(lambda: failed(no_answer)))

        return Wait(start)


class Message(NamedTuple):
    """``counter``: of its sender. ``due_ms`` 0: it has no time of its own."""

    counter: int
    queue: int
    delay_level: int
    due_ms: int = 0


class Producer(Client):
    """Several lanes, each with one batch that is not answered. A batch goes out again until it is
    answered, or its time is over.
    """

    def __init__(self, group: Group, machine: ClientMachine, pause_s: float, lanes: int) -> None:
        super().__init__(group, machine)
        self.stream = f"{machine.number:010X}{machine.lives:016X}"
        self._lanes = lanes
        self._pause_s = pause_s
        self._counter = 0
        self._keys = group.rules.topics.keys()

    def start(self) -> None:
        if self._lanes == 1:
            self.group.judge.groups.orderly_streams.add(self.stream.encode())
        for _ in range(self._lanes):
            self.spawn(self._lane())

    async def _lane(self) -> None:
        while not self.over:
            await self._deliver(self._batch())
            await self.sleep(self.world.between(0.1, 2.0) * self._pause_s)

    def _batch(self) -> list[Message]:
        rng = self.world.rng
        batch = []
        for _ in range(rng.choice([1, 1, 2, 3])):
            level = rng.choice(DELAY_LEVELS) if rng.random() < DELAYED_SHARE else 0
            queue = rng.randrange(self.group.rules.topics.count)
            is_timed = not level and rng.random() < TIMED_SHARE
            due_ms = self._wall_ms() + round(1000 * self.world.between(*TIMED_S))
            batch.append(Message(self._counter, queue, level, due_ms if is_timed else 0))
            self._counter += 1
        return batch

    def _wall_ms(self) -> int:
        return self.clock.wall_ms()

    async def _deliver(self, batch: list[Message]) -> None:
        until_s = self.world.now + RESEND_S
        while batch and self.world.now < until_s:
            try:
                accepted = await self.at_writer(self._request(batch))
            except BatchOutsideWindow as error:
                raise Violation(f"{self.name}: {error}") from error
            except CometError:
                self.world.counts["sends without a good answer"] += 1
                await self.sleep(self.world.between(0.1, 1.0))
                continue
            if accepted.record_count < len(batch):
                self.world.counts["batches of which a crash left the first messages"] += 1
            self._recall_some(batch[: accepted.record_count], accepted)
            batch = batch[accepted.record_count :]
        if batch:
            self.world.counts["batches given up"] += 1
            # It may be stored yet, behind what is sent from now on.
            self.group.judge.groups.orderly_streams.discard(self.stream.encode())

    def _recall_some(self, stored: list[Message], accepted: Accepted) -> None:
        """Each message with a time of its own is a run of its own."""
        timed = [one for one in stored if one.due_ms]
        assert len(timed) == len(accepted.timers)
        for one, (topic, offset, _) in zip(timed, accepted.timers, strict=True):
            if self.world.rng.random() < RECALLED_SHARE:
                self.spawn(self._recall(one, topic, offset))

    async def _recall(self, message: Message, topic: str, offset: int) -> None:
        await self.sleep(self.world.between(0.0, 10.0))
        unique_id = f"{self.stream}{message.counter:08X}"

        async def recall(role: Writer) -> list[bool | CometError]:
            recalls = role.broker.later.recalls
            handle = recalls.handle(topic, offset, message.due_ms, unique_id)
            return await role.broker.later.recall([handle])

        for _ in range(3):
            try:
                [answer] = await self.at_writer(recall)
            except CometError:
                self.world.counts["recalls without an answer"] += 1
                continue
            self.world.counts["recalls refused"] += isinstance(answer, CometError)
            return

    def _request(self, batch: list[Message]) -> Callable[[Writer], Coroutine[Any, Any, Accepted]]:
        records = b"".join(map(self._encoded, batch))
        claims = [
            Claim(
                *self._keys[one.queue],
                1,
                one.delay_level,
                timer=TimerForm.AT if one.due_ms else TimerForm.NONE,
            )
            for one in batch
        ]
        return lambda role: role.send(records, claims)

    def _encoded(self, message: Message) -> bytes:
        topic, queue_id = self._keys[message.queue]
        prefix = b""
        level = message.delay_level
        if level:
            prefix = delayed.prefix(level, topic, queue_id)
            topic, queue_id = SCHEDULE_TOPIC, delayed.queue_id_of(level)
        if message.due_ms:
            prefix = timers.with_time(timers.prefix(topic, queue_id), message.due_ms)
            topic, queue_id = TIMER_QUEUE
        unique_id = f"{self.stream}{message.counter:08X}".encode()
        return record.encode(
            topic.encode(),
            queue_id,
            unique_id,
            prefix + b"UNIQ_KEY\x01" + unique_id + b"\x02",
            born_time_ms=0,
            born_host=HOST,
            store_host=HOST,
        )


class Reader:
    """Reads one queue, wherever it gets to. It remembers a hash of all that it has read: a position
    that is not fenced has to mean exactly this.
    """

    def __init__(self, group: Group, queue: int, pause_s: float) -> None:
        self._group = group
        self._queue = queue
        self._pause_s = pause_s
        self._position = UNTOLD
        self._chains = [0]  # of what was read, after each message
        self._epoch = 0  # of whoever gave the position

    def go_on(self) -> None:
        group, rng = self._group, self._group.world.rng
        serving = [m.process for m in group.members if m.process and m.process.serving]
        if serving:
            role = rng.choice(serving)
            if not role.member.machine.stopped:
                self._pull(role)
        group.world.at(group.world.between(0.5, 1.5) * self._pause_s, self.go_on)

    def _pull(self, role: Role) -> None:
        history = role.history(self._queue)
        if history is None:
            return
        try:
            check = history.validate if role.writes else history.validate_at_copy
            self._read(role, check(self._position))
        except NotWriter:
            return
        except PositionFenced as error:
            self._fenced(role, Position(*(error.fence or (0, 0))))

    def _read(self, role: Role, position: Position) -> None:
        units = role.disk.queues[self._queue]
        readable, offset = role.readable(self._queue), position.offset
        if offset > len(units):
            # What a writer has, that was deposed and does not know it, is old.
            if role.writes and role.epoch >= self._epoch:
                raise Violation(f"{role.disk.replica_id} takes {position}, it has {len(units)}")
            return
        if offset > readable and not role.writes:
            return  # a copy that is not so far yet answers nothing, and moves nobody
        there = units[offset - 1].chain if offset else 0
        if there != self._chains[offset]:
            raise Violation(
                f"{role.disk.replica_id} of epoch {role.epoch} takes {self._position} as {position}"
                f" of queue {self._queue}: other messages than those that were read"
            )
        for unit in units[offset : min(readable, offset + READ_MAX)]:
            self._chains.append(unit.chain)
        self._position = Position(position.generation, len(self._chains) - 1)
        self._epoch = max(self._epoch, role.epoch)

    def _fenced(self, role: Role, fence: Position) -> None:
        """It is told that what it has read is not there. Below the fence it is, unless he who says
        so is behind himself.
        """
        group = self._group
        units = role.disk.queues[self._queue]
        offset = min(fence.offset, len(units))
        chains = [0, *(unit.chain for unit in units[:offset])]
        if role.epoch < self._epoch:
            group.world.counts["positions fenced by a writer of before"] += 1
        else:
            group.world.counts["positions fenced"] += 1
            read = self._chains[min(offset, len(self._chains) - 1)]
            if fence.offset > len(units) or chains[-1] != read:
                raise Violation(
                    f"{role.disk.replica_id} of epoch {role.epoch} fences {self._position} "
                    f"at {fence}: below it are other messages than those that were read"
                )
        self._chains = chains
        self._position = Position(fence.generation, offset)
        self._epoch = role.epoch
