"""``python -m bench peers``: CometMQ beside RocketMQ, NATS JetStream and Redis Streams.

Every server is started once, and JVMs are warmed up. In a round each measurement is made with one
system after the other; the others are stopped (SIGSTOP) meanwhile, so that they cost nothing. Each
run adds its lines to a file, and the tables are made of all lines in it: parts of the measurement
can be run at different times. docs/benchmarks/method.md has the definitions.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from bench.peers import table
from bench.peers.instance import LATENCY_BODY_BYTES, Instance
from bench.peers.peer import Peer, PeerMissing
from bench.processes import Line

PROJECT = Path(__file__).resolve().parents[2]
PEERS = ("cometmq", "rocketmq", "nats", "redis")
WHAT = ("single", "batch", "consume", "latency")
FLUSH_MODES = ("async", "sync")
CALLERS = (1, 64, 512)
RATES = (100, 500)
INSTALL_CLIENTS = ".venv/bin/uv sync --frozen --inexact --group bench"


@dataclass(frozen=True, slots=True)
class Arguments:
    peers: Sequence[str]
    what: Sequence[str]
    flush: Sequence[str]
    bodies: Sequence[int]
    rounds: int
    seconds: float
    latency_seconds: float


class Rounds:
    """Measures, adds lines to the file, and says each."""

    def __init__(self, arguments: Arguments, lines: Path) -> None:
        self._arguments = arguments
        self._lines = lines
        self._run = time.strftime("%Y-%m-%dT%H:%M:%S")
        self._instances: list[Instance] = []

    def run(self, folder: Path) -> None:
        # Leaves the stack as any error does: nothing goes on without this program.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        with ExitStack() as stack:
            for name in self._arguments.peers:
                for flush in self._arguments.flush:
                    try:
                        self._start(name, flush, folder / f"{name}-{flush}", stack)
                    except PeerMissing as error:
                        self._note(table.SKIP, {"peer": name, "flush": flush, "why": str(error)})
            for number in range(1, self._arguments.rounds + 1):
                self._round(number)

    def _start(self, name: str, flush: str, folder: Path, stack: ExitStack) -> None:
        try:
            peer: Peer = import_module(f"bench.peers.{name}").Peer()
            served = stack.enter_context(peer.serve(folder, flush))
        except ModuleNotFoundError as error:
            raise PeerMissing(f"{INSTALL_CLIENTS} ({error.name})") from error
        instance = Instance(peer, flush, served, stack)
        self._note(table.VERSIONS, {"peer": name, **served.versions})
        with instance.awake():
            instance.warm_up()
        self._instances.append(instance)

    def _round(self, number: int) -> None:
        said = self._arguments
        for what in said.what:
            for body_bytes in said.bodies if what != "latency" else (LATENCY_BODY_BYTES,):
                for instance in self._in_turn(number):
                    # A flush mode is a matter of sends.
                    if what in ("single", "batch") or instance.flush == said.flush[0]:
                        self._measure(number, instance, what, body_bytes)

    def _measure(self, number: int, instance: Instance, what: str, body_bytes: int) -> None:
        named: Line = {"round": number, "peer": instance.peer.name}
        named |= {"flush": instance.flush, "body_bytes": body_bytes}
        with instance.awake():
            for way, line in self._measurements(instance, what, body_bytes):
                self._note(what, named | {"way": way} | line)

    def _in_turn(self, number: int) -> Sequence[Instance]:
        """Another one begins in each round."""
        at = number % max(len(self._instances), 1)
        return self._instances[at:] + self._instances[:at]

    def _measurements(
        self, instance: Instance, what: str, body_bytes: int
    ) -> Iterator[tuple[str, Line]]:
        seconds = self._arguments.seconds
        match what:
            case "single":
                for callers in CALLERS:
                    yield table.callers(callers), instance.call(body_bytes, callers, seconds)
            case "batch":
                for way in instance.peer.batch_ways:
                    yield way, instance.batch(body_bytes, way, seconds)
            case "consume":
                for way in instance.peer.consume_ways:
                    yield way, instance.consume(body_bytes, way, seconds)
            case "latency":
                for rate in RATES:
                    late = instance.latency(rate, self._arguments.latency_seconds)
                    yield table.rate(rate), late

    def _note(self, what: str, line: Line) -> None:
        text = json.dumps({"run": self._run, "what": what, **line})
        with self._lines.open("a") as output:
            output.write(f"{text}\n")
        print(text, flush=True)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench peers", description=__doc__)
    parser.add_argument("--peers", type=_of(PEERS), default=PEERS, help=_listed(PEERS))
    parser.add_argument("--what", type=_of(WHAT), default=WHAT, help=_listed(WHAT))
    parser.add_argument(
        "--flush", type=_of(FLUSH_MODES), default=FLUSH_MODES, help=_listed(FLUSH_MODES)
    )
    parser.add_argument("--bodies", type=_sizes, default=(128, 1024), help="bytes, e.g. 128,1024")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a measurement")
    parser.add_argument("--latency_seconds", type=float, default=8.0)
    parser.add_argument("--folder", type=Path, default=PROJECT / "data" / "bench")
    parser.add_argument("--lines", type=Path, help="add to this file (default: a new one)")
    parser.add_argument("--table", action="store_true", help="only the tables of --lines")
    said = parser.parse_args(argv)
    if said.table and not said.lines:
        parser.error("--table needs --lines FILE")
    folder: Path = said.folder.resolve()
    lines: Path = said.lines or folder / time.strftime("peers-%Y%m%d-%H%M%S.jsonl")
    if not said.table:
        folder.mkdir(parents=True, exist_ok=True)
        names = ("peers", "what", "flush", "bodies", "rounds", "seconds", "latency_seconds")
        arguments = Arguments(**{name: getattr(said, name) for name in names})
        Rounds(arguments, lines).run(folder / "peers")
    print(table.markdown_of(lines.read_text().splitlines()))
    print(f"\nJSON: {lines}")


def _listed(allowed: Sequence[str]) -> str:
    return f"of {','.join(allowed)}; all by default"


def _of(allowed: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def names(text: str) -> tuple[str, ...]:
        found = tuple(text.split(","))
        if strange := [name for name in found if name not in allowed]:
            raise argparse.ArgumentTypeError(f"{strange[0]!r} is none of {','.join(allowed)}")
        return found

    return names


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(","))
