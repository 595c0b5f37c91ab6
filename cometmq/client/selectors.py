"""Ready-made choices of a message's queue, RocketMQ's, for ``ProducerOptions.selector``. A selector
gets the topic's writable queues in RocketMQ's order, by broker group and number.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from cometmq.format.taghash import java_hash
from cometmq.model import Message, QueueRef


def choose_by_hash(key: str, queues: Sequence[QueueRef]) -> QueueRef:
    """The queue of a key. RocketMQ's clients choose the same one: Java's hash of the text, modulo
    the number of queues, without its sign.
    """
    return queues[abs(java_hash(key)) % len(queues)]


def by_hash(
    key_of: Callable[[Message], str],
) -> Callable[[Message, Sequence[QueueRef]], QueueRef]:
    """Messages with one key go to one queue (SelectMessageQueueByHash), as long as the topic's
    writable queues stay the same. A message with a ``sharding_key`` needs no selector.
    """
    return lambda message, queues: choose_by_hash(key_of(message), queues)


def at_random(message: Message, queues: Sequence[QueueRef]) -> QueueRef:
    """Any queue (SelectMessageQueueByRandom)."""
    return random.choice(queues)
