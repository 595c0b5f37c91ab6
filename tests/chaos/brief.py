"""Clients that are killed: ``python -m tests.chaos.brief NAME HISTORY NAMESRV TOPIC…``.

A producer of that name, and another push consumer of the group *pushed*, which takes over queues
from the one of :mod:`tests.chaos.workload`, and gives them back when its process ends. A line on
its standard input ends it in order.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

from cometmq.client import Producer, ProducerOptions, PushConsumer
from tests.chaos.topics import queues_of
from tests.chaos.workload import PUSH, Pushed, Sender, cancel, send_steadily, until_told
from tests.support.faults.history import Recorder

WORK_S = 0.5  # long enough that there is always something unfinished when the process is killed


async def play(name: str, recorder: Recorder, namesrv: str, *topics: str) -> None:
    pushed = Pushed(recorder, WORK_S)
    async with (
        Producer(namesrv, options=ProducerOptions(in_flight_max=1)) as producer,
        PushConsumer(namesrv, "pushed", pushed.listen, options=PUSH) as consumer,
    ):
        for topic in topics:
            await consumer.subscribe(topic)
        sender = Sender(name, producer, recorder)
        sending = asyncio.create_task(send_steadily(sender, queues_of(topics)))
        await until_told()
        await cancel([sending])
        await producer.flush()


def main() -> None:
    name, path, *rest = sys.argv[1:]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    with Recorder(Path(path)) as recorder:
        asyncio.run(play(name, recorder, *rest))


if __name__ == "__main__":
    main()
