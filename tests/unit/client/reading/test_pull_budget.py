"""The budget of pulls against a model: a list of what is in flight, and one of what waits."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.client.reading.pull_budget import PULL_BYTES_MIN, PullBudget, worth_asking

KIB = 1024
STEPS = st.lists(
    st.tuples(st.sampled_from(["ask", "ask", "end", "give up"]), st.integers(0, 1 << 30)),
    max_size=60,
)


@dataclass
class Pull:
    wanted: int
    task: asyncio.Task[int] = field(repr=False)
    got: int | None = None


async def settle() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


@given(bytes_max=st.sampled_from([KIB, 300 * KIB, 1024 * KIB, 8192 * KIB]), steps=STEPS)
def test_pulls_in_flight_keep_the_budget_and_wait_in_order(
    bytes_max: int, steps: list[tuple[str, int]]
) -> None:
    async def play() -> None:
        budget = PullBudget(bytes_max)
        running: list[Pull] = []
        waiting: list[Pull] = []

        def check() -> None:
            served = [pull for pull in waiting if pull.task.done()]
            assert served == waiting[: len(served)], "first come, first served"
            for pull in served:
                waiting.remove(pull)
                pull.got = pull.task.result()
                running.append(pull)
                assert pull.got == min(pull.wanted, bytes_max)
            in_flight = sum(pull.got or 0 for pull in running)
            assert in_flight == budget.in_flight_bytes("g") <= bytes_max
            if waiting:  # nobody waits for what is free
                assert in_flight + min(waiting[0].wanted, bytes_max) > bytes_max

        for step, number in steps:
            if step == "ask":
                wanted = KIB + number % (4096 * KIB)
                waiting.append(Pull(wanted, asyncio.create_task(budget.reserve("g", wanted))))
            elif step == "end" and running:
                budget.release("g", running.pop(number % len(running)).got or 0)
            elif step == "give up" and waiting:
                waiting.pop(number % len(waiting)).task.cancel()
            await settle()
            check()
        while running:
            budget.release("g", running.pop().got or 0)
            await settle()
            check()
        assert not waiting
        assert budget.in_flight_bytes("g") == 0

    asyncio.run(play())


def test_a_queue_asks_for_what_it_has_left() -> None:
    assert worth_asking(0, 4_096, 100.0) == worth_asking(1_000, 4_096, 100.0) == PULL_BYTES_MIN
    assert worth_asking(1_500, 4_096, 1_000.0) == 3_000_000
    assert worth_asking(10_000, 4_096, 1_000.0) == 4_096_000


async def test_broker_groups_have_a_budget_each() -> None:
    budget = PullBudget(512 * KIB)
    assert await budget.reserve("a", 512 * KIB) == 512 * KIB
    assert await budget.reserve("b", 512 * KIB) == 512 * KIB


@pytest.mark.parametrize("is_served", [False, True])
async def test_a_pull_that_is_given_up_leaves_its_bytes_to_the_next(is_served: bool) -> None:
    budget = PullBudget(256 * KIB)
    await budget.reserve("g", 256 * KIB)
    first, second = (asyncio.create_task(budget.reserve("g", 256 * KIB)) for _ in range(2))
    await settle()
    if is_served:
        budget.release("g", 256 * KIB)
        first.cancel()  # before its task has run again
    else:
        first.cancel()
        await settle()
        budget.release("g", 256 * KIB)
    assert await second == 256 * KIB
    assert first.cancelled()
    budget.release("g", 256 * KIB)
    assert budget.in_flight_bytes("g") == 0
