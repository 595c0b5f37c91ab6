"""``python -m bench pop``: what groups that receive (POP) cost beside groups that pull.

A cluster of one broker and one pull-hold, a topic with 8 queues, bodies of 128 B. A group that
pulls and groups that receive read the same messages in turns, 32 messages a call: a push consumer
that pulls, one that receives, and a simple consumer with 16 tasks, which receive and acknowledge.
The clock runs from the first messages to the last acknowledgement. CPU is that of the client and
the broker. The log's growth says what leases and acknowledgements take. Then one task receives and
acknowledges alone.

Last, receives that find nothing wait, and the broker's CPU is read beside that of an idle broker:
``--idle`` of them, ten of each consumer, in groups of ten consumers, which are members as well.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median

import uvloop

from bench import stage
from bench.group import wait_for
from bench.holds import Scrape, pullhold
from bench.processes import Child, Line, Meter, cpu_seconds, say
from bench.report import machine, markdown
from bench.stats import percentile
from cometmq import native
from cometmq.admin import local, ops
from cometmq.admin.connection import Connection
from cometmq.client import (
    ConsumeMode,
    Message,
    Producer,
    PushConsumer,
    PushConsumerOptions,
    ReceivedMessage,
    SimpleConsumer,
    SimpleConsumerOptions,
)
from cometmq.errors import CometError
from cometmq.model import FlushMode
from cometmq.rpc.channels import open_channel
from cometmq.v1 import broker_pb2, broker_pb2_grpc, common_pb2

PROJECT = Path(__file__).resolve().parent.parent
BODY = bytes(128)
AT_ONCE = 32  # messages a call
SIMPLE_TASKS = 16
INVISIBLE_MS = 300_000
WAIT_S_MAX = 120.0
MANY = 4_096
# Idle receives: consumers of a process, calls of each, consumers of each group.
HOLDER_PROCESSES, CALLS_EACH, MEMBERS_EACH = 4, 10, 10
IDLE_WAIT_MS = 15_000
IDLE_READY_S_MAX = 300.0


async def fill(namesrv: str, topic: str, count: int) -> None:
    async with Producer(namesrv) as producer:
        for first in range(0, count, MANY):
            messages = [Message(topic, BODY) for _ in range(min(MANY, count - first))]
            await producer.send_many_and_wait(messages)


async def log_end(namesrv: str) -> int:
    async with Connection(namesrv) as connection:
        [member] = await ops.describe_cluster(connection)
    assert member.log_appended_offset is not None
    return member.log_appended_offset


# --- one group reads everything -------------------------------------------------------------------


async def by_listener(said: argparse.Namespace, mode: ConsumeMode, meters: dict[str, int]) -> Line:
    """A push consumer; its listener does nothing."""
    done = asyncio.Event()
    received, meter = 0, Meter(meters)

    async def listener(messages: list[ReceivedMessage]) -> None:
        nonlocal received, meter
        if not received:
            meter = Meter(meters)
        received += len(messages)
        if received >= said.count:
            done.set()

    options = PushConsumerOptions(
        consume_mode=mode,
        batch_count=AT_ONCE,
        pull_count_max=AT_ONCE,
        pop_count_max=AT_ONCE,
        pop_invisible_ms=INVISIBLE_MS,
    )
    async with PushConsumer(said.namesrv, said.group, listener, options=options) as consumer:
        await consumer.subscribe(said.topic)
        async with asyncio.timeout(WAIT_S_MAX):
            await done.wait()
    return meter.stop(received)


async def by_tasks(said: argparse.Namespace, meters: dict[str, int]) -> Line:
    """A simple consumer; each task receives, acknowledges, and so on."""
    acks_s: list[float] = []
    options = SimpleConsumerOptions(invisible_ms=INVISIBLE_MS)
    async with SimpleConsumer(said.namesrv, said.group, options=options) as consumer:
        await consumer.subscribe(said.topic)
        left = said.count

        async def work() -> None:
            nonlocal left
            while left > 0:
                messages = await consumer.receive(AT_ONCE, wait_ms=0)
                left -= len(messages)
                started_s = time.perf_counter()
                await consumer.ack_many(messages)
                acks_s.append(time.perf_counter() - started_s)

        meter = Meter(meters)
        async with asyncio.timeout(WAIT_S_MAX):
            await asyncio.gather(*(work() for _ in range(said.tasks)))
        line = meter.stop(said.count - left)
    return line | {
        "ack_p50_ms": percentile(acks_s, 0.5) * 1_000,
        "ack_p99_ms": percentile(acks_s, 0.99) * 1_000,
    }


async def consume(said: argparse.Namespace) -> None:
    meters = {"broker": said.broker_pid}
    before = await log_end(said.namesrv)
    if said.kind == "simple":
        line = await by_tasks(said, meters)
    else:
        mode = ConsumeMode.POP if said.kind == "pop" else ConsumeMode.PULL
        line = await by_listener(said, mode, meters)
    grown = await log_end(said.namesrv) - before
    say(line | {"log_bytes": grown / said.count})


def turn(bench: stage.Bench, kind: str, topic: str, group: str, count: int, tasks: int) -> Line:
    """One group reads ``count`` messages, in a process of its own."""
    with Child(
        "bench.pop",
        kind,
        namesrv=bench.namesrv,
        topic=topic,
        group=group,
        count=count,
        tasks=tasks,
        broker_pid=bench.broker_pid,
    ) as child:
        return child.read()


# --- receives that wait ---------------------------------------------------------------------------


async def wait_idle(said: argparse.Namespace) -> None:
    """``--count`` consumers from number ``--first`` on."""

    async def keep_receiving(consumer: SimpleConsumer) -> None:
        while True:
            with suppress(CometError):  # while all connect at once
                await consumer.receive(AT_ONCE, wait_ms=IDLE_WAIT_MS)

    async with asyncio.TaskGroup() as tasks:

        async def one(number: int) -> None:
            group = number // MEMBERS_EACH
            async with SimpleConsumer(said.namesrv, f"idle-{group}") as consumer:
                subscribed = False
                while not subscribed:
                    with suppress(CometError):  # while all connect at once
                        await consumer.subscribe(f"idle-{group}")
                        subscribed = True
                await asyncio.gather(*(keep_receiving(consumer) for _ in range(CALLS_EACH)))

        for number in range(said.first, said.first + said.count):
            tasks.create_task(one(number))
            await asyncio.sleep(
                0.05
            )  # a broker that is asked faster than it answers is asked again


def idle(folder: Path, receives: int, seconds: float) -> dict[str, float]:
    """Shares of a core: the broker where so many receives wait, and one without clients."""
    asyncio.run(local.down(folder / "cluster", purge=True))
    cluster = asyncio.run(local.up(folder / "cluster", broker_count=2))
    consumers = receives // CALLS_EACH

    async def create_topics() -> None:
        async with open_channel(cluster.brokers[0].internal_address) as channel:
            stub = broker_pb2_grpc.BrokerAdminServiceStub(channel)
            for group in range(-(-consumers // MEMBERS_EACH)):
                topic = common_pb2.TopicConfig(
                    name=f"idle-{group}",
                    read_queue_count=1,
                    write_queue_count=1,
                    flush_mode=common_pb2.FLUSH_MODE_ASYNC,
                )
                await stub.PutTopic(broker_pb2.PutTopicRequest(topic=topic), timeout=30)

    try:
        asyncio.run(create_topics())
        with pullhold(folder, cluster.namesrv) as hold, ExitStack() as children:
            share = consumers // HOLDER_PROCESSES
            for n in range(HOLDER_PROCESSES):
                child = Child(
                    "bench.pop", "idle", namesrv=cluster.namesrv, first=n * share, count=share
                )
                children.enter_context(child)
            wanted = share * HOLDER_PROCESSES * CALLS_EACH

            def all_wait() -> bool:
                return Scrape(hold.metrics_address).value("cometmq_holds_waiting") >= 0.99 * wanted

            wait_for(all_wait, f"{wanted} receives", poll_s=0.5, s_max=IDLE_READY_S_MAX)
            time.sleep(2 * IDLE_WAIT_MS / 1_000)  # each has waited to its end once
            pids = {"broker": cluster.brokers[0].pid, "bare": cluster.brokers[1].pid}
            pids["pullhold"] = hold.pid
            calls = Scrape(cluster.brokers[0].metrics_address).calls()
            cpu_s = {name: cpu_seconds(pid) for name, pid in pids.items()}
            started_s = time.monotonic()
            time.sleep(seconds)
            took_s = time.monotonic() - started_s
            after = Scrape(cluster.brokers[0].metrics_address).calls()
            found = {
                f"{name}_percent": 100 * (cpu_seconds(pid) - cpu_s[name]) / took_s
                for name, pid in pids.items()
            }
            received = after.get("Receive", 0) - calls.get("Receive", 0)
            return found | {"receives": wanted, "calls_a_second": received / took_s}
    finally:
        asyncio.run(local.down(folder / "cluster", purge=True))


# --- all of it ------------------------------------------------------------------------------------


def run(folder: Path, number: int, count: int) -> dict[str, float]:
    size, flush = len(BODY), FlushMode.ASYNC
    topic = stage.topic_name(size, flush)
    with stage.cluster(folder, [(size, flush)], pullholds=1) as bench:
        uvloop.run(fill(bench.namesrv, topic, count))
        found: dict[str, float] = {}
        for kind in ("pull", "pop", "simple"):
            line = turn(bench, kind, topic, f"{kind}-{number}", count, SIMPLE_TASKS)
            for key, value in line.items():
                found[f"{kind}_{key}"] = float(value)
        alone = turn(bench, "simple", topic, f"alone-{number}", count // 20, 1)
        for key in ("ack_p50_ms", "ack_p99_ms"):
            found[f"alone_{key}"] = float(alone[key])
    for kind in ("pop", "simple"):
        found[f"{kind}_ratio"] = found[f"{kind}_rate"] / found["pull_rate"]
    return found


ROWS = (
    ("a push consumer that pulls, messages/s", "pull_rate", 0, ""),
    ("... that receives, messages/s", "pop_rate", 0, ""),
    ("... share of pulling", "pop_ratio", 2, "0.30"),
    ("a simple consumer with 16 tasks, messages/s", "simple_rate", 0, ""),
    ("... share of pulling", "simple_ratio", 2, "0.30"),
    ("CPU of a message, pulling: client, µs", "pull_cpu_us_client", 1, ""),
    ("... broker, µs", "pull_cpu_us_broker", 1, ""),
    ("CPU of a message, push consumer that receives: client, µs", "pop_cpu_us_client", 1, ""),
    ("... broker, µs", "pop_cpu_us_broker", 1, ""),
    ("CPU of a message, simple consumer: client, µs", "simple_cpu_us_client", 1, ""),
    ("... broker, µs", "simple_cpu_us_broker", 1, ""),
    ("log of leases and acknowledgements, bytes a message", "simple_log_bytes", 1, "16"),
    ("... of the push consumer", "pop_log_bytes", 1, "16"),
    ("ack of 32, one at a time, p50 in ms", "alone_ack_p50_ms", 2, "2"),
    ("... p99", "alone_ack_p99_ms", 2, ""),
    ("ack of 32, 16 at a time, p50 in ms", "simple_ack_p50_ms", 2, ""),
    ("... p99", "simple_ack_p99_ms", 2, ""),
    ("receives that wait", "receives", 0, ""),
    ("the broker then, % of a core", "broker_percent", 2, "1 above a bare one"),
    ("a broker without clients, % of a core", "bare_percent", 2, ""),
    ("the pull-hold then, % of a core", "pullhold_percent", 2, ""),
    ("Receive calls a second then", "calls_a_second", 1, ""),
)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench pop", description=__doc__)
    kinds = ["run", "pull", "pop", "simple", "idle"]
    parser.add_argument("kind", nargs="?", default="run", choices=kinds)
    parser.add_argument("--count", type=int, default=400_000, help="messages a turn")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--idle", type=int, default=10_000, help="receives that wait; 0: none")
    parser.add_argument("--seconds", type=float, default=60.0, help="for which their cost is read")
    parser.add_argument("--folder", type=Path, default=PROJECT / "data" / "bench")
    for name in ("namesrv", "topic", "group"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    for name in ("first", "tasks", "broker_pid"):
        parser.add_argument(f"--{name}", type=int, help=argparse.SUPPRESS)
    said = parser.parse_args(argv)
    if said.kind != "run":
        uvloop.run(wait_idle(said) if said.kind == "idle" else consume(said))
        return
    folder = said.folder.resolve() / "pop"
    folder.mkdir(parents=True, exist_ok=True)
    runs = []
    for number in range(said.runs):
        runs.append(run(folder, number, said.count))
        print(json.dumps(runs[-1]), flush=True)
    waiting = idle(folder, said.idle, said.seconds) if said.idle else {}
    table = []
    for name, key, digits, limit in ROWS:
        values = [one[key] for one in [*runs, waiting] if key in one]
        if values:
            table.append([name, f"{median(values):,.{digits}f}", limit])
    print(markdown(["what", "median", "limit"], table))
    output = folder / "pop.json"
    output.write_text(json.dumps({"runs": runs, "idle": waiting}, indent=2) + "\n")
    print(f"\nJSON: {output}\n{native.description()}; machine: {machine()}")


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
