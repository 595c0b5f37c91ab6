"""One queue that a push consumer owns: prefetches within the flow control, tracks what is done,
drains when revoked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cometmq.client.consuming.listener import Work, Workers
from cometmq.client.messages import PullBatch, PullOutcome
from cometmq.client.names import of
from cometmq.client.options import PushConsumerOptions
from cometmq.client.reading.fetcher import Fetcher
from cometmq.client.reading.progress import AnyRun, Progress, Run
from cometmq.client.received import ReceivedMessage
from cometmq.client.remote.description import QueueState
from cometmq.errors import CometError, OffsetReset, PositionFenced, Retry
from cometmq.model import Position, QueueRef
from cometmq.rpc.tasks import Tasks, stop_all
from cometmq.telemetry import fields, logger

PASS_FILTERED_S_MAX = 1.0

_log = logger(__name__)


def _offsets(messages: Sequence[ReceivedMessage]) -> Sequence[int]:
    """Their queue offsets, which rise: mostly one by one."""
    if not messages:
        return ()
    first, last = messages[0].queue_offset, messages[-1].queue_offset
    if last - first == len(messages) - 1:
        return range(first, last + 1)
    return [message.queue_offset for message in messages]


class AssignedQueue:
    """From assignment to revocation. ``closed`` and ``running`` are the workers' view
    (``listening.Queue``).
    """

    def __init__(
        self, fetcher: Fetcher, workers: Workers, options: PushConsumerOptions, tasks: Tasks
    ) -> None:
        self.closed = False
        self.running = 0
        self._fetcher = fetcher
        self._workers = workers
        self._options = options
        self.tally = workers.rates.of(fetcher.queue.topic)
        self._progress: Progress | None = None  # None until the position is known
        self._committed: Position | None = None  # answered last by the broker
        self._changed = asyncio.Event()  # something has finished
        self._awaited = False  # somebody waits for it; else nobody sets it
        self._reading = tasks.start(self._read(), f"read {fetcher.queue}")

    @property
    def queue(self) -> QueueRef:
        return self._fetcher.queue

    @property
    def count(self) -> int:
        """Messages pulled and not done."""
        return self._progress.count if self._progress is not None else 0

    def state(self) -> QueueState:
        """The description of the queue, for operators."""
        progress = self._progress
        return QueueState(
            self.queue,
            self._committed,
            self._fetcher.position,
            self.count,
            progress.bytes_count if progress is not None else 0,
            self.running,
            self._fetcher.pulled_s,
            is_paused=self._workers.is_suspended,
        )

    # --- reading ----------------------------------------------------------------------------------

    async def _read(self) -> None:
        while True:
            try:
                await self._read_on()
            # of the kind that no retry mends; a changed route or an operator may
            except CometError as error:
                _log.warning("queue cannot be read", extra=fields(**of(self.queue), error=error))
                await asyncio.sleep(self._options.retry_backoff_max_ms / 1000)

    async def _read_on(self) -> None:
        position = await self._fetcher.locate()
        if self._progress is None:
            self._progress = Progress(position, self._fetcher.memory.hold)
        while True:
            while self._full(self._progress):
                await self._change()
            self._take(self._progress, await self._fetcher.fetch())
            if self._options.pull_interval_ms:
                await asyncio.sleep(self._options.pull_interval_ms / 1000)

    async def _change(self) -> None:
        """Waits until something finishes."""
        self._awaited = True
        self._changed.clear()
        await self._changed.wait()
        self._awaited = False

    def _full(self, progress: Progress) -> bool:
        options = self._options
        return (
            progress.count >= options.queue_count_max
            or progress.bytes_count >= options.queue_bytes_max
            or (progress.count > 0 and progress.span >= options.queue_span_max)
        )

    def _take(self, progress: Progress, batch: PullBatch) -> None:
        if batch.outcome is PullOutcome.OFFSET_MOVED:
            progress.rewind(batch.next_position)
            return
        messages = batch.messages
        self.tally.pulled += len(messages)
        run = progress.add(_offsets(messages), batch.next_position, batch.size_bytes)
        if messages:
            self._push(run, messages)

    def _push(self, run: Run, messages: list[ReceivedMessage]) -> None:
        self._workers.push(Work(self, run, messages))

    def finish(self, run: AnyRun, start: int, stop: int) -> None:
        """Called by the workers after each listener call."""
        assert self._progress is not None
        self._progress.finish(run, start, stop)
        if self._awaited:
            self._changed.set()

    # --- committing -------------------------------------------------------------------------------

    def to_commit(self) -> Position | None:
        """The position to commit; None: the broker knows it."""
        if self._progress is None:
            return None
        position = self._progress.committable
        return position if position != self._committed else None

    def commit_answered(self, answer: Position | CometError | None) -> None:
        """The broker's answer to a commit. Fenced = what was read above the fence is no longer
        there: go back to it.
        """
        if isinstance(answer, OffsetReset) and answer.fence is not None:
            self.reset(Position(*answer.fence))
        elif isinstance(answer, PositionFenced) and answer.fence is not None:
            _log.warning("commit fenced", extra=fields(**of(self.queue), error=answer))
            self._go_to(Position(*answer.fence))
        elif isinstance(answer, CometError):
            if answer.retry is Retry.NEVER:
                _log.warning("commit refused", extra=fields(**of(self.queue), error=answer))
        else:
            self._committed = answer

    def reset(self, position: Position) -> None:
        """The group was reset: go on there. Calls that run go on to their end, and their results do
        not count.
        """
        if self._progress is None:
            return  # its position is being asked for
        _log.warning(
            "the group was reset",
            extra=fields(
                **of(self.queue),
                offset=self._progress.committable.offset,
                goes_on_at=position.offset,
            ),
        )
        self._progress.restart(position)
        self._fetcher.position = self._committed = position
        self._changed.set()

    def _go_to(self, position: Position) -> None:
        assert self._progress is not None
        self._progress.rewind(position)
        self._fetcher.position = position
        self._changed.set()

    # --- leaving ----------------------------------------------------------------------------------

    async def revoke(self) -> None:
        """Stops reading, forgets what no listener has, waits for the calls that run (at most
        drain_timeout_ms).
        """
        limit_s = self._options.drain_timeout_ms / 1000
        try:
            async with asyncio.timeout(limit_s):
                await self._drain()
        except TimeoutError:
            self.closed = True
            _log.warning(
                "listener calls outlive the queue",
                extra=fields(**of(self.queue), calls=self.running, after_s=limit_s),
            )
        else:
            await self._pass_filtered()
        self._fetcher.memory.hold(0)

    async def _drain(self) -> None:
        self.closed = True
        await stop_all([self._reading])
        await self.until_idle()

    async def until_idle(self) -> None:
        """Waits for the calls that outlived the queue."""
        while self.running:
            await self._change()

    async def _pass_filtered(self) -> None:
        """Counts as done what the filter skips behind the last message, so that a commit at the end
        leaves no lag of messages that nobody wants. The broker may be away: then it stays.
        """
        progress = self._progress
        if progress is None or progress.count:
            return
        try:
            async with asyncio.timeout(PASS_FILTERED_S_MAX):
                while True:
                    before = progress.next_position
                    after = await self._fetcher.pass_filtered(before)
                    if after.offset <= before.offset:
                        return
                    progress.add([], after, 0)
        except (CometError, TimeoutError) as error:
            _log.info("end of the queue not asked", extra=fields(**of(self.queue), error=error))
