"""A message for a time of its own, and one that is taken back before: the order was paid.

cometmq topic create Deadlines
python -m examples.recall
"""

import asyncio
import time

from cometmq.client import Message, Producer, PushConsumer, ReceivedMessage

TOPIC, GROUP = "Deadlines", "Cancellation"

all_checked = asyncio.Event()


async def cancel(messages: list[ReceivedMessage]) -> None:
    for message in messages:
        print(f"{message.body.decode()} is cancelled: nobody paid")
        if message.body == b"order-3":
            all_checked.set()


async def main() -> None:
    async with Producer() as producer, PushConsumer(group=GROUP, listener=cancel) as consumer:
        await consumer.subscribe(TOPIC)
        noon_ms = time.time_ns() // 1_000_000 + 1_500  # any time up to timer_max_delay_sec ahead
        handles: dict[str, str] = {}
        for number, order in enumerate(("order-1", "order-2", "order-3")):
            message = Message(TOPIC, order.encode(), deliver_at_ms=noon_ms + number)
            handles[order] = (await producer.send_and_wait(message)).recall_handle
        in_time = await producer.recall(handles["order-2"])
        print(f"order-2 is paid {'in time' if in_time else 'too late'}")
        await all_checked.wait()


if __name__ == "__main__":
    asyncio.run(main())
