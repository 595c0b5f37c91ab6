"""Producers send, consumers spool, the job puts lines in their places: what goes on all the time,
while the other steps do theirs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from rich.console import Console

from examples.roundtrip import comparing, consuming
from examples.roundtrip.duplicates import Sightings
from examples.roundtrip.placing import Placer
from examples.roundtrip.screen import Bars
from examples.roundtrip.sources import SourceFile
from examples.roundtrip.spool import SpoolReader
from examples.roundtrip.stage import Folder
from examples.roundtrip.tally import Tally
from examples.roundtrip.workers import Worker

PRODUCER_COUNT = 2
CONSUMER_COUNT = 3
READY_S_MAX = 30.0
STALL_S_MAX = 60.0  # nothing stored and nothing placed for so long: the job gives up
POLL_S = 0.05

T = TypeVar("T")


class Traffic:
    """Use it inside ``async with``: consumers are ready then, nothing is sent yet. Whatever still
    runs at the end of the block is killed.
    """

    def __init__(
        self,
        namesrv: str,
        topic: str,
        group: str,
        files: Sequence[SourceFile],
        folder: Folder,
        console: Console,
    ) -> None:
        self._namesrv = namesrv
        self._topic = topic
        self._group = group
        self._folder = folder
        self._producers: list[Worker] = []
        self._consumers: list[Worker] = []
        self._readers = [SpoolReader(folder.spool(n)) for n in range(CONSUMER_COUNT)]
        self._stack = AsyncExitStack()
        self._held_since_s = 0.0
        self._held_s = 0.0
        self.placer = Placer(files, partial(comparing.write_back, folder.copies))
        self.sightings = Sightings(files)
        self.tally = Tally()
        self._bars = Bars(console, self.placer.expected)

    async def __aenter__(self) -> Self:
        """Errors: WorkerFailed, TimeoutError."""
        async with AsyncExitStack() as stack:
            self._consumers = [await self._consumer(stack, n) for n in range(CONSUMER_COUNT)]
            for consumer in self._consumers:
                await consumer.wait_for("ready", READY_S_MAX)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    async def _consumer(self, stack: AsyncExitStack, number: int) -> Worker:
        worker = await Worker.start(
            f"consumer-{number}",
            "examples.roundtrip.consuming",
            self._folder.path,
            namesrv=self._namesrv,
            topic=self._topic,
            group=self._group,
            spool=self._folder.spool(number),
        )
        stack.push_async_callback(worker.kill)
        return worker

    async def produce(self, root: Path, rate: int) -> None:
        """Lets the producers begin, each with ``rate`` messages a second (0: as fast as it goes),
        and shows the bars until the end of the block.
        """
        self._stack.enter_context(self._bars)
        for number in range(PRODUCER_COUNT):
            worker = await Worker.start(
                f"producer-{number}",
                "examples.roundtrip.producing",
                self._folder.path,
                namesrv=self._namesrv,
                topic=self._topic,
                root=root,
                plan=self._folder.plan,
                number=number,
                rate=rate,
            )
            self._stack.push_async_callback(worker.kill)
            self._producers.append(worker)

    # --- while it runs ----------------------------------------------------------------------------

    async def until(self, reached: Callable[[], bool]) -> None:
        """Places what comes until ``reached()``. Errors: WorkerFailed; TimeoutError when nothing
        moves any more.
        """
        clock = asyncio.get_running_loop().time
        state, changed_s = (-1, -1), clock()
        while not reached():
            read = self._read_spools()
            for worker in (*self._producers, *self._consumers):
                worker.check()
            now = (self.stored, self.placer.placed)
            self._bars.update(*now)
            if now != state:
                state, changed_s = now, clock()
            elif not self._complete and clock() - changed_s > STALL_S_MAX:
                raise TimeoutError(f"nothing has moved for {STALL_S_MAX:.0f} s: {self._where()}")
            await asyncio.sleep(0 if read else POLL_S)

    async def beside(self, work: Coroutine[Any, Any, T]) -> T:
        """Does ``work`` while lines are placed. Errors: its own, and as :meth:`until`."""
        task = asyncio.create_task(work)
        try:
            await self.until(task.done)
            return await task
        finally:
            task.cancel()
            await asyncio.wait([task])

    def _where(self) -> str:
        missing = self.placer.missing()
        return (
            f"{self.stored:,} messages stored, {self.placer.placed:,} of "
            f"{self.placer.expected:,} came back; lines of {len(missing):,} files are missing"
        )

    def _read_spools(self) -> bool:
        """A piece of each, so that whoever works beside has a turn; whether there was any."""
        pieces = [next(reader.read(), []) for reader in self._readers]
        place, note = self.placer.place, self.sightings.note
        for arrivals in pieces:
            self.tally.add(arrivals)
            for arrival in arrivals:
                place(*arrival[:3])
                note(arrival)
        return any(pieces)

    @property
    def share_stored(self) -> float:
        return self.stored / self.placer.expected

    @property
    def stored(self) -> int:
        """Messages known to be stored: acknowledged, or back already. Producers tell of their
        acknowledgements a few times a second only.
        """
        acked = sum(producer.said.get("acked", 0) for producer in self._producers)
        return max(acked, self.placer.placed)

    @property
    def all_stored(self) -> bool:
        return not any(producer.running for producer in self._producers)

    @property
    def _complete(self) -> bool:
        return self.placer.complete and self.all_stored

    def hold(self) -> None:
        """Consumers stop working, and stay in their group."""
        self._held_since_s = asyncio.get_running_loop().time()
        self.tally.latencies_count = False
        for consumer in self._consumers:
            consumer.signal(consuming.HOLD)

    def go_on(self) -> None:
        """After :meth:`hold`."""
        self._held_s = asyncio.get_running_loop().time() - self._held_since_s
        for consumer in self._consumers:
            consumer.signal(consuming.GO_ON)

    async def finish(self) -> None:
        """Until everything is stored and placed and the consumers have left their group. Errors: as
        :meth:`until`.
        """
        await self.until(lambda: self._complete)
        await asyncio.gather(*(consumer.stop() for consumer in self._consumers))
        while self._read_spools():  # a duplicate may have come after the last missing line
            pass

    # --- afterwards -------------------------------------------------------------------------------

    @property
    def produce_seconds(self) -> float:
        """From the first message sent to the last one acknowledged, over all producers."""
        said = [producer.said for producer in self._producers]
        if not all("ended_ms" in one for one in said):
            return 0.0
        return (max(s["ended_ms"] for s in said) - min(s["started_ms"] for s in said)) / 1000

    @property
    def consume_seconds(self) -> float:
        """From the first arrival to the last, without the time that consumers were held back."""
        return self.tally.seconds - self._held_s
