"""End-to-end latency at a fixed rate: from when a message was due to when the listener has it.

``python -m bench latency`` starts a cluster with a pull-hold and prints percentiles and the cores
of each process. With ``--explain`` it names the stage of each message that was later than 20 ms
(:mod:`bench.explain`): from the flight recorders, whose rings are read after the run, because
reading them would make messages late. A process watches whether the machine stood still
(:mod:`bench.standstills`).

Two roles, each a process: ``consume`` waits for ``count`` messages and says percentiles,
``produce`` sends one message every 1/rate seconds. The schedule is open-loop: a message that
goes out late because something stalled counts from when it was due; none goes out before. Both
sides read CLOCK_MONOTONIC, which all processes of a machine share; the body starts with the due
time in nanoseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

from bench import stage
from bench.alarm import Alarm
from bench.explain import Sent, Trace, table
from bench.processes import Child, Line, Meter, say
from bench.standstills import Standstill, Standstills
from bench.stats import summarise_latency
from cometmq.admin.trace import parse_answer
from cometmq.client import Message, Producer, PushConsumer, ReceivedMessage
from cometmq.flight_recorder import ENTRIES_MAX, ENTRIES_VARIABLE, Entry, Stage, recorder
from cometmq.model import FlushMode
from cometmq.rpc.polling import poll_in_one_thread
from cometmq.rpc.recorded_loop import RecordedLoop

LATE_MS = 20.0
DUE = struct.Struct(">qi")  # due time in ns; 1 = counts, 0 = warm-up
WARM_UP_MESSAGES = 500
WAIT_S_MAX = 120.0


class Stopwatch:
    """The listener: notes how late each counting message is."""

    def __init__(self, expected: int) -> None:
        self._expected = expected
        self.late: list[tuple[int, int, int]] = []  # queue id, queue offset, when it was seen
        self.latencies_ms: list[float] = []
        self.complete = asyncio.Event()

    async def __call__(self, messages: list[ReceivedMessage]) -> None:
        now_ns = time.monotonic_ns()
        for message in messages:
            due_ns, counts = DUE.unpack_from(message.body)
            if counts:
                late_ms = (now_ns - due_ns) / 1e6
                self.latencies_ms.append(late_ms)
                if late_ms > LATE_MS:
                    self.late.append((message.queue.queue_id, message.queue_offset, now_ns))
        if len(self.latencies_ms) >= self._expected:
            self.complete.set()


async def consume(arguments: argparse.Namespace) -> Line:
    """Says ``ready`` first."""
    stopwatch = Stopwatch(arguments.count)
    async with PushConsumer(arguments.namesrv, arguments.group, stopwatch) as consumer:
        await consumer.subscribe(arguments.topic)
        gc.freeze()  # as docs/client.md advises
        say({"ready": 1})
        async with asyncio.timeout(WAIT_S_MAX):
            await stopwatch.complete.wait()
    if arguments.trace:
        _keep(arguments.trace, {"late": stopwatch.late, "ring": recorder.entries()})
    return asdict(summarise_latency(stopwatch.latencies_ms))


async def produce(arguments: argparse.Namespace) -> Line:
    """Returns when all messages are acknowledged."""
    padding = bytes(arguments.body_bytes - DUE.size)
    interval_ns = int(1e9 / arguments.rate)
    with Alarm() as alarm:
        async with Producer(arguments.namesrv) as producer:
            start_ns = time.monotonic_ns() + interval_ns
            gc.freeze()  # as docs/client.md advises
            receipts, sent_ns = [], []
            for number in range(WARM_UP_MESSAGES + arguments.count):
                due_ns = start_ns + number * interval_ns
                await alarm.until(due_ns)
                body = DUE.pack(due_ns, number >= WARM_UP_MESSAGES) + padding
                receipts.append(await producer.send(Message(arguments.topic, body)))
                sent_ns.append(time.monotonic_ns())
            await producer.flush()
    if arguments.trace:
        dues = range(start_ns, start_ns + len(receipts) * interval_ns, interval_ns)
        found = [receipt.result() for receipt in receipts]
        places = [
            (r.queue.queue_id, r.queue_offset, int(r.message_id.split("/")[1])) for r in found
        ]
        sent = [(due, at, *place) for due, at, place in zip(dues, sent_ns, places, strict=True)]
        _keep(arguments.trace, {"sent": sent, "ring": recorder.entries()})
    return {"acked": len([receipt.result() for receipt in receipts])}


def _keep(path: Path, found: dict[str, object]) -> None:
    path.write_text(json.dumps(found))


# --- the whole ------------------------------------------------------------------------------------


def measure(folder: Path, seconds: float, rate: float, body_bytes: int, explain: bool) -> Line:
    """One run on a cluster of its own: percentiles in ms, cores by process; prints the late
    messages with ``explain``.
    """
    standstills = Standstills()
    poll_in_one_thread()  # the roles do, whose environment is this one: as docs/client.md advises
    count = int(seconds * rate)
    with stage.cluster(folder / "cluster", [(body_bytes, FlushMode.ASYNC)], pullholds=1) as bench:
        servers = {
            "namesrv": bench.cluster.of_kind("namesrv")[0],
            "broker": bench.cluster.brokers[0],
            "pullhold": bench.cluster.pullholds[0],
        }
        topic = stage.topic_name(body_bytes, FlushMode.ASYNC)
        common: dict[str, str | int] = {"namesrv": bench.namesrv, "topic": topic, "count": count}
        traces = {role: folder / f"{role}.json" for role in ("consume", "produce")}
        keep = {r: [f"--trace={traces[r]}"] if explain else [] for r in traces}
        watching = standstills if explain else nullcontext()
        with (
            watching,
            Child("bench.latency", "consume", *keep["consume"], **common) as receiver,
        ):
            receiver.read()
            more = {"rate": rate, "body_bytes": body_bytes}
            with Child("bench.latency", "produce", *keep["produce"], **common, **more) as sender:
                pids = {name: one.pid for name, one in servers.items()}
                pids |= {"consumer": receiver.pid, "producer": sender.pid}
                time.sleep(WARM_UP_MESSAGES / rate + 1.0)
                meter = Meter(pids)
                time.sleep(max(seconds - 1.5, 0.1))
                cores = meter.stop(1)
                line = receiver.read()
                sender.read()
        spent = {name: float(cores[f"cpu_us_{name}"]) / 1e6 for name in pids}
        line |= {f"cores_{name}": cpu_s / float(cores["seconds"]) for name, cpu_s in spent.items()}
        line["cores"] = sum(spent.values()) / float(cores["seconds"])
        line["other_cores"] = cores["other_cores"]
        if explain:
            rings = {name: parse_answer(one.metrics_address)[0] for name, one in servers.items()}
            print(_explained(traces, rings, standstills.found), flush=True)
    return line


def _explained(
    traces: Mapping[str, Path],
    rings: Mapping[str, Sequence[Entry]],
    standstills: Sequence[Standstill],
) -> str:
    sender, receiver = (json.loads(traces[role].read_text()) for role in ("produce", "consume"))
    roles = {"producer": sender, "consumer": receiver}
    own = {name: [Entry(Stage(e[0]), *e[1:]) for e in one["ring"]] for name, one in roles.items()}
    trace = Trace({**rings, **own}, standstills)
    by_place = {
        (sent.queue_id, sent.queue_offset): sent for sent in map(Sent._make, sender["sent"])
    }
    return table([trace.explain(by_place[q, n], seen_ns) for q, n, seen_ns in receiver["late"]])


def runs(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench latency", description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="runs in turn")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each run")
    parser.add_argument("--rate", type=float, default=500.0, help="messages a second")
    parser.add_argument("--body_bytes", type=int, default=1024)
    parser.add_argument("--explain", action="store_true", help="name the stage of late messages")
    parser.add_argument("--folder", type=Path, default=Path("data/bench-latency"))
    arguments = parser.parse_args(argv)
    folder: Path = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.explain:  # whole runs: the services and the roles read it
        os.environ[ENTRIES_VARIABLE] = str(ENTRIES_MAX)
    for run in range(1, arguments.runs + 1):
        line = measure(
            folder, arguments.seconds, arguments.rate, arguments.body_bytes, arguments.explain
        )
        print(f"run {run}: " + ", ".join(f"{k} {float(v):,.2f}" for k, v in line.items()))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.latency", description=__doc__)
    parser.add_argument("role", choices=["produce", "consume"])
    parser.add_argument("--namesrv", required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--group", default="bench-latency", help="consume: the consumer group")
    parser.add_argument("--count", type=int, default=2000, help="messages that count")
    parser.add_argument("--rate", type=float, default=500.0, help="produce: messages a second")
    parser.add_argument("--body_bytes", type=int, default=1024, help="produce: 12 or more")
    parser.add_argument("--trace", type=Path, help="write what is known of late messages there")
    arguments = parser.parse_args(argv)
    recorder.watch_collector()
    role = produce if arguments.role == "produce" else consume
    with asyncio.Runner(loop_factory=RecordedLoop) as runner:
        say(runner.run(role(arguments)))


if __name__ == "__main__":
    main()
