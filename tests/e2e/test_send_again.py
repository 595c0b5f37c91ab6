"""A call of ``Send`` that comes again to another process of the broker: stored once, whatever the
shape of its messages.
"""

from __future__ import annotations

from pathlib import Path

from cometmq.v1 import broker_pb2 as pb
from tests.support.cluster.broker import BrokerClient, BrokerProcess
from tests.support.cluster.send_shapes import REPLY_TOPIC, TOPIC, send_shapes

Place = tuple[str, int, int, int]  # id, queue, offset there, offset among the halves


async def test_each_shape_is_stored_once_after_a_kill_and_a_stop(tmp_path: Path) -> None:
    shapes = send_shapes()
    async with BrokerProcess(tmp_path) as process:
        broker = process.client
        await broker.put_topic(TOPIC, 2)
        await broker.put_topic(REPLY_TOPIC, 1)
        first = await _send_all(broker, shapes)
        assert await _send_all(broker, shapes) == first
        broker = await process.restart()
        assert await _send_all(broker, shapes) == first
        assert await process.stop() == 0
        broker = await process.start()
        assert await _send_all(broker, shapes) == first
        together = await broker.stub.Send(pb.SendRequest(messages=shapes.values()))
        assert list(map(place, together.sent)) == list(first.values())


def place(sent: pb.SentMessage) -> Place:
    return sent.message_id, sent.queue.queue_id, sent.position.offset, sent.half.half_offset


async def _send_all(
    broker: BrokerClient, shapes: dict[str, pb.OutgoingMessage]
) -> dict[str, Place]:
    """Where each message lies, by its shape."""
    places = {}
    for name, message in shapes.items():
        [sent] = (await broker.stub.Send(pb.SendRequest(messages=[message]))).sent
        places[name] = place(sent)
    return places
