"""An order and its message, both or neither: a database and a topic in one transaction.

cometmq topic create ShopOrders
python -m examples.transactions
"""

import asyncio
import sqlite3
from contextlib import suppress

from cometmq.client import (
    Message,
    PushConsumer,
    ReceivedMessage,
    TransactionProducer,
    TransactionState,
)

TOPIC, PRODUCERS, SHIPPING = "ShopOrders", "Shop", "ShopShipping"

database = sqlite3.connect(":memory:", check_same_thread=False)
database.execute("CREATE TABLE orders (name TEXT PRIMARY KEY)")
shipped = 0
all_shipped = asyncio.Event()


def is_stored(message: ReceivedMessage) -> TransactionState:
    """Brokers ask this when a producer has died between the message and the end."""
    found = database.execute("SELECT 1 FROM orders WHERE name = ?", [message.body.decode()])
    return TransactionState.COMMIT if found.fetchone() else TransactionState.ROLLBACK


async def ship(messages: list[ReceivedMessage]) -> None:
    global shipped
    for message in messages:
        print(f"{message.body.decode()} is shipped")
    shipped += len(messages)
    if shipped == 3:
        all_shipped.set()


async def order(producer: TransactionProducer, name: str) -> None:
    async with producer.transaction() as transaction:
        await transaction.send(Message(TOPIC, name.encode()))
        with database:
            database.execute("INSERT INTO orders VALUES (?)", [name])


async def main() -> None:
    async with (
        TransactionProducer(None, PRODUCERS, is_stored, topics=[TOPIC]) as producer,
        PushConsumer(None, SHIPPING, ship) as consumer,
    ):
        await consumer.subscribe(TOPIC)
        await order(producer, "pears")
        await order(producer, "plums")
        with suppress(sqlite3.IntegrityError):
            await order(producer, "pears")  # the insert fails: the message is rolled back
        forgotten = producer.transaction()  # as if this process died: the broker asks is_stored
        await forgotten.send(Message(TOPIC, b"apples"))
        with database:
            database.execute("INSERT INTO orders VALUES ('apples')")
        forgotten.leave_open()
        await all_shipped.wait()
    print(f"{shipped} of 3 orders are shipped, each once")


if __name__ == "__main__":
    asyncio.run(main())
