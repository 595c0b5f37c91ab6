"""A member: its machine with a clock, its disk, and whichever process runs there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cometmq.member.clocks import Clocks
from cometmq.messaging.generations import History
from cometmq.messaging.locks import LockTable
from cometmq.model import QueueKey, QueueRef
from cometmq.replication.election import Peer
from cometmq.replication.insync import SetPolicy
from cometmq.replication.lease import LeaseRecord, Reason
from cometmq.replication.watermarks import DurabilityClass
from tests.sim.disk import Disk
from tests.sim.lease import LeaseService
from tests.sim.network import End, Network, Stream
from tests.sim.topics import BROKER_GROUP, Topics
from tests.sim.world import Machine, Process, Wait, World

if TYPE_CHECKING:
    from tests.sim.judge import Judge
    from tests.sim.writer import Writer

GROUP = "g"
ASK_S_MAX = 2.0
WALL_MS = 1_790_000_000_000
WALL_WRONG_S_MAX = 0.3
CLOCK_SKEW_S_MAX = 2.0


@dataclass(frozen=True)
class Rules:
    """What the options of all members say. Times in seconds."""

    members: int
    topics: Topics
    demands: list[DurabilityClass]  # of all queues
    policy: SetPolicy
    knows_peers: bool
    counted_to: int = 0  # what the group's first writer begins to count generations at
    duration_s: float = 6.0
    renew_s: float = 2.0
    poll_s: float = 0.5

    @property
    def replicated(self) -> bool:
        """Some topic asks for copies."""
        replicated = DurabilityClass.REPLICATED | DurabilityClass.REPLICATED_FLUSHED
        return any(demand & replicated for demand in self.demands)


class MemberClock:
    """CLOCK_BOOTTIME of one machine: it starts where it likes, runs a little too fast or too slow,
    never goes back, and begins anew when the machine does.
    """

    def __init__(self, world: World, rate: float) -> None:
        self._world = world
        self._rate = rate
        self._since_s = world.now - world.between(10, 1e6)
        self._wrong_s = world.between(-WALL_WRONG_S_MAX, WALL_WRONG_S_MAX)
        self.jump_s = 0.0  # while its time of day is badly wrong

    def boottime_s(self) -> float:
        return (self._world.now - self._since_s) * self._rate

    monotonic_s = boottime_s

    def wall_ms(self) -> int:
        """Set by somebody, so it differs a little from machine to machine."""
        return WALL_MS + int((self._world.now + self._wrong_s + self.jump_s) * 1000)

    def booted(self) -> None:
        self._since_s = self._world.now - self._world.between(1, 10)


@dataclass
class Group:
    """All members, and what they share."""

    world: World
    rules: Rules
    network: Network
    lease: LeaseService
    judge: Judge
    members: list[Member] = field(default_factory=list)
    uids: int = 0
    failing: float = 0.0  # share of listener calls
    work_s: float = 0.5  # a listener call takes up to so long
    indexes: dict[QueueKey, int] = field(default_factory=dict)  # of the queues, on the disks
    refs: list[QueueRef] = field(default_factory=list)
    member_names: list[str] = field(default_factory=list)  # of consumer groups, the newest last

    def __post_init__(self) -> None:
        keys = self.rules.topics.keys()
        self.indexes = {key: index for index, key in enumerate(keys)}
        self.refs = [QueueRef(*key, BROKER_GROUP) for key in keys]

    def new_uids(self, count: int) -> int:
        self.uids += count
        return self.uids - count

    def writers(self) -> list[Writer]:
        """Who serves as a writer, whether it is one still or not."""
        return [m.process for m in self.members if m.process is not None and m.process.writes]  # type: ignore[misc]


class Role(Process):
    """A process of a member: a follower or a writer."""

    writes = False

    def __init__(self, member: Member) -> None:
        super().__init__(member.machine)
        self.member = member
        self.group = member.group
        self.rules = member.group.rules
        self.disk = member.disk
        self.serving = False
        self.clock = member.clock
        self.epoch = 0  # that it copies, or writes

    def start(self) -> None:
        raise NotImplementedError

    def leave(self) -> None:
        """It is about to be stopped in order."""

    @property
    def locks(self) -> LockTable:
        """Queue locks, as far as it knows them."""
        raise NotImplementedError

    def readable(self, queue: int) -> int:
        raise NotImplementedError

    def history(self, queue: int) -> History | None:
        raise NotImplementedError

    def visible(self, demands: DurabilityClass) -> int:
        raise NotImplementedError

    def accept(self, stream: Stream, end: End[object], hello: object) -> None:
        """A follower's stream reaches whatever runs at the address."""
        stream.close(end)

    def tell(self, what: str, *details: object) -> None:
        self.world.tell(f"n{self.member.id}", what, *details)

    def status(self) -> Peer:
        disk = self.disk
        return Peer(self.member.id, disk.store_id, disk.epoch, disk.flushed, self.writes)

    def become(self, writer: Reason | None, why: str) -> None:
        """Close the store, and be replaced by another process."""
        self.tell("ends", why)
        self.serving = False
        self.writes = False

        def closed() -> None:
            self.disk.close()
            self.alive = False
            self.member.execute(writer)

        self.after(self.world.between(0.005, 0.1), closed)


