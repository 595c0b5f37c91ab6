"""``python -m bench groups``: how soon queues have new owners, and what idle members cost.

Rebalance: 64 push consumers in a few processes divide the 1,024 queues of a topic. One of them ends
as a killed process does: its stream breaks. Measured is the time until the others read all queues,
and the most queues with two readers at any look. Then the same in order, of a member that leaves:
the locks of a killed one last for 15 s.

Idle members: 1,000 groups of five members, nearly each with a connection of its own. The broker's
CPU as a share of a core, and its memory a member.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop

from bench.group import wait_for
from bench.holds import rss_mib
from bench.processes import REPOSITORY, Child, cpu_seconds, say
from cometmq.admin import local
from cometmq.admin.local import LocalCluster
from cometmq.client import PushConsumer, PushConsumerOptions, ReceivedMessage
from cometmq.rpc.channels import open_channel
from cometmq.v1 import broker_pb2, broker_pb2_grpc, common_pb2

MEMBERS, QUEUES = 64, 1_024
CONSUMER_PROCESSES = 4
GROUPS, MEMBERS_PER_GROUP, IDLE_PROCESSES = 1_000, 5, 4
TOPIC = "shared"
VICTIM = "m000"  # who ends
# A few members share one: a server with 20,000 descriptors takes 4,936 connections.
CONNECTIONS_A_MEMBER = 0.9
SETTLE_S, LOOK_S = 2.0, 0.02
# The targets.
OWNED_S_MAX = 3.0
IDLE_CPU_MAX = 0.05
IDLE_KIB_MAX = 40.0


# --- consumers: a process of its own --------------------------------------------------------------


async def _listen(messages: list[ReceivedMessage]) -> None:
    """There are none."""


async def consumers(arguments: argparse.Namespace) -> None:
    """``--count`` members from number ``--first`` on; says which queues each reads, at each look.
    A line ``end`` on standard input ends the first of them, and says when; ``again`` starts it.
    """
    orderly = arguments.orderly == "1"
    options = {
        f"m{n:03}": PushConsumerOptions(client_id=f"m{n:03}", orderly=orderly)
        for n in range(arguments.first, arguments.first + arguments.count)
    }
    first = f"m{arguments.first:03}"
    running: dict[str, tuple[PushConsumer, AsyncExitStack]] = {}

    async def start(name: str) -> None:
        stack = AsyncExitStack()
        one = PushConsumer(arguments.namesrv, "bench", _listen, options=options[name])
        await stack.enter_async_context(one)
        await one.subscribe(TOPIC)
        running[name] = one, stack

    async def end(name: str) -> None:
        """As a process that is killed: the streams break; in order, as one that leaves."""
        one, stack = running.pop(name)
        if orderly:
            await stack.aclose()
            say({"ended_s": time.monotonic()})
        else:
            await one._share.stop()
            await one._share.leave()
            say({"ended_s": time.monotonic()})
            await stack.aclose()

    for name in options:
        await start(name)
    words = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(words), sys.stdin
    )

    async def obey() -> None:
        while word := (await words.readline()).decode().strip():
            await (end(first) if word == "end" else start(first))

    obeying = asyncio.create_task(obey())
    told = ""
    while not obeying.done():
        owned = {name: [q.queue_id for q in one.assigned] for name, (one, _) in running.items()}
        text = json.dumps(owned)
        if text != told:
            told = text
            say({"at_s": time.monotonic(), "owned": text})
        await asyncio.sleep(LOOK_S)


# --- idle members: a process of its own -----------------------------------------------------------


async def idlers(arguments: argparse.Namespace) -> None:
    """``--count`` members from number ``--first`` on, as raw streams."""

    connections = round(arguments.count * CONNECTIONS_A_MEMBER)
    channels = [open_channel(arguments.address) for _ in range(connections)]
    all_joined = asyncio.Semaphore(0)

    async def stay(number: int) -> None:
        group, member = divmod(number, MEMBERS_PER_GROUP)
        channel = channels[number % connections]
        stream = broker_pb2_grpc.BrokerServiceStub(channel).JoinGroup()
        queues = [QUEUES // MEMBERS_PER_GROUP * member + n for n in range(4)]
        held = broker_pb2.HeldQueues(topic=TOPIC, broker_group="g1", queue_ids=queues)
        await stream.write(
            broker_pb2.JoinGroupRequest(
                group=f"idle-{group}",
                client_id=f"idle-7d9c5b6f4-{number}@12345@a1b2c3",
                subscriptions=[broker_pb2.Subscription(topic=TOPIC)],
                instance_id=f"{number:016x}",
                allocation="average",
                held=[held],
            )
        )
        await stream.read()
        all_joined.release()
        while await stream.read():
            pass

    async with asyncio.TaskGroup() as tasks:
        for number in range(arguments.first, arguments.first + arguments.count):
            tasks.create_task(stay(number))
            await asyncio.sleep(0.005)
        for _ in range(arguments.count):
            await all_joined.acquire()
        say({"joined": arguments.count})


# --- the measurements -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rebalance:
    """Seconds from a member's end until all queues are owned, of each try."""

    orderly: bool
    owned_s: list[float]
    two_readers_max: int  # queues with two readers at a look

    @property
    def median_s(self) -> float:
        return statistics.median(self.owned_s)


