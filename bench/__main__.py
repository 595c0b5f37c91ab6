"""``make bench``: everything, several times in turn, into tables and JSON, as explained in
docs/benchmarks/method.md.

Every run starts a fresh cluster and measures each thing once, the bare loops close to what is
divided by them. So a busy minute of the machine spoils one run's figures and not one row of the
table.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bench import (
    chain,
    failover,
    filters,
    groups,
    holds,
    idle,
    joins,
    latency,
    messaging,
    pop,
    replication,
    requests,
    roundtrip,
    scale,
    soak,
    stage,
    tracing,
    transactions,
)
from bench.peers import rounds as peers
from bench.processes import Child, Line
from bench.produce import MANY
from bench.report import (
    BARE_DISK,
    BARE_PULL,
    BARE_STREAM,
    CONSUME,
    LATENCY,
    PRODUCE,
    PRODUCE_MANY,
    Measurement,
    machine,
    summarise,
)
from bench.stage import Bench, Chunk
from cometmq.model import FlushMode

PROJECT = Path(__file__).resolve().parent.parent
GROUP = "bench-consume"
OTHERS = {
    "chain": chain.main,
    "holds": holds.main,
    "idle": idle.main,
    "replication": replication.main,
    "failover": failover.main,
    "filters": filters.main,
    "messaging": messaging.main,
    "transactions": transactions.main,
    "pop": pop.main,
    "requests": requests.main,
    "tracing": tracing.main,
    "groups": groups.main,
    "joins": joins.main,
    "latency": latency.runs,
    "roundtrip": roundtrip.main,
    "peers": peers.main,
    "scale": scale.main,
    "soak": soak.main,
}


class Runner:
    """Measures, prints what it measured and remembers it."""

    def __init__(self, folder: Path, seconds: float, latency_count: int) -> None:
        self._folder = folder
        self._seconds = seconds
        self._latency_count = latency_count
        self._stored: dict[tuple[int, FlushMode], int] = {}  # messages in each topic
        self.measurements: list[Measurement] = []

    def run(self, number: int) -> None:
        """One run of everything; a ratio's two sides are measured close together."""
        topics = [(size, flush) for size in stage.BODY_SIZES for flush in stage.FLUSH_MODES]
        with stage.cluster(self._folder / "cluster", topics) as bench:
            for body_bytes in stage.BODY_SIZES:
                self._produce(bench, number, body_bytes)
                self._consume(bench, number, body_bytes)
                for flush in stage.FLUSH_MODES:
                    late = self._latency(bench, body_bytes, flush)
                    self._note(Measurement(LATENCY, body_bytes, mode(flush), number, late))

    def _produce(self, bench: Bench, run: int, body_bytes: int) -> None:
        chunk = stage.produce_chunk(body_bytes)
        self._note(Measurement(BARE_STREAM, body_bytes, "", run, self._bare("stream", chunk)))
        for flush in stage.FLUSH_MODES:
            self._stored[body_bytes, flush] = 0
            for kind, many in ((PRODUCE, 0), (PRODUCE_MANY, MANY)):
                line = result_of(producer(bench, body_bytes, flush, self._seconds, many))
                self._stored[body_bytes, flush] += int(line["stored"])
                self._note(Measurement(kind, body_bytes, mode(flush), run, line))
        self._note(Measurement(BARE_DISK, body_bytes, "", run, self._disk(chunk)))

    def _consume(self, bench: Bench, run: int, body_bytes: int) -> None:
        chunk = stage.consume_chunk(body_bytes)
        self._note(Measurement(BARE_PULL, body_bytes, "", run, self._bare("pull", chunk)))
        for flush in stage.FLUSH_MODES:
            stored = self._stored[body_bytes, flush]
            line = result_of(consumer(bench, body_bytes, flush, stored, GROUP))
            self._note(Measurement(CONSUME, body_bytes, mode(flush), run, line))

    def _bare(self, role: str, chunk: Chunk) -> Line:
        with Child("bench.limits", "server") as server:
            address = str(server.read()["address"])
            with Child(
                "bench.limits",
                role,
                address=address,
                chunk_bytes=chunk.chunk_bytes,
                chunk_messages=chunk.messages,
                window=chunk.window,
                seconds=self._seconds,
                watch=f"server={server.pid}",
            ) as client:
                return client.read()

    def _disk(self, chunk: Chunk) -> Line:
        with Child(
            "bench.limits",
            "disk",
            path=str(self._folder / "disk.bin"),
            chunk_bytes=chunk.chunk_bytes,
            chunk_messages=chunk.messages,
            seconds=self._seconds / 2,
        ) as disk:
            return disk.read()

    def _latency(self, bench: Bench, body_bytes: int, flush: FlushMode) -> Line:
        """The group is that of ``_consume``, so only the new messages are left to read."""
        common = {"namesrv": bench.namesrv, "topic": stage.topic_name(body_bytes, flush)}
        count = self._latency_count
        with Child("bench.latency", "consume", group=GROUP, count=count, **common) as receiver:
            receiver.read()
            with Child(
                "bench.latency", "produce", count=count, body_bytes=body_bytes, **common
            ) as sender:
                sender.read()
                return receiver.read()

    def _note(self, one: Measurement) -> None:
        self.measurements.append(one)
        figures = ", ".join(f"{name} {float(value):,.2f}" for name, value in one.values.items())
        print(f"run {one.run}: {one.kind} {one.body_bytes} B {one.flush}: {figures}", flush=True)


