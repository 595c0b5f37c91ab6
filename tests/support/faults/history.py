"""What clients did and saw: one line of JSON for each event, written while it happens, read when
all is over.

Times are CLOCK_MONOTONIC in seconds, which all processes of a machine share. A send has two lines:
one before it begins, one when its outcome is known; a send whose second line is missing (its
process was killed) is *unknown*, never failed. A last line that a killed process did not finish is
left out.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, Self

Queue = tuple[str, int]  # topic and queue id
Spot = tuple[int, int]  # a position: generation and offset


class Outcome(Enum):
    """What a producer was told of a send."""

    OK = "ok"  # SEND_OK: as durable as its topic asks for
    STORED = "stored"  # stored, but the disk or a slave was not in time
    UNKNOWN = "unknown"  # a timeout, a broken client: stored or not
    FAILED = "failed"  # refused before anything was sent
    REFUSED = "refused"  # tried once, and the broker said that nothing is stored


@dataclass(slots=True)
class Send:
    """One message that was sent. ``ended_s`` is infinite while its outcome is not known."""

    message: str  # "<producer>/<number>"; a producer's numbers rise
    queue: Queue
    began_s: float
    ended_s: float = inf
    outcome: Outcome = Outcome.UNKNOWN
    offset: int = -1  # in its queue, when it is known to be stored
    log_offset: int = -1
    refusal: str = ""  # the error's name, of one that was refused

    @property
    def producer(self) -> str:
        return self.message.partition("/")[0]

    @property
    def number(self) -> int:
        return int(self.message.partition("/")[2])


class Seen(NamedTuple):
    """A reader got a message. ``generation`` is 0 where the reader is not told it."""

    at_s: float
    reader: str
    queue: Queue
    generation: int
    offset: int
    message: str


class Step(Enum):
    """What else befalls a reader in a queue, with a position each."""

    BEGAN = "began"  # it begins to read here
    FENCED = "fenced"  # it was told that it has to go on here
    COMMITTED = "committed"  # the broker said that this is kept
    ASKED = "asked"  # the broker said that this is what it keeps


class Place(NamedTuple):
    """A step of a reader."""

    at_s: float
    reader: str
    queue: Queue
    step: Step
    spot: Spot


class Answer(Enum):
    """What a listener answered."""

    DONE = "done"
    LATER = "later"  # the message is to come again, or is a dead letter


@dataclass(slots=True)
class Call:
    """A listener of a consumer group got a message. ``ended_s`` is infinite while it has not
    answered: its process was killed. ``queue``: also the group's retry topic. ``tries``: how often
    the group had sent the message back before.
    """

    group: str
    client: str
    queue: Queue
    offset: int
    message: str
    tries: int
    began_s: float
    ended_s: float = inf
    answer: Answer | None = None


class Disturbance(NamedTuple):
    """A fault and how long it lasted."""

    name: str
    began_s: float
    ended_s: float


class Rebirth(NamedTuple):
    """A topic was deleted and made anew: when that was begun and done, and the generation that each
    of its queues had then.
    """

    topic: str
    began_s: float
    ended_s: float
    generations: dict[int, int]


class Darkness(NamedTuple):
    """Everybody who was in sync lost power at once. ``on_disk``: below this log offset somebody had
    everything on the disk.
    """

    at_s: float
    on_disk: int


@dataclass
class History:
    """All events of a run. ``reads`` holds what readers saw and did, in each reader's order."""

    sends: dict[str, Send] = field(default_factory=dict)
    reads: list[Seen | Place] = field(default_factory=list)
    calls: dict[str, Call] = field(default_factory=dict)  # of listeners, in the order of begin
    disturbances: list[Disturbance] = field(default_factory=list)
    rebirths: list[Rebirth] = field(default_factory=list)
    darknesses: list[Darkness] = field(default_factory=list)

    @classmethod
    def read(cls, paths: Iterable[Path]) -> Self:
        """Of the files of several recorders."""
        history = cls()
        for path in paths:
            for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
                if line.endswith("\n"):
                    history._add(*json.loads(line))
        history.calls = dict(sorted(history.calls.items(), key=lambda item: item[1].began_s))
        return history

    def readers(self) -> dict[tuple[str, Queue], list[Seen | Place]]:
        """What each reader saw and did in each queue, in order."""
        found: dict[tuple[str, Queue], list[Seen | Place]] = {}
        for event in self.reads:
            found.setdefault((event.reader, event.queue), []).append(event)
        return found

    def seen(self) -> Iterator[Seen]:
        return (event for event in self.reads if isinstance(event, Seen))

    def disturbed(self, from_s: float, to_s: float, after_s: float) -> bool:
        """Whether there was a fault, or one had ended less than ``after_s`` before, in between."""
        return any(d.began_s <= to_s and d.ended_s + after_s >= from_s for d in self.disturbances)

    def of_former_life(self, send: Send) -> bool:
        """Its topic was made anew later than it was sent, or meanwhile."""
        return any(r.topic == send.queue[0] and send.began_s <= r.ended_s for r in self.rebirths)

    def _add(self, kind: str, *values: Any) -> None:
        getattr(self, f"_add_{kind}")(*values)

    def _add_send(self, at_s: float, message: str, topic: str, queue_id: int) -> None:
        assert message not in self.sends, f"{message} was sent twice"
        self.sends[message] = Send(message, (topic, queue_id), at_s)

    def _add_sent(self, at_s: float, message: str, outcome: str, *where: int) -> None:
        send = self.sends[message]
        send.ended_s, send.outcome = at_s, Outcome(outcome)
        send.offset, send.log_offset = where

    def _add_refused(self, at_s: float, message: str, refusal: str) -> None:
        send = self.sends[message]
        send.ended_s, send.outcome, send.refusal = at_s, Outcome.REFUSED, refusal

    def _add_call(
        self, at_s: float, call: str, group: str, client: str, topic: str, queue_id: int, *rest: Any
    ) -> None:
        offset, message, tries = rest
        queue = topic, queue_id
        self.calls[call] = Call(group, client, queue, offset, message, tries, at_s)

    def _add_called(self, at_s: float, call: str, answer: str) -> None:
        self.calls[call].ended_s, self.calls[call].answer = at_s, Answer(answer)

    def _add_seen(self, at_s: float, reader: str, topic: str, queue_id: int, *rest: Any) -> None:
        self.reads.append(Seen(at_s, reader, (topic, queue_id), *rest))

    def _add_step(
        self, at_s: float, reader: str, topic: str, queue_id: int, step: str, *spot: int
    ) -> None:
        generation, offset = spot
        queue = topic, queue_id
        self.reads.append(Place(at_s, reader, queue, Step(step), (generation, offset)))

    def _add_fault(self, at_s: float, name: str, began_s: float) -> None:
        self.disturbances.append(Disturbance(name, began_s, at_s))

    def _add_reborn(self, at_s: float, topic: str, began_s: float, *pairs: list[int]) -> None:
        generations = {queue_id: generation for queue_id, generation in pairs}
        self.rebirths.append(Rebirth(topic, began_s, at_s, generations))

    def _add_dark(self, at_s: float, on_disk: int) -> None:
        self.darknesses.append(Darkness(at_s, on_disk))