@dataclass(frozen=True, slots=True)
class Idle:
    """What ``members`` that do nothing cost the broker."""

    members: int
    cpu: float  # of a core
    kib_each: float


class Owners:
    """What the consumers' processes say."""

    def __init__(self, children: list[Child]) -> None:
        self._children = children
        self._owned: dict[int, dict[str, list[int]]] = {}
        self.ended_s = 0.0
        self.at_s = 0.0
        self.two_readers_max = 0

    def readers(self) -> Counter[int]:
        return Counter(q for owned in self._owned.values() for ids in owned.values() for q in ids)

    def look(self) -> bool:
        """Takes what has come; whether every queue has a reader."""
        for number, child in enumerate(self._children):
            while (line := child.poll()) is not None:
                if "ended_s" in line:
                    self.ended_s = float(line["ended_s"])
                    self._owned[number].pop(VICTIM, None)
                    continue
                self._owned[number] = json.loads(str(line["owned"]))
                self.at_s = max(self.at_s, float(line["at_s"]))
        readers = self.readers()
        two = sum(count > 1 for count in readers.values())
        self.two_readers_max = max(self.two_readers_max, two)
        return len(readers) == QUEUES and not two


def measure_rebalance(cluster: LocalCluster, *, orderly: bool, tries: int) -> Rebalance:
    share = MEMBERS // CONSUMER_PROCESSES
    with ExitStack() as stack:
        children = [
            stack.enter_context(
                Child(
                    "bench.groups",
                    "consumers",
                    namesrv=cluster.namesrv,
                    first=n * share,
                    count=share,
                    orderly=int(orderly),
                )
            )
            for n in range(CONSUMER_PROCESSES)
        ]
        owners = Owners(children)
        wait_for(owners.look, "all queues have an owner")
        time.sleep(SETTLE_S * 5)
        took = []
        owners.look()
        for _ in range(tries):
            owners.two_readers_max, owners.ended_s = 0, 0.0
            children[0].tell("end")
            wait_for(lambda: owners.look() and owners.ended_s > 0, "all queues have a new owner")
            wait_for(lambda: len(owners.readers()) == QUEUES, "they have been told")
            took.append(max(0.0, owners.at_s - owners.ended_s))
            children[0].tell("again")
            time.sleep(SETTLE_S)
            wait_for(owners.look, "all queues have an owner again")
        return Rebalance(orderly, took, owners.two_readers_max)


