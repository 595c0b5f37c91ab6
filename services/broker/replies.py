"""Replies to requests: each is a message of the reply topic, and goes to the stream of the client
that waits for it. A stream that opens later gets what came before by the key index.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

from cometmq.clock import Clock
from cometmq.errors import (
    ClientIdInUse,
    CometError,
    LimitExceeded,
    MessageNotFound,
    ReplyInvalid,
    StoreDamaged,
)
from cometmq.format import properties, request_reply
from cometmq.format.record import decode_all
from cometmq.member.read.reader import Reader
from cometmq.member.read.search import Finder, KeyQuery
from cometmq.member.state.keeper import StateKeeper
from cometmq.member.storage.member_storage import Ticket
from cometmq.model import TopicConfig
from cometmq.names import check_client_id
from cometmq.store.base import BaseStore
from cometmq.store.log.commitlog import Span
from cometmq.telemetry import fields, logger
from services.broker.sending.produce import Claim

WAITING_MAX = 10_000  # replies of one stream that its client has not taken
IDS_MAX = 1_024  # correlation ids of one request
BYTES_MAX = 1024 * 1024  # of one answer
INDEX_S_MAX = 5.0  # how long replies that may have come are looked for
INDEX_POLL_S = 0.005
READABLE_POLL_S = 0.05
FOUND_MAX = 4  # messages of one correlation id that are looked at
TIME_MS_MAX = 2**63 - 1

_log = logger(__name__)


class RepliesObserver(Protocol):
    """Counts replies by their outcome."""

    def replies(self, outcome: str, count: int) -> None: ...


class Reply(NamedTuple):
    """A reply of a batch: for whom, and the byte of the batch where its record begins."""

    client_id: str
    start: int
    size: int


class Outbox:
    """Replies for one stream, as places in the log. Belongs to the event loop."""

    def __init__(self, client_id: str, opened_at: int) -> None:
        self.client_id = client_id
        self.opened_at = opened_at  # log offset: what lies behind it is handed in as it comes
        self._waiting: deque[Span] = deque()
        # Log offsets of those before `opened_at`: they may be found, and acknowledged later too.
        self._earlier: set[int] = set()
        self._wake = asyncio.Event()
        self._end: CometError | None = None
        self.is_over = False

    def put(self, log_offset: int, size: int) -> bool:
        """Takes a reply once; False: it was taken before, the stream is over, or its client takes
        nothing.
        """
        if self.is_over or len(self._waiting) >= WAITING_MAX:
            return False
        if log_offset < self.opened_at:
            if log_offset in self._earlier or len(self._earlier) >= WAITING_MAX:
                return False
            self._earlier.add(log_offset)
        self._waiting.append((log_offset, size))
        self._wake.set()
        return True

    def end(self, error: CometError | None = None) -> None:
        """No more is taken."""
        self.is_over, self._end = True, error
        self._wake.set()

    async def answers(self) -> AsyncIterator[list[Span]]:
        """Replies as they come, at most BYTES_MAX or one, until the stream is over. Raises why it
        was ended.
        """
        while not self.is_over:
            if self._waiting:
                yield self._next()
            else:
                self._wake.clear()
                await self._wake.wait()
        if self._end is not None:
            raise self._end

    def _next(self) -> list[Span]:
        spans = [self._waiting.popleft()]
        left = BYTES_MAX - spans[0][1]
        while self._waiting and self._waiting[0][1] <= left:
            spans.append(self._waiting.popleft())
            left -= spans[-1][1]
        return spans


class Replies:
    """All streams of requesters, by client id. Belongs to the event loop."""

    def __init__(
        self,
        store: BaseStore,
        keeper: StateKeeper,
        reader: Reader,
        cluster: str,
        observer: RepliesObserver,
        clock: Clock,
    ) -> None:
        self.topic = request_reply.reply_topic(cluster)
        self._store = store
        self._keeper = keeper
        self._reader = reader
        self._finder = Finder(reader)
        self._observer = observer
        self._clock = clock
        self._outboxes: dict[str, Outbox] = {}

    def __len__(self) -> int:
        """Open streams."""
        return len(self._outboxes)

    # --- what producers send ---

    def check(self, records: bytes, claims: Sequence[Claim]) -> Sequence[Reply]:
        """The replies of a batch. ReplyInvalid, with the segment: one of them names nobody, or
        waits for something; BatchMalformed.
        """
        topic = self.topic
        if all(claim.topic != topic for claim in claims):
            return ()
        for segment, claim in enumerate(claims):
            # It would be handed out now, a half message before its transaction is committed.
            if claim.topic == topic and (claim.waits or claim.half is not None):
                reason = "a reply has no delay, and belongs to no transaction"
                raise ReplyInvalid(reason, segment=segment)
        found: list[Reply] = []
        all_records = iter(decode_all(records))
        start = 0
        for segment, claim in enumerate(claims):
            for record in islice(all_records, claim.record_count):
                if claim.topic == topic:
                    client_id = _requester(record.raw_properties, segment)
                    found.append(Reply(client_id, start, record.size))
                start += record.size
        return found

    def stored(self, replies: Sequence[Reply], ticket: Ticket) -> None:
        """These replies are in the log; their streams get them once they are acknowledged."""
        if ticket.acked is None:
            self._hand_out(replies, ticket.appended.log_offset)
            return

        def decided(acked: asyncio.Future[None]) -> None:
            if not acked.cancelled() and acked.exception() is None:
                self._hand_out(replies, ticket.appended.log_offset)

        ticket.acked.add_done_callback(decided)

    def _hand_out(self, replies: Sequence[Reply], log_offset: int) -> None:
        pushed = 0
        for client_id, start, size in replies:
            outbox = self._outboxes.get(client_id)
            pushed += outbox is not None and outbox.put(log_offset + start, size)
        self._observer.replies("pushed", pushed)
        self._observer.replies("unclaimed", len(replies) - pushed)

    # --- what requesters ask ---

    async def open(self, client_id: str) -> Outbox:
        """A stream for the client; an older one ends. The reply topic is there afterwards. Raises
        InvalidRequest, and what creating a topic raises.
        """
        check_client_id(client_id)
        if not self._keeper.has_topic(self.topic):
            await self._keeper.create_topic(TopicConfig(self.topic, 1, 1))
        older = self._outboxes.get(client_id)
        if older is not None:
            older.end(ClientIdInUse(f"another stream of {client_id!r} takes replies here"))
        outbox = self._outboxes[client_id] = Outbox(client_id, self._store.appended_offset)
        return outbox

    def close(self, outbox: Outbox) -> None:
        """The stream has ended."""
        outbox.end()
        if self._outboxes.get(outbox.client_id) is outbox:
            del self._outboxes[outbox.client_id]

    def end_all(self) -> None:
        """The broker stops."""
        for outbox in self._outboxes.values():
            outbox.end()

    async def read(self, spans: Sequence[Span]) -> bytes:
        """The records of replies, end to end: from memory at once, else in a thread. Those that are
        gone or damaged are left out: their requesters time out.
        """
        try:
            return self._store.read_records(spans, nowait=True)
        except (BlockingIOError, MessageNotFound, StoreDamaged):
            return await asyncio.to_thread(self._read_one_by_one, spans)

    def _read_one_by_one(self, spans: Sequence[Span]) -> bytes:
        found: list[bytes] = []
        for span in spans:
            try:
                found.append(self._store.read_records([span]))
            except (MessageNotFound, StoreDamaged) as error:
                _log.warning("a reply cannot be read", extra=fields(at=span[0], error=error))
        return b"".join(found)

    def late(self, count: int) -> None:
        """So many replies came to a requester that waited no more."""
        self._observer.replies("late", count)

    async def look_for(self, outbox: Outbox, correlation_ids: Sequence[str]) -> None:
        """Hands out replies to these requests that were stored before the stream was opened."""
        if len(correlation_ids) > IDS_MAX:
            raise LimitExceeded(f"{len(correlation_ids)} correlation ids, {IDS_MAX} are allowed")
        if not correlation_ids or not await self._is_indexed(outbox.opened_at):
            return
        await self._until_readable(outbox)
        found = 0
        for correlation_id in correlation_ids:
            span = await self._find(outbox, correlation_id)
            found += span is not None and outbox.put(*span)
        self._observer.replies("found", found)

    async def _is_indexed(self, log_offset: int) -> bool:
        """Whether the keys of all messages before the place are known; waits a while for them."""
        index = self._store.index
        end_s = self._clock.monotonic_s() + INDEX_S_MAX
        while index.enabled and self._clock.monotonic_s() < end_s:
            if index.status.position >= log_offset:
                return True
            await asyncio.sleep(INDEX_POLL_S)
        _log.warning(
            "replies that came before are not looked for: the key index is off, or far behind",
            extra=fields(topic=self.topic, enabled=index.enabled),
        )
        return False

    async def _until_readable(self, outbox: Outbox) -> None:
        """Waits until all replies in the log can be read, or the stream is over: after a fail-over
        that may take as long as a follower is missing.
        """
        while not outbox.is_over and self._keeper.has_topic(self.topic):
            queue_count = self._keeper.state.topics.get(self.topic).read_queue_count
            queues = [(self.topic, queue_id) for queue_id in range(queue_count)]
            if not await self._reader.uncertain_ends(queues):
                return
            await asyncio.sleep(READABLE_POLL_S)

    async def _find(self, outbox: Outbox, correlation_id: str) -> Span | None:
        if not correlation_id:
            return None
        query = KeyQuery(self.topic, correlation_id, False, 0, TIME_MS_MAX, FOUND_MAX)
        for message, _ in (await self._finder.by_key(query)).found:
            found = properties.decode(message.raw_properties)
            if (
                message.log_offset < outbox.opened_at
                and found.get(request_reply.REPLY_TO_CLIENT) == outbox.client_id
                and found.get(request_reply.CORRELATION_ID) == correlation_id
            ):
                return message.log_offset, message.size
        return None


def _requester(raw_properties: bytes, segment: int) -> str:
    found = properties.decode(raw_properties)
    is_reply = found.get(request_reply.MSG_TYPE) == request_reply.REPLY
    client_id = found.get(request_reply.REPLY_TO_CLIENT, "")
    if not (is_reply and client_id and found.get(request_reply.CORRELATION_ID)):
        raise ReplyInvalid("a message of the reply topic is no reply to anybody", segment=segment)
    return client_id