def mode(flush: FlushMode) -> str:
    return flush.name.lower()


def producer(
    bench: Bench, body_bytes: int, flush: FlushMode, seconds: float, many: int = 0
) -> Child:
    """Says ``started``, then its measurement. ``many``: messages of a send_many; 0: send each."""
    return Child(
        "bench.produce",
        namesrv=bench.namesrv,
        topic=stage.topic_name(body_bytes, flush),
        body_bytes=body_bytes,
        seconds=seconds,
        many=many,
        watch=f"broker={bench.broker_pid}",
    )


def consumer(bench: Bench, body_bytes: int, flush: FlushMode, count: int, group: str) -> Child:
    """Says ``started``, then its measurement."""
    return Child(
        "bench.consume",
        namesrv=bench.namesrv,
        topic=stage.topic_name(body_bytes, flush),
        group=group,
        count=count,
        body_bytes=body_bytes,
        watch=f"broker={bench.broker_pid}",
    )


def result_of(child: Child) -> Line:
    """What it says after ``started``."""
    with child:
        child.read()
        return child.read()


def arguments_of(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short run: a look, not a result")
    parser.add_argument("--runs", type=int, help="runs in turn (default 3)")
    parser.add_argument("--seconds", type=float, help="of each throughput measurement (default 3)")
    parser.add_argument("--folder", type=Path, default=PROJECT / "data" / "bench")
    arguments = parser.parse_args(argv)
    arguments.runs = arguments.runs or (1 if arguments.quick else 3)
    arguments.seconds = arguments.seconds or (1.5 if arguments.quick else 3.0)
    return arguments


def main(argv: Sequence[str]) -> None:
    if argv and argv[0] in OTHERS:
        OTHERS[argv[0]](argv[1:])
        return
    arguments = arguments_of(argv)
    folder: Path = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    load = os.getloadavg()[0]
    runner = Runner(folder, arguments.seconds, 1000 if arguments.quick else 2500)
    for number in range(1, arguments.runs + 1):
        runner.run(number)
    report = summarise(runner.measurements)
    result = {"machine": machine(), "load_before": load} | report.as_json()
    result["measurements"] = [asdict(one) for one in runner.measurements]
    output = folder / "report.json"
    output.write_text(json.dumps(result, indent=2) + "\n")
    print(f"\n{report.as_text()}\n\nmachine: {machine()}\nJSON: {output}")


if __name__ == "__main__":
    main(sys.argv[1:])