def measure_idle(cluster: LocalCluster, seconds: float) -> Idle:
    broker = cluster.brokers[0]
    before_mib, members = rss_mib(broker.pid), GROUPS * MEMBERS_PER_GROUP
    share = members // IDLE_PROCESSES
    with ExitStack() as stack:
        for n in range(IDLE_PROCESSES):
            child = Child(
                "bench.groups", "idlers", address=broker.address, first=n * share, count=share
            )
            stack.enter_context(child)
            child.read()
        time.sleep(10.0)
        cpu_s, began_s = cpu_seconds(broker.pid), time.monotonic()
        time.sleep(seconds)
        cpu = (cpu_seconds(broker.pid) - cpu_s) / (time.monotonic() - began_s)
        kib_each = (rss_mib(broker.pid) - before_mib) * 1024 / members
    return Idle(members, cpu, kib_each)


async def create_topic(cluster: LocalCluster, name: str, queue_count: int) -> None:
    """Makes a topic at a broker that wants no proof of the secret."""
    async with open_channel(cluster.brokers[0].internal_address) as channel:
        topic = common_pb2.TopicConfig(
            name=name,
            read_queue_count=queue_count,
            write_queue_count=queue_count,
            flush_mode=common_pb2.FLUSH_MODE_ASYNC,
        )
        stub = broker_pb2_grpc.BrokerAdminServiceStub(channel)
        await stub.PutTopic(broker_pb2.PutTopicRequest(topic=topic), timeout=30)


def run(folder: Path, tries: int, seconds: float) -> tuple[list[Rebalance], Idle]:
    asyncio.run(local.down(folder, purge=True))
    # The local cluster's secret is not known to raw stubs.
    options = {"internal_secret_file": "", "group_creations_per_peer_max": "100000"}
    cluster = asyncio.run(local.up(folder, broker_count=1, options=options))
    try:
        asyncio.run(create_topic(cluster, TOPIC, QUEUES))
        idle = measure_idle(cluster, seconds)
        moved = [
            measure_rebalance(cluster, orderly=orderly, tries=tries) for orderly in (False, True)
        ]
        return moved, idle
    finally:
        asyncio.run(local.down(folder, purge=True))


def text_of(moved: list[Rebalance], idle: Idle) -> str:
    lines = [
        f"{MEMBERS} members, {QUEUES:,} queues{', in order' if one.orderly else ''}: all queues "
        f"owned {one.median_s:.2f} s after a member's end (each: "
        f"{', '.join(f'{s:.2f}' for s in one.owned_s)}); two readers: {one.two_readers_max} queues"
        for one in moved
    ]
    lines.append(
        f"{GROUPS:,} groups with {idle.members:,} idle members: {idle.cpu:.1%} of a core, "
        f"{idle.kib_each:.1f} KiB each"
    )
    return "\n".join(lines)


def missed(moved: list[Rebalance], idle: Idle) -> list[str]:
    """Which targets were not reached."""
    checks = {
        "queues are owned in time": all(one.median_s <= OWNED_S_MAX for one in moved),
        "no queue has two readers": not any(one.two_readers_max for one in moved),
        "CPU of idle members": idle.cpu <= IDLE_CPU_MAX,
        "memory of idle members": idle.kib_each <= IDLE_KIB_MAX,
    }
    return [name for name, reached in checks.items() if not reached]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench groups", description=__doc__)
    parser.add_argument("role", nargs="?", default="run", choices=["run", "consumers", "idlers"])
    parser.add_argument("--tries", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=30.0, help="of idling")
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "data" / "bench")
    for name in ("namesrv", "address", "orderly"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    for name in ("first", "count"):
        parser.add_argument(f"--{name}", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.role != "run":
        uvloop.run({"consumers": consumers, "idlers": idlers}[arguments.role](arguments))
        return
    folder: Path = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    moved, idle = run(folder / "cluster", arguments.tries, arguments.seconds)
    output = folder / "groups.json"
    result = {"rebalance": [asdict(one) for one in moved], "idle": asdict(idle)}
    output.write_text(json.dumps(result, indent=2) + "\n")
    print(f"{text_of(moved, idle)}\nJSON: {output}")
    if targets := missed(moved, idle):
        sys.exit(f"not reached: {', '.join(targets)}")


if __name__ == "__main__":
    main()
