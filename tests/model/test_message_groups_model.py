"""A queue that is consumed in the order of its message groups, against lists: pulls, calls in any
order, failures, dead letters, fences and resets.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, cast

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cometmq.client.consuming.listener import Work, Workers
from cometmq.client.consuming.orderly import OrderlyQueue, leave_to_lane, orderly_in_place
from cometmq.client.group.queue_locks import Lock
from cometmq.client.messages import Later, OrderBy, PullBatch, PullOutcome
from cometmq.client.options import PushConsumerOptions
from cometmq.client.reading.fetcher import Fetcher
from cometmq.client.reading.memory import Memory
from cometmq.client.reading.progress import Progress
from cometmq.client.received import ReceivedMessage
from cometmq.client.remote.rates import Rates
from cometmq.format.properties import encode as encode_properties
from cometmq.format.record import encode
from cometmq.model import Position, QueueRef
from cometmq.rpc.tasks import Tasks

QUEUE = QueueRef("T", 0, "g")
START = Position(1, 0)
HOST = bytes(8)
KEYS = st.sampled_from(["a", "b", "c", ""])


def message(offset: int, key: str) -> ReceivedMessage:
    properties = {"TAGS": "x"} | ({"__SHARDINGKEY": key} if key else {})
    record = encode(
        b"T",
        0,
        b"",
        encode_properties(properties),
        born_time_ms=1,
        born_host=HOST,
        store_host=HOST,
        queue_offset=offset,
    )
    return ReceivedMessage(record, QUEUE)


class _Tasks:
    def start(self, task: Coroutine[Any, Any, None], name: str) -> None:
        task.close()


class _Fetcher:
    queue = QUEUE
    position = START
    memory = Memory(1 << 30).share()


class _Workers:
    """Work as the real ones keep it: in the order of arrival, dropped when nothing is left."""

    def __init__(self) -> None:
        self.rates = Rates()
        self.work: list[Work] = []
        self.delayed: list[Work] = []

    def redeliver(self, work: Work, start: int, stop: int, delay_s: float | None = None) -> None:
        again = Work(work.queue, work.run, work.messages)
        again.cursor, again.stop = start, stop
        self.delayed.append(again)

    def push(self, work: Work) -> None:
        self.work.append(work)

    append = push

    def next(self) -> Work | None:
        while self.work:
            work = self.work[0]
            work.stop = min(work.stop, work.run.limit)
            if work.cursor < work.stop:
                return work
            del self.work[0]
        return None


Call = tuple[Work, int, int, list[int]]  # with the offsets of its messages


class MessageGroups(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.workers = _Workers()
        self.batch_count = 2
        options = PushConsumerOptions(
            orderly=True, order_by=OrderBy.MESSAGE_GROUP, batch_count=self.batch_count
        )
        self.queue = OrderlyQueue(
            cast(Fetcher, _Fetcher()),
            cast(Workers, self.workers),
            options,
            cast(Tasks, _Tasks()),
            Lock(1, float("inf")),
        )
        self.progress = self.queue._progress = Progress(START)
        self.calls: list[Call] = []  # that run, or are at the broker to be sent back
        self.delayed = self.workers.delayed
        # The model: what was read and counts, by offset: its key; and which of it is done.
        self.read: dict[int, str] = {}
        self.done: set[int] = set()
        self.next_offset = 0
        self.generation = 1

    @rule(keys=st.lists(KEYS, min_size=1, max_size=6), skipped=st.integers(0, 2))
    def pull(self, keys: list[str], skipped: int) -> None:
        first = self.next_offset + skipped
        messages = [message(first + n, key) for n, key in enumerate(keys)]
        self.next_offset = first + len(keys)
        self.read |= {first + n: key for n, key in enumerate(keys)}
        self._take(PullOutcome.FOUND, messages)

    def _take(self, outcome: PullOutcome, messages: list[ReceivedMessage]) -> None:
        position = Position(self.generation, self.next_offset)
        batch = PullBatch(outcome, messages, position, 0, 1 << 40, len(messages))
        self.queue._take(self.progress, batch)

    @rule()
    def call(self) -> None:
        work = self.workers.next()
        if work is None:
            return
        start = work.cursor
        work.cursor = stop = min(start + self.batch_count, work.stop)
        work.queue.running += 1
        offsets = [one.queue_offset for one in work.messages[start:stop]]
        keys = {one.sharding_key for one in work.messages[start:stop]}
        assert len(keys) == 1, "a call has messages of one group"
        (key,) = keys
        assert all(offset in self.read for offset in offsets), "a fence has cut it off"
        assert not self.done & set(offsets)
        if key:
            busy = {w.messages[s].sharding_key for w, s, _, _ in self.calls}
            assert key not in busy, "two calls at a time for a group"
            group = [o for o, k in sorted(self.read.items()) if k == key and o not in self.done]
            assert offsets == group[: len(offsets)], "out of order"
        self.calls.append((work, start, stop, offsets))

    def _end(self, which: int) -> Call:
        call = self.calls.pop(which % len(self.calls))
        call[0].queue.running -= 1
        return call

    @precondition(lambda self: self.calls)
    @rule(which=st.integers(0, 9), done=st.integers(0, 2))
    def end(self, which: int, done: int) -> None:
        """A call ends; the first ``done`` messages are done, the others come again."""
        work, start, stop, offsets = self._end(which)
        first = min(start + done, stop)
        stop = min(stop, work.run.limit)
        if first < stop:
            orderly_in_place(work, first, stop, Later())
        # What a fence has cut off meanwhile does not count.
        self.done |= set(offsets[: max(0, min(first, work.run.limit) - start)])
        work.queue.finish(work.run, start, first)

    @precondition(lambda self: self.calls)
    @rule(
        which=st.integers(0, 9),
        order=st.permutations([0, 1]),
        taken=st.tuples(*[st.booleans()] * 2),
    )
    def end_and_send_back(self, which: int, order: list[int], taken: tuple[bool, bool]) -> None:
        """A call fails for the last time: its messages are dead letters, one by one, as far as the
        broker takes them.
        """
        work, start, stop, offsets = self._end(which)
        stop = min(stop, work.run.limit)
        work.queue.running += stop - start
        work.queue.finish(work.run, start, start)
        for n in [n for n in order if n < stop - start]:
            place = start + n
            work.queue.running -= 1
            if taken[n]:
                if place < work.run.limit:
                    self.done.add(offsets[n])
                work.queue.finish(work.run, place, place + 1)
            else:
                leave_to_lane(work, place, place + 1)
                work.queue.finish(work.run, place, place)

    @precondition(lambda self: self.delayed)
    @rule(which=st.integers(0, 9))
    def due(self, which: int) -> None:
        self.workers.push(self.delayed.pop(which % len(self.delayed)))

    @rule(back=st.integers(0, 8), by_commit=st.booleans(), comes_again=st.booleans())
    def fence(self, back: int, by_commit: bool, comes_again: bool) -> None:
        self.generation += 1
        to = max(0, self.next_offset - back)
        self.next_offset = to
        keys = [key for offset, key in self.read.items() if offset >= to]
        self.read = {offset: key for offset, key in self.read.items() if offset < to}
        self.done = {offset for offset in self.done if offset < to}
        position = Position(self.generation, to)
        if by_commit:
            self.queue._go_to(position)
        else:
            self._take(PullOutcome.OFFSET_MOVED, [])
        if comes_again and keys:
            self.pull(keys, 0)

    @rule(to=st.integers(0, 20))
    def reset(self, to: int) -> None:
        self.generation += 1
        self.next_offset = to
        self.read, self.done = {}, set()
        self.queue.reset(Position(self.generation, to))

    @invariant()
    def the_commit_is_at_the_lowest_unfinished_message(self) -> None:
        left = [offset for offset in self.read if offset not in self.done]
        assert self.progress.committable.offset == min(left, default=self.next_offset)
        assert self.progress.count == len(left)

    @invariant()
    def nothing_is_kept_of_groups_that_are_done(self) -> None:
        busy = {w.messages[s].sharding_key for w, s, _, _ in self.calls}
        left = {key for offset, key in self.read.items() if offset not in self.done}
        free = [o for o, key in self.read.items() if o not in self.done and not key]
        free += [call[3][0] for call in self.calls if not call[0].messages[call[1]].sharding_key]
        assert len(self.queue._lanes) <= len((left | busy) - {""}) + len(set(free))

    def teardown(self) -> None:
        """All comes to its end: nothing waits for ever."""
        while self.calls or self.delayed or self.workers.next() is not None:
            for _ in range(len(self.calls)):
                self.end(0, 2)
            for _ in range(len(self.delayed)):
                self.due(0)
            while self.workers.next() is not None:
                self.call()
        self.the_commit_is_at_the_lowest_unfinished_message()
        assert self.progress.committable.offset == self.next_offset
        assert (self.queue.running, self.queue._lanes) == (0, {})


TestMessageGroups = MessageGroups.TestCase
