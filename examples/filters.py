"""Two groups that want some of a topic's messages: one by tag, one by an SQL92 expression.

Brokers choose; what a group does not want never travels to it.

cometmq topic create Trades
python -m examples.filters
"""

import asyncio
from collections.abc import Awaitable, Callable

from cometmq.client import Message, Producer, PushConsumer, ReceivedMessage
from cometmq.errors import FilterInvalid

TOPIC = "Trades"
TRADES = [("sell", "eu", "40"), ("buy", "eu", "7"), ("buy", "us", "90"), ("buy", "eu", "90")]


def printer(
    group: str, wanted: int, finished: asyncio.Event
) -> Callable[[list[ReceivedMessage]], Awaitable[None]]:
    seen: list[str] = []

    async def take(messages: list[ReceivedMessage]) -> None:
        seen.extend(message.body.decode() for message in messages)
        if len(seen) == wanted:
            print(f"{group}: {', '.join(sorted(seen))}")
            finished.set()

    return take


async def main() -> None:
    first, second = asyncio.Event(), asyncio.Event()
    sellers, large = printer("Sellers", 1, first), printer("LargeInEurope", 1, second)
    async with (
        Producer() as producer,
        PushConsumer(group="Sellers", listener=sellers) as by_tag,
        PushConsumer(group="LargeInEurope", listener=large) as by_property,
    ):
        await by_tag.subscribe(TOPIC, "sell || short")
        await by_property.subscribe(TOPIC, sql="region = 'eu' AND amount >= 50")
        try:
            await by_property.subscribe(TOPIC, sql="region == 'eu'")
        except FilterInvalid as error:  # the filter of before holds
            print("refused:", error.message)
        for side, region, amount in TRADES:
            properties = {"region": region, "amount": amount}
            body = f"{side} {amount} in {region}".encode()
            await producer.send(Message(TOPIC, body, tag=side, properties=properties))
        await asyncio.gather(first.wait(), second.wait())


if __name__ == "__main__":
    asyncio.run(main())
