"""Operations on single messages: send one, look one up. :mod:`.topic_reader` reads many."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from cometmq.admin.connection import Connection, call, until
from cometmq.admin.convert import message_view, writer_of
from cometmq.admin.views import MessageView, SentView
from cometmq.errors import MessageNotFound, RouteNotFound
from cometmq.format.ids import parse_message_id
from cometmq.model import Message
from cometmq.v1 import broker_pb2, namesrv_pb2

FLUSH_WAIT_S = 12.0  # a broker with little to do syncs its log every 10 s unless a consumer waits


async def send_message(connection: Connection, message: Message) -> SentView:
    """Store one message; without ``message.queue`` on the first writable broker group of the
    topic's route, which chooses the queue."""
    route = await connection.route(message.topic)
    wanted = message.queue.broker_group if message.queue else ""
    groups = (group for group in route.groups if wanted in ("", group.broker_group))
    member = next(filter(None, map(writer_of, groups)), None)
    if member is None:
        where = f"broker group {wanted}" if wanted else "any broker group"
        raise RouteNotFound(f"topic {route.topic} has no writer on {where}")
    outgoing = broker_pb2.OutgoingMessage(
        topic=message.topic,
        queue_id=message.queue.queue_id if message.queue else None,
        body=message.body,
        tag=message.tag,
        keys=message.keys,
        properties=message.properties,
        flag=message.flag,
    )
    request = broker_pb2.SendRequest(messages=[outgoing])
    answer = await call(member.address, connection.broker(member).Send, request)
    sent = answer.sent[0]
    return SentView(
        message_id=sent.message_id,
        topic=sent.queue.topic,
        broker_group=member.broker_group,
        queue_id=sent.queue.queue_id,
        queue_offset=sent.position.offset,
        generation=sent.position.generation,
        store_time_ms=answer.store_time_ms,
    )


async def get_message(connection: Connection, message_id: str) -> MessageView:
    """One message by its id. MessageIdInvalid, MessageNotFound, GroupNotFound.

    RocketMQ's ids name a host that may have moved: with one of those every broker group is asked.
    A message that was acknowledged before it was on disk is waited for.
    """
    broker_group, _, log_offset = parse_message_id(message_id)
    writers = await connection.writers((broker_group,) if broker_group else ())
    request = broker_pb2.GetMessageRequest(message_id=message_id)
    for member in writers.values():
        await until_settled(connection, member, log_offset)
        with suppress(MessageNotFound):
            answer = await call(member.address, connection.broker(member).GetMessage, request)
            return message_view(answer.message)
    raise MessageNotFound(f"no message {message_id} on {', '.join(writers)}")


async def until_settled(
    connection: Connection, member: namesrv_pb2.Member, log_offset: int
) -> None:
    """Waits until a message at this place can be read if there is one, FLUSH_WAIT_S at most."""
    await until(partial(_is_settled, connection, member, log_offset), FLUSH_WAIT_S)


async def _is_settled(connection: Connection, member: namesrv_pb2.Member, log_offset: int) -> bool:
    """False while a message at this place may exist but cannot be read yet."""
    method = connection.admin(member).DescribeBroker
    said = await call(member.internal_address, method, broker_pb2.DescribeBrokerRequest())
    return not said.log_flushed_offset <= log_offset < said.log_appended_offset
