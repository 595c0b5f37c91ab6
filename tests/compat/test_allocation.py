"""Our members of a consumer group divide its queues as RocketMQ's members do."""

from __future__ import annotations

from random import Random

import pytest

from cometmq.client import (
    Allocation,
    ByConfig,
    ByMachineRoom,
    MachineRoomNearby,
    QueueRef,
    Strategy,
)
from cometmq.client.group.rebalance import allocate
from scripts.maven import JavaMissing
from tests.compat.listing import note_compared
from tests.compat.rocketmq import allocations

GROUPS = 1_000
THEIRS = [one for one in Allocation if one is not Allocation.STICKY]
ROOMS = ["east", "west", "north"]


def strategy(random: Random, queues: list[QueueRef]) -> Strategy:
    """One of RocketMQ's, with a setting where it has one."""
    plain = random.choice(THEIRS)
    by_config = ByConfig(random.sample(queues, random.randint(0, len(queues))))
    by_room = ByMachineRoom(random.sample(ROOMS, random.randint(1, 3)))
    return random.choice([plain, by_config, by_room, MachineRoomNearby(plain)])


@pytest.mark.slow
def test_every_member_gets_the_queues_that_rocketmq_gives_it() -> None:
    random = Random(17)
    cases = []
    for _ in range(GROUPS):
        topic = random.choice(["T", "%RETRY%G"])
        members = random.sample(
            [f"{random.choice(ROOMS)}@10.0.0.{n}" for n in range(30)], random.randint(1, 12)
        )
        names = ["g", *(f"{room}@g" for room in ROOMS)]
        queues = [
            QueueRef(topic, queue_id, random.choice(names) + str(number))
            for number in range(random.randint(1, 3))
            for queue_id in range(random.randint(1, 16))
        ]
        queues = list(set(queues))
        random.shuffle(queues)
        cases.append((strategy(random, queues), random.choice(members), members, queues))
    try:
        found = allocations(cases)
    except JavaMissing as error:
        pytest.skip(str(error))
    for case, theirs in zip(cases, found, strict=True):
        assert allocate(*case) == theirs, case
    note_compared("allocations of a group's queues", GROUPS)
