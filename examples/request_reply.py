"""A request and its reply: one program asks a group of workers for prices, and waits for each.

cometmq topic create PriceRequests
python -m examples.request_reply
"""

import asyncio

from cometmq.client import Message, Producer, PushConsumer, PushConsumerOptions, ReceivedMessage
from cometmq.errors import RequestTimeout

TOPIC, GROUP = "PriceRequests", "PriceService"
PRICES = {"apple": 30, "pear": 45, "plum": 20}
OPTIONS = PushConsumerOptions(concurrency=8)


class PriceService:
    """A consumer that replies. Any number of them may run: one of the group gets a request."""

    def __init__(self) -> None:
        self.consumer = PushConsumer(group=GROUP, listener=self.answer, options=OPTIONS)

    async def answer(self, messages: list[ReceivedMessage]) -> None:
        for message in messages:
            price = PRICES.get(message.body.decode())
            if price is not None:  # who asks for another fruit waits in vain
                await self.consumer.reply(message, b"%d" % price)


async def main() -> None:
    service = PriceService()
    async with service.consumer, Producer() as producer:
        await service.consumer.subscribe(TOPIC)
        asked = [producer.request(Message(TOPIC, fruit.encode()), 30.0) for fruit in PRICES]
        for fruit, reply in zip(PRICES, await asyncio.gather(*asked), strict=True):
            print(f"{fruit}: {int(reply.body)} cents")
        try:
            await producer.request(Message(TOPIC, b"stone"), timeout_s=1.0)
        except RequestTimeout as error:
            print(error.name())


if __name__ == "__main__":
    asyncio.run(main())
