"""``python -m bench scale``: how throughput grows with broker groups on one machine.

For each number of groups a fresh cluster with one address list and one topic on all groups; the
clients find the groups by themselves. Producers send as fast as they can, then each of as many
consumers reads everything as a group of its own. Twice: all processes anywhere (``free``), and the
clients on the last cores, a half of them, the servers on the others (``apart``).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import bench
from bench.figures import number
from bench.processes import Child, Line, Meter
from bench.produce import MANY
from bench.report import machine, markdown
from bench.stage import QUEUE_COUNT
from bench.stats import ratios
from cometmq.admin import local, ops
from cometmq.admin.connection import Connection
from cometmq.client import PullConsumer
from cometmq.model import FlushMode

PROJECT = Path(bench.__file__).resolve().parents[1]
TOPIC = "bench-scale"
GROUPS = (1, 2, 4)
FREE, APART = "free", "apart"


@dataclass(frozen=True, slots=True)
class Stage:
    """A cluster of some broker groups."""

    namesrv: str
    broker_pids: tuple[int, ...]
    client_cores: frozenset[int]


@contextmanager
def cluster(folder: Path, groups: int, placement: str) -> Iterator[Stage]:
    cores = sorted(os.sched_getaffinity(0))
    half = max(len(cores) // 2, 1)
    servers, clients = (cores, cores) if placement == FREE else (cores[:half], cores[-half:])
    asyncio.run(local.down(folder, purge=True))  # what an interrupted run may have left
    running = asyncio.run(local.up(folder, broker_count=groups))
    try:
        for process in running.processes:
            pin(process.pid, servers)
        asyncio.run(_create_topic(running.namesrv))
        pids = tuple(process.pid for process in running.brokers)
        yield Stage(running.namesrv, pids, frozenset(clients))
    finally:
        asyncio.run(local.down(folder, purge=True))


def pin(pid: int, cores: Sequence[int] | frozenset[int]) -> None:
    """All threads of a process; those that it starts later follow."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), cores)


async def _create_topic(namesrv: str) -> None:
    async with Connection(namesrv) as connection:
        await ops.create_topic(
            connection,
            TOPIC,
            read_queue_count=QUEUE_COUNT,
            write_queue_count=QUEUE_COUNT,
            flush_mode=FlushMode.ASYNC,
        )


async def stored_by_group(namesrv: str) -> dict[str, int]:
    """How many messages of the topic each broker group has."""
    async with PullConsumer(namesrv, "bench-spread") as consumer:
        stored: dict[str, int] = {}
        for queue, bounds in (await consumer.bounds(await consumer.queues(TOPIC))).items():
            stored[queue.broker_group] = stored.get(queue.broker_group, 0) + bounds.max_offset
        return stored


def together(stage: Stage, module: str, options: Sequence[Line]) -> Line:
    """Clients at the same time: their rates together, and the cores that they and the brokers kept
    busy from when the last one had started to when the first one had finished.
    """
    with ExitStack() as stack:
        clients = []
        for each in options:
            client = stack.enter_context(Child(module, namesrv=stage.namesrv, topic=TOPIC, **each))
            pin(client.pid, stage.client_cores)
            clients.append(client)
        for client in clients:
            client.read()
        pids = {f"client{at}": client.pid for at, client in enumerate(clients)}
        brokers = {f"broker{at}": pid for at, pid in enumerate(stage.broker_pids)}
        meter = Meter(pids | brokers)
        first = clients[0].read()
        spent = meter.stop(1)
        rates = [float(line["rate"]) for line in (first, *(one.read() for one in clients[1:]))]
    seconds = float(spent["seconds"]) * 1e6
    return {
        "rate": sum(rates),
        "broker_cores": sum(float(spent[f"cpu_us_{name}"]) for name in brokers) / seconds,
        "client_cores": sum(float(spent[f"cpu_us_{name}"]) for name in pids) / seconds,
        "other_cores": float(spent["other_cores"]),
    }


def measure(stage: Stage, body_bytes: int, clients: int, seconds: float) -> Iterator[Line]:
    """What is produced, then what is consumed."""
    # By send_many: the clients are to need less than the brokers.
    sends: Line = {"body_bytes": body_bytes, "seconds": seconds, "many": MANY}
    produced = together(stage, "bench.produce", [sends] * clients)
    stored = asyncio.run(stored_by_group(stage.namesrv))
    spread = min(stored.values()) / max(stored.values())
    yield {"what": "produce", **produced, "spread": spread}
    count = sum(stored.values())
    reads: list[Line] = [
        {"body_bytes": body_bytes, "count": count, "group": f"bench-scale-{at}"}
        for at in range(clients)
    ]
    yield {"what": "consume", **together(stage, "bench.consume", reads), "spread": spread}


def table(lines: Sequence[Line]) -> str:
    """Medians over the runs; growth is over one group in the same run."""
    header = (
        *("what", "body", "placement", "groups", "messages/s", "growth"),
        *("cores: brokers", "clients", "other", "spread", "n"),
    )
    keys = dict.fromkeys(_key(line) for line in lines)
    return markdown(header, [_cells(lines, key) for key in sorted(keys)])


Key = tuple[str, int, str, int]


def _key(line: Line) -> Key:
    return str(line["what"]), int(line["body_bytes"]), str(line["placement"]), int(line["groups"])


def _cells(lines: Sequence[Line], key: Key) -> tuple[str, ...]:
    what, body_bytes, placement, groups = key
    its = [line for line in lines if _key(line) == key]
    growth = ratios(_rates(its), _rates([one for one in lines if _key(one) == (*key[:3], 1)]))

    def middle(field: str) -> float:
        return median(float(line[field]) for line in its)

    return (
        *(what, f"{body_bytes} B", placement, str(groups), number(middle("rate"))),
        f"{median(growth):.2f}" if growth else "",
        *(f"{middle(name):.2f}" for name in ("broker_cores", "client_cores", "other_cores")),
        f"{middle('spread'):.2f}",
        str(len(its)),
    )


def _rates(lines: Sequence[Line]) -> dict[int, float]:
    return {int(line["run"]): float(line["rate"]) for line in lines}


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench scale", description=__doc__)
    parser.add_argument("--groups", type=int, nargs="+", default=GROUPS)
    parser.add_argument("--placement", nargs="+", choices=(FREE, APART), default=(FREE, APART))
    parser.add_argument("--body_bytes", type=int, nargs="+", default=(128, 1024))
    parser.add_argument("--clients", type=int, default=2, help="producers, then consumers")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each producer")
    parser.add_argument("--folder", type=Path, default=PROJECT / "data" / "bench")
    said = parser.parse_args(argv)
    folder = said.folder.resolve() / "scale"
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[Line] = []
    runs = range(1, said.runs + 1)
    for run, body_bytes, placement, groups in itertools.product(
        runs, said.body_bytes, said.placement, said.groups
    ):
        named = {"run": run, "body_bytes": body_bytes, "placement": placement, "groups": groups}
        with cluster(folder, groups, placement) as stage:
            for line in measure(stage, body_bytes, said.clients, said.seconds):
                lines.append({**named, **line})
                print(json.dumps(lines[-1]), flush=True)
    print(f"\n{table(lines)}\n\nmachine: {machine()}")
