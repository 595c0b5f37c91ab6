from __future__ import annotations

import pytest

from cometmq.admin import messages
from cometmq.admin.connection import Connection
from cometmq.errors import MessageIdInvalid, MessageNotFound, RouteNotFound
from cometmq.model import Message, QueueRef

from .conftest import FakeCluster


async def test_a_sent_message_is_found_by_its_id(
    connection: Connection, cluster: FakeCluster
) -> None:
    cluster.g1.put("T")
    message = Message("T", b"hi", tag="a", keys=("k1", "k2"), properties={"p": "1"})
    sent = await messages.send_message(connection, message)
    assert (sent.broker_group, sent.queue_offset) == ("g1", 0)
    found = await messages.get_message(connection, sent.message_id)
    assert (found.body_text, found.tag, found.keys) == ("hi", "a", ["k1", "k2"])
    assert found.properties == {"p": "1"}


async def test_a_named_queue_decides_the_broker_group(
    connection: Connection, cluster: FakeCluster
) -> None:
    cluster.g1.put("T")
    cluster.g2.put("T")
    queue = QueueRef("T", 1, "g2")
    sent = await messages.send_message(connection, Message("T", b"hi", queue=queue))
    assert (sent.broker_group, sent.queue_id) == ("g2", 1)


async def test_sending_where_nobody_writes_is_refused(
    connection: Connection, cluster: FakeCluster
) -> None:
    cluster.g1.put("T")
    message = Message("T", b"hi", queue=QueueRef("T", 0, "g2"))
    with pytest.raises(RouteNotFound, match="g2"):
        await messages.send_message(connection, message)


async def test_a_hexadecimal_id_is_looked_up_everywhere(
    connection: Connection, cluster: FakeCluster
) -> None:
    found = cluster.g2.add("T", 0, b"old")
    found.message_id = "7F0000010000277F000000000000006E"
    message = await messages.get_message(connection, found.message_id)
    assert message.body_text == "old"


@pytest.mark.parametrize("message_id", ["", "x", "g1/-1", "g1/x"])
async def test_a_malformed_id_is_refused(connection: Connection, message_id: str) -> None:
    with pytest.raises(MessageIdInvalid):
        await messages.get_message(connection, message_id)


async def test_an_unknown_id_is_not_found(connection: Connection) -> None:
    with pytest.raises(MessageNotFound):
        await messages.get_message(connection, "g1/12345")


async def test_what_is_not_on_disk_yet_is_waited_for(
    connection: Connection, cluster: FakeCluster
) -> None:
    cluster.g1.flushed_offsets = [50, 20, 0]  # 0, then 20, then 50
    with pytest.raises(MessageNotFound):
        await messages.get_message(connection, "g1/30")
    assert cluster.g1.flushed_offsets == []


async def test_what_was_never_appended_is_not_waited_for(
    connection: Connection, cluster: FakeCluster
) -> None:
    cluster.g1.flushed_offsets = [50, 50]
    with pytest.raises(MessageNotFound):
        await messages.get_message(connection, "g1/100")
    assert cluster.g1.flushed_offsets == [50]
