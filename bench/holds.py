"""``python -m bench holds``: what idle holds cost, and how soon a parked pull gets its message.

Two brokers, one name server, one pullhold. At the first broker 10,000 pulls wait on 5,000 queues
for nothing, held for 1,000 clients, each with a connection of its own (the SDK's way to hold, in a
few processes). The second broker does nothing. Over the same stretch of time: CPU of both brokers,
of the pullhold, and the calls that the first broker got. Then the latency of messages that come 500
times a second through parked pulls.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop

from bench.group import wait_for
from bench.processes import REPOSITORY, STOP_S_MAX, Child, Line, cpu_seconds, say
from cometmq.admin import local
from cometmq.admin.local import LocalProcess
from cometmq.client.cluster.connections import Connections
from cometmq.client.reading.long_poller import LongPoller
from cometmq.rpc.channels import open_channel
from cometmq.rpc.tasks import Tasks
from cometmq.v1 import broker_pb2, broker_pb2_grpc, common_pb2

CLIENT_COUNT = 1_000
HOLDS_PER_CLIENT = 10
TOPIC_COUNT, QUEUES_PER_TOPIC = 5, 1_000
HOLDER_PROCESSES = 4
HOLD_MS = 15_000
LATENCY_RATE = 500.0
BODY_BYTES = 1_024
# The targets.
BROKER_EXTRA_CPU_MAX = 0.01
LATENCY_P50_MS_MAX = 2.0


# --- the clients: a process of its own ------------------------------------------------------------


def queue_of(number: int) -> common_pb2.QueueRef:
    """The queue that hold ``number`` of all is for."""
    topic, queue_id = divmod(number % (TOPIC_COUNT * QUEUES_PER_TOPIC), QUEUES_PER_TOPIC)
    return common_pb2.QueueRef(topic=f"holds-{topic}", queue_id=queue_id)


async def hold_on(
    holding: LongPoller, broker_group: str, number: int, counts: dict[str, int]
) -> None:
    """Parks one pull again and again, as a consumer of an idle queue does."""
    pull = broker_pb2.PullRequest(queue=queue_of(number), position=common_pb2.Position(offset=0))
    while True:
        response = await holding.park(broker_group, pull)
        if response is None:
            counts["unreachable"] += 1
            await asyncio.sleep(0.2)
        elif response.status == broker_pb2.PULL_STATUS_FOUND:
            counts["found"] += 1
            pull.position.CopyFrom(response.next_position)
        else:
            counts["ended"] += 1


async def clients(arguments: argparse.Namespace) -> None:
    """``--count`` clients from number ``--first`` on; says its counts each second."""
    counts = {"ended": 0, "found": 0, "unreachable": 0}
    tasks = Tasks("bench")
    for client in range(arguments.first, arguments.first + arguments.count):
        holding = LongPoller(f"bench-{client}", Connections(arguments.namesrv), lambda: "", HOLD_MS)
        holding.start(tasks)
        for n in range(HOLDS_PER_CLIENT):
            number = client * HOLDS_PER_CLIENT + n
            tasks.start(hold_on(holding, arguments.broker_group, number, counts), f"hold {number}")
    while True:
        await asyncio.sleep(1.0)
        say({"at_s": time.monotonic(), **counts})


# --- the stage ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pullhold:
    pid: int
    metrics_address: str


@contextmanager
def pullhold(folder: Path, namesrv: str) -> Iterator[Pullhold]:
    """A pullhold; gone when the block is left."""
    announce = folder / "pullhold.json"
    announce.unlink(missing_ok=True)
    flags = {"namesrv": namesrv, "port": 0, "metrics_port": 0, "announce_file": announce}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    with (folder / "pullhold.log").open("wb") as log:
        command = [sys.executable, "-m", "services.pullhold", *words]
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=REPOSITORY)
    try:
        wait_for(lambda: announce.exists() or process.poll() is not None, "the pullhold")
        yield Pullhold(process.pid, json.loads(announce.read_text())["metrics_address"])
    finally:
        process.terminate()
        process.wait(STOP_S_MAX)


async def create_topics(broker: LocalProcess) -> None:
    async with open_channel(broker.internal_address) as channel:
        stub = broker_pb2_grpc.BrokerAdminServiceStub(channel)
        for number in range(TOPIC_COUNT):
            topic = common_pb2.TopicConfig(
                name=f"holds-{number}",
                read_queue_count=QUEUES_PER_TOPIC,
                write_queue_count=QUEUES_PER_TOPIC,
                flush_mode=common_pb2.FLUSH_MODE_ASYNC,
            )
            await stub.PutTopic(broker_pb2.PutTopicRequest(topic=topic), timeout=30)
        topic = common_pb2.TopicConfig(
            name="late",
            read_queue_count=8,
            write_queue_count=8,
            flush_mode=common_pb2.FLUSH_MODE_ASYNC,
        )
        await stub.PutTopic(broker_pb2.PutTopicRequest(topic=topic), timeout=30)


class Scrape:
    """The metrics of a process at one time."""

    def __init__(self, address: str) -> None:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            self._text = answer.read().decode()

    def value(self, name: str) -> float:
        """The sum of a metric's series."""
        found = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", self._text, flags=re.M)
        return sum(map(float, found))

    def calls(self) -> dict[str, int]:
        """Unary calls so far, by method."""
        pattern = r'^rocketmq_rpc_latency_count{[^}]*request_code="[^"]*/(\w+)"[^}]*} (\S+)$'
        counts: dict[str, int] = {}
        for method, number in re.findall(pattern, self._text, flags=re.M):
            counts[method] = counts.get(method, 0) + int(float(number))
        return counts