class Recorder:
    """Writes a history. Each line is with the kernel when its call returns."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def send(self, message: str, queue: Queue) -> None:
        self._write("send", message, *queue)

    def sent(self, message: str, outcome: Outcome, offset: int = -1, log_offset: int = -1) -> None:
        self._write("sent", message, outcome.value, offset, log_offset)

    def refused(self, message: str, refusal: str) -> None:
        self._write("refused", message, refusal)

    def call(
        self,
        call: str,
        group: str,
        client: str,
        queue: Queue,
        offset: int,
        message: str,
        tries: int,
    ) -> None:
        """``call``: its name, which no other has."""
        self._write("call", call, group, client, *queue, offset, message, tries)

    def called(self, call: str, answer: Answer) -> None:
        self._write("called", call, answer.value)

    def seen(
        self, reader: str, queue: Queue, message: str, *, offset: int, generation: int = 0
    ) -> None:
        self._write("seen", reader, *queue, generation, offset, message)

    def step(self, reader: str, queue: Queue, step: Step, spot: Spot) -> None:
        self._write("step", reader, *queue, step.value, *spot)

    @contextmanager
    def fault(self, name: str) -> Iterator[None]:
        """Something is wrong as long as the block lasts."""
        began_s = time.monotonic()
        try:
            yield
        finally:
            self._write("fault", name, began_s)

    def reborn(self, topic: str, began_s: float, generations: dict[int, int]) -> None:
        self._write("reborn", topic, began_s, *generations.items())

    def dark(self, on_disk: int) -> None:
        """Written before the power goes, so that nothing that is told later counts."""
        self._write("dark", on_disk)

    def _write(self, kind: str, *values: object) -> None:
        line = json.dumps([kind, time.monotonic(), *values], separators=(",", ":"))
        self._file.write(line.encode() + b"\n")
