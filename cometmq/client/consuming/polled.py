"""The queues that an application polls: what is fetched ahead for it, in turn, and how far it has
come in each.

``polled`` lies behind the messages that were handed out. ``done`` lies behind those of earlier
turns: the application has come back for more, so it is done with them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from cometmq.client.messages import PullBatch
from cometmq.client.reading.fetcher import Fetcher
from cometmq.client.received import ReceivedMessage
from cometmq.client.remote.description import QueueState
from cometmq.errors import QueueNotFound
from cometmq.model import Position, QueueRef
from cometmq.rpc.tasks import stop_all


class PolledQueues:
    """Belongs to the event loop. Of each queue one fetch at most runs, or waits to be polled."""

    def __init__(self) -> None:
        self.polled: dict[QueueRef, Position] = {}
        self.done: dict[QueueRef, Position] = {}
        self.came_back = asyncio.Event()  # set whenever the application does
        self._fetchers: dict[QueueRef, Fetcher] = {}  # the next to be polled comes first
        self._fetching: dict[QueueRef, asyncio.Task[PullBatch]] = {}
        self._begins: dict[QueueRef, Position] = {}  # of the fetch that runs or has ended
        self._paused: set[QueueRef] = set()
        self._resting: set[QueueRef] = set()  # about to be polled, or to be given up
        self._changed = asyncio.Event()

    def __contains__(self, queue: object) -> bool:
        return queue in self._fetchers

    @property
    def queues(self) -> Collection[QueueRef]:
        """All of them."""
        return self._fetchers.keys()

    def states(self) -> list[QueueState]:
        """The description of the queues, for operators, without the committed positions: these are
        not known here.
        """
        states = []
        for queue, fetcher in self._fetchers.items():
            fetching = self._fetching.get(queue)
            waits = fetching is not None and fetching.done() and not fetching.cancelled()
            found = (
                fetching.result().messages
                if fetching is not None and waits and fetching.exception() is None
                else []
            )
            states.append(
                QueueState(
                    queue,
                    None,
                    self.polled.get(queue) or self._begins.get(queue),
                    len(found),
                    sum(message.size for message in found),
                    pulled_s=fetcher.pulled_s,
                    is_paused=queue in self._paused,
                )
            )
        return states

    def add(self, fetcher: Fetcher, *, resting: bool = False) -> None:
        """Polls hand out its messages from now on; of a resting one after :meth:`go_on`."""
        self._fetchers[fetcher.queue] = fetcher
        if resting:
            self._resting.add(fetcher.queue)
        self._changed.set()

    async def rest(self, queues: Collection[QueueRef]) -> None:
        """Polls hand out nothing of these queues; what was fetched is forgotten."""
        self._resting |= {*queues}
        for fetcher in [self._fetchers[queue] for queue in queues]:
            await self._stop_fetching(fetcher)
        self._changed.set()

    def go_on(self, queues: Collection[QueueRef]) -> None:
        """Polls hand out messages of these queues, if they are not paused."""
        self._resting -= {*queues}
        self._changed.set()

    async def remove(self, queues: Collection[QueueRef]) -> None:
        """These queues are polled no more."""
        # First, else a poll that waits would fetch again.
        for fetcher in [self._fetchers.pop(queue) for queue in queues if queue in self._fetchers]:
            await self._stop_fetching(fetcher)
            for known in (self._begins, self.polled, self.done):
                known.pop(fetcher.queue, None)
        self._paused -= {*queues}
        self._resting -= {*queues}

    async def seek(self, queue: QueueRef, position: Position) -> None:
        """The next poll of the queue begins there. QueueNotFound."""
        fetcher = self.fetcher(queue)
        await self._stop_fetching(fetcher)
        fetcher.position = position
        for known in (self.polled, self.done, self._begins):
            known.pop(queue, None)
        self._changed.set()

    def pause(self, queues: Collection[QueueRef]) -> None:
        """Polls hand out nothing of these queues before :meth:`resume`."""
        self._paused |= {*queues}

    def resume(self, queues: Collection[QueueRef]) -> None:
        """Polls hand out messages of these queues again."""
        self._paused -= {*queues}
        self._changed.set()

    def fetcher(self, queue: QueueRef) -> Fetcher:
        """QueueNotFound: the queue is not polled here."""
        if queue not in self._fetchers:
            raise QueueNotFound(f"{queue} is not assigned.")
        return self._fetchers[queue]

    async def position(self, queue: QueueRef) -> Position:
        """The position that the next poll of the queue begins at. QueueNotFound."""
        fetcher = self.fetcher(queue)
        known = self.polled.get(queue) or self._begins.get(queue)
        return known if known is not None else await fetcher.locate()

    def in_work(self, queues: Collection[QueueRef]) -> bool:
        """Whether the application has messages of these queues that it may not be done with."""
        return any(self.polled.get(queue) != self.done.get(queue) for queue in queues)

    def all_done(self) -> None:
        """The application is done with everything that was handed out."""
        self.done |= self.polled
        self.came_back.set()

    async def next(self, timeout_s: float) -> list[ReceivedMessage]:
        """Messages of one queue as soon as there are some; none when the time is over. Raises what
        no retry can mend, once for each try.
        """
        self.all_done()
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while True:
            self._changed.clear()
            silent = self._paused | self._resting
            wanted = [queue for queue in self._fetchers if queue not in silent]
            for queue in wanted:
                if queue not in self._fetching:
                    self._start_fetching(queue)
            changed = loop.create_task(self._changed.wait())
            try:
                done, _ = await asyncio.wait(
                    [changed, *(self._fetching[queue] for queue in wanted)],
                    timeout=max(0.0, deadline_s - loop.time()),
                    return_when=asyncio.FIRST_COMPLETED,
                )
            finally:
                changed.cancel()
            if not done:
                return []
            messages = self._take_turn()
            # A filter may leave nothing of each answer.
            if messages or loop.time() >= deadline_s:
                return messages

    def _start_fetching(self, queue: QueueRef) -> None:
        async def fetch(fetcher: Fetcher) -> PullBatch:
            self._begins[queue] = await fetcher.locate()
            batch = await fetcher.fetch()
            fetcher.memory.hold(batch.size_bytes)  # until it is polled
            return batch

        self._fetching[queue] = asyncio.create_task(fetch(self._fetchers[queue]))

    def _take_turn(self) -> list[ReceivedMessage]:
        """The messages of the first queue in turn that has an answer; its turn is over then."""
        for queue in list(self._fetchers):
            if queue in self._paused or queue in self._resting:
                continue
            if queue in self._fetching and self._fetching[queue].done():
                self._fetchers[queue] = self._fetchers.pop(queue)
                self._fetchers[queue].memory.hold(0)
                batch = self._fetching.pop(queue).result()
                self.polled[queue] = batch.next_position
                self._start_fetching(queue)
                if batch.messages:
                    return batch.messages
                self.done[queue] = batch.next_position
        return []

    async def _stop_fetching(self, fetcher: Fetcher) -> None:
        """Cancels the fetch that runs, and forgets what it found."""
        if fetcher.queue in self._fetching:
            await stop_all([self._fetching.pop(fetcher.queue)])
            fetcher.memory.hold(0)
