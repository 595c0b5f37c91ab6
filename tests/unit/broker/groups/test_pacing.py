from __future__ import annotations

import asyncio

from services.broker.groups.notices import TOLD_COUNT, Notices
from services.broker.groups.pacing import ENTER_COUNT, ENTER_COUNT_MIN, WAIT_S_MAX, Admission, Pacer
from tests.support.waiting import until


async def test_a_lone_call_enters_at_once_and_a_crowd_in_turns_and_in_order() -> None:
    admission, entered = Admission(), list[int]()

    async def enter(number: int) -> None:
        await admission.enter()
        entered.append(number)

    async with asyncio.TaskGroup() as tasks:
        for number in range(3 * ENTER_COUNT):
            tasks.create_task(enter(number))
        turns: list[int] = []
        while len(entered) < 3 * ENTER_COUNT:
            if not turns or len(entered) > turns[-1]:
                turns.append(len(entered))
            await asyncio.sleep(0)
    # While more come than are let in, few are; then as many as a turn has.
    few = 1 + ENTER_COUNT_MIN
    assert turns[-4:] == [1, few, few + ENTER_COUNT, few + 2 * ENTER_COUNT]
    assert entered == list(range(3 * ENTER_COUNT))
    assert not len(admission)


async def test_calls_that_end_while_they_wait_take_no_turn() -> None:
    admission = Admission()
    waiting = [asyncio.create_task(admission.enter()) for _ in range(4 * ENTER_COUNT)]
    await asyncio.sleep(0)
    for one in waiting[1:-1]:
        one.cancel()
    async with asyncio.timeout(10):
        await waiting[-1]
    assert not len(admission)


async def test_a_loop_that_is_late_gets_fewer_turns() -> None:
    loop, began_s = asyncio.get_running_loop(), list[float]()

    def work() -> bool:
        began_s.append(loop.time())
        return len(began_s) < 3

    pacer = Pacer(work, 100.0)
    pacer.start()
    until_s = loop.time() + 0.05
    while loop.time() < until_s:  # the loop has much to do
        pass
    await until(lambda: len(began_s) == 3)
    assert began_s[2] - began_s[1] >= 0.9 * WAIT_S_MAX


class Member:
    def __init__(self) -> None:
        self.count = 0

    def wake(self) -> None:
        self.count += 1


async def test_a_lone_change_is_told_at_once_and_those_of_a_crowd_together() -> None:
    small, large = [Member()], [Member() for _ in range(3 * TOLD_COUNT)]
    notices = Notices({"small": small, "large": large}.__getitem__)
    notices.tell("small")
    assert small[0].count == 1
    for _ in range(100):
        notices.tell("large")
        notices.tell("small")
    assert sum(one.count for one in large) == 0, "in their turn"
    await until(lambda: not len(notices))
    assert small[0].count == 2
    assert {one.count for one in large} == {1}


async def test_groups_take_turns_and_a_change_during_a_round_is_told_to_all() -> None:
    small, large = [Member()], [Member() for _ in range(10 * TOLD_COUNT)]
    notices = Notices({"small": small, "large": large}.__getitem__)
    notices.tell("large")
    told = sum(one.count for one in large)
    assert told == TOLD_COUNT
    notices.tell("large")
    notices.tell("small")
    await until(lambda: small[0].count == 1)
    assert sum(one.count for one in large) < 3 * TOLD_COUNT, "a small one does not wait for it"
    await until(lambda: not len(notices))
    assert {one.count for one in large} == {2}
