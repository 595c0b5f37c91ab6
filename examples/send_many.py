"""Sends ten thousand messages without waiting for each, and prints what became of them.

cometmq topic create Measurements
python -m examples.send_many
"""

import asyncio
import time

from cometmq.client import Message, Producer, SendStatus
from cometmq.errors import BodyTooLarge, CometError

TOPIC = "Measurements"
COUNT = 10_000


async def main() -> None:
    async with Producer() as producer:
        started_s = time.monotonic()
        # `send` puts a message into the buffer; it waits only while the buffer is full.
        futures = [
            await producer.send(Message(TOPIC, f"{number}".encode(), tag="celsius"))
            for number in range(COUNT)
        ]
        answers = await asyncio.gather(*futures, return_exceptions=True)
        seconds = time.monotonic() - started_s

        # A failed message is named by its error; nothing else of its batch is lost.
        failed = [answer for answer in answers if isinstance(answer, CometError)]
        stored = [answer for answer in answers if not isinstance(answer, BaseException)]
        safe = sum(receipt.status is SendStatus.SEND_OK for receipt in stored)
        print(f"stored {len(stored)}, as safe as the topic asks {safe}, failed {len(failed)}")
        print(f"{COUNT / seconds:,.0f} messages a second")

        try:
            await producer.send(Message(TOPIC, bytes(5 * 1024 * 1024)))
        except BodyTooLarge as error:  # what can be known before is raised at once
            print("not sent:", error.code)


if __name__ == "__main__":
    asyncio.run(main())