class Member:
    """One of the group. ``process`` is None while nothing runs."""

    def __init__(
        self, group: Group, member_id: int, start: Callable[[Member, Reason | None], Role]
    ) -> None:
        self.id = member_id
        self.group = group
        self.machine = Machine(group.world)
        self.process: Role | None = None
        self.boot = 1
        self.disks = 0
        self.slow_disk_s = 0.0
        rate = 1 + group.world.between(-5e-4, 5e-4)
        self.clock = MemberClock(group.world, rate)
        self.clocks = Clocks(self.clock, CLOCK_SKEW_S_MAX, None)
        self.disk = self._new_disk()
        self._start = start
        self._life = 0  # a start that was due in another one is not made

    def _new_disk(self) -> Disk:
        self.disks += 1
        name = f"{'abcdef'[self.id]}{self.disks}"
        return Disk(self.id, len(self.group.rules.demands), name)

    @property
    def address(self) -> str:
        return str(self.id)

    @property
    def runs(self) -> bool:
        return self.process is not None

    def execute(self, writer: Reason | None = None, delay_s: float | None = None) -> None:
        """Start a process, in a moment; with a reason it writes."""
        self.process = None
        world, life = self.group.world, self._life

        def begin() -> None:
            if life == self._life and self.process is None:
                self.process = self._start(self, writer)
                self.process.call(self.process.start)

        delay_s = world.between(0.02, 0.6) if delay_s is None else delay_s
        world.at(delay_s, lambda: self.machine.do(begin))

    def kill(self) -> None:
        """The process dies; what is in the page cache stays."""
        self._life += 1
        if self.process is not None:
            self.process.alive = False
        self.process = None
        self.clocks = Clocks(self.clock, CLOCK_SKEW_S_MAX, None)  # an exec would keep them
        self.disk.kill()
        for stream in list(self.group.network.streams):
            stream.break_if_of(self.id)

    def lose_power(self) -> int:
        """How many records are gone."""
        self.kill()
        self.boot += 1
        self.machine.restart()
        self.clock.booted()
        return self.disk.lose_power(self.group.world.rng)

    def lose_disk(self) -> None:
        self.lose_power()
        self.disk = self._new_disk()

    def flush_s(self) -> float:
        return self.group.world.between(0.001, 0.02) + self.slow_disk_s


class MemberPeers:
    """Asks the others how they stand (as ``cometmq.member.status.Peers``)."""

    def __init__(self, role: Role) -> None:
        members = role.group.members
        others = frozenset(m.id for m in members) - {role.member.id}
        self.ids = others if role.rules.knows_peers else None
        self._role = role

    async def ask(self, member_ids: Iterable[int]) -> dict[int, Peer]:
        known = frozenset(member_ids) & (self.ids or frozenset())
        found: dict[int, Peer] = {}
        await self._asked(known, found)
        return dict(found)

    def _asked(self, member_ids: frozenset[int], found: dict[int, Peer]) -> Wait[None]:
        role, network = self._role, self._role.group.network

        def start(done: Callable[[None], None], _: object) -> None:
            over = False

            def end() -> None:
                nonlocal over
                if not over:
                    over = True
                    done(None)

            def take(peer: Peer) -> None:
                if not over:
                    found[peer.member_id] = peer
                    if len(found) == len(member_ids):
                        end()

            for other in member_ids:
                self._request(network, other, take)
            role.after(0.0 if not member_ids else ASK_S_MAX, end)

        return Wait(start)

    def _request(self, network: Network, other: int, take: Callable[[Peer], None]) -> None:
        mine, role = self._role.member.id, self._role

        def arrived() -> None:
            process = role.group.members[other].process
            if process is not None and process.serving:
                process.call(lambda: answer(process))

        def answer(process: Role) -> None:
            peer = process.status()
            network.send((other, mine), lambda: role.call(lambda: take(peer)))

        network.send((mine, other), arrived)


def reason_of(record: LeaseRecord) -> Reason:
    """Why the holder of that lease leads."""
    return Reason.RESTART if record.opened else Reason(record.reason)
