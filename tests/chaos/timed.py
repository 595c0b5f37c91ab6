"""Messages that come later, as one process: ``python -m tests.chaos.timed NAME HISTORY NAMESRV``.

It sends messages with a time of their own, one by one and in storms that are all due in the same
ms, and takes some back, at once or as their time comes. It sends what :mod:`tests.chaos.receivers`
receive, and watches the topics of delivered and of committed messages. A line on its standard input
ends the producers; it ends itself when all that it knows of has come.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from asyncio import Future
from contextlib import AsyncExitStack, suppress
from functools import partial

from cometmq.client import Message, Producer, PullConsumer, SendReceipt, SendStatus
from cometmq.errors import CometError, SendTimeout
from tests.chaos.topics import DUE, RECEIVED, SETTLED, queues_of
from tests.chaos.workload import (
    DRAIN_S,
    RETRY_S,
    UNDECIDED_MAX,
    Sender,
    Steady,
    cancel,
    queue_ref,
    run_delivery_client,
    until_told,
)
from tests.support.faults.delivery_history import DeliveryRecorder
from tests.support.faults.history import Outcome, Queue

PAUSE_S, DELAY_S = 0.1, (0.05, 9.0)  # of single messages
STORM_PAUSE_S, STORM_COUNT, STORM_DELAY_S = 3.0, 100, 4.0
RECEIVED_PAUSE_S = 0.07
RECALL_S = 0.3  # after the message was acknowledged
BEFORE_S = (-0.02, 0.05)  # a recall that comes so long before the message's time
RECALL_TRIES = 5
RECALLS_S = 30.0  # in the end


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class TimedSender:
    """Its messages are numbered; body ``<name>/<number>``."""

    def __init__(self, name: str, producer: Producer, recorder: DeliveryRecorder) -> None:
        self._name = name
        self._producer = producer
        self._recorder = recorder
        self._numbers = itertools.count()
        self._room = asyncio.Semaphore(UNDECIDED_MAX)
        self._recalls: set[asyncio.Task[None]] = set()
        self.last_due_ms = 0

    async def send(self, due_ms: int) -> None:
        """One message; its outcome is written when it is known."""
        await self._room.acquire()
        number = next(self._numbers)
        name = f"{self._name}/{number}"
        self._recorder.timed(name, due_ms, time.monotonic() + (due_ms - now_ms()) / 1000)
        self.last_due_ms = max(self.last_due_ms, due_ms)
        try:
            future = await self._producer.send(Message(DUE, name.encode(), deliver_at_ms=due_ms))
        except CometError:
            self._recorder.timed_sent(name, Outcome.FAILED)
            self._room.release()
            await asyncio.sleep(RETRY_S)
            return
        future.add_done_callback(partial(self._decided, name, number, due_ms))

    def _decided(self, name: str, number: int, due_ms: int, future: Future[SendReceipt]) -> None:
        self._room.release()
        if future.cancelled() or future.exception() is not None:
            self._recorder.timed_sent(name, Outcome.UNKNOWN)
            return
        receipt = future.result()
        good = receipt.status is SendStatus.SEND_OK
        self._recorder.timed_sent(name, Outcome.OK if good else Outcome.STORED)
        if number % 8 == 1:
            at_once = number % 16 == 1
            before_s = random.uniform(*BEFORE_S)
            wait_s = RECALL_S if at_once else (due_ms - now_ms()) / 1000 - before_s
            recall = asyncio.create_task(self._recall(name, receipt.recall_handle, wait_s))
            self._recalls.add(recall)
            recall.add_done_callback(self._recalls.discard)

    async def _recall(self, name: str, handle: str, wait_s: float) -> None:
        await asyncio.sleep(max(0.0, wait_s))
        self._recorder.recall(name)
        for _ in range(RECALL_TRIES):
            try:
                in_time = await self._producer.recall(handle)
            except SendTimeout:
                continue
            except CometError:
                return
            self._recorder.recalled(name, in_time=in_time)
            return

    async def recalled(self) -> None:
        """All recalls are over, or are given up: what became of their messages is not known."""
        recalls = list(self._recalls)
        if recalls:
            await asyncio.wait(recalls, timeout=RECALLS_S)
        for recall in recalls:
            recall.cancel()
        await asyncio.gather(*recalls, return_exceptions=True)


async def send_single(sender: TimedSender) -> None:
    while True:
        await sender.send(now_ms() + int(1000 * random.uniform(*DELAY_S)))
        await asyncio.sleep(PAUSE_S)


async def send_storms(sender: TimedSender) -> None:
    while True:
        due_ms = now_ms() + int(1000 * STORM_DELAY_S)
        for _ in range(STORM_COUNT):
            await sender.send(due_ms)
        await asyncio.sleep(STORM_PAUSE_S)


async def send_to_receivers(sender: Sender) -> None:
    for queue in itertools.cycle(queues_of([RECEIVED])):
        await sender.send(queue)
        await asyncio.sleep(RECEIVED_PAUSE_S)


async def until_all_has_come(
    consumer: PullConsumer, steadies: dict[Queue, Steady], last_due_ms: int
) -> None:
    """The last message's time has come, and the watcher is at the end of every queue."""
    while True:
        with suppress(CometError):
            bounds = await consumer.bounds([queue_ref(queue) for queue in steadies])
            ends = {(ref.topic, ref.queue_id): b.max_offset for ref, b in bounds.items()}
            is_read = all(steadies[queue].offset >= end for queue, end in ends.items())
            if is_read and now_ms() > last_due_ms + 2_000:
                return
        await asyncio.sleep(RETRY_S)


async def play(name: str, recorder: DeliveryRecorder, namesrv: str) -> None:
    async with AsyncExitStack() as stack:
        producers = [Producer(namesrv) for _ in range(3)]
        consumer = PullConsumer(namesrv, "watching")
        for producer in producers:
            await stack.enter_async_context(producer)
        await stack.enter_async_context(consumer)
        single, storms = (
            TimedSender(f"{name}-{kind}", producer, recorder)
            for kind, producer in zip(("single", "storms"), producers, strict=False)
        )
        to_receivers = Sender(f"{name}-received", producers[2], recorder)
        watched = queues_of([DUE, SETTLED])
        steadies = {queue: Steady(consumer, queue, recorder) for queue in watched}
        reading = [asyncio.create_task(steady.run()) for steady in steadies.values()]
        sending = [
            asyncio.create_task(send_single(single)),
            asyncio.create_task(send_storms(storms)),
            asyncio.create_task(send_to_receivers(to_receivers)),
        ]
        await until_told()
        await cancel(sending)
        await asyncio.gather(*(producer.flush() for producer in producers))
        await asyncio.gather(single.recalled(), storms.recalled())
        last_due_ms = max(single.last_due_ms, storms.last_due_ms)
        with suppress(TimeoutError):  # what was not read by then is for the checkers
            async with asyncio.timeout(DRAIN_S):
                await until_all_has_come(consumer, steadies, last_due_ms)
        await cancel(reading)


if __name__ == "__main__":
    run_delivery_client(play)
