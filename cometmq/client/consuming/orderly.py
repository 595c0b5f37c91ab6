"""A queue of a consumer in order: none of its messages is consumed without the queue's lock, and
one listener call at a time gets messages of the queue, or of a message group in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from cometmq.client.consuming.assigned import AssignedQueue
from cometmq.client.consuming.listener import NotDone, SendBack, Work, Workers
from cometmq.client.group.queue_locks import Lock
from cometmq.client.messages import Later, OrderBy, PullBatch, PullOutcome
from cometmq.client.options import PushConsumerOptions
from cometmq.client.reading.fetcher import Fetcher
from cometmq.client.reading.progress import AnyRun, Progress, Run, RunPart
from cometmq.client.received import ReceivedMessage
from cometmq.client.remote.description import QueueState
from cometmq.client.remote.rates import Tally
from cometmq.format.properties import sharding_key_of
from cometmq.model import DEAD_LETTER_LEVEL, Position
from cometmq.rpc.tasks import Tasks, stop_all

_WHOLE_QUEUE = b""  # as the key of a lane; a message group has a longer one


class OrderlyQueue(AssignedQueue):
    """Hands the workers one piece of work at a time: at most ``batch_count`` messages. The next one
    follows when all of them are done. With ``OrderBy.MESSAGE_GROUP`` that is one piece for each
    message group, and messages without a group are in no order.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        workers: Workers,
        options: PushConsumerOptions,
        tasks: Tasks,
        lock: Lock,
    ) -> None:
        self._revoked = False
        super().__init__(fetcher, workers, options, tasks)
        self._lock = lock
        self._by_group = options.order_by == OrderBy.MESSAGE_GROUP
        self._lanes: dict[bytes | int, _Lane] = {}  # those with unfinished messages

    @property
    def closed(self) -> bool:
        """Also while the lock is not ours: what the workers drop then is read again under the next
        lock.
        """
        return self._revoked or not self._lock.is_held

    @closed.setter
    def closed(self, closed: bool) -> None:
        self._revoked = closed

    def state(self) -> QueueState:
        return replace(super().state(), lock_number=self._lock.number, is_locked=self._lock.is_held)

    def _push(self, run: Run, messages: list[ReceivedMessage]) -> None:
        if not self._by_group:
            self._append(_WHOLE_QUEUE, run, messages)
            return
        groups: dict[bytes, list[int]] = {}
        for place, message in enumerate(messages):
            groups.setdefault(sharding_key_of(message.raw_properties), []).append(place)
        for places in _cut(groups.pop(b"", []), self._options.batch_count):
            # Without a group: each call has a lane of its own, called by an offset.
            self._append(run.offsets[places[0]], *_part(run, messages, places))
        for key, places in groups.items():
            self._append(key, *_part(run, messages, places))

    def _append(self, key: bytes | int, run: AnyRun, messages: list[ReceivedMessage]) -> None:
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = _Lane(self, key, self._workers, self._options.batch_count)
        lane.put(Work(lane, run, messages))

    def forget(self, key: bytes | int) -> None:
        """The lane has nothing left to do."""
        del self._lanes[key]

    def _go_to(self, position: Position) -> None:
        super()._go_to(position)
        self._go_on()

    def reset(self, position: Position) -> None:
        super().reset(position)
        self._go_on()

    def _take(self, progress: Progress, batch: PullBatch) -> None:
        super()._take(progress, batch)
        if batch.outcome is PullOutcome.OFFSET_MOVED:
            self._go_on()

    async def _drain(self) -> None:
        """Also ends what lies below messages that are done or with the listener: else these would
        come again at the next member.
        """
        await stop_all([self._reading])
        progress = self._progress
        if progress is not None and self._by_group:
            running = [lane.stop for lane in self._lanes.values() if lane.running]
            stop = max(progress.finished_stop(), *running, progress.committable.offset)
            progress.rewind(Position(progress.next_position.generation, stop))
            self._go_on()
            while progress.count and not (self.closed or self._workers.is_suspended):
                await self._change()
        await super()._drain()

    def _go_on(self) -> None:
        for lane in list(self._lanes.values()):
            lane.go_on()


