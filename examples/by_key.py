"""Messages of one order stay in order: all of them go to one queue, the one of their key.

Messages of other orders use the other queues. With `orderly=True` a queue has one listener call at
a time, in its order. A message that fails comes again after `suspend_queue_ms`, and what follows it
waits: an exception is all that a listener has to raise.

cometmq topic create Changes --queues 4
python -m examples.by_key
"""

import asyncio
from collections import defaultdict

from cometmq.client import Message, Producer, PushConsumer, PushConsumerOptions, ReceivedMessage

TOPIC, GROUP = "Changes", "OrderHistory"
ORDERS, STEPS = 8, ("created", "paid", "packed", "sent")
OPTIONS = PushConsumerOptions(orderly=True, suspend_queue_ms=50)

history: defaultdict[str, list[str]] = defaultdict(list)
has_failed: set[str] = set()
complete = asyncio.Event()


def store(order: str, step: str) -> None:
    """A database that is away now and then."""
    if step == "paid" and order not in has_failed:
        has_failed.add(order)
        raise ConnectionError
    history[order].append(step)


async def record(messages: list[ReceivedMessage]) -> None:
    for message in messages:
        store(message.sharding_key, message.body.decode())
    if sum(map(len, history.values())) == ORDERS * len(STEPS):
        complete.set()


async def main() -> None:
    async with Producer() as producer:
        for step in STEPS:
            for number in range(ORDERS):
                key = f"order-{number}"
                await producer.send(Message(TOPIC, step.encode(), sharding_key=key))
    async with PushConsumer(group=GROUP, listener=record, options=OPTIONS) as consumer:
        await consumer.subscribe(TOPIC)
        await complete.wait()
    in_order = sum(tuple(steps) == STEPS for steps in history.values())
    print(f"{in_order} of {ORDERS} orders in order, {len(has_failed)} failed once")


if __name__ == "__main__":
    asyncio.run(main())
