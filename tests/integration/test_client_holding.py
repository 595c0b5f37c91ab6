"""The push consumer and real pullholds: it parks, fails over, polls while there is none."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cometmq.client import PushConsumer, PushConsumerOptions, ReceivedMessage
from cometmq.client.cluster.rendezvous import ranked
from cometmq.client.reading import long_poller
from cometmq.rpc.retry import BackoffPolicy
from services.pullhold import holds
from tests.support.cluster.broker import LiveBroker, running_broker, running_namesrv
from tests.support.cluster.processes import Processes, Service
from tests.support.cluster.pullhold import LivePullhold, rpc_count, running_pullhold
from tests.support.waiting import until, until_async

QUEUES = 2
POLL = {"poll_backoff_ms": 5, "poll_backoff_max_ms": 20}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failed pullholds are tried again soon."""
    monkeypatch.setattr(long_poller, "SET_ASIDE", BackoffPolicy(first_s=0.02, max_s=0.05))
    monkeypatch.setattr(long_poller, "NONE_THERE", BackoffPolicy(first_s=0.02, max_s=0.05))
    monkeypatch.setattr(long_poller, "LIST_EVERY_S", 0.1)


class Listener:
    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.gate = asyncio.Event()  # when cleared, calls wait
        self.gate.set()

    async def __call__(self, messages: list[ReceivedMessage]) -> None:
        await self.gate.wait()
        self.bodies += [message.body for message in messages]


class Stage:
    """A name server and a broker with topic t; pullholds and consumers come as tests want."""

    def __init__(self, stack: AsyncExitStack, namesrv: str, broker: LiveBroker) -> None:
        self.stack = stack
        self.namesrv = namesrv
        self.broker = broker
        self.listener = Listener()

    async def pullhold(self, port: int = 0) -> LivePullhold:
        return await self.stack.enter_async_context(running_pullhold(self.namesrv, port=port))

    async def consumer(self, **options: Any) -> PushConsumer:
        given = {"rebalance_delay_ms": 1, "retry_backoff_ms": 5, **options}
        made = PushConsumer(self.namesrv, "G", self.listener, options=PushConsumerOptions(**given))
        consumer = await self.stack.enter_async_context(made)
        await consumer.subscribe("t")
        return consumer

    async def send(self, *bodies: bytes) -> None:
        """To both queues in turn, and wait until the listener has all."""
        for n, body in enumerate(bodies):
            await self.broker.send("t", n % QUEUES, body)
        await until(lambda: set(bodies) <= set(self.listener.bodies))

    async def pulls(self) -> int:
        return await rpc_count(self.broker.metrics_address, "Pull")


@asynccontextmanager
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    async with AsyncExitStack() as stack:
        namesrv = await stack.enter_async_context(running_namesrv(tmp_path))
        running = running_broker(tmp_path, namesrv=(namesrv,))
        broker = await stack.enter_async_context(running)
        await broker.put_topic("t", queues=QUEUES)
        yield Stage(stack, namesrv, broker)


async def test_queues_without_messages_are_parked_and_cost_the_broker_nothing(
    tmp_path: Path,
) -> None:
    async with stage(tmp_path) as on:
        pullhold = await on.pullhold()
        await on.consumer(hold_ms=50)
        await until(lambda: pullhold.waiting == QUEUES)
        before, answered = await on.pulls(), pullhold.answered
        await until(lambda: pullhold.answered >= answered + 5 * QUEUES)
        assert await on.pulls() == before
        assert pullhold.metric("cometmq_hold_clients") == 1


async def test_messages_come_without_polling(tmp_path: Path) -> None:
    async with stage(tmp_path) as on:
        pullhold = await on.pullhold()
        await on.consumer(**POLL)
        for number in range(3):
            await until(lambda: pullhold.waiting == QUEUES)
            await on.send(b"a%d" % number, b"b%d" % number)
        assert len(on.listener.bodies) == 6
        assert pullhold.metric("cometmq_hold_duration_seconds_count", outcome="found") == 6
        assert pullhold.safety_finds == 0


async def test_a_hold_serves_several_answers_and_is_taken_back_when_it_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    send = long_poller.HoldConnection._send

    def note(connection: Any, request: Any) -> None:
        sent.append(request.WhichOneof("kind"))
        send(connection, request)

    monkeypatch.setattr(long_poller.HoldConnection, "_send", note)
    monkeypatch.setattr(long_poller, "TEND_S", 0.01)
    async with stage(tmp_path) as on:
        pullhold = await on.pullhold()
        await on.consumer(queue_count_max=1)
        await until(lambda: pullhold.waiting == QUEUES)
        for number in range(long_poller.ANSWERS_MAX - 1):
            await on.send(b"a%d" % number, b"b%d" % number)
            await until(lambda: pullhold.waiting == QUEUES)
        assert sent == ["hold"] * QUEUES
        on.listener.gate.clear()  # the consumer has no room for more
        await on.broker.send("t", 0, b"a")
        await until(lambda: pullhold.waiting == QUEUES - 1)
        on.listener.gate.set()
        await on.send(b"c", b"d")


