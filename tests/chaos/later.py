"""The clients of messages that come later: what runs where, how they come to their end, and what
the queues hold then.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import partial
from pathlib import Path

from cometmq.admin.connection import Connection
from cometmq.admin.transactions import open_halves
from cometmq.errors import CometError
from tests.chaos.machines import AnyNetwork, Clients
from tests.chaos.receivers import GROUP as RECEIVERS
from tests.chaos.topics import DUE, RECEIVED, SETTLED, queues_of
from tests.support.cluster.broker import BrokerClient
from tests.support.faults.checkers import Held
from tests.support.faults.delivery_checkers import Ends
from tests.support.faults.history import Queue

HISTORY = "deliveries"  # what the names of their histories end with
DECIDERS = RECEIVERS_COUNT = 2


class Later:
    """``timed`` also watches what is delivered. Of the others one goes on when one is killed."""

    def __init__(self, directory: Path, network: AnyNetwork) -> None:
        machine = partial(Clients, directory, network, history=HISTORY)
        self.timed = machine("t0", "timed")
        self.deciders = [machine(f"d{number}", "deciders") for number in range(DECIDERS)]
        self.receivers = [machine(f"r{number}", "receivers") for number in range(RECEIVERS_COUNT)]
        self.operator = machine("o0", "operator")

    def machines(self) -> list[Clients]:
        return [self.operator, self.timed, *self.deciders, *self.receivers]

    def start(self, namesrv: str) -> None:
        for machine in reversed(self.machines()):
            machine.arguments = [namesrv]
            machine.start()


async def all_have_ended(connection: Connection) -> bool:
    """No half message is open."""
    try:
        async for _ in open_halves(connection):
            return False
    except CometError:
        return False
    return True


async def all_is_received(client: BrokerClient) -> bool:
    """The group that receives has acknowledged everything."""
    for topic, number in queues_of([RECEIVED]):
        end = (await client.status(topic, number)).max_offset
        at = await client.committed(RECEIVERS, topic, number)
        if end and (at is None or at.offset < end):
            return False
    return True


async def read_ends(client: BrokerClient) -> Ends:
    """What there is in the end, as the writer serves it."""
    queues: dict[Queue, Held] = {}
    stored_ms: dict[str, list[int]] = defaultdict(list)
    shown: Counter[str] = Counter()
    for queue in queues_of([DUE, SETTLED, RECEIVED]):
        records = await client.read_queue(*queue)
        names = [found.body.partition(b" ")[0].decode() for found in records]
        queues[queue] = Held(0, names)
        if queue[0] == DUE:
            for name, found in zip(names, records, strict=True):
                stored_ms[name].append(found.store_time_ms)
        elif queue[0] == SETTLED:
            shown.update(names)
    return Ends(queues, stored_ms, shown, frozenset({RECEIVED}))
