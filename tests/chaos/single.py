"""Producers that send each message once, by the raw stream, so that a refusal is one: what was
refused is nowhere, and nothing is anywhere twice.
"""

from __future__ import annotations

import asyncio
import itertools
import zlib
from collections.abc import Iterator
from contextlib import suppress

import grpc

from cometmq.admin.connection import Connection
from cometmq.errors import CometError, DiskFull, FlowControl, SlaveNotAvailable, TopicNotFound
from cometmq.rpc.interceptors import from_proto
from cometmq.v1 import broker_pb2 as pb
from tests.chaos.topics import GROUP, queues_of
from tests.support.cluster.broker import BrokerClient, SendLane, StreamEnded, batch
from tests.support.faults.history import Outcome, Queue, Recorder

PAUSE_S, AGAIN_S = 0.2, 0.3
# Told before anything is appended. Another error may be the answer to what was appended already.
NOT_STORED = (SlaveNotAvailable, DiskFull, FlowControl, TopicNotFound)
# The last: gRPC, for a stream that ended between two batches.
BROKEN = (
    CometError,
    grpc.aio.AioRpcError,
    StreamEnded,
    TimeoutError,
    asyncio.InvalidStateError,
)


def name_of(topic: str) -> str:
    """The producer that sends to this topic."""
    return f"single-{topic}"


async def send_once(namesrv: str, topic: str, recorder: Recorder) -> None:
    """To every queue of a topic in turn, one batch of one message at a time. A stream for each
    topic, so that one which waits for a disk holds up nobody.
    """
    names = (f"{name_of(topic)}/{number}" for number in itertools.count())
    messages = zip(names, itertools.cycle(queues_of([topic])), strict=False)
    async with Connection(namesrv) as connection:
        while True:
            with suppress(*BROKEN):
                writer = (await connection.writers((GROUP,)))[GROUP]
                client = BrokerClient(writer.address, writer.internal_address)
                try:
                    await _send_on(await client.lane(), messages, recorder)
                finally:
                    await client.close()
            await asyncio.sleep(AGAIN_S)


async def _send_on(
    lane: SendLane, messages: Iterator[tuple[str, Queue]], recorder: Recorder
) -> None:
    """Until the stream breaks; what it carried then is unknown."""
    for name, queue in messages:
        records, segments = batch((*queue, [name.encode()]))
        recorder.send(name, queue)
        try:
            result = await lane.exchange(records, segments, zlib.crc32(records))
        except BROKEN:
            recorder.sent(name, Outcome.UNKNOWN)
            raise
        _decided(name, result, recorder)
        await asyncio.sleep(PAUSE_S)


def _decided(name: str, result: pb.SendBatchResult, recorder: Recorder) -> None:
    if not result.HasField("error"):
        good = result.status == pb.SEND_STATUS_SEND_OK
        outcome = Outcome.OK if good else Outcome.STORED
        recorder.sent(name, outcome, result.queue_offsets[0], result.log_offset)
        return
    error = from_proto(result.error)
    if isinstance(error, NOT_STORED):
        recorder.refused(name, error.name())
    else:
        recorder.sent(name, Outcome.UNKNOWN)
