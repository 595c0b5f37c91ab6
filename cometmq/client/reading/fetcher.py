"""Reading one queue on and on: pulls, waits at a pullhold while there is nothing, follows fences,
moved offsets and the broker's word where to read.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace

from cometmq.client.cluster.pulled import Pulled
from cometmq.client.messages import PullBatch, PullOutcome
from cometmq.client.names import of
from cometmq.client.options import GroupOptions, backoff_policy
from cometmq.client.reading.long_poller import LongPoller
from cometmq.client.reading.memory import MemoryShare
from cometmq.client.reading.offsets import (
    BrokerCalls,
    position_from_proto,
    position_to_proto,
)
from cometmq.client.reading.pull_budget import PULL_BYTES_MIN, PullBudget, worth_asking
from cometmq.client.received import decode_received
from cometmq.errors import CometError, InternalError, PositionFenced, Retry
from cometmq.model import BUSY_COUNT, Filter, Position, QueueRef
from cometmq.rpc.retry import Backoff, BackoffPolicy
from cometmq.telemetry import fields, logger
from cometmq.turns import Turns
from cometmq.v1 import broker_pb2, common_pb2

_OUTCOMES = {
    broker_pb2.PULL_STATUS_FOUND: PullOutcome.FOUND,
    broker_pb2.PULL_STATUS_NO_MATCHED_MESSAGE: PullOutcome.NO_MATCH,
    broker_pb2.PULL_STATUS_NOT_FOUND: PullOutcome.NOT_FOUND,
    broker_pb2.PULL_STATUS_OFFSET_MOVED: PullOutcome.OFFSET_MOVED,
}

LOST_HOLDS_MAX = 3  # holds in a row that got no answer; then the broker is asked itself

_log = logger(__name__)


async def pull(
    calls: BrokerCalls,
    queue: QueueRef,
    position: Position,
    *,
    count_max: int,
    bytes_max: int,
    wanted: Filter,
) -> PullBatch:
    """One pull. Raises errors of the catalogue."""
    request = pull_request(
        calls, queue, position, count_max=count_max, bytes_max=bytes_max, wanted=wanted
    )
    return batch_of(await calls.pull(queue.broker_group, request), queue, wanted, calls)


def pull_request(
    calls: BrokerCalls,
    queue: QueueRef,
    position: Position,
    *,
    count_max: int,
    bytes_max: int,
    wanted: Filter,
    lock_number: int = 0,
) -> broker_pb2.PullRequest:
    return broker_pb2.PullRequest(
        group=calls.wire_group,
        client_id=calls.client_id,
        lock_number=lock_number,
        queue=calls.to_proto(queue),
        position=position_to_proto(position),
        filter=common_pb2.Filter(tags=sorted(wanted.tags), sql=wanted.sql),
        max_count=count_max,
        max_bytes=bytes_max,
        form=broker_pb2.MESSAGE_FORM_RECORDS,
    )


def batch_of(
    pulled: Pulled,
    queue: QueueRef,
    wanted: Filter,
    calls: BrokerCalls,
) -> PullBatch:
    """The answer of a broker to a pull, its own or through a pullhold."""
    response, records = pulled
    outcome = _OUTCOMES.get(response.status)
    if outcome is None:
        raise InternalError(f"The broker answered a pull with status {response.status}.")
    shown_name = calls.namespace.shown if calls.namespace.name else None
    messages, size_bytes = decode_received(records, queue, shown_name), len(records)
    if wanted.tags:  # the broker compares hashes, so a wrong tag may come along
        messages = [message for message in messages if message.tag in wanted.tags]
    if calls.keep is not None:
        messages = calls.keep(messages)
    if wanted.tags or calls.keep is not None:
        size_bytes = sum(message.size for message in messages)
    return PullBatch(
        outcome,
        messages,
        position_from_proto(response.next_position),
        response.min_offset,
        response.max_offset,
        size_bytes,
    )


def _drained(batch: PullBatch) -> bool:
    """Whether a held pull got the little that there was: then asking the broker whether there is
    more would double its work.
    """
    return (
        batch.outcome is PullOutcome.FOUND
        and len(batch.messages) < BUSY_COUNT
        and batch.next_position.offset >= batch.max_offset
    )


def _move(queue: QueueRef, start: Position, to: Position) -> dict[str, object]:
    """The fields of a move, which shows the generation where it changes."""
    moved = {"offset": start.offset, "goes_on_at": to.offset}
    if start.generation != to.generation:
        moved |= {"generation": start.generation, "goes_on_in": to.generation}
    return {**of(queue), **moved}


class Fetcher:
    """One queue's reading position and the waits between its pulls."""

    def __init__(
        self,
        calls: BrokerCalls,
        queue: QueueRef,
        wanted: Filter,
        options: GroupOptions,
        start: Callable[[QueueRef], Awaitable[Position]],
        budget: PullBudget,
        memory: MemoryShare,
        long_poller: LongPoller | None = None,
        lock_number: int = 0,
    ) -> None:
        """``start`` returns where to begin. ``budget`` is the consumer's. In ``memory`` the caller
        holds what :meth:`fetch` returns, from the same turn of the event loop on. With
        ``long_poller`` a queue that has nothing is waited for at a pullhold, without or while there
        is none by polling. ``lock_number``: of a queue that is read in order.
        """
        self.queue = queue
        self.position: Position | None = None  # None: not known yet
        self.pulled_s: float | None = None  # when a pull was answered last, by the loop's clock
        self._calls = calls
        self._wanted = wanted
        self._options = options
        self._failures = Backoff(backoff_policy(options), random.Random())
        self._moves = Turns("reading a queue that goes on elsewhere each time")
        self._read_to: Position | None = None  # by the last answer that was no move
        first_s = options.poll_backoff_ms / 1000
        self._polls = BackoffPolicy(first_s, max(first_s, options.poll_backoff_max_ms / 1000))
        self._empty_polls = 0
        self._long_poller = long_poller
        self._lock_number = lock_number
        self._start = start
        self._budget = budget
        self.memory = memory
        self._worth_bytes = PULL_BYTES_MIN  # of the next pull
        self._parked = False  # nothing is there: the next pull is for a pullhold
        self._refused = False  # the last hold was
        self._suggested: int | None = None  # the follower to read from; None = the writer

    async def locate(self) -> Position:
        """The position, asked for when it is not known. Tries until it is; raises only what no
        retry can mend.
        """
        while self.position is None:
            try:
                self.position = await self._start(self.queue)
            except CometError as error:
                await self._wait_after(error)
        return self.position

    async def fetch(self) -> PullBatch:
        """The next answer, as soon as there is something: FOUND, NO_MATCH (only the position
        moves), or OFFSET_MOVED (the queue goes on elsewhere). A position set meanwhile makes the
        answer to an older one void. Raises only what no retry can mend.
        """
        while True:
            position = await self.locate()
            try:
                batch = await self._look(position)
            except PositionFenced as error:
                batch = self._fenced(error, position)
            except CometError as error:
                await self._wait_after(error)
                continue
            self._failures.reset()
            if self.position is not position:
                continue
            if batch.outcome is not PullOutcome.NOT_FOUND:
                return self._moved_on(batch)
            # The same place in the queue's present generation, or behind what a hold has passed.
            self.position = batch.next_position
            self._parked = True
            if batch.next_position.offset > position.offset:
                return replace(batch, outcome=PullOutcome.NO_MATCH)

    async def pass_filtered(self, position: Position) -> Position:
        """Behind the messages from ``position`` on that the filter does not want; the same place
        when there are none. One pull; nothing is kept of it.
        """
        if not self._wanted:
            return position
        request = pull_request(
            self._calls, self.queue, position, count_max=1, bytes_max=1, wanted=self._wanted
        )
        pulled = await self._calls.pull(self.queue.broker_group, request, self._suggested)
        batch = batch_of(pulled, self.queue, self._wanted, self._calls)
        if batch.outcome is PullOutcome.OFFSET_MOVED:
            return position
        if batch.messages:
            return Position(batch.next_position.generation, batch.messages[0].queue_offset)
        return batch.next_position

    async def _look(self, position: Position) -> PullBatch:
        """One answer: of a pullhold when there was nothing before, else of the broker. While no
        pullhold will do the broker is asked with growing waits between.
        """
        options = self._options
        request = pull_request(
            self._calls,
            self.queue,
            position,
            count_max=options.pull_count_max,
            bytes_max=options.pull_bytes_max,
            wanted=self._wanted,
            lock_number=self._lock_number,
        )
        while self._parked:
            self.memory.answered(await self.memory.ask(PULL_BYTES_MIN))
            response = await self._hold(request)
            if response is not None:
                self._empty_polls = 0
                return self._took(Pulled.of(response), position)
            await asyncio.sleep(self._polls.ceiling_s(self._empty_polls))
            self._empty_polls += 1
            self._parked = self._next_pullhold()
        return self._took(await self._pull(request), position)

    async def _pull(self, request: broker_pb2.PullRequest) -> Pulled:
        """Asks the broker, for as many of the bytes as there is room for, and as may be in
        flight.
        """
        budget, broker_group = self._budget, self.queue.broker_group
        asked_bytes = await self.memory.ask(min(request.max_bytes, self._worth_bytes))
        try:
            size_bytes = await budget.reserve(broker_group, asked_bytes)
            try:
                request.max_bytes = size_bytes
                return await self._calls.pull(broker_group, request, self._suggested)
            finally:
                budget.release(broker_group, size_bytes)
        finally:
            self.memory.answered(asked_bytes)

    def _took(self, pulled: Pulled, position: Position) -> PullBatch:
        self.pulled_s = asyncio.get_running_loop().time()
        response = pulled.response
        is_suggested = response.HasField("suggested_member_id")
        self._suggested = response.suggested_member_id if is_suggested else None
        batch = batch_of(pulled, self.queue, self._wanted, self._calls)
        if response.count:
            backlog_count = batch.max_offset - batch.next_position.offset
            record_bytes = len(pulled.records) / response.count
            count_max = self._options.pull_count_max
            self._worth_bytes = worth_asking(backlog_count, count_max, record_bytes)
        if batch.outcome is PullOutcome.OFFSET_MOVED:
            _log.warning(
                "offset moved",
                extra=fields(**_move(self.queue, position, batch.next_position)),
            )
        return batch

    async def _hold(self, request: broker_pb2.PullRequest) -> broker_pb2.PullResponse | None:
        """None: no pullhold will do now."""
        if self._long_poller is None:
            return None
        try:
            return await self._long_poller.park(self.queue.broker_group, request)
        except PositionFenced:
            raise
        except CometError as error:  # if the broker is of the same mind, it will say so itself
            _log.info("hold refused", extra=fields(**of(self.queue), error=error))
            self._refused = True
            return None

    def _next_pullhold(self) -> bool:
        """After a lost hold: whether to try another. When a pullhold dies the next one takes its
        holds, and the broker need not notice.
        """
        refused, self._refused = self._refused, False
        back = self._long_poller is not None and self._long_poller.address is not None
        return back and not refused and self._empty_polls < LOST_HOLDS_MAX

    def _moved_on(self, batch: PullBatch) -> PullBatch:
        self._empty_polls = 0
        if batch.outcome is PullOutcome.OFFSET_MOVED:
            self._moves.next(self._read_to)
        else:
            self._read_to = batch.next_position
        self._parked = self._parked and _drained(batch)
        self.position = batch.next_position
        return batch

    def _fenced(self, error: PositionFenced, position: Position) -> PullBatch:
        """A fence is a move that the broker explains, in words of its own."""
        if error.fence is None:
            raise InternalError("The broker fenced a position without saying where to go on.")
        fence = Position(*error.fence)
        _log.warning(
            "position fenced", extra=fields(**_move(self.queue, position, fence), error=error)
        )
        return PullBatch(PullOutcome.OFFSET_MOVED, [], fence, 0, 0, 0)

    async def _wait_after(self, error: CometError) -> None:
        if error.retry is Retry.NEVER:
            raise error
        _log.info("pull refused", extra=fields(**of(self.queue), error=error))
        wait_s = self._failures.next_s()
        if error.retry_after_ms is not None:  # a quota: the broker knows when there is more of it
            wait_s = error.retry_after_ms / 1000
        await self._calls.wait(wait_s)