class _Lane:
    """Messages of one queue that are consumed one after the other: a ``listener.Queue``."""

    __slots__ = (
        "_batch_count",
        "_comes_again",
        "_key",
        "_piece",
        "_queue",
        "_running",
        "_waiting",
        "_workers",
    )

    def __init__(
        self, queue: OrderlyQueue, key: bytes | int, workers: Workers, batch_count: int
    ) -> None:
        self._queue = queue
        self._key = key
        self._workers = workers
        self._batch_count = batch_count
        self._running = 0
        self._comes_again = False  # a part of the piece waits for its time
        self._waiting: deque[Work] = deque()  # the piece's, and what comes behind it
        self._piece: Work | None = None  # with the workers, at the broker, or waits for its time

    @property
    def closed(self) -> bool:
        return self._queue.closed

    @property
    def tally(self) -> Tally:
        return self._queue.tally

    @property
    def running(self) -> int:
        """Calls and send-backs with messages of this lane."""
        return self._running

    @running.setter
    def running(self, running: int) -> None:
        self._queue.running += running - self._running
        if running > self._running:
            self._comes_again = False
        self._running = running

    @property
    def stop(self) -> int:
        """Offset behind the piece."""
        piece = self._piece
        return piece.messages[piece.stop - 1].queue_offset + 1 if piece is not None else 0

    def put(self, work: Work) -> None:
        """Takes what comes behind all that is here."""
        self._waiting.append(work)
        if self._piece is None and self._next_piece():
            self._workers.push(self._waiting[0])

    def finish(self, run: AnyRun, start: int, stop: int) -> None:
        """As ``listener.Queue`` says."""
        self._queue.finish(run, start, stop)
        work, low = self._piece, run.low
        if work is None or work.run is not run:
            return
        if low < work.stop and low < run.limit:
            self._look_after(work, low)
            return
        if low < run.limit:  # mostly there is more of the same work
            work.cursor, work.stop = low, min(low + self._batch_count, run.limit)
        elif self._next_piece():
            work = self._waiting[0]
        else:
            self._queue.forget(self._key)
            return
        self._workers.append(work)  # who calls sees to it

    def redeliver(self, work: Work, start: int, stop: int, delay_s: float | None = None) -> None:
        """A part of the piece comes again; nothing else of the lane does meanwhile."""
        self._comes_again = True
        self._workers.redeliver(work, start, stop, delay_s)

    def _look_after(self, work: Work, low: int) -> None:
        """Lets messages that nobody took back come again, in order: as far as a message that was
        taken.
        """
        if self._running or self._comes_again:
            return
        end = min(work.stop, work.run.limit)
        stop = next((n for n in range(low, end) if work.run.is_finished(n)), end)
        self.redeliver(work, low, stop)

    def go_on(self) -> None:
        """A rewind may have cut the piece off while no call had it: then nobody finishes it."""
        piece = self._piece
        if piece is not None and not self._running and piece.run.low >= piece.run.limit:
            if self._next_piece():
                self._workers.push(self._waiting[0])
            else:
                self._queue.forget(self._key)

    def _next_piece(self) -> bool:
        """Cut the next piece off what waits; False: nothing does."""
        self._piece = None
        self._comes_again = False
        while self._waiting:
            work = self._waiting[0]
            first = max(work.cursor, work.run.low)
            last = min(len(work.messages), work.run.limit)
            if first < last:
                work.cursor, work.stop = first, min(first + self._batch_count, last)
                self._piece = work
                return True
            self._waiting.popleft()
        return False


def _cut(places: list[int], count: int) -> Iterator[list[int]]:
    for first in range(0, len(places), count):
        yield places[first : first + count]


def _part(
    run: Run, messages: list[ReceivedMessage], places: list[int]
) -> tuple[RunPart, list[ReceivedMessage]]:
    return RunPart(run, places), [messages[place] for place in places]


def orderly_not_done(send_back: SendBack, options: PushConsumerOptions) -> NotDone:
    """Lets messages that failed come again after a wait; after the last try, if there is one, they
    are dead letters.
    """

    def not_done(work: Work, start: int, stop: int, later: Later) -> None:
        times_max = options.retry_times_max
        if later.delay_level < 0 or 0 <= times_max < work.attempt:
            send_back(work, start, stop, DEAD_LETTER_LEVEL)
        else:
            suspend_ms = later.suspend_ms or options.suspend_queue_ms
            assert isinstance(work.queue, _Lane)
            work.queue.redeliver(work, start, stop, suspend_ms / 1000)

    return not_done


def orderly_in_place(work: Work, start: int, stop: int, _: Later) -> None:
    """Lets messages that failed come again, without end; nothing goes to the broker."""
    assert isinstance(work.queue, _Lane)
    work.queue.redeliver(work, start, stop)


def leave_to_lane(_work: Work, _start: int, _stop: int) -> None:
    """Does nothing for messages that no broker takes back: their lane lets them come again when all
    answers are there, for two messages of a lane must not come at a time.
    """
