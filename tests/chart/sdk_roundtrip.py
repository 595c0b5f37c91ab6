"""Runs inside a pod: sends messages to the topic named in the argument, one by one, each when the
one before has arrived at a consumer that waits for it. Prints what arrived.
"""

from __future__ import annotations

import asyncio
import os
import sys

from cometmq.client import Message, Producer, PushConsumer, ReceivedMessage

COUNT = 10
ARRIVAL_S_MAX = 20.0


async def main(namesrv: str, topic: str) -> None:
    arrived: asyncio.Queue[str] = asyncio.Queue(COUNT)

    async def listener(messages: list[ReceivedMessage]) -> None:
        for message in messages:
            arrived.put_nowait(message.body.decode())

    async with Producer(namesrv) as producer, PushConsumer(namesrv, "g", listener) as consumer:
        await consumer.subscribe(topic)
        for number in range(COUNT):
            await producer.send_and_wait(Message(topic, f"message {number}".encode()))
            async with asyncio.timeout(ARRIVAL_S_MAX):
                print(await arrived.get())


asyncio.run(main(os.environ["COMETMQ_NAMESRV"], sys.argv[1]))
