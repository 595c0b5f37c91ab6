"""One member of a group that receives (POP), as a process that is killed, stopped and cut off:
``python -m tests.chaos.receivers NAME HISTORY NAMESRV``.

By the message's number its work is fast, or longer than the message's time with or without a longer
time asked for, or the message is forgotten at its first delivery. A line on its standard input ends
it. Beside it is a member of the group that operators ask (:mod:`tests.chaos.asked`).
"""

from __future__ import annotations

import asyncio
import itertools
import time

from cometmq.client import ConsumeFrom, ReceivedMessage, SimpleConsumer, SimpleConsumerOptions
from cometmq.errors import CometError, HandleInvalid
from tests.chaos.asked import member
from tests.chaos.topics import ASKED, RECEIVED
from tests.chaos.workload import RETRY_S, name_of, run_delivery_client, until_told
from tests.support.faults.delivery_history import DeliveryRecorder, Place

GROUP = "receivers"
INVISIBLE_MS = 10_000
WAIT_MS = 1_000  # of a receive that finds nothing
COUNT_MAX = 8
WORK_S = 0.05
SLOW_S = 12.0  # longer than the message is nobody else's
RENEW_S = 7.0


class Receiver:
    def __init__(self, name: str, consumer: SimpleConsumer, recorder: DeliveryRecorder) -> None:
        self._name = name
        self._consumer = consumer
        self._recorder = recorder
        self._numbers = itertools.count()
        self._working: set[asyncio.Task[None]] = set()

    async def receive(self) -> None:
        while True:
            asked_s = time.monotonic()
            try:
                found = await self._consumer.receive(
                    COUNT_MAX, invisible_ms=INVISIBLE_MS, wait_ms=WAIT_MS
                )
            except CometError:
                await asyncio.sleep(RETRY_S)
                continue
            for message in found:
                call = f"{self._name}/{next(self._numbers)}"
                place = Place((message.queue.topic, message.queue.queue_id), message.queue_offset)
                until_s = asked_s + INVISIBLE_MS / 1000
                name = name_of(message)
                self._recorder.given(call, self._name, place, name, asked_s, until_s)
                task = asyncio.create_task(self._work(call, message))
                self._working.add(task)
                task.add_done_callback(self._working.discard)

    async def _work(self, call: str, message: ReceivedMessage) -> None:
        number = int(name_of(message).partition("/")[2])
        is_first = message.attempt == 1
        if number % 17 == 3 and is_first:
            return
        if number % 19 == 4:
            await asyncio.sleep(RENEW_S)
            if not await self._renew(call, message):
                return
            await asyncio.sleep(RENEW_S)
        elif number % 13 == 5 and is_first:
            await asyncio.sleep(SLOW_S)
        else:
            await asyncio.sleep(WORK_S)
        self._recorder.acking(call)
        try:
            await self._consumer.ack(message)
        except HandleInvalid as error:
            self._recorder.acked(call, error.name())
        except CometError:
            return  # it is not known
        else:
            self._recorder.acked(call)

    async def _renew(self, call: str, message: ReceivedMessage) -> bool:
        asked_s = time.monotonic()
        try:
            await self._consumer.change_invisible_time(message, INVISIBLE_MS)
        except CometError:
            return False
        self._recorder.renewed(call, asked_s + INVISIBLE_MS / 1000)
        return True


async def play(name: str, recorder: DeliveryRecorder, namesrv: str) -> None:
    options = SimpleConsumerOptions(consume_from=ConsumeFrom.FIRST)
    async with (
        SimpleConsumer(namesrv, GROUP, options=options) as consumer,
        member(namesrv, name, recorder) as asked,
    ):
        await consumer.subscribe(RECEIVED)
        asked.suspend()
        await asked.subscribe(ASKED)
        receiving = asyncio.create_task(Receiver(name, consumer, recorder).receive())
        await until_told()
        receiving.cancel()


if __name__ == "__main__":
    run_delivery_client(play)
