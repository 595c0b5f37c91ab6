"""Sends messages back to the brokers that have them: those of one turn of the event loop, and all
that fail while a call is on its way, travel together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from cometmq.client.cluster.accumulator import Accumulator
from cometmq.client.consuming.listener import Work
from cometmq.client.names import of
from cometmq.client.reading.offsets import ITEMS_PER_CALL_MAX, BrokerCalls, send_back_item
from cometmq.errors import CometError, FlowControl, PeerUnavailable
from cometmq.model import Position
from cometmq.rpc.tasks import Tasks
from cometmq.telemetry import fields, logger
from cometmq.v1 import broker_pb2

CALLS_MAX = 5  # for the same messages, while nobody answers
CALL_AGAIN_S = 1.0

_log = logger(__name__)


class Failed(NamedTuple):
    """Message ``place`` of a work, which the listener could not do. ``delay_level`` and
    ``delay_ms`` as in the contract: both 0 = as the number of its tries says.
    """

    work: Work
    place: int
    delay_level: int
    delay_ms: int


class SendBacks:
    """A message counts as done only when the broker has taken it back. ``redeliver`` gets those
    that no broker takes now: the listener sees them again, here. ``wake`` lets so many workers look
    for work.
    """

    def __init__(
        self,
        calls: BrokerCalls,
        tasks: Tasks,
        retry_times_max: int,
        redeliver: Callable[[Work, int, int], None],
        wake: Callable[[int], None],
    ) -> None:
        self._calls = calls
        self._retry_times_max = retry_times_max  # below 0: the group's
        self._redeliver = redeliver
        self._wake = wake
        self._failed = Accumulator(tasks, self._call, size_max=ITEMS_PER_CALL_MAX)

    def put(self, work: Work, start: int, stop: int, delay_level: int, delay_ms: int = 0) -> None:
        """Send messages ``start`` to ``stop`` back. Until that is answered they count as running,
        so that their queue is not handed over meanwhile.
        """
        broker_group = work.messages[start].queue.broker_group
        work.queue.running += stop - start
        for place in range(start, stop):
            self._failed.put(broker_group, Failed(work, place, delay_level, delay_ms))

    async def _call(self, broker_group: str, some: list[Failed]) -> None:
        """Send them back, again if nobody answers or a quota is used up: the broker may have taken
        them, and knows a send-back that comes twice, while the listener would see the messages
        twice.
        """
        for calls_left in reversed(range(CALLS_MAX)):
            items = list(map(self._item, some))
            answers = await self._calls.send_back(broker_group, items)
            unknown: list[Failed] = []
            wait_s = CALL_AGAIN_S
            for failed, answer in zip(some, answers, strict=True):
                if calls_left and isinstance(answer, PeerUnavailable | FlowControl):
                    unknown.append(failed)
                    wait_s = max(wait_s, (answer.retry_after_ms or 0) / 1000)
                else:
                    self._answered(failed, answer)
            self._wake(len(some) - len(unknown))  # queues in order have gone on
            if not unknown:
                return
            some = unknown
            await self._calls.wait(wait_s)

    def _item(self, failed: Failed) -> broker_pb2.SendBackItem:
        work, place, delay_level, delay_ms = failed
        message = work.messages[place]
        failed_at = Position(work.run.generation, message.queue_offset)
        item = send_back_item(message.queue, failed_at, delay_level, delay_ms)
        if self._retry_times_max >= 0:
            item.retry_times_max = self._retry_times_max
        return item

    def _answered(self, failed: Failed, error: CometError | None) -> None:
        work, place, *_ = failed
        queue, message = work.queue, work.messages[place]
        queue.running -= 1
        if error is None:
            queue.finish(work.run, place, place + 1)
            return
        _log.warning(
            "message not taken back: it comes again here",
            extra=fields(**of(message.queue), offset=message.queue_offset, error=error),
        )
        self._redeliver(work, place, place + 1)
        queue.finish(work.run, place, place)  # who waits for the queue looks again