def rss_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) / 1024


# --- the measurements -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class IdleHolds:
    """What ``seconds`` of waiting cost; CPU as a share of one core."""

    holds: int
    seconds: float
    broker_cpu: float
    idle_broker_cpu: float
    pullhold_cpu: float
    pullhold_rss_mib: float
    broker_calls: dict[str, int]
    holds_ended: int
    pulls: int
    safety_finds: int

    @property
    def extra_cpu(self) -> float:
        return self.broker_cpu - self.idle_broker_cpu


def measure_idle(
    held: LocalProcess, idle: LocalProcess, hold: Pullhold, seconds: float
) -> IdleHolds:
    pids = {"broker": held.pid, "idle": idle.pid, "pullhold": hold.pid}
    calls, metrics = Scrape(held.metrics_address).calls(), Scrape(hold.metrics_address)
    cpu_s = {name: cpu_seconds(pid) for name, pid in pids.items()}
    started_s = time.monotonic()
    time.sleep(seconds)
    took_s = time.monotonic() - started_s
    share = {name: (cpu_seconds(pid) - cpu_s[name]) / took_s for name, pid in pids.items()}
    after = Scrape(hold.metrics_address)
    calls_after = Scrape(held.metrics_address).calls()
    ended, pulls = "cometmq_hold_duration_seconds_count", "cometmq_hold_pulls_total"
    return IdleHolds(
        holds=int(after.value("cometmq_holds_waiting")),
        seconds=took_s,
        broker_cpu=share["broker"],
        idle_broker_cpu=share["idle"],
        pullhold_cpu=share["pullhold"],
        pullhold_rss_mib=rss_mib(hold.pid),
        broker_calls={k: n - calls.get(k, 0) for k, n in calls_after.items() if n != calls.get(k)},
        holds_ended=int(after.value(ended) - metrics.value(ended)),
        pulls=int(after.value(pulls) - metrics.value(pulls)),
        safety_finds=int(after.value("cometmq_hold_safety_finds_total")),
    )


def measure_latency(namesrv: str, count: int) -> Line:
    """Percentiles of messages that come one by one to parked pulls."""
    common = {"namesrv": namesrv, "topic": "late"}
    with Child("bench.latency", "consume", group="late", count=count, **common) as consumer:
        consumer.read()
        with Child(
            "bench.latency",
            "produce",
            count=count,
            rate=LATENCY_RATE,
            body_bytes=BODY_BYTES,
            **common,
        ) as producer:
            producer.read()
            return consumer.read()


