"""Many deadlines by one timer, against a list of them."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from cometmq.client.requests import deadlines
from cometmq.client.requests.deadlines import Deadlines
from tests.support.waiting import until


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(1, 20)),
            st.tuples(st.just("done"), st.integers(0, 30)),
            st.tuples(st.just("pass"), st.integers(1, 8)),
        ),
        max_size=60,
    )
)
def test_each_ends_at_its_time_unless_it_is_done(steps: list[tuple[str, int]]) -> None:
    loop = asyncio.new_event_loop()
    now_s = 0.0
    loop.time = lambda: now_s  # type: ignore[method-assign]
    waiting: dict[int, float] = {}
    ended: list[int] = []

    def expire(one: int) -> None:
        del waiting[one]
        ended.append(one)

    async def play() -> None:
        nonlocal now_s
        some = Deadlines(lambda one: one in waiting, expire)
        expected: list[int] = []
        number = 0
        for what, amount in steps:
            if what == "add":
                waiting[number] = now_s + amount
                some.add(number, amount)
                number += 1
            elif what == "done":
                waiting.pop(amount, None)
            else:
                now_s += amount
                due = [one for one, at_s in waiting.items() if at_s <= now_s]
                expected += sorted(due, key=lambda one: (waiting[one], one))
                for _ in range(3):
                    await asyncio.sleep(0)
                assert ended == expected
        some.close()

    try:
        loop.run_until_complete(play())
    finally:
        loop.close()


async def test_those_that_have_ended_take_no_room() -> None:
    waiting: set[int] = set()
    some: Deadlines[int] = Deadlines(waiting.__contains__, waiting.remove)
    for number in range(10 * deadlines.SWEEP_COUNT_MIN):
        waiting.add(number)
        some.add(number, 86_400)
        if number >= 100:
            waiting.remove(number)
    assert len(some) <= deadlines.SWEEP_COUNT_MIN
    some.add(-1, 0.001)
    waiting.add(-1)
    await until(lambda: -1 not in waiting)
    some.close()
