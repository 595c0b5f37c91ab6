"""A message that consumers get after a delay: is the order still unpaid after one second?

cometmq topic create Reminders
python -m examples.reminders
"""

import asyncio

from cometmq.client import Message, Producer, PushConsumer, ReceivedMessage

TOPIC, GROUP = "Reminders", "PaymentCheck"
AFTER_1_S = 1  # levels 1 to 18: 1, 5, 10, 30 s; 1 to 10 min; 20, 30 min; 1, 2 h

paid = {"order-2"}
checked: list[str] = []
all_checked = asyncio.Event()


async def check(messages: list[ReceivedMessage]) -> None:
    for message in messages:
        order = message.body.decode()
        waited_ms = message.store_time_ms - message.born_time_ms
        print(f"{order} is {'paid' if order in paid else 'cancelled'} after {waited_ms} ms")
        checked.append(order)
    if len(checked) == 2:
        all_checked.set()


async def main() -> None:
    async with Producer() as producer, PushConsumer(group=GROUP, listener=check) as consumer:
        await consumer.subscribe(TOPIC)
        for order in ("order-1", "order-2"):
            await producer.send_and_wait(Message(TOPIC, order.encode(), delay_level=AFTER_1_S))
        await all_checked.wait()


if __name__ == "__main__":
    asyncio.run(main())