def run(folder: Path, seconds: float, latency_count: int) -> tuple[IdleHolds, Line, Line]:
    """The idle holds, then the latency without them and with them."""
    asyncio.run(local.down(folder / "cluster", purge=True))
    cluster = asyncio.run(local.up(folder / "cluster", broker_count=2))
    try:
        held, idle = cluster.brokers
        asyncio.run(create_topics(held))
        with pullhold(folder, cluster.namesrv) as hold, ExitStack() as children:
            alone = measure_latency(cluster.namesrv, latency_count)
            share = CLIENT_COUNT // HOLDER_PROCESSES
            for n in range(HOLDER_PROCESSES):
                child = Child(
                    "bench.holds",
                    "clients",
                    namesrv=cluster.namesrv,
                    broker_group=held.name,
                    first=n * share,
                    count=share,
                )
                children.enter_context(child)
            wanted = CLIENT_COUNT * HOLDS_PER_CLIENT

            def all_wait() -> bool:
                return Scrape(hold.metrics_address).value("cometmq_holds_waiting") >= wanted

            wait_for(all_wait, f"{wanted} holds")
            time.sleep(5.0)  # connections are made, everything is told
            waiting = measure_idle(held, idle, hold, seconds)
            beside = measure_latency(cluster.namesrv, latency_count)
            return waiting, alone, beside
    finally:
        asyncio.run(local.down(folder / "cluster", purge=True))


def text_of(waiting: IdleHolds, alone: Line, beside: Line) -> str:
    calls = ", ".join(f"{name} {count}" for name, count in sorted(waiting.broker_calls.items()))
    lines = [
        f"{waiting.holds:,} holds of {CLIENT_COUNT:,} clients on "
        f"{TOPIC_COUNT * QUEUES_PER_TOPIC:,} queues for {waiting.seconds:.0f} s",
        f"  broker         {waiting.broker_cpu:7.2%} of a core; an idle one "
        f"{waiting.idle_broker_cpu:.2%}; extra {waiting.extra_cpu:+.2%} "
        f"(at most {BROKER_EXTRA_CPU_MAX:.0%})",
        f"  calls it got   {calls or 'none'}; pulls {waiting.pulls}; holds that ended and began "
        f"again: {waiting.holds_ended:,}",
        f"  pullhold       {waiting.pullhold_cpu:7.2%} of a core, "
        f"{waiting.pullhold_rss_mib:.0f} MiB resident",
        f"  safety finds   {waiting.safety_finds} (must be 0)",
    ]
    for name, line in (("alone", alone), ("beside the idle holds", beside)):
        figures = ", ".join(f"{key} {float(value):,.2f}" for key, value in line.items())
        lines.append(f"latency through parked pulls at {LATENCY_RATE:.0f}/s, {name}: {figures}")
    return "\n".join(lines)


def missed(waiting: IdleHolds, alone: Line) -> list[str]:
    """Which targets were not reached."""
    checks = {
        "every pull is held": waiting.holds >= CLIENT_COUNT * HOLDS_PER_CLIENT * 0.99,
        "broker CPU": waiting.extra_cpu <= BROKER_EXTRA_CPU_MAX,
        "no call for a hold": waiting.pulls + waiting.broker_calls.get("Pull", 0) == 0,
        "safety finds": waiting.safety_finds == 0,
        "latency p50": float(alone["p50_ms"]) <= LATENCY_P50_MS_MAX,
    }
    return [name for name, reached in checks.items() if not reached]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench holds", description=__doc__)
    parser.add_argument("role", nargs="?", default="run", choices=["run", "clients"])
    parser.add_argument("--quick", action="store_true", help="10 s: a look, not a result")
    parser.add_argument("--seconds", type=float, help="of waiting (default 60)")
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "data" / "bench")
    for name in ("namesrv", "broker_group"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    for name in ("first", "count"):
        parser.add_argument(f"--{name}", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.role == "clients":
        uvloop.run(clients(arguments))
        return
    folder: Path = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    seconds = arguments.seconds or (10.0 if arguments.quick else 60.0)
    waiting, alone, beside = run(folder, seconds, 1_000 if arguments.quick else 5_000)
    result = {"waiting": asdict(waiting), "latency": alone, "latency_beside_holds": beside}
    output = folder / "holds.json"
    output.write_text(json.dumps(result, indent=2) + "\n")
    print(f"{text_of(waiting, alone, beside)}\nJSON: {output}")
    if targets := missed(waiting, alone):
        sys.exit(f"not reached: {', '.join(targets)}")


if __name__ == "__main__":
    main()
