"""The fixed queues of ordered topics: RocketMQ's order configuration, kept by name servers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from cometmq.errors import InvalidRequest
from cometmq.model import QUEUES_PER_TOPIC_MAX

NAMESPACE = "ORDER_TOPIC_CONFIG"  # of the key-value table; a key is a topic
QUEUES_MAX = 16_384  # of a topic on all broker groups
_ENTRY = re.compile(r"([%|a-zA-Z0-9._@-]{1,127}):([0-9]{1,4})")


class OrderedQueues(NamedTuple):
    """The queues from 0 on of one broker group."""

    broker_group: str
    queue_count: int


@lru_cache(maxsize=4096)  # asked for with each route
def parse(text: str) -> tuple[OrderedQueues, ...]:
    """``GROUP:COUNT;GROUP:COUNT``, in this order. Raises InvalidRequest for anything else: no
    entry, 0 or more than 1,024 queues of a group, a group twice, more than 16,384 queues.
    """
    found = []
    for entry in text.strip().removesuffix(";").split(";"):
        match = _ENTRY.fullmatch(entry.strip())
        if match is None or not 1 <= int(match[2]) <= QUEUES_PER_TOPIC_MAX:
            raise InvalidRequest(
                f"order: {entry[:150]!r} is not GROUP:COUNT, with 1 to {QUEUES_PER_TOPIC_MAX}"
            )
        found.append(OrderedQueues(match[1], int(match[2])))
    if len({one.broker_group for one in found}) < len(found):
        raise InvalidRequest("order: a broker group is there twice")
    if sum(one.queue_count for one in found) > QUEUES_MAX:
        raise InvalidRequest(f"order: more than {QUEUES_MAX} queues")
    return tuple(found)


def text_of(queues: Iterable[OrderedQueues]) -> str:
    """What :func:`parse` reads."""
    return ";".join(f"{group}:{count}" for group, count in queues)
