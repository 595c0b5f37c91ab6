"""A queue of a consumer in order: one listener call at a time, none without the queue's lock."""

from __future__ import annotations

from collections import deque

from cometmq.client.assigned import AssignedQueue
from cometmq.client.fetcher import Fetcher
from cometmq.client.listener import NotDone, SendBack, Work, Workers
from cometmq.client.messages import Later, PullBatch
from cometmq.client.options import PushConsumerOptions
from cometmq.client.progress import Progress, Run
from cometmq.client.queue_locks import Lock
from cometmq.model import DEAD_LETTER_LEVEL, Position
from cometmq.rpc.tasks import Tasks


class OrderlyQueue(AssignedQueue):
    """Hands the workers one piece of work at a time: at most ``batch_count`` messages. The next one
    follows when all of them are done.
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
        self._waiting: deque[Work] = deque()  # behind the piece
        self._piece: Work | None = None  # with the workers, at the broker, or waits for its time

    @property
    def closed(self) -> bool:
        """Also while the lock is not ours: what the workers drop then is read again under the next
        lock.
        """
        return self._revoked or not self._lock.is_held

    @closed.setter
    def closed(self, closed: bool) -> None:
        self._revoked = closed

    def _push(self, work: Work) -> None:
        self._waiting.append(work)
        if self._piece is None and self._next_piece():
            self._workers.push(self._waiting[0])

    def finish(self, run: Run, start: int, stop: int) -> None:
        super().finish(run, start, stop)
        work, low = self._piece, run.low
        if work is None or work.run is not run or (low < work.stop and low < run.limit):
            return
        if low < run.limit:  # mostly there is more of the same work
            work.cursor, work.stop = low, min(low + self._options.batch_count, run.limit)
        elif self._next_piece():
            work = self._waiting[0]
        else:
            return
        self._workers.append(work)  # who calls sees to it

    def _go_to(self, position: Position) -> None:
        super()._go_to(position)
        self._go_on()

    def reset(self, position: Position) -> None:
        super().reset(position)
        self._go_on()

    def _take(self, progress: Progress, batch: PullBatch) -> None:
        super()._take(progress, batch)
        self._go_on()

    def _go_on(self) -> None:
        """A rewind may have cut the piece off while no call had it: then nobody finishes it."""
        piece = self._piece
        if piece is not None and not self.running and piece.run.low >= piece.run.limit:
            self._piece = None
            if self._next_piece():
                self._workers.push(self._waiting[0])

    def _next_piece(self) -> bool:
        """Cut the next piece off what waits; False: nothing does."""
        self._piece = None
        while self._waiting:
            work = self._waiting[0]
            first = max(work.cursor, work.run.low)
            last = min(len(work.messages), work.run.limit)
            if first < last:
                work.cursor, work.stop = first, min(first + self._options.batch_count, last)
                self._piece = work
                return True
            self._waiting.popleft()
        return False


def orderly_not_done(
    workers: Workers, send_back: SendBack, options: PushConsumerOptions
) -> NotDone:
    """What failed comes again after a wait; after the last try, if there is one, it is a dead
    letter.
    """

    def not_done(work: Work, start: int, stop: int, later: Later) -> None:
        times_max = options.retry_times_max
        if later.delay_level < 0 or 0 <= times_max < work.attempt:
            send_back(work, start, stop, DEAD_LETTER_LEVEL)
        else:
            suspend_ms = later.suspend_ms or options.suspend_queue_ms
            workers.redeliver(work, start, stop, suspend_ms / 1000)

    return not_done
