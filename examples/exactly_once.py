"""A count that is exact: positions are kept in the same transaction as the result.

The consumer stores how far it has come beside what it has computed, so a crash takes back both or
neither. The broker's committed offsets are not needed; they are written for `cometmq group
progress` and the lag tables.

cometmq topic create Clicks
python -m examples.exactly_once clicks.db
"""

import asyncio
import sqlite3
import sys

from cometmq.client import Message, Position, Producer, PullConsumer, QueueRef

TOPIC, GROUP, COUNT = "Clicks", "ClickCounter", 1_000


class Counter:
    """The number of clicks, and the position of each queue behind the clicks that are in it."""

    def __init__(self, path: str) -> None:
        self._database = sqlite3.connect(path)
        self._database.executescript(
            "CREATE TABLE IF NOT EXISTS count (id INTEGER PRIMARY KEY, clicks INTEGER NOT NULL);"
            "INSERT OR IGNORE INTO count VALUES (1, 0);"
            "CREATE TABLE IF NOT EXISTS position "
            "(queue TEXT PRIMARY KEY, generation INTEGER, at INTEGER);"
        )

    @property
    def clicks(self) -> int:
        return int(self._database.execute("SELECT clicks FROM count").fetchone()[0])

    def position(self, queue: QueueRef) -> Position | None:
        found = self._database.execute(
            "SELECT generation, at FROM position WHERE queue = ?", (str(queue),)
        ).fetchone()
        return Position(*found) if found else None

    def add(self, queue: QueueRef, clicks: int, behind: Position) -> None:
        with self._database:
            self._database.execute("UPDATE count SET clicks = clicks + ?", (clicks,))
            self._database.execute(
                "INSERT OR REPLACE INTO position VALUES (?, ?, ?)",
                (str(queue), behind.generation, behind.offset),
            )


async def main(path: str) -> None:
    async with Producer() as producer:
        for _ in range(COUNT):
            await producer.send(Message(TOPIC, b"click"))
    counter = Counter(path)
    async with PullConsumer(group=GROUP) as consumer:
        await consumer.assign(await consumer.queues(TOPIC))
        for queue in await consumer.queues(TOPIC):
            if (position := counter.position(queue)) is not None:
                await consumer.seek(queue, position)
        while messages := await consumer.poll(timeout_ms=2_000):  # of one queue
            queue = messages[0].queue
            counter.add(queue, len(messages), await consumer.position(queue))
        await consumer.commit()
    print(f"{counter.clicks} clicks")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "clicks.db"))
