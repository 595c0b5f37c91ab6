"""How far a consumer is in one queue: the window of messages in work, and the position that is safe
to commit.

A window is a list of runs, one for each pull answer, in queue order. The committable position is
the lowest unfinished message: everything before it is done, so a commit never passes a message that
is still in work, in whatever order the messages finish. Pure: no I/O, no time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from cometmq.model import Position


class Run:
    """The messages of one pull answer. ``offsets`` rise; ``limit`` of them count (a rewind cuts the
    rest off).
    """

    __slots__ = ("bytes_count", "finished", "generation", "limit", "low", "next_offset", "offsets")

    def __init__(
        self, offsets: Sequence[int], next_offset: int, generation: int, bytes_count: int
    ) -> None:
        assert not offsets or offsets[-1] < next_offset
        self.offsets = offsets
        self.next_offset = (
            next_offset  # first offset behind the run, messages filtered out included
        )
        self.generation = generation
        self.bytes_count = (
            bytes_count  # size of the records; returned as a whole when the run is done
        )
        self.limit = len(offsets)
        self.low = 0  # all before this index are finished
        self.finished = bytearray(len(offsets))  # 1 = finished

    def finish(self, start: int, stop: int) -> int:
        """Marks messages ``start`` to ``stop`` as finished; returns how many of them had not been
        and still count.
        """
        stop = min(stop, self.limit)
        if start >= stop:
            return 0
        fresh = stop - start - self.finished.count(1, start, stop)
        self.finished[start:stop] = b"\x01" * (stop - start)
        if start <= self.low < stop:
            unfinished = self.finished.find(0, self.low, self.limit)
            self.low = self.limit if unfinished < 0 else unfinished
        assert self.low <= self.limit
        return fresh

    def cut(self, offset: int) -> int:
        """Forgets messages from ``offset`` on; returns how many unfinished ones that were."""
        limit = bisect_left(self.offsets, offset, 0, self.limit)
        dropped = (self.limit - limit) - self.finished.count(1, limit, self.limit)
        self.limit = limit
        self.low = min(self.low, limit)
        self.next_offset = min(self.next_offset, offset)
        return dropped

    def is_finished(self, index: int) -> bool:
        """Whether the message is."""
        return bool(self.finished[index])

    @property
    def committable(self) -> int:
        """Offset of the lowest unfinished message, or of what follows the run."""
        return self.next_offset if self.low >= self.limit else self.offsets[self.low]


class RunPart:
    """Some messages of a run, by their ``places`` in it, which rise: those of one message group.
    Reads like a run of its own.
    """

    __slots__ = ("low", "places", "run")

    def __init__(self, run: Run, places: Sequence[int]) -> None:
        self.run = run
        self.places = places
        self.low = 0  # all before this index are finished

    @property
    def generation(self) -> int:
        return self.run.generation

    @property
    def limit(self) -> int:
        """So many of them count."""
        return bisect_left(self.places, self.run.limit)

    def is_finished(self, index: int) -> bool:
        """Whether the message is."""
        return bool(self.run.finished[self.places[index]])

    def pass_finished(self) -> None:
        """Moves ``low`` to the first message that is not finished."""
        places, finished, low = self.places, self.run.finished, self.low
        while low < len(places) and finished[places[low]]:
            low += 1
        self.low = low


AnyRun = Run | RunPart


class Progress:
    """One queue's window. ``count`` and ``bytes_count`` say what it holds; both are 0 when all is
    done. ``on_bytes`` hears of each change of the latter.
    """

    def __init__(self, start: Position, on_bytes: Callable[[int], None] = lambda _: None) -> None:
        self._on_bytes = on_bytes
        self._runs: list[Run] = []
        self._start = start  # where the next run begins
        self._done = start  # what is committable when no run is left
        self.count = 0
        self.bytes_count = 0

    @property
    def next_position(self) -> Position:
        """Where to pull next."""
        return self._start

    @property
    def committable(self) -> Position:
        """Lowest unfinished position; within a generation it only falls by :meth:`rewind`."""
        if not self._runs:
            return self._done
        first = self._runs[0]
        return Position(first.generation, first.committable)

    @property
    def span(self) -> int:
        """Offsets from the lowest unfinished message to the next one to pull."""
        return max(0, self._start.offset - self.committable.offset)

    def add(self, offsets: Sequence[int], next_position: Position, bytes_count: int) -> Run:
        """Takes a pull answer into the window; without messages (all filtered out) it only moves
        on.
        """
        assert not offsets or offsets[0] >= self._start.offset
        run = Run(offsets, next_position.offset, next_position.generation, bytes_count)
        self._start = next_position
        self._runs.append(run)
        self.count += len(offsets)
        self.bytes_count += bytes_count
        self._on_bytes(self.bytes_count)
        self._drop_finished()
        return run

    def finish(self, run: AnyRun, start: int, stop: int) -> None:
        """Messages ``start`` to ``stop`` of the run are done; repeating it, or a run cut off
        meanwhile, does no harm.
        """
        if isinstance(run, RunPart):
            for place in run.places[start:stop]:
                self.finish(run.run, place, place + 1)
            run.pass_finished()
            return
        if start == run.low and stop - start == 1 and stop < run.limit and not run.finished[stop]:
            run.finished[start] = 1  # in order and one at a time: most calls, so without detours
            run.low = stop
            self.count -= 1
            return
        self.count -= run.finish(start, stop)
        assert self.count >= 0
        if run.low >= run.limit:
            self._drop_finished()

    def finished_stop(self) -> int:
        """Offset behind the last message of all that is finished; 0 = none that is still here."""
        for run in reversed(self._runs):
            last = run.finished.rfind(1, 0, run.limit)
            if last >= 0:
                return run.offsets[last] + 1
        return 0

    def rewind(self, position: Position) -> None:
        """The queue goes on at ``position``: what lies at or above it no longer counts, what lies
        below still does.
        """
        for run in self._runs:
            self.count -= run.cut(position.offset)
        self._start = self._done = position
        self._drop_finished()

    def restart(self, position: Position) -> None:
        """The queue goes on at ``position``: nothing that was read so far counts any more."""
        for run in self._runs:
            run.cut(-1)
        self._runs.clear()
        self.count = self.bytes_count = 0
        self._on_bytes(0)
        self._start = self._done = position

    def _drop_finished(self) -> None:
        runs = self._runs
        done = 0
        while done < len(runs) and runs[done].low >= runs[done].limit:
            self.bytes_count -= runs[done].bytes_count
            done += 1
        if done:
            last = runs[done - 1]
            self._done = Position(last.generation, last.next_offset)
            del runs[:done]
            self._on_bytes(self.bytes_count)
        if not runs:
            self._done = self._start
            assert self.count == 0
            assert self.bytes_count == 0
