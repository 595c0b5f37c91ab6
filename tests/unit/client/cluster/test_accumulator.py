"""The accumulator against a model of what each broker group has to get."""

from __future__ import annotations

import asyncio
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.client.cluster.accumulator import Accumulator
from cometmq.errors import ClientClosed
from cometmq.rpc.tasks import Tasks

SIZE_MAX = 10
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from("ab"), st.integers(1, 15)),
        st.tuples(st.just("answer"), st.sampled_from("ab"), st.just(0)),
        st.tuples(st.just("turn"), st.just(""), st.just(0)),
    ),
    max_size=60,
)


class Sent:
    """Calls that end when they are answered."""

    def __init__(self) -> None:
        self.calls: defaultdict[str, list[list[int]]] = defaultdict(list)
        self.running: dict[str, asyncio.Event] = {}
        self.tasks = Tasks("test")
        self.made = Accumulator(self.tasks, self._send, size_max=SIZE_MAX, size_of=lambda one: one)

    async def _send(self, broker_group: str, items: list[int]) -> None:
        assert broker_group not in self.running, "two calls at a time"
        self.calls[broker_group].append(items)
        self.running[broker_group] = asyncio.Event()
        try:
            await self.running[broker_group].wait()
        finally:
            del self.running[broker_group]

    def answer(self, broker_group: str) -> None:
        if broker_group in self.running:
            self.running[broker_group].set()

    async def settle(self) -> None:
        for _ in range(4):
            await asyncio.sleep(0)


@given(steps=STEPS)
def test_each_broker_group_gets_all_items_in_order_in_as_few_calls_as_fit(
    steps: list[tuple[str, str, int]],
) -> None:
    async def play() -> None:
        sent, put = Sent(), defaultdict[str, list[int]](list)
        for what, broker_group, size in steps:
            if what == "put":
                put[broker_group].append(size)
                sent.made.put(broker_group, size)
            elif what == "answer":
                sent.answer(broker_group)
            else:
                await sent.settle()
        while sent.running or len(sent.tasks):
            await sent.settle()
            for broker_group in "ab":
                sent.answer(broker_group)
        for broker_group, items in put.items():
            calls = sent.calls[broker_group]
            assert [item for call in calls for item in call] == items
            assert all(sum(call) <= SIZE_MAX or len(call) == 1 for call in calls)

    asyncio.run(play())


async def test_what_is_put_in_a_turn_or_during_a_call_travels_together() -> None:
    sent = Sent()
    for item in (1, 2, 3):
        sent.made.put("a", item)
    sent.made.put("b", 9)
    await sent.settle()
    assert sent.calls == {"a": [[1, 2, 3]], "b": [[9]]}
    for item in (4, 5, 6):
        sent.made.put("a", item)
        await sent.settle()
    assert len(sent.calls["a"]) == 1
    sent.answer("a")
    await sent.settle()
    assert sent.calls["a"] == [[1, 2, 3], [4, 5]]
    await sent.tasks.stop()


async def test_a_closed_one_returns_what_no_call_had() -> None:
    sent = Sent()
    sent.made.put("a", 1)
    await sent.settle()
    sent.made.put("a", 2)
    sent.made.put("b", 3)
    assert sorted(sent.made.close()) == [2, 3]
    with pytest.raises(ClientClosed):
        sent.made.put("a", 4)
    sent.answer("a")
    await sent.settle()
    assert sent.calls == {"a": [[1]]}
    assert not len(sent.tasks)
