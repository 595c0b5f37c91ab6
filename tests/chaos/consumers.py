"""One member of each consumer group, as a process that is killed, stopped and cut off:
``python -m tests.chaos.consumers NAME HISTORY NAMESRV TOPIC…``.

*ordered* consumes in order, *retried* concurrently. Their listeners fail by the message's number:
some once, a few until the message is dead. A line on its standard input ends it in order.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
from pathlib import Path

from cometmq.client import Later, PushConsumer, PushConsumerOptions, ReceivedMessage
from tests.chaos.workload import name_of, until_told
from tests.support.faults.history import Answer, Recorder

ORDERED, RETRIED = "ordered", "retried"  # the groups
TOPICS = ("landed", "certain")  # what they read
TRIES_MAX = 2
WORK_S = 0.002
LEVEL = 1  # a message that is sent back comes again after 1 s
SUSPEND_MS = 200  # in order


def failures(number: int) -> int:
    """How often a listener fails at a message."""
    if number % 41 == 7:
        return TRIES_MAX + 1
    return int(number % 11 == 3)


class Listener:
    """Writes down what it gets and what it answers."""

    def __init__(self, recorder: Recorder, group: str, client: str) -> None:
        self._recorder = recorder
        self._group = group
        self._client = client
        self._numbers = itertools.count()

    async def listen(self, messages: list[ReceivedMessage]) -> Later | None:
        [message] = messages
        call, name = f"{self._client}/{self._group}/{next(self._numbers)}", name_of(message)
        queue = message.queue.topic, message.queue.queue_id
        tries = message.reconsume_times
        self._recorder.call(
            call, self._group, self._client, queue, message.queue_offset, name, tries
        )
        await asyncio.sleep(WORK_S)
        before = message.attempt - 1 if self._group == ORDERED else tries
        fails = before < failures(int(name.partition("/")[2]))
        self._recorder.called(call, Answer.LATER if fails else Answer.DONE)
        return Later(delay_level=LEVEL, suspend_ms=SUSPEND_MS) if fails else None


def options(group: str) -> PushConsumerOptions:
    return PushConsumerOptions(
        commit_interval_ms=1_000, retry_times_max=TRIES_MAX, orderly=group == ORDERED
    )


async def play(name: str, recorder: Recorder, namesrv: str, *topics: str) -> None:
    async with (
        PushConsumer(
            namesrv,
            ORDERED,
            Listener(recorder, ORDERED, name).listen,
            options=options(ORDERED),
        ) as ordered,
        PushConsumer(
            namesrv,
            RETRIED,
            Listener(recorder, RETRIED, name).listen,
            options=options(RETRIED),
        ) as retried,
    ):
        for topic in topics:
            await ordered.subscribe(topic)
            await retried.subscribe(topic)
        await until_told()


def main() -> None:
    name, path, *rest = sys.argv[1:]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    with Recorder(Path(path)) as recorder:
        asyncio.run(play(name, recorder, *rest))


if __name__ == "__main__":
    main()
