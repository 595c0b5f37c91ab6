"""The clients of a chaos run, as a process of its own: producers and readers that write a history.

``python -m tests.chaos.workload NAMESRV HISTORY TOPIC…``; a line on its standard input ends the
producers; it ends itself when its readers have come to the end of every queue.

*orderly* has one batch unanswered at a time, *eager* eight; those of :mod:`tests.chaos.single` send
nothing twice. *steady* pulls by itself, so it knows every position, commits each second, and begins
anew at what is committed every few seconds; *pushed* is the push consumer as it comes.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
from collections.abc import Callable, Coroutine, Iterable
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from cometmq.client import (
    Message,
    Position,
    Producer,
    ProducerOptions,
    PullConsumer,
    PullConsumerOptions,
    PullOutcome,
    PushConsumer,
    PushConsumerOptions,
    QueueRef,
    ReceivedMessage,
    SendReceipt,
    SendStatus,
)
from cometmq.errors import CometError, PositionFenced
from tests.chaos.single import send_once
from tests.chaos.topics import GROUP, queues_of
from tests.support.faults.delivery_history import DeliveryRecorder
from tests.support.faults.history import Outcome, Queue, Recorder, Step

ORDERLY, EAGER = "orderly", "eager"  # the producers
EAGER_BURST = 12
EAGER_PAUSE_S, ORDERLY_PAUSE_S = 0.15, 0.02
UNDECIDED_MAX = 400  # sends of a producer that wait for their outcome
SESSION_S, COMMIT_S, POLL_S, RETRY_S = 16.0, 1.0, 0.1, 0.2
PUSH = PushConsumerOptions(batch_count=64, commit_interval_ms=1_000)
DRAIN_S = 60.0


def queue_ref(queue: Queue) -> QueueRef:
    return QueueRef(*queue, GROUP)


class Sender:
    """One producer. Its messages are numbered; body ``<name>/<number> …``."""

    def __init__(self, name: str, producer: Producer, recorder: Recorder) -> None:
        self._name = name
        self._producer = producer
        self._recorder = recorder
        self._numbers = itertools.count()
        self._room = asyncio.Semaphore(UNDECIDED_MAX)

    async def send(self, queue: Queue) -> None:
        """One message; its outcome is written when it is known."""
        await self._room.acquire()
        number = next(self._numbers)
        name = f"{self._name}/{number}"
        self._recorder.send(name, queue)
        body = name.encode() + b" " + b"." * (number * 37 % 500)
        try:
            future = await self._producer.send(Message(queue[0], body, queue=queue_ref(queue)))
        except CometError:
            self._recorder.sent(name, Outcome.FAILED)
            self._room.release()
            await asyncio.sleep(RETRY_S)
            return
        future.add_done_callback(partial(self._decided, name))

    def _decided(self, name: str, future: asyncio.Future[SendReceipt]) -> None:
        self._room.release()
        if future.cancelled() or future.exception() is not None:
            self._recorder.sent(name, Outcome.UNKNOWN)
            return
        receipt = future.result()
        good = receipt.status is SendStatus.SEND_OK
        log_offset = int(receipt.message_id.rpartition("/")[2])
        outcome = Outcome.OK if good else Outcome.STORED
        self._recorder.sent(name, outcome, receipt.queue_offset, log_offset)


class Steady:
    """Reads one queue by single pulls."""

    def __init__(self, consumer: PullConsumer, queue: Queue, recorder: Recorder) -> None:
        self._consumer = consumer
        self._queue = queue
        self._ref = queue_ref(queue)
        self._recorder = recorder
        self._at = Position(0, 0)

    @property
    def offset(self) -> int:
        return self._at.offset

    async def run(self) -> None:
        while True:
            with suppress(CometError):
                await self._session()
            await asyncio.sleep(RETRY_S)

    async def _session(self) -> None:
        """Begin where the group has committed, and read for a while."""
        kept = (await self._consumer.committed([self._ref]))[self._ref]
        if kept is not None:
            self._note(Step.ASKED, kept)
        bounds = (await self._consumer.bounds([self._ref]))[self._ref]
        self._at = kept or Position(bounds.generation, 0)
        self._note(Step.BEGAN, self._at)
        now = asyncio.get_running_loop().time
        ends_s, commits_s = now() + SESSION_S, now() + COMMIT_S
        while now() < ends_s:
            await self._pull()
            if now() >= commits_s:
                commits_s = now() + COMMIT_S
                await self._commit()

    async def _pull(self) -> None:
        try:
            batch = await self._consumer.pull(self._ref, self._at, count_max=500)
        except PositionFenced as fenced:
            self._go_on_at(Position(*_fence(fenced)))
            return
        except CometError:
            await asyncio.sleep(RETRY_S)
            return
        if batch.outcome is PullOutcome.OFFSET_MOVED:
            self._go_on_at(batch.next_position)
            return
        for message in batch.messages:
            self._recorder.seen(
                "steady",
                self._queue,
                name_of(message),
                offset=message.queue_offset,
                generation=batch.next_position.generation,
            )
        self._at = batch.next_position
        if not batch.messages:
            await asyncio.sleep(POLL_S)

    async def _commit(self) -> None:
        try:
            kept = (await self._consumer.commit({self._ref: self._at}))[self._ref]
        except CometError:
            return  # a fence shows at the next pull
        assert kept is not None, "a commit that was kept is told"
        self._note(Step.COMMITTED, kept)

    def _go_on_at(self, position: Position) -> None:
        self._at = position
        self._note(Step.FENCED, position)

    def _note(self, step: Step, position: Position) -> None:
        spot = position.generation, position.offset
        self._recorder.step("steady", self._queue, step, spot)


def _fence(error: PositionFenced) -> tuple[int, int]:
    assert error.fence is not None, error
    return error.fence


def name_of(message: ReceivedMessage) -> str:
    return message.body.partition(b" ")[0].decode()


class Pushed:
    """The listener of a push consumer, whose work takes ``work_s`` each time; then its messages
    count as seen. ``ends``: behind the last message of each queue.
    """

    def __init__(self, recorder: Recorder, work_s: float = 0.0) -> None:
        self._recorder = recorder
        self._work_s = work_s
        self.ends: dict[Queue, int] = {}

    async def listen(self, messages: list[ReceivedMessage]) -> None:
        await asyncio.sleep(self._work_s)
        for message in messages:
            queue = message.queue.topic, message.queue.queue_id
            self._recorder.seen("pushed", queue, name_of(message), offset=message.queue_offset)
            self.ends[queue] = max(self.ends.get(queue, 0), message.queue_offset + 1)


async def send_steadily(sender: Sender, queues: list[Queue]) -> None:
    for queue in itertools.cycle(queues):
        await sender.send(queue)
        await asyncio.sleep(ORDERLY_PAUSE_S)


async def send_in_bursts(sender: Sender, queues: list[Queue]) -> None:
    for queue in itertools.cycle(queues):
        for _ in range(EAGER_BURST):
            await sender.send(queue)
        await asyncio.sleep(EAGER_PAUSE_S)


async def until_told() -> None:
    """Until a line comes, or the other end is gone."""
    await asyncio.to_thread(sys.stdin.readline)


async def until_read(consumer: PullConsumer, steadies: dict[Queue, Steady], pushed: Pushed) -> None:
    """Until both readers are at the end of every queue."""
    while True:
        with suppress(CometError):
            bounds = await consumer.bounds([queue_ref(queue) for queue in steadies])
            ends = {(ref.topic, ref.queue_id): b.max_offset for ref, b in bounds.items()}
            if all(steadies[q].offset >= end <= pushed.ends.get(q, 0) for q, end in ends.items()):
                return
        await asyncio.sleep(RETRY_S)


async def play(namesrv: str, recorder: Recorder, topics: Iterable[str]) -> None:
    queues = queues_of(topics)
    pushed = Pushed(recorder)
    async with AsyncExitStack() as stack:
        orderly = Producer(namesrv, options=ProducerOptions(in_flight_max=1))
        eager = Producer(namesrv)
        consumer = PullConsumer(namesrv, "steady", options=PullConsumerOptions())
        pusher = PushConsumer(namesrv, "pushed", pushed.listen, options=PUSH)
        for each in (orderly, eager, consumer, pusher):
            await stack.enter_async_context(each)
        for topic in topics:
            await pusher.subscribe(topic)
        steadies = {queue: Steady(consumer, queue, recorder) for queue in queues}
        reading = [asyncio.create_task(steady.run()) for steady in steadies.values()]
        sending = [
            asyncio.create_task(send_steadily(Sender(ORDERLY, orderly, recorder), queues)),
            asyncio.create_task(send_in_bursts(Sender(EAGER, eager, recorder), queues)),
            *(asyncio.create_task(send_once(namesrv, topic, recorder)) for topic in topics),
        ]
        await until_told()
        await cancel(sending)
        await asyncio.gather(orderly.flush(), eager.flush())
        print("sent", flush=True)
        with suppress(TimeoutError):  # what was not read by then is for the checkers
            async with asyncio.timeout(DRAIN_S):
                await until_read(consumer, steadies, pushed)
        print("read", flush=True)
        await cancel(reading)


async def cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if not isinstance(result, asyncio.CancelledError):
            raise result or AssertionError("it ends only when it is told")


def run_delivery_client(
    play: Callable[[str, DeliveryRecorder, str], Coroutine[Any, Any, None]],
) -> None:
    """The process of a client of messages that come later: ``NAME HISTORY NAMESRV``."""
    name, path, namesrv = sys.argv[1:]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    with DeliveryRecorder(Path(path)) as recorder:
        asyncio.run(play(name, recorder, namesrv))


def main() -> None:
    namesrv, path, *topics = sys.argv[1:]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    with Recorder(Path(path)) as recorder:
        asyncio.run(play(namesrv, recorder, topics))


if __name__ == "__main__":
    main()
