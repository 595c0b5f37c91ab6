"""``python -m bench messaging``: what delay levels, times and retries cost beside plain messages.

A cluster of one broker, one topic with 8 queues, bodies of 128 B. Plain and delayed sends take
turns. One consumer reads them, concurrently and in order. Then many messages become due at the same
time while another producer goes on sending alone: how late is the last of them readable, and how
long do the lone sends take? The same with messages that each name a time of their own, all within
one second. Last, a group sends back what it has pulled.

``--pending`` above 0: so many messages wait for a time that does not come, and the broker's memory
is read before and after.

``--only`` measures one part. Two parts are measured so only: *steady*, how late each message is
received when 1,000 are due each second, and *store*, stores full of ``--pending`` messages that
wait (``bench/waiting.py``).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

import grpc
import uvloop

from bench import stage, waiting
from bench.holds import rss_mib
from bench.report import machine, markdown
from bench.stage import Bench
from bench.stats import percentile
from cometmq import native
from cometmq.client import (
    Message,
    Producer,
    PullConsumer,
    PushConsumer,
    PushConsumerOptions,
    ReceivedMessage,
)
from cometmq.model import FlushMode
from cometmq.v1 import broker_pb2, broker_pb2_grpc, common_pb2

PROJECT = Path(__file__).resolve().parent.parent
BODY = bytes(128)
LATE = 18  # the level of 2 hours: nothing of it is delivered within a run
DUE, DUE_S = 2, 5.0
LONE_SENDS_EACH_S = 0.002
SEND_BACK_ITEMS, SEND_BACK_CALLS = 1_024, 4
MANY = 5_000
TIMED_S, TIMED_RATE_MIN = 2, 20_000  # so long, and a second for so many, until the first is due
DAY_MS = 86_400_000
WARM_UP = 100_000
STEADY_RATE, STEADY_S = 1_000, 20
RECOVERED_MAX = 2_000_000  # of more only the index is measured
TOPIC, QUIET = (stage.topic_name(size, FlushMode.ASYNC) for size in (len(BODY), 1024))
TOPICS = [(len(BODY), FlushMode.ASYNC), (1024, FlushMode.ASYNC)]


async def send(
    namesrv: str, topic: str, count: int, delay_level: int = 0, *, delay_ms: int = 0
) -> float:
    """Messages a second, all acknowledged."""
    async with Producer(namesrv) as producer:
        await producer.send_and_wait(
            Message(topic, BODY, delay_level=delay_level, delay_ms=delay_ms)
        )
        started_s = time.perf_counter()
        last = None
        for _ in range(count):
            last = await producer.send(
                Message(topic, BODY, delay_level=delay_level, delay_ms=delay_ms)
            )
        await producer.flush()
        assert last is not None
        await last
        return count / (time.perf_counter() - started_s)


async def send_timed(namesrv: str, topic: str, count: int, first_ms: int, within_ms: int) -> float:
    """Messages a second by ``send_many``, all acknowledged; they are due one after the other from
    ``first_ms`` on, within so long, in an order that begins again with each batch.
    """
    async with Producer(namesrv) as producer:
        started_s = time.perf_counter()
        for first in range(0, count, MANY):
            size = min(MANY, count - first)
            times = [first_ms + place * within_ms // size for place in range(size)]
            messages = [Message(topic, BODY, deliver_at_ms=time_ms) for time_ms in times]
            await producer.send_many_and_wait(messages)
        return count / (time.perf_counter() - started_s)


async def lone_sends(namesrv: str, topic: str, until: asyncio.Event) -> list[float]:
    """Seconds from each send to its acknowledgement."""
    took: list[float] = []
    async with Producer(namesrv) as producer:
        while not until.is_set():
            started_s = time.perf_counter()
            await producer.send_and_wait(Message(topic, BODY))
            took.append(time.perf_counter() - started_s)
            with suppress(TimeoutError):
                await asyncio.wait_for(until.wait(), LONE_SENDS_EACH_S)
    return took


async def timed_at_once(namesrv: str, topic: str, quiet: str, count: int) -> dict[str, float]:
    """As :func:`due_at_once`, of messages that are due within one second."""
    async with PullConsumer(namesrv, "bench-timed") as consumer:
        queues = await consumer.queues(topic)
        shown = sum(b.max_offset for b in (await consumer.bounds(queues)).values())
        end = shown + count
        first_ms = time.time_ns() // 1_000_000 + 1_000 * (TIMED_S + count // TIMED_RATE_MIN)
        await send_timed(namesrv, topic, count, first_ms, 1_000)
        wait_s = first_ms / 1_000 - time.time()
        assert wait_s > 0, "they were due before all were sent"
        await asyncio.sleep(wait_s - 0.2)
        over = asyncio.Event()
        meanwhile = asyncio.create_task(lone_sends(namesrv, quiet, over))
        while shown < end:
            await asyncio.sleep(0.01)
            shown = sum(b.max_offset for b in (await consumer.bounds(queues)).values())
        late_s = time.time() - first_ms / 1_000 - 0.999
        over.set()
        return {
            "timed_late_s": late_s,
            "timed_p99_ms": percentile(await meanwhile, 0.99) * 1_000,
        }


async def due_at_once(namesrv: str, topic: str, quiet: str, count: int) -> dict[str, float]:
    """How late the last of so many is readable, and the p99 of lone sends to another topic before
    and while they are delivered.
    """
    before = asyncio.Event()
    timer = asyncio.get_running_loop().call_later(3.0, before.set)
    calm = await lone_sends(namesrv, quiet, before)
    timer.cancel()
    async with PullConsumer(namesrv, "bench-due") as consumer:
        queues = await consumer.queues(topic)
        shown = sum(b.max_offset for b in (await consumer.bounds(queues)).values())
        end = shown + count
        rate = await send(namesrv, topic, count - 1, DUE)
        last_due_s = time.perf_counter() + DUE_S
        await asyncio.sleep(DUE_S - count / rate - 0.2)
        over = asyncio.Event()
        meanwhile = asyncio.create_task(lone_sends(namesrv, quiet, over))
        while shown < end:
            await asyncio.sleep(0.01)
            shown = sum(b.max_offset for b in (await consumer.bounds(queues)).values())
        late_s = time.perf_counter() - last_due_s
        over.set()
        return {
            "late_s": late_s,
            "calm_p99_ms": percentile(calm, 0.99) * 1_000,
            "due_p99_ms": percentile(await meanwhile, 0.99) * 1_000,
        }


async def steady(namesrv: str, topic: str) -> dict[str, float]:
    """How late messages are stored and received of which 1,000 a second are due, in steps of 1 ms;
    each names its time in its body.
    """
    count = STEADY_RATE * STEADY_S
    first_ms = time.time_ns() // 1_000_000 + 5_000
    stored_ms: list[float] = []
    received_ms: list[float] = []
    all_seen = asyncio.Event()

    async def listener(messages: list[ReceivedMessage]) -> None:
        now_ms = time.time() * 1_000
        for message in messages:
            due_ms = int(message.body)
            stored_ms.append(message.store_time_ms - due_ms)
            received_ms.append(now_ms - due_ms)
        if len(received_ms) >= count:
            all_seen.set()

    async with PushConsumer(namesrv, "bench-steady", listener) as consumer:
        await consumer.subscribe(topic)
        async with Producer(namesrv) as producer:
            times = [first_ms + place * 1_000 // STEADY_RATE for place in range(count)]
            for at in range(0, count, MANY):
                await producer.send_many_and_wait(
                    [
                        Message(topic, b"%d" % time_ms, deliver_at_ms=time_ms)
                        for time_ms in times[at : at + MANY]
                    ]
                )
        await all_seen.wait()
    assert min(stored_ms) >= 0, "it came early"
    return {
        "stored_p99_ms": percentile(stored_ms, 0.99),
        "received_p99_ms": percentile(received_ms, 0.99),
    }


async def consume(namesrv: str, topic: str, count: int, *, orderly: bool) -> float:
    """Messages a second that a push consumer hands, one a call, to a listener that does nothing."""
    seen = 0
    first_s = 0.0
    all_seen = asyncio.Event()

    async def listener(messages: list[ReceivedMessage]) -> None:
        nonlocal seen, first_s
        first_s = first_s or time.perf_counter()
        seen += len(messages)
        if seen >= count:
            all_seen.set()

    options = PushConsumerOptions(orderly=orderly)
    group = f"bench-{'orderly' if orderly else 'concurrent'}"
    async with PushConsumer(namesrv, group, listener, options=options) as consumer:
        await consumer.subscribe(topic)
        await all_seen.wait()
        return seen / (time.perf_counter() - first_s)


async def send_backs(address: str, namesrv: str, topic: str, count: int) -> float:
    """Messages a second that the broker has taken back, and acknowledged."""
    async with PullConsumer(namesrv, "bench-retry") as consumer:
        queues = await consumer.queues(topic)
        bounds = await consumer.bounds(queues)
    items = [
        broker_pb2.SendBackItem(
            queue=common_pb2.QueueRef(topic=topic, queue_id=queue.queue_id),
            position=common_pb2.Position(generation=bounds[queue].generation, offset=offset),
            delay_level=LATE,
        )
        for queue in queues
        for offset in range(min(bounds[queue].max_offset, count // len(queues)))
    ]
    calls = [items[at : at + SEND_BACK_ITEMS] for at in range(0, len(items), SEND_BACK_ITEMS)]
    async with grpc.aio.insecure_channel(address) as channel:
        broker = broker_pb2_grpc.BrokerServiceStub(channel)

        async def work() -> None:
            while calls:
                request = broker_pb2.SendBackRequest(group="bench-retry", items=calls.pop())
                answer = await broker.SendBack(request, timeout=30)
                assert not any(result.HasField("error") for result in answer.results)

        started_s = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(SEND_BACK_CALLS)))
        return len(items) / (time.perf_counter() - started_s)


def measure_sends(bench: Bench, said: argparse.Namespace) -> dict[str, float]:
    return {
        name: uvloop.run(send(bench.namesrv, TOPIC, said.count, level, delay_ms=delay_ms))
        for name, level, delay_ms in (
            ("plain", 0, 0),
            ("delayed", LATE, 0),
            ("timed", 0, DAY_MS),
        )
    }


def measure_listeners(bench: Bench, said: argparse.Namespace) -> dict[str, float]:
    if said.only:
        uvloop.run(send(bench.namesrv, TOPIC, said.count))
    return {
        name: uvloop.run(consume(bench.namesrv, TOPIC, said.count, orderly=orderly))
        for name, orderly in (("concurrent", False), ("orderly", True))
    }


def measure_due(bench: Bench, said: argparse.Namespace) -> dict[str, float]:
    found = uvloop.run(due_at_once(bench.namesrv, TOPIC, QUIET, said.due))
    return found | uvloop.run(timed_at_once(bench.namesrv, TOPIC, QUIET, said.due))


def measure_steady(bench: Bench, said: argparse.Namespace) -> dict[str, float]:
    return uvloop.run(steady(bench.namesrv, TOPIC))


def measure_pending(bench: Bench, said: argparse.Namespace) -> dict[str, float]:
    if not said.pending:
        return {}
    now_ms = time.time_ns() // 1_000_000
    # What the first calls take of the broker is no part of what waits.
    uvloop.run(send_timed(bench.namesrv, TOPIC, WARM_UP, now_ms, 1))
    before_mib, far_ms = rss_mib(bench.broker_pid), now_ms + DAY_MS
    uvloop.run(send_timed(bench.namesrv, TOPIC, said.pending, far_ms, DAY_MS))
    return {"pending_mib": rss_mib(bench.broker_pid) - before_mib}


def measure_back(bench: Bench, said: argparse.Namespace) -> dict[str, float]:
    if said.only:
        uvloop.run(send(bench.namesrv, TOPIC, said.due))
    address = bench.cluster.brokers[0].address
    return {"back": uvloop.run(send_backs(address, bench.namesrv, TOPIC, said.due))}


PARTS = {
    "sends": measure_sends,
    "listeners": measure_listeners,
    "due": measure_due,
    "pending": measure_pending,
    "back": measure_back,
}
ALONE = {"steady": measure_steady}


def one_run(folder: Path, said: argparse.Namespace) -> dict[str, float]:
    if said.only == "store":
        return waiting.measure(folder, said.pending, recovers=said.pending <= RECOVERED_MAX)
    parts = [(PARTS | ALONE)[said.only]] if said.only else list(PARTS.values())
    found: dict[str, float] = {}
    with stage.cluster(folder, TOPICS) as bench:
        for part in parts:
            found |= part(bench, said)
    return found


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench messaging", description=__doc__)
    parser.add_argument("--count", type=int, default=500_000, help="plain or delayed sends a run")
    parser.add_argument("--due", type=int, default=100_000, help="messages that are due at once")
    parser.add_argument("--pending", type=int, default=0, help="messages that wait for their time")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", choices=[*PARTS, *ALONE, "store"], default="", help="one part")
    parser.add_argument("--folder", type=Path, default=PROJECT / "data" / "bench")
    said = parser.parse_args(argv)
    if said.only in ("store", "pending") and not said.pending:
        said.pending = 1_000_000
    folder = said.folder.resolve() / "messaging"
    folder.mkdir(parents=True, exist_ok=True)
    runs: list[dict[str, float]] = []
    for _ in range(said.runs):
        runs.append(one_run(folder, said))
        print(json.dumps(runs[-1]), flush=True)
    table = [
        [name, f"{median(run[key] for run in runs):,.{digits}f}", limit]
        for name, key, digits, limit in (
            ("plain sends/s", "plain", 0, ""),
            ("delay-level sends/s", "delayed", 0, "80 % of plain"),
            ("sends/s that wait for a time of their own", "timed", 0, "80 % of plain"),
            ("concurrent listener calls/s", "concurrent", 0, ""),
            ("orderly listener calls/s", "orderly", 0, "60 % of concurrent"),
            (f"last of {said.due:,} that are due at once, s late", "late_s", 2, "1"),
            ("lone sends before, p99 ms", "calm_p99_ms", 2, ""),
            ("lone sends meanwhile, p99 ms", "due_p99_ms", 2, "3 times before"),
            (f"last of {said.due:,} that are due within 1 s, s late", "timed_late_s", 2, "1"),
            ("lone sends meanwhile, p99 ms", "timed_p99_ms", 2, "3 times before"),
            ("1,000 due each second: stored so late, p99 ms", "stored_p99_ms", 0, "50"),
            ("... received so late, p99 ms", "received_p99_ms", 0, ""),
            (f"MiB for {said.pending:,} that wait", "pending_mib", 0, "40 for 1,000,000"),
            ("messages sent back/s", "back", 0, "20,000"),
            ("opening after kill -9, plain, s", "plain_open_s", 2, ""),
            (f"... {said.pending:,} that wait for a level, s", "level_open_s", 2, ""),
            (f"... {said.pending:,} that wait for a time, s", "timer_open_s", 2, ""),
            ("... and their index, s more than plain", "open_longer_s", 2, "0.5"),
            ("recovery from the log, levels, % of plain", "level_recovery", 0, "50"),
            ("recovery from the log, times, % of plain", "timer_recovery", 0, "50"),
            ("index: entries/s from the queue", "index_rate", 0, "5,000,000"),
            ("... a second of CPU", "index_cpu_rate", 0, ""),
            ("... MiB", "index_mib", 0, "40 for 1,000,000; 96 for 10,000,000"),
            ("... from its files, s", "index_files_s", 2, ""),
        )
        if key in runs[0]
    ]
    print(markdown(["what", "median", "limit"], table))
    print(f"\n{native.description()}; machine: {machine()}")


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
