"""``python -m bench joins``: many members join at once, while an ordinary client sends.

5,000 members join 50 groups, as raw streams of a few processes. Measured is the time until the last
one has its first answer, and until each has the list with all members of its group. Meanwhile
another client makes a call of one message each 20 ms: its p99, its maximum, and how many calls did
not end within their deadline.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc
import uvloop

from bench.groups import create_topic
from bench.processes import REPOSITORY, Child, cpu_seconds, say
from bench.stats import percentile
from cometmq.admin import local
from cometmq.admin.local import LocalCluster
from cometmq.errors import CometError
from cometmq.rpc.channels import open_channel
from cometmq.rpc.retry import Backoff, BackoffPolicy
from cometmq.rpc.streams import read, write
from cometmq.v1 import broker_pb2, broker_pb2_grpc

MEMBERS, GROUPS, PROCESSES = 5_000, 50, 2
MEMBERS_PER_CONNECTION = 50  # else its processes need more than the broker
TOPIC = "crowded"
SEND_EACH_S, SEND_DEADLINE_S = 0.02, 3.0
JOINED_S_MAX = 15.0


# --- the crowd: a process of its own --------------------------------------------------------------


class Crowd:
    """Members of one process. ``answered``, ``complete``: those that have had an answer, and those
    that have had the list of their whole group.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._group_size = arguments.members // GROUPS
        self.numbers = range(arguments.first, arguments.first + arguments.count)
        connections = -(-arguments.count // MEMBERS_PER_CONNECTION)
        self._channels = [open_channel(arguments.address) for _ in range(connections)]
        self.answered: set[int] = set()
        self.complete: set[int] = set()
        self.bytes_read = 0
        self.refused: Counter[str] = Counter()
        self._heard = asyncio.Event()

    async def _follow(self, number: int) -> None:
        channel = self._channels[number % len(self._channels)]
        stream = broker_pb2_grpc.BrokerServiceStub(channel).JoinGroup()
        with suppress(CometError):  # the reader gets the reason
            await write(
                stream,
                broker_pb2.JoinGroupRequest(
                    group=f"crowd-{number % GROUPS}",
                    client_id=f"crowd-7d9c5b6f4-{number}@12345@a1b2c3",
                    subscriptions=[broker_pb2.Subscription(topic=TOPIC)],
                    instance_id=f"{number:016x}",
                    allocation="average",
                ),
            )
        while (response := await read(stream)) is not None:
            self.bytes_read += response.ByteSize()
            self.answered.add(number)
            if len(response.members) == self._group_size:
                self.complete.add(number)
            self._heard.set()

    async def stay(self, number: int) -> None:
        """As the SDK: a stream that ends is opened again after a while."""
        backoff = Backoff(BackoffPolicy(), random.Random(number))
        while True:
            try:
                await self._follow(number)
            except CometError as error:
                self.refused[error.name()] += 1
            await asyncio.sleep(backoff.next_s())

    async def all_are_in(self, members: set[int]) -> float:
        """When they all were, by the monotonic clock."""
        while len(members) < len(self.numbers):
            self._heard.clear()
            await self._heard.wait()
        return time.monotonic()


async def crowd(arguments: argparse.Namespace) -> None:
    """``--count`` members from number ``--first`` on. A line ``join`` on standard input lets them
    join; says when all were answered, and when all know their whole group.
    """
    members = Crowd(arguments)
    say({"ready": arguments.count})
    await asyncio.to_thread(sys.stdin.readline)
    async with asyncio.TaskGroup() as tasks:
        for number in members.numbers:
            tasks.create_task(members.stay(number))
        answered_s = await members.all_are_in(members.answered)
        complete_s = await members.all_are_in(members.complete)
        say(
            {
                "answered_s": answered_s,
                "complete_s": complete_s,
                "bytes": members.bytes_read,
                "refused": json.dumps(members.refused),
            }
        )


# --- the ordinary client: a process of its own ----------------------------------------------------


async def sender(arguments: argparse.Namespace) -> None:
    """Sends until a line comes on standard input; says what its calls took."""
    took_s: list[float] = []
    failed: dict[str, int] = {}
    stub = broker_pb2_grpc.BrokerServiceStub(open_channel(arguments.address))
    request = broker_pb2.SendRequest(messages=[broker_pb2.OutgoingMessage(topic=TOPIC, body=b".")])

    async def send() -> None:
        began_s = time.monotonic()
        try:
            await stub.Send(request, timeout=SEND_DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            name = error.code().name
            failed[name] = failed.get(name, 0) + 1
        took_s.append(time.monotonic() - began_s)

    await send()
    say({"ready": 1})
    took_s.clear()
    stopping = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
    async with asyncio.TaskGroup() as tasks:
        while not stopping.done():
            tasks.create_task(send())
            await asyncio.sleep(SEND_EACH_S)
    took_s.sort()
    say(
        {
            "count": len(took_s),
            "p50_ms": percentile(took_s, 0.5) * 1000,
            "p99_ms": percentile(took_s, 0.99) * 1000,
            "max_ms": took_s[-1] * 1000,
            "failed": sum(failed.values()),
            "codes": json.dumps(failed),
        }
    )


# --- the measurement ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Joins:
    """What it took until ``members`` had joined; the ordinary client's calls meanwhile."""

    members: int
    answered_s: float
    complete_s: float
    broker_cpu_s: float
    mib: float
    refused: str  # joins that were tried again, by error
    calls: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    failed: int
    codes: str


def measure(cluster: LocalCluster, members: int) -> Joins:
    broker = cluster.brokers[0]
    share = members // PROCESSES
    with ExitStack() as stack:
        children = [
            stack.enter_context(
                Child(
                    "bench.joins",
                    "crowd",
                    address=broker.address,
                    first=n * share,
                    count=share,
                    members=members,
                )
            )
            for n in range(PROCESSES)
        ]
        ordinary = stack.enter_context(Child("bench.joins", "sender", address=broker.address))
        for child in (*children, ordinary):
            child.read()
        cpu_s, began_s = cpu_seconds(broker.pid), time.monotonic()
        for child in children:
            child.tell("join")
        lines = [child.read() for child in children]
        cpu_s = cpu_seconds(broker.pid) - cpu_s
        ordinary.tell("end")
        sent = ordinary.read()
    return Joins(
        members,
        answered_s=max(float(line["answered_s"]) for line in lines) - began_s,
        complete_s=max(float(line["complete_s"]) for line in lines) - began_s,
        broker_cpu_s=cpu_s,
        refused=json.dumps(
            sum((Counter(json.loads(str(line["refused"]))) for line in lines), Counter())
        ),
        mib=sum(int(line["bytes"]) for line in lines) / 2**20,
        calls=int(sent["count"]),
        p50_ms=float(sent["p50_ms"]),
        p99_ms=float(sent["p99_ms"]),
        max_ms=float(sent["max_ms"]),
        failed=int(sent["failed"]),
        codes=str(sent["codes"]),
    )


def run(folder: Path, members: int) -> Joins:
    asyncio.run(local.down(folder, purge=True))
    # The local cluster's secret is not known to raw stubs.
    options = {"internal_secret_file": "", "group_creations_per_peer_max": "100000"}
    cluster = asyncio.run(local.up(folder, broker_count=1, options=options))
    try:
        asyncio.run(create_topic(cluster, TOPIC, 8))
        return measure(cluster, members)
    finally:
        asyncio.run(local.down(folder, purge=True))


def text_of(found: Joins) -> str:
    return (
        f"{found.members:,} members joined {GROUPS} groups in {found.answered_s:.1f} s, and knew "
        f"all others after {found.complete_s:.1f} s; {found.broker_cpu_s:.1f} s of the broker's "
        f"CPU, {found.mib:.0f} MiB of lists; tried again {found.refused}\n"
        f"meanwhile {found.calls} calls of one message: p50 {found.p50_ms:.1f} ms, "
        f"p99 {found.p99_ms:.1f} ms, at most {found.max_ms:.0f} ms; "
        f"{found.failed} failed {found.codes}"
    )


def missed(found: Joins) -> list[str]:
    """Which targets were not reached."""
    checks = {
        "members join in time": found.complete_s <= JOINED_S_MAX,
        "no call of another client fails": not found.failed,
    }
    return [name for name, reached in checks.items() if not reached]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench joins", description=__doc__)
    parser.add_argument("role", nargs="?", default="run", choices=["run", "crowd", "sender"])
    parser.add_argument("--members", type=int, default=MEMBERS)
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "data" / "bench")
    parser.add_argument("--address", help=argparse.SUPPRESS)
    for name in ("first", "count"):
        parser.add_argument(f"--{name}", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.role != "run":
        uvloop.run({"crowd": crowd, "sender": sender}[arguments.role](arguments))
        return
    folder: Path = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    found = run(folder / "cluster", arguments.members)
    output = folder / "joins.json"
    output.write_text(json.dumps(asdict(found), indent=2) + "\n")
    print(f"{text_of(found)}\nJSON: {output}")
    if targets := missed(found):
        sys.exit(f"not reached: {', '.join(targets)}")


if __name__ == "__main__":
    main()
