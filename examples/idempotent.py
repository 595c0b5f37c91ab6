"""Payments that count once, however often their messages come.

A queue delivers at least once: after a crash between the work and its commit a message is delivered
again. The work and the payment's key therefore go into one transaction of the database. The key is
chosen by the sender, so that it also knows a payment that an application sent twice by itself.

cometmq topic create Payments
python -m examples.idempotent
"""

import asyncio
import json
import sqlite3

from cometmq.client import Message, Producer, PushConsumer, ReceivedMessage

TOPIC, GROUP = "Payments", "Accounts"


class Accounts:
    """Balances, and the keys of the payments that are in them."""

    def __init__(self, path: str) -> None:
        self._database = sqlite3.connect(path)
        self._database.executescript(
            "CREATE TABLE IF NOT EXISTS payment (key TEXT PRIMARY KEY);"
            "CREATE TABLE IF NOT EXISTS account (name TEXT PRIMARY KEY, cents INTEGER NOT NULL);"
        )

    def book(self, key: str, name: str, cents: int) -> bool:
        """Whether the payment is new. Both tables change, or neither."""
        with self._database:
            new = self._database.execute("INSERT OR IGNORE INTO payment VALUES (?)", (key,))
            if not new.rowcount:
                return False
            self._database.execute(
                "INSERT INTO account VALUES (?1, ?2) ON CONFLICT DO UPDATE SET cents = cents + ?2",
                (name, cents),
            )
            return True

    def balance(self, name: str) -> int:
        row = self._database.execute("SELECT cents FROM account WHERE name = ?", (name,)).fetchone()
        return int(row[0]) if row else 0


async def main() -> None:
    accounts = Accounts(":memory:")
    seen: list[bool] = []
    finished = asyncio.Event()

    async def book(messages: list[ReceivedMessage]) -> None:
        for message in messages:
            payment = json.loads(message.body)
            seen.append(accounts.book(message.keys[0], payment["account"], payment["cents"]))
        if len(seen) == 4:
            finished.set()

    payments = [("p-1", 500), ("p-2", 250), ("p-1", 500), ("p-1", 500)]  # one of them three times
    async with Producer() as producer:
        for key, cents in payments:
            body = json.dumps({"account": "alice", "cents": cents}).encode()
            await producer.send(Message(TOPIC, body, keys=(key,)))
    async with PushConsumer(group=GROUP, listener=book) as consumer:
        await consumer.subscribe(TOPIC)
        await finished.wait()
    print(f"{len(seen)} messages, {sum(seen)} payments, balance {accounts.balance('alice')} cents")


if __name__ == "__main__":
    asyncio.run(main())
