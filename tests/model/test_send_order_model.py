"""Messages of one key, whatever is refused, lost or stored in part: acknowledged ones lie in the
log in the order of the sends. The real window and the real rule of the broker; a naive broker and
network.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from dataclasses import dataclass, field
from itertools import count

from cometmq.client.sending.batch import Batch, Segment
from cometmq.client.sending.in_flight import InFlightBatches
from cometmq.errors import BatchOutOfOrder
from cometmq.messaging.send_order import SendOrder
from cometmq.model import QueueRef

LOST, REFUSED, BEHIND, OUTSIDE = "lost", "refused", "behind", "outside the window"
WITHOUT = ["without its first segment", "without its second one", "without its third one"]
IN_PART, NONE = "in part", -1
Request = tuple[int, int, list[int], int]  # batch id, refusal that is known, messages, bad segment


@dataclass
class Wire:
    """A stream: what is on its way to the broker and back, and what the broker knows of it."""

    requests: deque[Request] = field(default_factory=deque)
    answers: deque[tuple[int, int | str]] = field(default_factory=deque)
    order: SendOrder = field(default_factory=SendOrder)


class World:
    def __init__(self, seed: int) -> None:
        self.source = random.Random(seed)
        self.loop = asyncio.new_event_loop()
        self.log: list[int] = []
        self.window = InFlightBatches(self.source.choice([1, 2, 8]))
        self.wire, self.old = Wire(), Wire()
        self.numbers, self.sequences = count(), count(1)
        self.acknowledged: list[int] = []
        self.failed: set[int] = set()
        self.met: set[str] = set()

    def new_batch(self) -> None:
        batch = Batch(next(self.sequences), 1e9)
        for _ in range(self.source.choice([1, 1, 3])):
            segment = Segment(QueueRef("T", 0, "g"), True, "S", 0)
            for _ in range(self.source.choice([1, 2, 5])):
                batch.waiters.append(self.loop.create_future())
                batch.starts.append(batch.size)
                batch.buffer += next(self.numbers).to_bytes(4, "big")
                segment.count += 1
            batch.segments.append(segment)
        batch.close()
        self.window.push(batch)

    def send(self) -> None:
        if (item := self.window.take(0.0)) is not None:
            batch_id, batch = item
            bad = self.source.randrange(12)  # the segment that is refused for good
            if bad >= len(batch.segments) or len(batch.segments) == 1:
                bad = NONE
            self.wire.requests.append((batch_id, self.window.refused_id, messages(batch), bad))

    def serve(self, wire: Wire) -> None:
        """The broker takes the next batch of a stream."""
        if not wire.requests:
            return
        batch_id, known_id, numbers, bad = wire.requests.popleft()
        try:
            wire.order.check(known_id)
        except BatchOutOfOrder:
            self.met.add(BEHIND)
            wire.answers.append((batch_id, BEHIND))
            return
        stored = [n for n in numbers if n in self.log]
        if stored and stored[0] != numbers[0]:  # of an old stream
            answer: int | str = OUTSIDE
        elif stored:
            assert stored == numbers[: len(stored)], "what is stored is the beginning"
            answer = len(stored)
        elif bad != NONE:
            answer = WITHOUT[bad]
        elif self.source.random() < 0.15:
            answer = REFUSED
        else:
            self.log += numbers
            answer = len(numbers)
        if answer != len(numbers):
            wire.order.refused(batch_id)
            self.met.add(IN_PART if isinstance(answer, int) else answer)
        wire.answers.append((batch_id, answer))

    def hear(self) -> None:
        """The producer takes the next answer, as BrokerSender does."""
        if not self.wire.answers:
            return
        batch_id, answer = self.wire.answers.popleft()
        batch, _ = self.window.answered(batch_id)
        if answer not in (BEHIND, batch.count):
            self.window.refused(batch_id)
        if answer in (BEHIND, REFUSED):
            self.window.push(batch)
        elif answer in WITHOUT:
            failed, rest = batch.split({WITHOUT.index(answer)})
            self.failed |= {n for part in failed for n in messages(part)}
            for part in rest:
                self.window.push(part)
        else:
            assert isinstance(answer, int)
            if answer < batch.count:
                batch, rest_of_it = batch.split_at(answer)
                self.window.push(rest_of_it)
            self.acknowledged += messages(batch)

    def lose_stream(self) -> None:
        """The broker may go on reading the old stream for a while."""
        self.met.add(LOST)
        self.old, self.wire = self.wire, Wire()
        self.window.restart()

    def crash(self) -> None:
        """The log loses its end that nobody has an answer for."""
        kept = max((self.log.index(n) + 1 for n in self.acknowledged), default=0)
        self.log = self.log[: self.source.randint(kept, len(self.log))]
        self.lose_stream()
        self.old = Wire()

    def play(self) -> None:
        for _ in range(self.source.randrange(400)):
            match self.source.randrange(20):
                case 0 | 1 | 2:
                    self.new_batch()
                case 3 if self.source.random() < 0.3:
                    self.lose_stream()
                case 4 if self.source.random() < 0.1:
                    self.crash()
                case 5 | 6 | 7 | 8:
                    self.send()
                case 9 | 10 | 11 | 12:
                    self.serve(self.wire)
                case 13 | 14:
                    self.serve(self.old)
                case _:
                    self.hear()

    def finish(self) -> None:
        for _ in range(100_000):
            if not self.window.waiting and not self.window.in_flight:
                break
            self.send()
            self.serve(self.wire)
            self.hear()


def messages(batch: Batch) -> list[int]:
    data = batch.records
    return [int.from_bytes(data[at : at + 4], "big") for at in range(0, len(data), 4)]


def test_acknowledged_messages_lie_in_the_order_of_the_sends() -> None:
    met: set[str] = set()
    for seed in range(300):
        world = World(seed)
        world.play()
        world.finish()
        assert len(set(world.log)) == len(world.log), seed
        wanted = [n for n in range(next(world.numbers)) if n not in world.failed]
        assert sorted(world.acknowledged) == wanted, "all of them, once"
        assert [n for n in world.log if n not in world.failed] == wanted, seed
        met |= world.met
        world.loop.close()
    assert met == {LOST, REFUSED, BEHIND, OUTSIDE, *WITHOUT, IN_PART}
