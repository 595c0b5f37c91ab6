"""One system that runs, and what is measured of it. It is stopped (SIGSTOP) while it is not."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import TypeAlias

from bench.peers.peer import Peer, Served
from bench.processes import Line, Meter, Program

LATENCY_BODY_BYTES = 1024
LATENCY_WARM_UP_S = 2
SETTLE_S = 0.5  # after a pause: timers that are due, connections that are made again

Fields: TypeAlias = Mapping[str, object]


class Instance:
    """One system with one flush mode: its server and two load programs, one to send and one to
    receive.
    """

    def __init__(self, peer: Peer, flush: str, served: Served, stack: ExitStack) -> None:
        self.peer = peer
        self.flush = flush
        self._pids = served.pids
        self.sender = stack.enter_context(Program(f"{peer.name} sender", served.load))
        self.receiver = stack.enter_context(Program(f"{peer.name} receiver", served.load))
        self._topics = 0
        stack.callback(self._signal, signal.SIGCONT)  # so that they can end

    @contextmanager
    def awake(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        time.sleep(SETTLE_S)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        for pid in (*self._pids.values(), self.sender.pid, self.receiver.pid):
            with suppress(ProcessLookupError):  # it failed: that is the error to show
                os.kill(pid, number)

    def warm_up(self) -> None:
        """Everything in turn, until the peer's time is over."""
        end = time.monotonic() + self.peer.warm_up_s
        while time.monotonic() < end:
            self.call(128, 512, 1)
            self.call(1024, 1, 1)
            for way in self.peer.consume_ways:
                self.consume(128, way, 1)
            self.latency(500, 1)

    def call(self, body_bytes: int, callers: int, seconds: float) -> Line:
        topic = self._topic()
        fields = {"body_bytes": body_bytes, "callers": callers, "seconds": seconds}
        return self._measure(self.sender, "call", topic, fields)

    def batch(self, body_bytes: int, way: str, seconds: float) -> Line:
        topic = self._topic()
        fields = {"body_bytes": body_bytes, "way": way, "seconds": seconds}
        return self._measure(self.sender, "batch", topic, fields)

    def consume(self, body_bytes: int, way: str, seconds: float) -> Line:
        """What its last way of batches sends in these seconds is then consumed."""
        topic = self._topic()
        way_in = self.peer.batch_ways[-1]
        self._ask(
            self.sender,
            "batch",
            topic,
            {"body_bytes": body_bytes, "way": way_in, "seconds": seconds},
        )
        stored = self.sender.read()["stored"]
        fields = {"body_bytes": body_bytes, "way": way, "count": stored}
        return self._measure(self.receiver, "consume", topic, fields)

    def latency(self, rate: int, seconds: float) -> Line:
        topic, count = self._topic(), int(rate * seconds)
        way = self.peer.consume_ways[0]
        self._ask(self.receiver, "receive", topic, {"count": count, "way": way})
        self._tell(
            self.sender,
            "schedule",
            topic,
            {
                "rate": rate,
                "count": count,
                "warm_up": rate * LATENCY_WARM_UP_S,
                "body_bytes": LATENCY_BODY_BYTES,
            },
        )
        self.sender.read()
        meter = Meter({"client": self.sender.pid, "consumer": self.receiver.pid, **self._pids})
        late = self.receiver.read()
        line = meter.stop(count)
        self.sender.read()
        self._ask(self.receiver, "drop", topic)
        return self._summed(line | late)

    def _topic(self) -> str:
        self._topics += 1
        topic = f"bench-{self._topics}"
        self._ask(self.sender, "create", topic, {"flush": self.flush})
        return topic

    def _tell(self, program: Program, word: str, topic: str, fields: Fields | None = None) -> None:
        named = {"topic": topic, **(fields or {})}
        program.tell("\t".join([word, *(f"{name}={value}" for name, value in named.items())]))

    def _ask(self, program: Program, word: str, topic: str, fields: Fields | None = None) -> Line:
        self._tell(program, word, topic, fields)
        return program.read()

    def _measure(self, program: Program, word: str, topic: str, fields: Fields) -> Line:
        self._ask(program, word, topic, fields)
        meter = Meter({"client": program.pid, **self._pids})
        measured = program.read()
        line = meter.stop(int(measured["messages"])) | measured
        self._ask(program, "drop", topic)
        return self._summed(line)

    def _summed(self, line: Line) -> Line:
        server = sum(float(line[f"cpu_us_{name}"]) for name in self._pids)
        return line | {"cpu_us_server": server}
