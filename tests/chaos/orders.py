"""Restarts in odd orders, and a topic that begins a new life in between."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

import grpc

from cometmq.errors import CometError, TopicNotFound
from cometmq.rpc.interceptors import error_from
from cometmq.v1 import broker_pb2 as pb
from cometmq.v1 import common_pb2 as common
from tests.chaos.cluster import Cluster
from tests.chaos.listing import everybody, fault, nobody, writer
from tests.chaos.machines import Member
from tests.chaos.nodes import dead
from tests.chaos.topics import FLEETING, QUEUES, config_of
from tests.support.cluster import network
from tests.support.cluster.broker import BrokerClient

OUTDATED_S = 3.0
CALL_S = 10.0

Answer = TypeVar("Answer")


@asynccontextmanager
async def all_stopped(cluster: Cluster, *members: Member) -> AsyncIterator[None]:
    """In good order each, so the writer looks for somebody to hand over to."""
    for member in members:
        member.signal(signal.SIGCONT)  # a stop wakes whom another fault has stopped
        member.signal(signal.SIGTERM)
    for member in members:
        if member.process is not None:
            await asyncio.to_thread(member.end)
    with dead(cluster, *members):
        yield


@asynccontextmanager
async def followers_first(cluster: Cluster) -> AsyncIterator[None]:
    followers = cluster.followers()
    with dead(cluster, *cluster.members):
        for follower in followers:
            follower.revive()
        yield


@asynccontextmanager
async def outdated(cluster: Cluster, member: Member) -> AsyncIterator[None]:
    """It reads the lease as it was when it was killed."""
    with cluster.leases.outdated(member.address):
        with dead(cluster, member):
            yield
        await asyncio.sleep(OUTDATED_S)


@asynccontextmanager
async def reborn(cluster: Cluster) -> AsyncIterator[None]:
    """Deleted at the beginning, made anew at the end, under producers and readers."""
    began_s = time.monotonic()
    await _at_the_writer(cluster, _delete)
    yield
    generations = await _at_the_writer(cluster, _create)
    cluster.recorder.reborn(FLEETING, began_s, generations)


async def _delete(client: BrokerClient) -> None:
    request = pb.DeleteTopicRequest(topic=FLEETING)
    try:
        await client.admin.DeleteTopic(request, timeout=CALL_S)
    except grpc.aio.AioRpcError as error:
        if not isinstance(
            error_from(error), TopicNotFound
        ):  # else an attempt before was carried out
            raise


async def _create(client: BrokerClient) -> dict[int, int]:
    """The generation of each of its queues."""
    config = config_of(FLEETING)
    await client.admin.PutTopic(pb.PutTopicRequest(topic=config), timeout=CALL_S)
    refs = [common.QueueRef(topic=FLEETING, queue_id=number) for number in range(QUEUES)]
    request = pb.QueryQueuesRequest(queues=refs)
    answer = await client.stub.QueryQueues(request, timeout=CALL_S)
    return {number: bounds.generation for number, bounds in enumerate(answer.queues)}


async def _at_the_writer(
    cluster: Cluster, act: Callable[[BrokerClient], Awaitable[Answer]]
) -> Answer:
    """Done by whoever writes, as soon as somebody does."""
    done: list[Answer] = []

    async def attempt() -> bool:
        client = cluster.client(cluster.writer())
        try:
            with suppress(grpc.aio.AioRpcError, CometError):
                done.append(await act(client))
        finally:
            await client.close()
        return bool(done)

    await cluster.until("the topic's deletion or creation", attempt)
    return done[0]


fault("all members stopped at once", all_stopped, everybody)
fault("all members killed, the followers back before the writer", followers_first, nobody)
fault(
    "kill -9 of everything",
    dead,
    lambda cluster, rng: rng.sample(cluster.servers(), len(cluster.servers())),
)
fault("the writer back with an older view of the lease", outdated, writer, missing=network.why_not)
fault("a topic deleted and made anew", reborn, nobody, waits=True)
