"""A small cluster of real processes under traffic, with a real Prometheus that scrapes it.

Two name servers, a broker group of two members and one of a stand-alone broker, a pullhold;
producers, consumers, one group that reads nothing, some calls that are refused: enough for every
metric to have a value.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from cometmq.client import (
    Later,
    Message,
    Producer,
    PushConsumer,
    ReceivedMessage,
    SimpleConsumer,
    TransactionProducer,
    TransactionState,
)
from cometmq.rpc.channels import open_channel
from cometmq.v1 import broker_pb2 as pb
from cometmq.v1 import common_pb2, namesrv_pb2, namesrv_pb2_grpc
from tests.support.cluster.broker import ASYNC, SYNC, BrokerClient
from tests.support.cluster.processes import Processes, Service
from tests.support.cluster.prometheus import Prometheus
from tests.support.waiting import until_async, wait_until

CLUSTER = "shop"
NAMESPACE = "queues"
TOPICS = {"Orders": ASYNC, "Payments": SYNC}
JOBS, REQUESTS = "Jobs", "Requests"  # delayed, in transactions, given back; and with replies
IDLE_GROUP = "audit"  # commits once and reads nothing
SMALL = {
    "mapped_file_size_commit_log": 4 * 1024 * 1024,
    "mapped_file_size_consume_queue": 20_000,
    "max_hash_slot_num": 1_000,
    "max_index_num": 4_000,
    "store_quota_bytes": 1024 * 1024 * 1024,
}
SCRAPES_MIN = 8  # of each process under traffic, before anybody looks


@dataclass(frozen=True)
class Scene:
    """What runs."""

    services: tuple[Service, ...]
    prometheus: Prometheus
    processes: Processes


@contextmanager
def playing(directory: Path, rules: Path) -> Iterator[Scene]:
    """Start everything; the block begins when Prometheus has seen it all for some seconds."""
    with Processes(directory) as processes:
        services = tuple(_services(processes))
        labels = [{"namespace": NAMESPACE, "pod": service.name} for service in services]
        targets = [
            ("cometmq", service.metrics_address, its)
            for service, its in zip(services, labels, strict=True)
        ]
        prometheus = Prometheus(processes, targets, rules)
        with _traffic(services):
            _wait_for_samples(prometheus, len(services))
            yield Scene(services, prometheus, processes)


def _services(processes: Processes) -> Iterator[Service]:
    here = processes.directory
    name_servers = []
    for number in range(2):
        name = f"namesrv-{number}"
        name_servers.append(
            processes.service(name, "namesrv", kv_config_path=here / f"{name}.kv.json")
        )
    yield from name_servers
    shared: dict[str, Any] = {
        "cluster": CLUSTER,
        "namesrv": ";".join(service.address for service in name_servers),
    }
    yield from _members(processes, {**shared, **SMALL, "internal_port": 0})
    yield processes.service("pullhold-0", "pullhold", **shared)


def _members(processes: Processes, shared: dict[str, Any]) -> Iterator[Service]:
    """Both ways to start one: as the chart does, with a lease; and alone."""
    here = processes.directory
    leased = {"broker_group": "g1", "lease": f"file://{here / 'g1-lease.json'}"}
    for number in range(2):
        name = f"g1-{number}"
        own = {"member_id": number, "store_path": here / f"{name}-store"}
        yield processes.service(name, "haslave", **shared, **leased, **own)
    # It knows that the group has no other member, so that it says how many should be in sync.
    alone = {"broker_group": "g2", "store_path": here / "g2-store", "peers": "0@127.0.0.1:10911"}
    yield processes.service("g2-0", "broker", **shared, **alone)


def _wait_for_samples(prometheus: Prometheus, process_count: int) -> None:
    """All processes are scraped, and what traffic brings forth has been there for a while."""
    late = (
        'rocketmq_messages_out_total{consumer_group="billing"}',
        f'rocketmq_consumer_lag_messages{{consumer_group="{IDLE_GROUP}"}}',
        'rocketmq_rpc_latency_count{response_code="TOPIC_NOT_FOUND"}',
        'cometmq_hold_duration_seconds_count{outcome="found"} > 0',
        'cometmq_rpc_streams_ended_total{response_code="OK"}',
        "cometmq_replica_connected == 1",
        'cometmq_namesrv_members{broker_group="g1", role="follower"} == 1',
        'cometmq_pop_delivered_again_messages_total{consumer_group="boxes"}',
        'rocketmq_send_back_messages_total{consumer_group="workers"}',
        'rocketmq_send_to_dlq_messages_total{consumer_group="workers"}',
        "rocketmq_timer_dequeue_total",
        "cometmq_replies_total",
    )

    def seen() -> bool:
        up = prometheus.now("count(up == 1)")
        if not up or int(up[0]["value"][1]) < process_count:
            return False
        counts = [prometheus.now(f"max(count_over_time(({expr})[1m:1s]))") for expr in late]
        return all(found and float(found[0]["value"][1]) >= SCRAPES_MIN for found in counts)

    wait_until("Prometheus has seen the traffic", seen, deadline_s=80)


# --- traffic --------------------------------------------------------------------------------------


@contextmanager
def _traffic(services: tuple[Service, ...]) -> Iterator[None]:
    """Producers and consumers in a thread of their own; what they raise is raised here."""
    stop = threading.Event()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(_play(services, stop))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="traffic")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert not failures, failures


async def _play(services: tuple[Service, ...], stop: threading.Event) -> None:
    name_servers = [service.address for service in services if service.kind == "namesrv"]
    namesrv = ";".join(name_servers)
    brokers = await _writers(name_servers[0])
    try:
        await _prepare(brokers)
        consumer = PushConsumer(namesrv, "billing", _read)
        async with Producer(namesrv) as producer, consumer, AsyncExitStack() as stack:
            for topic in TOPICS:
                await consumer.subscribe(topic)
            play_jobs = await _jobs(namesrv, stack)
            while not stop.is_set():
                await _once(producer, brokers)
                await play_jobs()
                await asyncio.sleep(0.1)
    finally:
        for broker in brokers:
            await broker.close()


async def _writers(namesrv: str) -> list[BrokerClient]:
    """The members that write, once both groups have one."""
    found: list[namesrv_pb2.Member] = []
    async with open_channel(namesrv) as channel:
        stub = namesrv_pb2_grpc.NameServiceStub(channel)

        async def complete() -> bool:
            answer = await stub.DescribeCluster(namesrv_pb2.DescribeClusterRequest())
            members = [status.member for status in answer.members]
            found[:] = [m for m in members if m.role == common_pb2.MEMBER_ROLE_WRITER]
            return len(found) == 2

        await until_async(complete)
    return [BrokerClient(member.address, member.internal_address) for member in found]


async def _prepare(brokers: list[BrokerClient]) -> None:
    for broker in brokers:
        for topic, flush in {**TOPICS, JOBS: ASYNC, REQUESTS: ASYNC}.items():
            await broker.put_topic(topic, 2, flush)
        await broker.commit(IDLE_GROUP, ("Orders", 0, 0, 0))


async def _jobs(namesrv: str, stack: AsyncExitStack) -> Callable[[], Awaitable[None]]:
    """What plays a few delayed messages, transactions, requests, and jobs that are given back."""
    producer = await stack.enter_async_context(
        TransactionProducer(namesrv, "shop", lambda _: TransactionState.UNKNOWN, topics=[JOBS])
    )
    workers = await stack.enter_async_context(PushConsumer(namesrv, "workers", _give_back))
    await workers.subscribe(JOBS)
    boxes = await stack.enter_async_context(SimpleConsumer(namesrv, "boxes"))
    await boxes.subscribe(JOBS)

    async def answer(messages: list[ReceivedMessage]) -> None:
        for message in messages:
            await desk.reply(message, b"yes")

    desk = await stack.enter_async_context(PushConsumer(namesrv, "desk", answer))
    await desk.subscribe(REQUESTS)

    async def play() -> None:
        await producer.send(Message(JOBS, b"x", delay_level=1))
        await producer.send(Message(JOBS, b"x", delay_ms=200))
        for is_committed in (True, False):
            one = producer.transaction()
            await one.send(Message(JOBS, b"x"))
            await (one.commit() if is_committed else one.rollback())
        await producer.request(Message(REQUESTS, b"x"), 30.0)
        await boxes.receive(8, invisible_ms=10_000, wait_ms=0)  # never acknowledged

    return play


async def _give_back(messages: list[ReceivedMessage]) -> Later:
    """A job that cannot be done: it comes again, or is dead."""
    return Later(delay_level=1 if messages[0].queue_offset % 2 else -1)


async def _read(_: list[ReceivedMessage]) -> None:
    """What a consumer does with messages here."""


async def _once(producer: Producer, brokers: list[BrokerClient]) -> None:
    """A few messages, and what operators and clumsy clients do."""
    for topic in TOPICS:
        await producer.send(Message(topic, b"x" * 500))
    await producer.flush()
    for broker in brokers:
        async for _ in broker.admin.SnapshotOffsets(pb.SnapshotOffsetsRequest()):
            pass
        with suppress(grpc.aio.AioRpcError):
            await broker.pull("NotThere", 0, 0)
        with suppress(grpc.aio.AioRpcError):
            call = broker.stub.JoinGroup()
            await call.write(pb.JoinGroupRequest(group="no name!"))
            await call.read()
