"""A consumer as a service: it works until SIGTERM or Ctrl-C, and loses nothing then.

Start it twice: the two processes divide the queues. Send to it with `cometmq message send`.

cometmq topic create Orders
python -m examples.service
"""

import asyncio
import logging
import signal

from cometmq.client import PushConsumer, PushConsumerOptions, ReceivedMessage

TOPIC, GROUP = "Orders", "OrderService"
OPTIONS = PushConsumerOptions(
    concurrency=8,  # calls of the listener at a time
    batch_count=16,  # messages a call gets at most
    drain_timeout_ms=20_000,  # for running calls at the end: less than Kubernetes' grace period
)


async def handle(messages: list[ReceivedMessage]) -> None:
    """Whatever it raises, these messages come again; when it returns, they are done."""
    for message in messages:
        print(f"done {message.body.decode()} of queue {message.queue.queue_id}", flush=True)


async def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with PushConsumer(group=GROUP, listener=handle, options=OPTIONS) as consumer:
        await consumer.subscribe(TOPIC)
        print("ready", flush=True)
        await stop.wait()
    # The block has let running calls end, committed what they did, and left the group.
    print("committed", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
