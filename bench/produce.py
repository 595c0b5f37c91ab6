"""How many messages a second one producer process gets acknowledged.

Every message is a ``send`` of its own and every receipt is looked at, as an application would. With
``--many`` so many messages are a ``send_many``. The clock stops when the last message sent is
acknowledged. Says ``started`` when it starts.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import deque
from functools import partial

import uvloop

from bench.processes import Line, Meter, say, watch_argument, watched
from cometmq.client import Message, Producer, SendReceipt, SendReceipts

UNCONFIRMED_MAX = 20_000
BURST = 64  # messages between two looks at the clock
WARM_UP_S = 0.5
MANY = 1024  # messages of a send_many, where benches compare it


async def send_for(producer: Producer, topic: str, body: bytes, seconds: float) -> int:
    """Messages sent and acknowledged; raises the error of the first that was not."""
    receipts: deque[asyncio.Future[SendReceipt]] = deque()
    end = time.perf_counter() + seconds
    count = 0
    while time.perf_counter() < end:
        for _ in range(BURST):
            receipts.append(await producer.send(Message(topic, body)))
        count += BURST
        while len(receipts) > UNCONFIRMED_MAX:
            await receipts.popleft()
    await producer.flush()
    for receipt in receipts:
        receipt.result()
    return count


async def send_many_for(
    producer: Producer, topic: str, body: bytes, seconds: float, many: int
) -> int:
    """The same with ``send_many``."""
    receipts: deque[asyncio.Future[SendReceipts]] = deque()
    end = time.perf_counter() + seconds
    count = 0
    while time.perf_counter() < end:
        receipts.append(await producer.send_many([Message(topic, body) for _ in range(many)]))
        count += many
        while len(receipts) * many > UNCONFIRMED_MAX:
            (await receipts.popleft()).raise_first_error()
    for future in receipts:
        (await future).raise_first_error()
    return count


async def measure(arguments: argparse.Namespace) -> Line:
    body = bytes(arguments.body_bytes)
    send = partial(send_many_for, many=arguments.many) if arguments.many else send_for
    async with Producer(arguments.namesrv) as producer:
        warm = await send(producer, arguments.topic, body, WARM_UP_S)
        say({"started": 1})
        meter = Meter(watched(arguments))
        count = await send(producer, arguments.topic, body, arguments.seconds)
        return meter.stop(count) | {"stored": warm + count}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.produce", description=__doc__)
    parser.add_argument("--namesrv", required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--body_bytes", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument(
        "--many", type=int, default=0, help="messages of a send_many; 0 = send each"
    )
    watch_argument(parser)
    say(uvloop.run(measure(parser.parse_args())))


if __name__ == "__main__":
    main()
