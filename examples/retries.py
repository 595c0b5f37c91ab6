"""A message that fails is tried again later; one that cannot succeed becomes a dead letter at once.

cometmq topic create Invoices
python -m examples.retries
cometmq dlq list InvoiceMailer
"""

import asyncio

from cometmq.client import (
    Later,
    Message,
    Producer,
    PushConsumer,
    PushConsumerOptions,
    ReceivedMessage,
)

TOPIC, GROUP = "Invoices", "InvoiceMailer"
AFTER_1_S, NEVER = 1, -1  # delay levels: 1 = 1 s to 18 = 2 h; 0 = 10 s, 30 s, 1 min … 2 h by itself
OPTIONS = PushConsumerOptions(batch_count=1)  # a verdict is about all messages of a call

sent = asyncio.Event()


async def mail(messages: list[ReceivedMessage]) -> Later | None:
    [message] = messages
    print(f"{message.body.decode()}: try {message.reconsume_times + 1}")
    if message.body == b"invoice without an address":
        return Later(delay_level=NEVER)
    if message.reconsume_times == 0:
        return Later(delay_level=AFTER_1_S)  # the mail server is busy, say
    sent.set()
    return None


async def main() -> None:
    async with (
        Producer() as producer,
        PushConsumer(group=GROUP, listener=mail, options=OPTIONS) as consumer,
    ):
        await consumer.subscribe(TOPIC)
        for text in ("invoice without an address", "invoice 7"):
            await producer.send_and_wait(Message(TOPIC, text.encode()))
        await sent.wait()


if __name__ == "__main__":
    asyncio.run(main())