async def test_a_consumer_that_leaves_takes_its_holds_back(tmp_path: Path) -> None:
    async with stage(tmp_path) as on:
        pullhold = await on.pullhold()
        consumer = await on.consumer()
        await until(lambda: pullhold.waiting == QUEUES)
        await consumer.subscribe("t", "red")  # revokes the queues: others are held from now on
        await until(lambda: pullhold.answered == 0 and pullhold.waiting == QUEUES)
        await consumer.__aexit__(None, None, None)
        await until(lambda: pullhold.waiting == 0)


async def test_a_filter_that_skips_leaves_no_lag_while_parked_and_when_leaving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def common(on: Stage, *bodies: bytes) -> None:
        for body in bodies:  # message by message: each arrival moves the hold on
            for queue_id in range(QUEUES):
                await on.broker.send("t", queue_id, body)

    async def ends(on: Stage) -> list[int]:
        return [(await on.broker.pull("t", queue_id, 0)).max_offset for queue_id in range(QUEUES)]

    async def all_readable(on: Stage, count: int) -> bool:
        return await ends(on) == [count] * QUEUES

    async def caught_up(on: Stage) -> bool:
        done = [await on.broker.committed("G", "t", queue_id) for queue_id in range(QUEUES)]
        return await ends(on) == [position.offset if position else 0 for position in done]

    async with stage(tmp_path) as on:
        pullhold = await on.pullhold()
        consumer = await on.consumer(commit_interval_ms=20)
        await consumer.subscribe("t", "rare")
        await until(lambda: pullhold.waiting == QUEUES)
        with monkeypatch.context() as soon:
            soon.setattr(holds, "PASSED_S_MAX", 0.05)
            await common(on, b"one", b"two", b"three")
            await until_async(lambda: all_readable(on, 3))
            await until_async(lambda: caught_up(on))
        await until(lambda: pullhold.waiting == QUEUES)
        await common(on, b"four", b"five")  # told long after it has left
        await until_async(lambda: all_readable(on, 5))  # an answer to a send may come before
        await consumer.__aexit__(None, None, None)
        assert await caught_up(on)
        assert on.listener.bodies == []


async def test_without_pullholds_it_polls_and_parks_when_one_comes(tmp_path: Path) -> None:
    async with stage(tmp_path) as on:
        await on.consumer(**POLL)
        await on.send(b"polled", b"polled too")
        pullhold = await on.pullhold()
        await until(lambda: pullhold.waiting == QUEUES)
        await on.send(b"parked", b"parked too")


async def test_a_pullhold_that_stops_hands_its_clients_on(tmp_path: Path) -> None:
    async with stage(tmp_path) as on:
        pullholds = [await on.pullhold(), await on.pullhold()]
        await on.consumer(**POLL)
        await until(lambda: sum(p.waiting for p in pullholds) == QUEUES)
        pullholds.sort(key=lambda p: p.waiting)
        other, present = pullholds
        await present.stop()
        await until(lambda: other.waiting == QUEUES)
        await on.send(b"one", b"two")


async def test_a_client_returns_to_its_first_choice(tmp_path: Path) -> None:
    async with stage(tmp_path) as on:
        first, second = await on.pullhold(), await on.pullhold()
        both = [first.address, second.address]
        names = map("client-{}".format, range(1_000))
        client_id = next(name for name in names if ranked(name, both)[0] == first.address)
        await first.stop()
        await on.consumer(client_id=client_id, hold_ms=100)
        await until(lambda: second.waiting == QUEUES)
        again = await on.pullhold(int(first.address.rpartition(":")[2]))
        await until(lambda: (again.waiting, second.waiting) == (QUEUES, 0))
        await on.send(b"one", b"two")


async def started(processes: Processes, on: Stage, port: int = 0) -> Service:
    """A pullhold as a process, which can be killed."""
    start = functools.partial(processes.service, namesrv=on.namesrv, port=port)
    return await asyncio.to_thread(start, f"pullhold-{port}", "pullhold")


async def test_kill_9_of_the_pullhold_loses_nothing_and_polling_bridges(tmp_path: Path) -> None:
    async with stage(tmp_path) as on:
        processes = on.stack.enter_context(Processes(tmp_path))
        address = (await started(processes, on)).address
        consumer = await on.consumer(**POLL)
        await until(lambda: consumer.pullhold == address)
        await on.send(b"parked", b"parked too")
        processes.kill("pullhold-0")
        await on.send(b"polled", b"polled too")
        assert consumer.pullhold is None
        again = await started(processes, on, int(address.rpartition(":")[2]))
        await until(lambda: consumer.pullhold == address)
        await on.send(b"parked again", b"and again")
        assert await asyncio.to_thread(processes.end, again.name, signal.SIGTERM) == 0
        assert sorted(on.listener.bodies) == sorted(set(on.listener.bodies))


async def test_an_unanswered_hold_sends_the_client_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_poller, "OVERDUE_S", 0.1)
    async with stage(tmp_path) as on:
        processes = on.stack.enter_context(Processes(tmp_path))
        pullhold = await started(processes, on)
        consumer = await on.consumer(**POLL, hold_ms=100)
        await until(lambda: consumer.pullhold == pullhold.address)
        monkeypatch.setattr(long_poller, "CALL_TIMEOUT_S", 0.2)
        os.kill(pullhold.pid, signal.SIGSTOP)
        await on.send(b"one", b"two")
        processes.kill(pullhold.name)
