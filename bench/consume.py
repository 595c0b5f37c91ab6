"""How many messages a second one consumer process gets through its listener.

A push consumer of a new group reads what lies in the topic from its first message on. The clock
runs from the first listener call to the one that completes the count; the messages of the first
call are not counted, because the time that they took was not measured. Says ``started`` then.
The result's ``duplicates`` are messages that came more than once.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import uvloop

from bench.processes import Line, Meter, say, watch_argument, watched
from cometmq.client import PushConsumer, PushConsumerOptions, QueueRef, ReceivedMessage

WAIT_S_MAX = 120.0


class Counter:
    """The listener: looks at each body's length, as the least that an application does. Calls are
    in the order of each queue, because none waits for anything.
    """

    def __init__(self, expected: int, body_bytes: int, watch: dict[str, int]) -> None:
        self._expected = expected
        self._body_bytes = body_bytes
        self._watch = watch
        self._meter: Meter | None = None
        self._unmeasured = 0
        self.received = self.duplicates = 0
        self._next_offset: dict[QueueRef, int] = {}
        self.result: asyncio.Future[Line] = asyncio.get_running_loop().create_future()

    async def __call__(self, messages: list[ReceivedMessage]) -> None:
        for message in messages:
            assert len(message.body) == self._body_bytes
        self.received += len(messages)
        queue, first = messages[0].queue, messages[0].queue_offset
        behind = self._next_offset.get(queue, first)
        self.duplicates += min(max(behind - first, 0), len(messages))
        self._next_offset[queue] = max(behind, messages[-1].queue_offset + 1)
        if self._meter is None:
            say({"started": 1})
            self._meter = Meter(self._watch)
            self._unmeasured = self.received
        elif self.received >= self._expected and not self.result.done():
            self.result.set_result(self._meter.stop(self.received - self._unmeasured))


async def measure(arguments: argparse.Namespace) -> Line:
    counter = Counter(arguments.count, arguments.body_bytes, watched(arguments))
    set_by_hand: dict[str, Any] = {name: int(value) for name, value in arguments.option}
    options = PushConsumerOptions(batch_count=arguments.listener_messages, **set_by_hand)
    async with PushConsumer(
        arguments.namesrv, arguments.group, counter, options=options
    ) as consumer:
        await consumer.subscribe(arguments.topic)
        async with asyncio.timeout(WAIT_S_MAX):
            line = await counter.result
    return line | {"duplicates": counter.duplicates}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.consume", description=__doc__)
    parser.add_argument("--namesrv", required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--group", required=True)
    parser.add_argument("--count", type=int, required=True, help="messages that are there")
    parser.add_argument("--body_bytes", type=int, default=1024)
    parser.add_argument("--listener_messages", type=int, default=256)
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=NUMBER",
        type=lambda text: text.split("=", 1),
        help="of PushConsumerOptions",
    )
    watch_argument(parser)
    say(uvloop.run(measure(parser.parse_args())))


if __name__ == "__main__":
    main()
