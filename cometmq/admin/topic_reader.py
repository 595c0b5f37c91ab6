"""Reading a topic without being a consumer: nothing is committed, no group is joined."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from cometmq.admin.connection import Connection, call
from cometmq.admin.convert import message_view, writer_of
from cometmq.admin.views import MessageView
from cometmq.errors import PositionFenced, QueueNotFound
from cometmq.turns import Turns
from cometmq.v1 import broker_pb2, common_pb2, namesrv_pb2

PULL_COUNT_MAX = 32


@dataclass(slots=True)
class _Cursor:
    """A queue and the position from which the reader pulls next."""

    member: namesrv_pb2.Member
    queue: common_pb2.QueueRef
    position: common_pb2.Position
    appended_offset: int  # end of the queue when the reader was opened, readable or not


class TopicReader:
    """Reads all queues of a topic side by side; made by :func:`open_reader`."""

    def __init__(
        self,
        connection: Connection,
        cursors: Iterable[_Cursor],
        wanted: common_pb2.Filter,
        *,
        to_the_end: bool = False,
    ) -> None:
        """``to_the_end``: nothing that comes after this is read."""
        self._connection = connection
        self._cursors = list(cursors)
        self._filter = wanted
        self._to_the_end = to_the_end

    @property
    def caught_up(self) -> bool:
        """All that was appended when the reader was opened has been read.

        What a broker has acknowledged may become readable a moment later, when it is on disk.
        """
        return all(c.position.offset >= c.appended_offset for c in self._cursors)

    async def read(self) -> list[MessageView]:
        """The next messages of every queue, by store time; none: the end is reached for now."""
        runs = await asyncio.gather(*(self._pull(cursor) for cursor in self._cursors))
        messages = [message for run in runs for message in run]
        ordered = sorted(messages, key=lambda m: (m.store_time_ms, m.queue.queue_id))
        return [message_view(message) for message in ordered]

    async def _pull(self, cursor: _Cursor) -> list[broker_pb2.StoredMessage]:
        """Pull one queue until there are messages or nothing is left; moves the cursor on."""
        end = cursor.appended_offset if self._to_the_end else sys.maxsize
        turns = Turns(f"reading {cursor.queue.topic}")
        while cursor.position.offset < end:
            turns.next(cursor.position.offset)
            answer = await self._pull_once(cursor)
            if answer is None:
                continue
            cursor.position = answer.next_position
            if answer.status == broker_pb2.PULL_STATUS_NOT_FOUND:
                return []
            if found := [one for one in answer.messages if one.queue_offset < end]:
                return found
        return []

    async def _pull_once(self, cursor: _Cursor) -> broker_pb2.PullResponse | None:
        """One pull; None when the position was fenced and the cursor moved to the fence."""
        request = broker_pb2.PullRequest(
            queue=cursor.queue,
            position=cursor.position,
            filter=self._filter,
            max_count=PULL_COUNT_MAX,
            form=broker_pb2.MESSAGE_FORM_MESSAGES,
        )
        broker = self._connection.broker(cursor.member)
        try:
            return await call(cursor.member.address, broker.Pull, request)
        except PositionFenced as fenced:
            if fenced.fence is None:
                raise
            generation, offset = fenced.fence
            cursor.position = common_pb2.Position(generation=generation, offset=offset)
            return None


async def open_reader(
    connection: Connection,
    topic: str,
    *,
    from_end: bool = False,
    tags: Iterable[str] = (),
    sql: str = "",
    broker_group: str = "",
    queue_id: int | None = None,
    begin_ms: int | None = None,
    to_the_end: bool = False,
) -> TopicReader:
    """A reader from the first message on, the first that was not stored before ``begin_ms``, or
    from the end; of all queues, those of one broker group, or those of one number. ``tags`` or
    ``sql``, an SQL92 expression over properties, say which messages. ``to_the_end``: only of what
    is there now. QueueNotFound when no readable queue is left."""
    route = await connection.route(topic)
    groups = [g for g in route.groups if broker_group in ("", g.broker_group)]
    found = [await _cursors(connection, group, queue_id, from_end) for group in groups]
    cursors = [cursor for group in found for cursor in group]
    if not cursors:
        which = f"queue {broker_group}/{queue_id}" if broker_group else "queue"
        raise QueueNotFound(f"topic {topic} has no {which} that can be read")
    if begin_ms is not None:
        for cursor in cursors:
            await _move_to(connection, cursor, begin_ms)
    wanted = common_pb2.Filter(tags=sorted(tags), sql=sql)
    return TopicReader(connection, cursors, wanted, to_the_end=to_the_end)


async def _move_to(connection: Connection, cursor: _Cursor, time_ms: int) -> None:
    request = broker_pb2.QueryOffsetsByTimeRequest(
        queues=[cursor.queue], time_ms=time_ms, boundary=broker_pb2.TIME_BOUNDARY_LOWER
    )
    method = connection.broker(cursor.member).QueryOffsetsByTime
    [found] = (await call(cursor.member.address, method, request, deadline_s=10.0)).queues
    if not found.HasField("error"):
        cursor.position = found.position


async def _cursors(
    connection: Connection, group: namesrv_pb2.GroupRoute, queue_id: int | None, from_end: bool
) -> list[_Cursor]:
    """A cursor for each wanted queue of one broker group, at its first message or its end."""
    member, topic = writer_of(group), group.topic
    if member is None:
        return []
    request = broker_pb2.DescribeTopicRequest(topic=topic.name)
    answer = await call(member.internal_address, connection.admin(member).DescribeTopic, request)
    return [
        _Cursor(
            member=member,
            queue=common_pb2.QueueRef(topic=topic.name, queue_id=queue.queue_id),
            position=common_pb2.Position(
                generation=queue.generation,
                offset=queue.max_offset if from_end else queue.min_offset,
            ),
            appended_offset=queue.appended_offset,
        )
        for queue in answer.queues
        if queue.queue_id < topic.read_queue_count and queue_id in (None, queue.queue_id)
    ]
