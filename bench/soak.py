"""Saturation for minutes: is memory flat, are descriptors few, does nothing stand still?

``python -m bench soak`` starts a cluster with a pull-hold whose store has a quota, so that old log
files go all the time. A producer sends as many messages as are taken, a push consumer reads them.
It looks at every process each 5 s, and prints for each: memory (RSS) in the first and the last
third after a warm-up (medians), descriptors, threads; then the loop turns that took longer than
50 ms, by what is known of their cause. The role ``consume`` is the consumer's process.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from bench import stage
from bench.holds import rss_mib
from bench.processes import Child, say
from bench.standstills import Standstill, Standstills, overlap_ns
from bench.watching import producing
from cometmq.admin.trace import parse_answer
from cometmq.client import PushConsumer, PushConsumerOptions, ReceivedMessage
from cometmq.flight_recorder import Entry, Stage
from cometmq.model import FlushMode

LOOK_S = 5.0
TURN_S = 1.0  # between two looks into the rings: a busy one has some seconds
STALL_MS = 50.0
CAUSE_MS = 5  # a cause that is looked at
GROWTH_MAX = 0.05  # of memory, that counts as flat
LISTENER_MESSAGES = 1024
MIB = 1024 * 1024
_CAUSES = (Stage.GC_PAUSE, Stage.FILE_GROWTH, Stage.STATE_SNAPSHOT)


@dataclass(slots=True)
class Usage:
    """Memory, descriptors and threads of a process at each look."""

    memory_mib: list[float] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)

    def look(self, pid: int) -> None:
        self.memory_mib.append(rss_mib(pid))
        self.threads.append(len(os.listdir(f"/proc/{pid}/task")))
        self.descriptors.append(len(os.listdir(f"/proc/{pid}/fd")))

    def memory(self) -> tuple[float, float]:
        """MiB in the first third and in the last, medians."""
        third = max(len(self.memory_mib) // 3, 1)
        first, last = self.memory_mib[:third], self.memory_mib[-third:]
        return statistics.median(first), statistics.median(last)


@dataclass(slots=True)
class Stalls:
    """Loop turns above STALL_MS of a process, and what could be their cause."""

    turns: set[Entry] = field(default_factory=set)
    causes: set[Entry] = field(default_factory=set)

    def note(self, entries: Sequence[Entry]) -> None:
        self.turns.update(
            e for e in entries if e.stage is Stage.LOOP_TURN and e.duration_ns > STALL_MS * 1e6
        )
        self.causes.update(e for e in entries if e.stage in _CAUSES)

    def explained(self, standstills: Sequence[Standstill]) -> Counter[str]:
        """How many turns by the cause that took most of them."""
        return Counter(self._cause(turn, standstills) for turn in self.turns)

    def _cause(self, turn: Entry, standstills: Sequence[Standstill]) -> str:
        took: Counter[str] = Counter()
        for one in standstills:
            took["the machine stood still"] += max(overlap_ns(one, turn), 0)
        for cause in self.causes:
            took[cause.stage.name.lower()] += max(overlap_ns(cause, turn), 0)
        name, longest_ns = max(took.items(), key=lambda one: one[1], default=("", 0))
        return name if longest_ns > turn.duration_ns / 2 else "unexplained"


def row(name: str, usage: Usage, stalls: Counter[str]) -> str:
    """A line of the table."""
    first, last = usage.memory()
    growth = last / first - 1
    verdict = "flat" if abs(growth) <= GROWTH_MAX else "not flat"
    causes = ", ".join(f"{count} {cause}" for cause, count in stalls.most_common()) or "none"
    return (
        f"{name:10} {first:7.1f} MiB {growth:+7.1%} {verdict:8}  descriptors "
        f"{min(usage.descriptors)} to {max(usage.descriptors)}, threads {max(usage.threads)}, "
        f"turns above {STALL_MS:.0f} ms: {causes}"
    )


def measure(
    folder: Path, seconds: float, body_bytes: int, quota_bytes: int, warm_up_s: float
) -> None:
    options = {"store_quota_bytes": str(quota_bytes)}
    size = [(body_bytes, FlushMode.ASYNC)]
    topic = stage.topic_name(*size[0])
    whole_s = warm_up_s + seconds
    with (
        stage.cluster(folder, size, pullholds=1, options=options) as bench,
        Child("bench.soak", "consume", namesrv=bench.namesrv, topic=topic) as consumer,
        Standstills() as standstills,
        producing(
            bench.namesrv, topic, seconds=whole_s + LOOK_S, rate=0, body_bytes=body_bytes
        ) as watch,
    ):
        servers = {p.name: p for p in bench.cluster.processes}
        pids = {name: one.pid for name, one in servers.items()}
        pids |= {"consumer": consumer.pid, "producer": watch.pid}
        time.sleep(warm_up_s)
        from_s, received = time.time(), _received(consumer)
        usages = {name: Usage() for name in pids}
        stalls = {name: Stalls() for name in servers}
        addresses = {name: one.metrics_address for name, one in servers.items()}
        end_s = time.monotonic() + seconds
        look_s = 0.0
        while (now_s := time.monotonic()) < end_s:
            if now_s >= look_s:
                look_s = now_s + LOOK_S
                for name, pid in pids.items():
                    usages[name].look(pid)
            _look_into_rings(addresses, stalls)
            time.sleep(TURN_S)
        to_s = time.time()
        sent = watch.rate(from_s, to_s - TURN_S)
        read = (_received(consumer) - received) / (to_s - from_s)
    print(f"{seconds:.0f} s: {sent:,.0f} messages/s of {body_bytes} B sent, {read:,.0f} received")
    for name, usage in usages.items():
        causes = stalls[name].explained(standstills.found) if name in stalls else Counter[str]()
        print(row(name, usage, causes))
    print(f"the machine stood still {len(standstills.found)} times", flush=True)


def _look_into_rings(addresses: Mapping[str, str], stalls: Mapping[str, Stalls]) -> None:
    for name, address in addresses.items():
        stalls[name].note(parse_answer(address, CAUSE_MS)[0])


def _received(consumer: Child) -> int:
    consumer.tell("count")
    return int(consumer.read()["received"])


# --- the consumer's process -----------------------------------------------------------------------


async def consume(arguments: argparse.Namespace) -> None:
    """Says how many messages were received at each line of the standard input."""
    received = 0

    async def count(messages: list[ReceivedMessage]) -> None:
        nonlocal received
        received += len(messages)

    options = PushConsumerOptions(batch_count=LISTENER_MESSAGES)
    async with PushConsumer(arguments.namesrv, "bench-soak", count, options=options) as consumer:
        await consumer.subscribe(arguments.topic)
        gc.freeze()  # as docs/client.md advises
        while await asyncio.to_thread(input):
            say({"received": received})


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--warm_up_s", type=float, default=60.0, help="before the first look")
    parser.add_argument("--body_bytes", type=int, default=1024)
    parser.add_argument("--quota_gib", type=float, default=4.0, help="of the broker's store")
    parser.add_argument("--folder", type=Path, default=Path("data/bench-soak"))
    arguments = parser.parse_args(argv)
    measure(
        arguments.folder.resolve(),
        arguments.minutes * 60,
        arguments.body_bytes,
        int(arguments.quota_gib * 1024 * MIB),
        arguments.warm_up_s,
    )


def role() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.soak")
    parser.add_argument("role", choices=["consume"])
    parser.add_argument("--namesrv", required=True)
    parser.add_argument("--topic", required=True)
    uvloop.run(consume(parser.parse_args()))


if __name__ == "__main__":
    role()
