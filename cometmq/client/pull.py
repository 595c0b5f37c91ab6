"""A consumer that the application calls: single pulls, or :meth:`PullConsumer.poll` with prefetch,
of queues that it assigns itself or that it gets as a member of its group.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence

from cometmq.client.consuming.pull_queues import PullQueues
from cometmq.client.consuming.queue_listener import QueueListener
from cometmq.client.group.share import GroupShare
from cometmq.client.messages import SendReceipt
from cometmq.client.names import (
    check_position,
    check_queues,
    check_tags,
    check_topic,
    filter_of,
)
from cometmq.client.options import PullConsumerOptions, backoff_policy, options_of
from cometmq.client.reading.long_poller import LongPoller
from cometmq.client.reading.offsets import ITEMS_PER_CALL_MAX, send_back_item
from cometmq.client.reading.positions import OffsetStore, check_store, may_pass
from cometmq.client.reading.queue_calls import QueueCalls, good
from cometmq.client.received import ReceivedMessage
from cometmq.client.remote.answers import Answers
from cometmq.client.remote.description import Describer
from cometmq.client.requests.replier import Replier
from cometmq.client.tracing.consume_tracer import ConsumeTracer
from cometmq.client.tracing.dispatcher import TraceDispatcher
from cometmq.errors import CometError, DelayLevelInvalid, InvalidRequest
from cometmq.model import DELAY_LEVEL_MAX, Filter, Position, QueueRef, check_delay
from cometmq.rpc.retry import Backoff
from cometmq.rpc.tasks import Tasks
from cometmq.v1 import broker_pb2


class PullConsumer(QueueCalls):
    """Use it inside ``async with``; one event loop. Without ``commit_interval_ms`` leaving the
    block commits nothing: call :meth:`commit`.
    """

    def __init__(
        self,
        namesrv: str | None = None,
        group: str = "",
        *,
        options: PullConsumerOptions | None = None,
        offset_store: OffsetStore | None = None,
        queue_listener: QueueListener | None = None,
    ) -> None:
        """``namesrv``: ``host:port`` of the name servers, ``;`` between them; None = what
        COMETMQ_NAMESRV says. ``offset_store`` keeps how far the consumer is, instead of the
        brokers. ``queue_listener`` learns which queues come and go after :meth:`subscribe`.
        ConfigInvalid, GroupNameInvalid.
        """
        self._options = options_of(PullConsumerOptions, options)
        super().__init__(
            namesrv, group, self._options, lambda topic: self._share.route_changed(topic)
        )
        self._calls.client_id = self._options.client_id
        self._tasks = Tasks(f"pull consumer {group}")
        self._tracing = TraceDispatcher(
            self._connections.namesrv, self._options.client_id, self._options
        )
        self._tracer = ConsumeTracer(self._tracing) if self._options.trace_enable else None
        self._replier = Replier(self._connections.namesrv, self._options.client_id)
        self._long_poller = LongPoller(
            self._options.client_id, self._connections, self._routes.cluster, self._options.hold_ms
        )
        self._answers = Answers(
            self._options.client_id,
            self._calls.broker,
            self._describe,
            is_enabled=self._options.remote_questions_enable,
        )
        self._describer = Describer(
            broker_pb2.CLIENT_ROLE_PULL, self._options, self._calls.namespace
        )
        store = check_store(offset_store)
        subscriptions: dict[str, Filter] = {}
        self._queues = PullQueues(
            self._options, self._calls, subscriptions, self._long_poller, store, queue_listener
        )
        self._polled = self._queues.polled
        self._share = GroupShare(
            self._options,
            self._calls,
            self._routes,
            self._queues,
            subscriptions,
            secrets.token_hex(8),
            follows_resets=store is None,
        )
        self._share.answer(self._answers)

    def _describe(self, _with_stacks: bool) -> broker_pb2.ClientDescription:
        return self._describer.describe(
            self._answers.rates,
            subscriptions=self._share.subscriptions,
            queues=self._queues.states(),
        )

    async def _enter(self) -> None:
        self._routes.start(self._tasks)
        self._queues.start(self._tasks)
        self._tracing.start(self._tasks)
        self._answers.start(self._tasks)
        self._open = self._replier.is_open = True

    async def _leave(self, error: BaseException | None) -> None:
        self._answers.close()
        try:
            await self._share.stop()
            if error is None:
                self._polled.all_done()
            await self._queues.stop()
            await self._replier.close()
            self._open = False
            await self._share.leave()
        finally:
            self._open = False
            try:
                await self._tracing.close(flush=not isinstance(error, asyncio.CancelledError))
                await self._tasks.stop()
            finally:
                await self._connections.close()

    # --- assign or subscribe ----------------------------------------------------------------------

    async def assign(
        self,
        queues: Iterable[QueueRef],
        *,
        tags: Collection[str] = (),
        sql: str | None = None,
    ) -> None:
        """Reads exactly these queues from now on, each from the group's committed position or as
        ``consume_from`` says; with ``tags`` or ``sql``, an SQL92 expression, only what passes.
        What was fetched and not polled is forgotten. InvalidRequest after :meth:`subscribe`.
        """
        wanted, only = check_queues(queues), filter_of(check_tags(tags), sql)
        self._check_open()
        if self._share.subscriptions:
            raise InvalidRequest("This consumer has subscribed: its queues come from the group.")
        await self._queues.unassign()
        if wanted:
            await self._know(wanted)
        self._queues.assign(wanted, only)

    async def subscribe(
        self, topic: str, expression: str | Collection[str] = "*", *, sql: str | None = None
    ) -> None:
        """Becomes a member of the group and reads its share of the topic's queues from now on;
        ``expression`` and ``sql`` as of a push consumer. A second call for a topic replaces its
        filter. As with :meth:`poll`, the application has done what it has. Raises TopicNameInvalid,
        FilterInvalid, ClientClosed, InvalidRequest after :meth:`assign`.
        """
        self._check_open()
        wanted = filter_of(expression, sql)
        if not self._share.subscriptions:
            if self._queues.reading:
                raise InvalidRequest("This consumer has assigned queues: assign([]) ends that.")
            if not self._share.is_started:
                self._queues.become_member()
                self._long_poller.start(self._tasks)
                self._share.start(self._tasks)
        self._polled.all_done()  # else a queue would wait for the next poll
        await self._share.subscribe(check_topic(topic), wanted)

    async def unsubscribe(self, topic: str) -> None:
        """Reads the topic no more; other members get its queues. A topic that is not read is no
        error. Raises TopicNameInvalid, ClientClosed.
        """
        self._check_open()
        self._polled.all_done()
        await self._share.unsubscribe(check_topic(topic))

    async def reply(self, message: ReceivedMessage, body: bytes) -> SendReceipt:
        """Replies to a request that a consumer has received, as ``Producer.reply`` does."""
        self._check_open()
        return await self._replier.reply(message, body)

    async def leave_for_good(self) -> None:
        """The other members get this one's queues when the block ends, whatever ``session_ms``
        says.
        """
        self._check_open()
        await self._share.end_session()

    @property
    def assigned(self) -> list[QueueRef]:
        """The queues that this consumer reads now."""
        return sorted(self._queues.reading)

    @property
    def traces_lost(self) -> int:
        """Trace records that were dropped or not stored; the log has them, too."""
        return self._tracing.lost_count

    # --- poll -------------------------------------------------------------------------------------

    async def poll(self, timeout_ms: int = 5_000) -> list[ReceivedMessage]:
        """Messages of one queue as soon as there are some; none when the time is over. While the
        application works, the next ones are fetched. It has done what earlier polls handed out.
        Raises what no retry can mend, once for each try.
        """
        self._check_open()
        if isinstance(timeout_ms, bool) or not isinstance(timeout_ms, int | float):
            raise InvalidRequest(f"timeout_ms is a number of milliseconds, not {timeout_ms!r}.")
        if not self._polled.queues and not self._share.subscriptions:
            raise InvalidRequest("No queue is assigned.")
        messages = await self._polled.next(timeout_ms / 1000)
        if messages:
            tally = self._answers.rates.of(messages[0].queue.topic)
            tally.pulled += len(messages)
            tally.done += len(messages)
        if self._tracer is not None and messages:
            self._tracer.polled(self._calls.group, messages)
        return messages

    async def _unpoll(self, messages: Sequence[ReceivedMessage]) -> None:
        """The application has not got what a poll has found: the next poll of the queue begins with
        it. The queue may have gone meanwhile.
        """
        queue = messages[0].queue
        if queue in self._polled:
            await self._polled.seek(queue, self._position_of(messages[0]))

    async def seek(self, queue: QueueRef, position: Position) -> None:
        """The next poll of a queue begins there. QueueNotFound: this consumer does not read it."""
        self._polled.fetcher(queue)
        check_position(position)
        await self._polled.seek(queue, position)

    async def seek_to_begin(self, queues: Collection[QueueRef] | None = None) -> None:
        """The next polls of these queues, or of all, begin at the first message."""
        for queue, bounds in (await self.bounds(self._some(queues))).items():
            await self.seek(queue, Position(bounds.generation, bounds.min_offset))

    async def seek_to_end(self, queues: Collection[QueueRef] | None = None) -> None:
        """The next polls of these queues, or of all, begin behind the last message.
        OffsetNotAvailable: just after a fail-over the broker does not know yet where that is.
        """
        wanted = self._some(queues)
        for queue, answer in (await self._calls.bounds(wanted, end_wanted=True)).items():
            bounds = good(answer)
            await self.seek(queue, Position(bounds.generation, bounds.max_offset))

    async def seek_to_time(self, time_ms: int, queues: Collection[QueueRef] | None = None) -> None:
        """The next polls of these queues, or of all, begin as :meth:`positions_at` says."""
        for queue, position in (await self.positions_at(self._some(queues), time_ms)).items():
            await self.seek(queue, position)

    def pause(self, queues: Collection[QueueRef]) -> None:
        """Polls hand out nothing of these queues before :meth:`resume`. The consumer keeps them.
        QueueNotFound.
        """
        self._polled.pause(self._some(queues))

    def resume(self, queues: Collection[QueueRef]) -> None:
        """Polls hand out messages of these queues again. QueueNotFound."""
        self._polled.resume(self._some(queues))

    async def position(self, queue: QueueRef) -> Position:
        """The position that the next poll of a queue begins at. QueueNotFound when this consumer
        does not read it.
        """
        return await self._polled.position(queue)

    def _some(self, queues: Collection[QueueRef] | None) -> list[QueueRef]:
        """Those, or all that are read."""
        self._check_open()
        some = sorted(self._polled.queues) if queues is None else check_queues(queues)
        for queue in some:
            self._polled.fetcher(queue)
        return some

    # --- commits and send-backs -------------------------------------------------------------------

    async def commit(
        self, positions: Mapping[QueueRef, Position] | None = None
    ) -> dict[QueueRef, Position | None]:
        """Commits; without ``positions`` everything that :meth:`poll` has handed out. Answers the
        positions that are kept now. A queue whose broker group has no writer for a moment is tried
        again until the time for one request is over. Raises the first queue's error.
        """
        if positions is not None and not isinstance(positions, Mapping):
            raise InvalidRequest(
                f"positions is a dict of QueueRef to Position, or nothing, not {positions!r:.80}"
            )
        positions = (
            self._queues.not_committed(self._polled.polled) if positions is None else positions
        )
        for position in positions.values():
            check_position(position)
        await self._know(positions)
        answers = await self._queues.commit(positions)
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._timeout_s
        backoff = Backoff(backoff_policy(self._options), random.Random())
        while (again := [q for q, a in answers.items() if may_pass(a)]) and (
            loop.time() < deadline_s
        ):
            await self._calls.wait(min(backoff.next_s(), deadline_s - loop.time()))
            answers |= await self._queues.commit({q: positions[q] for q in again})
        return {queue: good(answer) for queue, answer in answers.items()}

    async def send_back(
        self, messages: Collection[ReceivedMessage], delay_level: int = 0, *, delay_ms: int = 0
    ) -> None:
        """The brokers deliver these messages again after a delay, in the group's retry topic
        ``%RETRY%`` and its name, which has to be read too: 0 = by the number of their tries, 1
        (1 s) to 18 (2 h), -1 = never, they are dead letters. ``delay_ms``: instead, after so many
        ms, at most 40 days. Commit afterwards. Raises the first message's error; the others are
        sent back all the same.
        """
        if type(delay_level) is not int or not -1 <= delay_level <= DELAY_LEVEL_MAX:
            raise DelayLevelInvalid(f"delay_level is -1 to {DELAY_LEVEL_MAX}, not {delay_level!r}.")
        check_delay(delay_ms)
        await self._know([message.queue for message in messages])
        first_error: CometError | None = None
        for broker_group in sorted({message.queue.broker_group for message in messages}):
            items = [
                send_back_item(message.queue, self._position_of(message), delay_level, delay_ms)
                for message in messages
                if message.queue.broker_group == broker_group
            ]
            for start in range(0, len(items), ITEMS_PER_CALL_MAX):
                some = items[start : start + ITEMS_PER_CALL_MAX]
                for error in await self._calls.send_back(broker_group, some):
                    first_error = first_error or error
        if first_error is not None:
            raise first_error

    def _position_of(self, message: ReceivedMessage) -> Position:
        """With the generation that was polled last; of messages that were pulled it is unknown."""
        polled = self._polled.polled.get(message.queue)
        return Position(polled.generation if polled else 0, message.queue_offset)
