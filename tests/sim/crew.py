"""All clients of a run, and what befalls them."""

from __future__ import annotations

from collections.abc import Callable

from cometmq.client.group.rebalance import Allocation
from cometmq.errors import CometError
from tests.sim.clients import Client, ClientMachine, Producer
from tests.sim.consumers import Consumer, OrderlyConsumer
from tests.sim.inquirers import Inquirer
from tests.sim.member import Group
from tests.sim.newcomers import Newcomer
from tests.sim.receivers import Receiver
from tests.sim.topics import PULLING
from tests.sim.transactors import Transactor
from tests.sim.writer import Writer

PRODUCERS, TRANSACTORS, MEMBERS = 2, 2, 3  # members: of each consumer group
LANES_MAX = 3  # of the second producer; the first sends one batch after the other
FAILING_MAX = 0.25  # share of listener calls
RESET_S = (8.0, 40.0)
CALM_WORK_S = 0.05  # of a listener call in peace, so that consumers come to the end soon
LOSS = 0.02  # of what goes between clients and brokers: a connection breaks


class Operator(Client):
    """Resets groups now and then."""

    def start(self) -> None:
        self.spawn(self._work())

    async def _work(self) -> None:
        while not self.over:
            await self.sleep(self.world.between(*RESET_S))
            if not self.over:
                try:
                    await self.at_writer(self._reset)
                except CometError:
                    self.world.counts["resets without an answer"] += 1

    async def _reset(self, role: Writer) -> int:
        rng = self.world.rng
        index = rng.randrange(self.group.rules.topics.count)
        key = self.group.rules.topics.keys()[index]
        offset = rng.randint(0, role.readable(index))
        return await role.broker.reset(rng.choice(PULLING), key, offset)


class Seat:
    """A client's place: one life after the other on the same machine."""

    def __init__(self, group: Group, number: int, make: Callable[[ClientMachine], Client]) -> None:
        self.machine = ClientMachine(group, number)
        self._make = make
        self.client = make(self.machine)
        self.client.start()

    def kill(self) -> None:
        self.client.alive = False
        self.machine.restart()

    def revive(self) -> None:
        if not self.client.alive:
            self.client = self._make(self.machine)
            self.client.start()


class Crew:
    """Everybody. They begin at once."""

    def __init__(self, group: Group) -> None:
        world = group.world
        self._group = group
        pause_s = world.between(0.15, 0.6)
        lanes = [1, world.rng.randint(1, LANES_MAX)]
        group.failing = world.between(0.0, FAILING_MAX)
        group.network.client_loss = LOSS
        allocation = world.rng.choice(list(Allocation))
        makers: list[Callable[[ClientMachine], Client]] = [
            *(self._producer(pause_s, count) for count in lanes),
            *[lambda machine: OrderlyConsumer(group, machine, allocation)] * MEMBERS,
            *[lambda machine: Consumer(group, machine, allocation)] * MEMBERS,
            *[lambda machine: Transactor(group, machine, pause_s)] * TRANSACTORS,
            *[lambda machine: Receiver(group, machine)] * MEMBERS,
            lambda machine: Newcomer(group, machine),
            lambda machine: Inquirer(group, machine),
            lambda machine: Operator(group, machine),
        ]
        self.seats = [Seat(group, number, make) for number, make in enumerate(makers)]

    def _producer(self, pause_s: float, lanes: int) -> Callable[[ClientMachine], Client]:
        return lambda machine: Producer(self._group, machine, pause_s, lanes)

    def choose(self) -> Seat:
        """One whom a fault may hit: not the operator."""
        return self._group.world.rng.choice(self.seats[:-1])

    def calm(self) -> None:
        """Nothing fails any more, everybody runs, nobody resets anything."""
        self._group.failing = self._group.network.client_loss = 0.0
        self._group.work_s = CALM_WORK_S
        for seat in self.seats:
            seat.machine.go_on()
            seat.revive()
        self.seats[-1].client.over = True

    def stop_transactions(self) -> None:
        """No transaction begins any more; checks are answered."""
        for seat in self.seats:
            if isinstance(seat.client, Transactor):
                seat.client.begins = False

    def stop(self, kind: type[Client]) -> None:
        """Clients of this kind come to their end."""
        for seat in self.seats:
            if isinstance(seat.client, kind):
                seat.client.over = True
