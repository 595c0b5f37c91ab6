"""The memory of a consumer against a model: what each queue holds, has asked for, and waits for."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from cometmq.client.reading.memory import Memory

MIB = 1024
QUEUES = 4
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "answer", "answer", "done", "give up"]),
        st.integers(0, QUEUES - 1),
        st.integers(1, 4 * MIB),
    ),
    max_size=60,
)


class Queue:
    """One queue, as the model knows it."""

    def __init__(self, memory: Memory) -> None:
        self.share = memory.share()
        self.held = 0
        self.wanted = 0
        self.asking: asyncio.Task[int] | None = None

    @property
    def granted(self) -> int:
        return self.asking.result() if self.asking is not None and self.asking.done() else 0

    @property
    def waits(self) -> bool:
        return self.asking is not None and not self.asking.done()

    async def play(self, step: str, size: int) -> None:
        if step == "ask" and self.asking is None:
            self.wanted = size
            self.asking = asyncio.create_task(self.share.ask(size))
        elif step == "answer" and self.granted:
            granted, self.asking = self.granted, None
            self.share.answered(granted)
            self.hold(self.held + granted)
        elif step == "done":
            self.hold(max(0, self.held - size))
        elif step == "give up" and self.waits:
            await self.give_up()
        await settle()

    def hold(self, held: int) -> None:
        self.held = held
        self.share.hold(held)

    async def give_up(self) -> None:
        assert self.asking is not None
        self.asking.cancel()
        await settle()
        self.asking = None


async def settle() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


def check(memory: Memory, queues: list[Queue]) -> None:
    used = sum(queue.held + queue.granted for queue in queues)
    assert memory.used_bytes == used
    assert used <= memory.bytes_max
    for queue in queues:
        if queue.waits:
            assert used, "one is always allowed where there is nothing"
            wanted = min(queue.wanted, memory.bytes_max)
            assert queue.held + wanted > memory.bytes_max - used


@given(bytes_max=st.sampled_from([MIB // 2, 8 * MIB, 64 * MIB]), steps=STEPS)
def test_queues_hold_no_more_than_is_free_and_nobody_waits_for_what_may_come(
    bytes_max: int, steps: list[tuple[str, int, int]]
) -> None:
    async def play() -> None:
        memory = Memory(bytes_max)
        queues = [Queue(memory) for _ in range(QUEUES)]
        for step, number, size in steps:
            await queues[number].play(step, size)
            check(memory, queues)
        for queue in queues:
            if queue.waits:
                await queue.give_up()
            await queue.play("answer", 0)
            queue.hold(0)
        await settle()
        assert all(not queue.waits for queue in queues)

    asyncio.run(play())


async def test_a_wait_that_is_given_up_as_it_is_served_takes_nothing() -> None:
    memory = Memory(MIB)
    first, second = memory.share(), memory.share()
    await first.ask(MIB)
    waiting = asyncio.create_task(second.ask(MIB))
    await asyncio.sleep(0)
    first.answered(MIB)
    asyncio.get_running_loop().call_soon(waiting.cancel)
    await asyncio.wait([waiting])
    await settle()
    assert memory.used_bytes == 0


async def test_a_greedy_queue_leaves_room_for_one_that_has_nothing() -> None:
    memory = Memory(64 * MIB)
    greedy, modest = memory.share(), memory.share()
    held = 0
    while greedy.try_ask(2 * MIB):
        greedy.answered(2 * MIB)
        held += 2 * MIB
        greedy.hold(held)
    assert held == 32 * MIB
    assert modest.try_ask(2 * MIB)
