"""Writes what a topic has now as JSON lines, and ends. It joins no group and commits nothing.

python -m examples.dump Orders > orders.jsonl
"""

import asyncio
import base64
import json
import sys

from cometmq.client import Position, PullConsumer, PullOutcome, QueueRef


async def dump(consumer: PullConsumer, queue: QueueRef) -> int:
    """The messages from the queue's first to the last that is there at the start."""
    bounds = (await consumer.bounds([queue]))[queue]
    position, count = Position(bounds.generation, bounds.min_offset), 0
    while position.offset < bounds.max_offset:
        batch = await consumer.pull(queue, position)
        if batch.outcome is PullOutcome.NOT_FOUND:
            break  # the topic was emptied meanwhile
        for message in batch.messages:
            if message.queue_offset < bounds.max_offset:
                count += 1
                row = {
                    "id": message.message_id,
                    "queue": str(queue),
                    "offset": message.queue_offset,
                    "stored_ms": message.store_time_ms,
                    "tag": message.tag,
                    "keys": message.keys,
                    "body_base64": base64.b64encode(message.body).decode(),
                }
                print(json.dumps(row))
        position = batch.next_position
    return count


async def main(topic: str) -> None:
    async with PullConsumer(group="dump") as consumer:
        queues = await consumer.queues(topic)
        counts = await asyncio.gather(*[dump(consumer, queue) for queue in queues])
        print(f"{sum(counts)} messages of {len(queues)} queues", file=sys.stderr)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
