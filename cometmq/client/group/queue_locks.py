"""The queue locks of a consumer in order: it has a queue only while its own clock says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Protocol

from cometmq.client.names import of
from cometmq.clock import Clock, SystemClock
from cometmq.errors import CometError, QueueLocked
from cometmq.model import QueueRef
from cometmq.telemetry import fields, logger

RENEW_S = 5.0
_CLOCK = SystemClock()

_log = logger(__name__)


class LockCalls(Protocol):
    """Calls to the brokers: :class:`cometmq.client.reading.offsets.BrokerCalls`."""

    @property
    def group(self) -> str: ...

    async def lock(
        self, client_id: str, queues: Collection[QueueRef]
    ) -> tuple[dict[QueueRef, int | CometError], float]: ...

    async def unlock(self, client_id: str, queues: Collection[QueueRef]) -> None: ...


class Lock:
    """A queue's lock, as long as this client renews it."""

    __slots__ = ("_clock", "number", "until_s")

    def __init__(self, number: int, until_s: float, clock: Clock = _CLOCK) -> None:
        self.number = number
        self.until_s = until_s  # by the clock that counts while the machine is suspended
        self._clock = clock

    @property
    def is_held(self) -> bool:
        """Whether no other client can have the queue now."""
        return self._clock.boottime_s() < self.until_s


class QueueLocks:
    """``on_lost`` gets queues whose lock ended before it could be renewed, or that another client
    has.
    """

    def __init__(
        self,
        calls: LockCalls,
        client_id: str,
        on_lost: Callable[[Collection[QueueRef]], None],
        clock: Clock = _CLOCK,
    ) -> None:
        self._calls = calls
        self._clock = clock
        self._client_id = client_id
        self._on_lost = on_lost
        self._held: dict[QueueRef, Lock] = {}  # renewed
        # Also of locks that ended: commits go out with them, and the broker decides.
        self._numbers: dict[QueueRef, int] = {}

    def holds(self, queue: QueueRef) -> bool:
        """Whether this client renews the queue's lock."""
        return queue in self._held

    def get(self, queue: QueueRef) -> Lock:
        """The lock of a queue that this client has locked."""
        return self._held[queue]

    def number(self, queue: QueueRef) -> int:
        """The newest lock number that this client got for the queue."""
        return self._numbers[queue]

    async def lock(self, queues: Collection[QueueRef]) -> set[QueueRef]:
        """Ask for the locks; the queues that this client has now."""
        asked_s = self._clock.boottime_s()  # the lease counts from before the broker gave it
        answers, lease_s = await self._calls.lock(self._client_id, queues)
        for queue, answer in answers.items():
            if isinstance(answer, CometError):
                _log.info("queue not locked", extra=fields(**of(queue), error=answer))
            else:
                self._held[queue] = Lock(answer, asked_s + lease_s, self._clock)
                self._numbers[queue] = answer
        return {queue for queue in queues if self.holds(queue) and self._held[queue].is_held}

    def abandon(self, queues: Collection[QueueRef]) -> None:
        """Renew these locks no more."""
        for queue in queues:
            lock = self._held.pop(queue, None)
            if lock is not None:
                lock.until_s = 0.0

    async def unlock(self, queues: Collection[QueueRef]) -> None:
        """Let other clients have these queues at once."""
        self.abandon(queues)
        await self._calls.unlock(self._client_id, queues)

    async def renew(self) -> None:
        """Renew all locks again and again, until cancelled."""
        while True:
            await asyncio.sleep(RENEW_S)
            if self._held:
                await self.renew_all()

    async def renew_all(self) -> None:
        """Renew all locks once."""
        asked_s, queues = self._clock.boottime_s(), list(self._held)
        answers, lease_s = await self._calls.lock(self._client_id, queues)
        lost = []
        for queue, answer in answers.items():
            lock = self._held.get(queue)
            if lock is None:
                continue  # given up meanwhile
            # Another number: a fail-over took the grant back, and others may have had the queue.
            # So they may have while the lease was over.
            is_other = isinstance(answer, int) and answer != lock.number
            if is_other or not lock.is_held or isinstance(answer, QueueLocked):
                lost.append(queue)
            elif isinstance(answer, int):
                lock.until_s = asked_s + lease_s
        if lost:
            _log.warning(
                "queue locks lost",
                extra=fields(group=self._calls.group, queue_count=len(lost), first=str(lost[0])),
            )
            self.abandon(lost)
            self._on_lost(lost)
