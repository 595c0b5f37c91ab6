"""Our members of a consumer group divide its queues as RocketMQ's members do."""

from __future__ import annotations

from random import Random

import pytest

from cometmq.client import Allocation, QueueRef
from cometmq.client.rebalance import allocate
from tests.compat.listing import COMPARED
from tests.compat.rocketmq import RocketMqMissing, allocations

GROUPS = 1_000
THEIRS = [one for one in Allocation if one is not Allocation.STICKY]


@pytest.mark.slow
def test_every_member_gets_the_queues_that_rocketmq_gives_it() -> None:
    random = Random(17)
    cases = []
    for _ in range(GROUPS):
        topic = random.choice(["T", "%RETRY%G"])
        members = random.sample([f"10.0.0.{n}@{n * 37}" for n in range(30)], random.randint(1, 12))
        queues = [
            QueueRef(topic, queue_id, f"g{number}")
            for number in range(random.randint(1, 3))
            for queue_id in range(random.randint(1, 16))
        ]
        random.shuffle(queues)
        cases.append((random.choice(THEIRS), random.choice(members), members, queues))
    try:
        found = allocations(cases)
    except RocketMqMissing as error:
        pytest.skip(str(error))
    for case, theirs in zip(cases, found, strict=True):
        assert allocate(*case) == theirs, case
    COMPARED["allocations of a group's queues"] += GROUPS
