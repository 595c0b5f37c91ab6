"""Pulls at one broker group for holds that an arrival woke. Their number at a time and the bytes on
their way have limits; each hold has its turn.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from cometmq.clock import Clock
from cometmq.errors import CometError, InternalError
from cometmq.flight_recorder import Stage, queue_end, recorder
from cometmq.messaging.pull import BYTES_MAX
from cometmq.rpc.tasks import stop_all
from cometmq.telemetry import fields, logger
from cometmq.v1 import broker_pb2
from services.pullhold.answers import Answers, Reply
from services.pullhold.holds import Holds
from services.pullhold.metrics import HoldMetrics
from services.pullhold.model import Hold, HoldState
from services.pullhold.peers import BrokerPeer

# Bytes on their way from a broker. A pull counts as its queue's last answer, or as its own limit.
COMING_BYTES_MAX = 16 * 1024 * 1024

_log = logger(__name__)


class Pulls:
    """``on_waiting`` gets each hold that waits again after its pull found nothing. Belongs to the
    event loop.
    """

    def __init__(
        self,
        holds: Holds,
        answers: Answers,
        pulls_max: int,
        clock: Clock,
        metrics: HoldMetrics,
        on_waiting: Callable[[Hold], None],
    ) -> None:
        self._holds = holds
        self._answers = answers
        self._pulls_max = pulls_max
        self._clock = clock
        self._metrics = metrics
        self._on_waiting = on_waiting
        self._peer: BrokerPeer | None = None
        self._queued: deque[Hold] = deque()  # PULLING, in the order in which they woke
        self._running: set[asyncio.Task[None]] = set()
        self._coming_bytes = 0

    def __len__(self) -> int:
        """Pulls in flight."""
        return len(self._running)

    def connect(self, peer: BrokerPeer) -> None:
        """Pulls go to this member from now on."""
        self._peer = peer

    def disconnect(self) -> None:
        """The link to the member broke. Pulls in flight go on: see :meth:`finish`."""
        self._peer = None

    async def finish(self) -> None:
        """Waits for the pulls in flight: they have deadlines, and holds to answer."""
        if self._running:
            await asyncio.wait(list(self._running))

    async def close(self) -> None:
        """Cancels the pulls; their holds have ended."""
        await stop_all(self._running)

    def pull(self, holds: Iterable[Hold]) -> None:
        """Pulls for these holds, which are PULLING, each when its turn comes. Those that wait for
        arrivals are answered.
        """
        for hold in holds:
            if hold.arrival_group:
                self._answers.arrived(hold)
            else:
                self._queued.append(hold)
        self._pump()

    def advance(self, hold: Hold, generation: int, offset: int) -> None:
        """The broker has nothing for the hold before ``offset``: it pulls again, waits or ends."""
        state = self._holds.pulled(hold, generation, offset, self._clock.monotonic_s())
        if state is HoldState.PULLING:
            self._queued.append(hold)
        elif state is HoldState.DONE:
            self._answers.nothing(hold)
        else:
            self._on_waiting(hold)

    def found(self, hold: Hold, reply: Reply, begun_ns: int) -> None:
        """Answers a hold with what was looked for since ``begun_ns``, of the flight recorder's
        clock. If the hold goes on, it pulls again or waits.
        """
        self._answers.found(hold, reply)
        end = queue_end(hold.key.queue_id, reply.response.next_position.offset)
        recorder.note_limited(Stage.HOLD_ANSWERED, begun_ns, end)
        if hold.state is HoldState.PULLING:
            self._queued.append(hold)
        elif hold.state is HoldState.WAITING:
            self._on_waiting(hold)

    def _pump(self) -> None:
        while self._queued and len(self._running) < self._pulls_max:
            hold = self._queued.popleft()
            if hold.state is HoldState.DONE:
                continue
            if self._peer is None:  # the next watch reports the queue again
                self.advance(hold, hold.generation, hold.offset)
            elif self._answers.full(hold):  # its client pulls again later
                self._answers.nothing(hold)
            else:
                usual_bytes = hold.queue.answer_bytes
                size_bytes = BYTES_MAX if usual_bytes is None else usual_bytes
                if self._running and self._coming_bytes + size_bytes > COMING_BYTES_MAX:
                    self._queued.appendleft(hold)
                    return
                task = asyncio.create_task(self._pull(self._peer, hold))
                self._running.add(task)
                self._coming_bytes += size_bytes
                task.add_done_callback(partial(self._end_pull, hold, size_bytes))

    def _end_pull(self, hold: Hold, size_bytes: int, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._coming_bytes -= size_bytes
        assert self._coming_bytes >= 0, self._coming_bytes
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a pull failed", extra=fields(queue=hold.key), exc_info=error)
            self._answers.failed(hold, InternalError("a pull failed; the log has the reason"))
        self._pump()

    async def _pull(self, peer: BrokerPeer, hold: Hold) -> None:
        request: broker_pb2.PullRequest = hold.request
        request.position.generation, request.position.offset = hold.generation, hold.offset
        self._metrics.pulls.inc()
        begun_ns = recorder.now_ns()
        try:
            response = await peer.pull(request, hold.session.address.strip("[]"))
        except CometError as error:
            self._answers.failed(hold, error)
            return
        reply = Reply(response)
        if (queue := self._holds.queues.find(hold.key)) is not None:
            queue.answer_bytes = max(reply.size_bytes, queue.answer_bytes or 0)
        if hold.state is HoldState.DONE:  # it was due, or cancelled
            return
        if response.status in (broker_pb2.PULL_STATUS_FOUND, broker_pb2.PULL_STATUS_OFFSET_MOVED):
            self.found(hold, reply, begun_ns)
        else:
            position = response.next_position
            self.advance(hold, position.generation, position.offset)
