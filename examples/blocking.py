"""A listener that blocks: a plain function, called in threads.

cometmq topic create Images
python -m examples.blocking
"""

import asyncio
import threading
import time

from cometmq.client import Message, Producer, PushConsumer, PushConsumerOptions, ReceivedMessage

TOPIC, GROUP, COUNT = "Images", "Thumbnails", 12
OPTIONS = PushConsumerOptions(concurrency=4, batch_count=1)  # four threads, a message each
done: list[str] = []
all_done = threading.Event()


def make_thumbnail(messages: list[ReceivedMessage]) -> None:
    """It may use any library that waits: a database driver, an HTTP client, a subprocess."""
    time.sleep(0.2)
    done.extend(message.body.decode() for message in messages)
    if len(done) >= COUNT:
        all_done.set()


async def main() -> None:
    async with Producer() as producer:
        for number in range(COUNT):
            await producer.send(Message(TOPIC, f"image-{number}".encode()))
    async with PushConsumer(group=GROUP, listener=make_thumbnail, options=OPTIONS) as consumer:
        await consumer.subscribe(TOPIC)
        started_s = time.monotonic()
        await asyncio.to_thread(all_done.wait)
        print(f"{len(set(done))} images in {time.monotonic() - started_s:.1f} s by 4 threads")


if __name__ == "__main__":
    asyncio.run(main())
