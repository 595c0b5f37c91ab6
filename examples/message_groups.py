"""Messages of one account one after the other, those of many accounts at the same time.

With `OrderBy.MESSAGE_GROUP` a queue has one listener call at a time for each `sharding_key`, and
up to `concurrency` keys at once. A key that fails waits alone: the others of its queue go on.

cometmq topic create Bookings
python -m examples.message_groups
"""

import asyncio

from cometmq.client import (
    Message,
    OrderBy,
    Producer,
    PushConsumer,
    PushConsumerOptions,
    ReceivedMessage,
)

TOPIC, GROUP = "Bookings", "Ledger"
ACCOUNTS, BOOKINGS = 20, 3
OPTIONS = PushConsumerOptions(
    orderly=True, order_by=OrderBy.MESSAGE_GROUP, concurrency=ACCOUNTS, suspend_queue_ms=50
)

balances: dict[str, int] = {}
booked: list[str] = []
LOCKED, OTHERS = "account-7", (ACCOUNTS - 1) * BOOKINGS  # until all others are booked
all_booked = asyncio.Event()


async def book(messages: list[ReceivedMessage]) -> None:
    for message in messages:
        account = message.sharding_key
        if account == LOCKED and len(booked) < OTHERS:
            raise ConnectionError(f"{account} is locked")
        number = int(message.body)
        assert balances.get(account, 0) == number, "in order, none twice at a time"
        await asyncio.sleep(0.01)
        balances[account] = number + 1
        booked.append(account)
    if len(booked) == ACCOUNTS * BOOKINGS:
        all_booked.set()


async def main() -> None:
    async with Producer() as producer:
        for number in range(BOOKINGS):
            for account in range(ACCOUNTS):
                key = f"account-{account}"
                await producer.send(Message(TOPIC, b"%d" % number, sharding_key=key))
    async with PushConsumer(group=GROUP, listener=book, options=OPTIONS) as consumer:
        await consumer.subscribe(TOPIC)
        await all_booked.wait()
    in_order = sum(balance == BOOKINGS for balance in balances.values())
    print(f"{in_order} of {ACCOUNTS} accounts in order, last: {booked[-1]}")


if __name__ == "__main__":
    asyncio.run(main())
