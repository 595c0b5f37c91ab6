"""The messages of a push consumer whose group receives (POP): from all queues of all broker groups,
in the place of a share of the queues.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Coroutine, Mapping, Sequence
from typing import Any

from cometmq.client.cluster.routes import RouteWatcher
from cometmq.client.consuming.listener import Work, Workers
from cometmq.client.messages import Later
from cometmq.client.options import PushConsumerOptions, backoff_policy
from cometmq.client.pop.arrivals import PopArrivals
from cometmq.client.pop.calls import Lease, LeasedRun, PopAnswer, PopCalls
from cometmq.client.pop.member import PopMember
from cometmq.client.pop.settler import PopSettler
from cometmq.client.reading.long_poller import LongPoller
from cometmq.client.reading.memory import Memory, MemoryShare
from cometmq.client.reading.offsets import BrokerCalls
from cometmq.client.reading.progress import AnyRun, Run
from cometmq.client.received import ReceivedMessage
from cometmq.client.remote.answers import Answers
from cometmq.client.remote.description import LeaseState
from cometmq.client.remote.rates import Tally
from cometmq.errors import CometError, Retry
from cometmq.model import Filter, QueueRef
from cometmq.rpc.retry import Backoff
from cometmq.rpc.tasks import Tasks, stop_all, wait_at_most
from cometmq.telemetry import fields, logger

CALLS_MAX = 4  # receives at a time, while there is plenty
IDLE_S = 600.0  # a broker is asked so often that has nothing, whatever pull-holds say
TELL_EVERY_S = 60.0  # that a group's broker refuses it

_log = logger(__name__)


_Answers = tuple[list[PopAnswer], CometError | None]


class _Received:
    """Messages of one lease in work: a queue of the workers."""

    def __init__(
        self, source: _Source, leased: LeasedRun, messages: list[ReceivedMessage], tally: Tally
    ) -> None:
        self.tally = tally
        offsets = [message.queue_offset for message in messages]
        self.running = 0
        self.lease = leased.lease
        self.run = Run(offsets, offsets[-1] + 1, 0, sum(message.size for message in messages))
        self.begun = False
        self._source = source

    @property
    def closed(self) -> bool:
        return self._source.is_closed or self.lease.is_lost

    def finish(self, run: AnyRun, start: int, stop: int) -> None:
        """As the workers say."""
        if stop > start:
            self._source.settler.done(self.lease, self.run.offsets[start:stop])
            self.end(start, stop)
        elif self.lease.is_lost:
            self.lost()
        self._source.ended.set()

    def fail(self, start: int, stop: int, later: Later) -> None:
        self._source.settler.failed(self.lease, self.run.offsets[start:stop], later)
        self.end(start, stop)

    def end(self, start: int, stop: int) -> None:
        """No work is left with these messages."""
        self._count_ended(start, stop)
        if self.run.low == self.run.limit:
            self._source.forget(self)
        self._source.ended.set()

    def lost(self) -> None:
        """Its messages come again: workers drop what they have not begun, and tell nobody."""
        self._count_ended(0, self.run.limit)
        if not self.running:  # a stop waits for calls that run
            self._source.forget(self)
        self._source.ended.set()

    def _count_ended(self, start: int, stop: int) -> None:
        self._source.open_count -= self.run.finish(start, stop)


class _Source:
    """One broker group. ``open_count``: messages that are not done."""

    def __init__(self, settler: PopSettler, memory: MemoryShare) -> None:
        self.settler = settler
        self.memory = memory
        self.open_count = 0
        self.received: dict[_Received, None] = {}
        self._held_bytes = 0
        self.asking: asyncio.Task[_Answers] | None = None  # receives on their way
        self.ended = asyncio.Event()  # a listener call has ended
        self.sooner = asyncio.Event()  # messages may come back before the last answer said so
        self.received_s: float | None = None  # when a call was answered last
        self.is_closed = False
        self.is_blocked = False  # messages wait for others of their message group

    def take(self, received: _Received) -> None:
        """Its messages are in work."""
        self.received[received] = None
        self.open_count += received.run.limit
        self._held_bytes += received.run.bytes_count
        self.memory.hold(self._held_bytes)

    def forget(self, received: _Received) -> None:
        """Its messages are in work no more."""
        if received in self.received:
            del self.received[received]
            self._held_bytes -= received.run.bytes_count
            self.memory.hold(self._held_bytes)

    def was_lost(self, lease: Lease) -> None:
        """There is room for other messages in place of the lease's."""
        for received in [one for one in self.received if one.lease is lease]:
            received.lost()

    def was_told(self, has_failed: bool) -> None:
        """The broker group knows what is done. What failed, or had to wait, may come now."""
        if has_failed or self.is_blocked:
            self.sooner.set()


async def _all_of(calls: Sequence[Coroutine[Any, Any, PopAnswer]]) -> _Answers:
    """The answers of the calls, and the error of one that was refused: the others' messages are not
    lost.
    """
    answers: list[PopAnswer] = []
    refused: CometError | None = None
    for answer in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(answer, CometError):
            refused = answer
        elif isinstance(answer, BaseException):
            raise answer
        else:
            answers.append(answer)
    return answers, refused


class PopShare:
    """Belongs to the event loop."""

    def __init__(
        self,
        options: PushConsumerOptions,
        calls: BrokerCalls,
        routes: RouteWatcher,
        workers: Workers,
        long_poller: LongPoller,
    ) -> None:
        self._options = options
        self._calls = calls
        self._routes = routes
        self._workers = workers
        self._subscriptions: dict[str, Filter] = {}
        self._pop = PopCalls(calls, routes, options, self._subscriptions)
        self._arrivals = PopArrivals(calls, options, long_poller, self._subscriptions)
        self._member = PopMember(options, calls, self._pop, self._subscriptions)
        self._sources: dict[str, _Source] = {}
        self._memory = Memory(options.memory_bytes_max)
        self._feeding: list[asyncio.Task[None]] = []
        self._settling: list[asyncio.Task[None]] = []
        self._tasks: Tasks | None = None
        self._told_s: dict[str, float] = {}
        workers.not_done = self._not_done
        workers.send_back = self._took_too_long

    @property
    def reading(self) -> Collection[QueueRef]:
        """No queue is this member's alone."""
        return ()

    @property
    def subscriptions(self) -> Mapping[str, Filter]:
        """The filters of the topics that are received."""
        return self._subscriptions

    @property
    def retry_times_max(self) -> int | None:
        """As a share of the queues has it."""
        return self._member.retry_times_max

    def answer(self, answers: Answers) -> None:
        """As a share of the queues does."""
        self._member.answer(answers)

    def states(self) -> list[LeaseState]:
        """The description of the messages in work, for operators."""
        return [
            LeaseState(
                broker_group,
                source.open_count,
                sum(one.run.bytes_count for one in source.received),
                sum(one.running for one in source.received),
                source.received_s,
            )
            for broker_group, source in sorted(self._sources.items())
        ]

    def start(self, tasks: Tasks) -> None:
        """Receive from broker groups as they come."""
        self._tasks = tasks
        self._member.start(tasks)

    async def subscribe(self, topic: str, wanted: Filter, *, waits: bool = True) -> None:
        """Receive from the topic from now on."""
        self._routes.watch(topic)
        self._subscriptions[topic] = wanted
        self._look()
        self._ask_soon()

    async def unsubscribe(self, topic: str, *, waits: bool = True) -> None:
        """Receive from it no more; what was received is consumed."""
        self._subscriptions.pop(topic, None)
        self._member.look_again()

    def route_changed(self, topic: str) -> None:
        """There may be another broker group, or other queues."""
        self._look()
        if topic in self._subscriptions:
            self._ask_soon()

    def _ask_soon(self) -> None:
        """Brokers that had nothing may have messages of other queues: no wait stands for those."""
        for source in self._sources.values():
            source.sooner.set()

    def _look(self) -> None:
        self._member.look_again()
        for broker_group in self._pop.broker_groups():
            if broker_group not in self._sources and self._tasks is not None:
                settler = PopSettler(self._pop, self._calls, broker_group)
                source = self._sources[broker_group] = _Source(settler, self._memory.share())
                settler.on_told, settler.on_lost = source.was_told, source.was_lost
                feed = self._tasks.start(self._feed(broker_group, source), f"pop {broker_group}")
                settle = self._tasks.start(settler.run(), f"settle at {broker_group}")
                self._feeding.append(feed)
                self._settling.append(settle)

    async def stop(self) -> None:
        """Receive nothing more; wait for the listener calls that run; tell what they did."""
        await stop_all(self._feeding)
        await self._take_last()
        for source in self._sources.values():
            source.is_closed = True
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._options.drain_timeout_ms / 1000
        for source in self._sources.values():
            while any(one.running for one in source.received) and loop.time() < deadline_s:
                source.ended.clear()
                await wait_at_most(source.ended, deadline_s - loop.time())
        for source in self._sources.values():
            source.settler.close()
        if self._settling:
            await asyncio.wait(self._settling)  # each of their calls has a deadline
        # Side by side: one that does not answer keeps the others from nothing.
        await asyncio.gather(*(self._end(one, deadline_s) for one in self._sources.values()))
        self._sources.clear()
        await self._pop.close()

    async def _take_last(self) -> None:
        """Waits for receives that were on their way: their messages are to be given back."""
        asking = {one.asking: one for one in self._sources.values() if one.asking is not None}
        try:
            if asking:
                await asyncio.wait(asking, timeout=self._calls.timeout_s)
        finally:
            await stop_all(asking)
        for task, source in asking.items():
            if not task.cancelled() and task.exception() is None:
                answers, _ = task.result()
                for run in (run for answer in answers for run in answer.runs):
                    source.settler.add(run.lease)

    async def _end(self, source: _Source, deadline_s: float) -> None:
        while not await source.settler.settle() and asyncio.get_running_loop().time() < deadline_s:
            await self._calls.wait(0.1)
        await source.settler.give_back()

    async def leave(self) -> None:
        """A member of the group no more."""
        await self._member.leave()

    async def end_session(self) -> None:
        """There is no session: members of such a group have no queues of their own."""

    # --- receiving --------------------------------------------------------------------------------

    async def _feed(self, broker_group: str, source: _Source) -> None:
        failures = Backoff(backoff_policy(self._options), random.Random())
        options = self._options
        count = min(options.pop_count_max, options.queue_count_max)
        call_count = 1
        while True:
            room = options.queue_count_max - source.open_count
            if room < count:
                source.ended.clear()
                await source.ended.wait()
                continue
            source.sooner.clear()
            asked_bytes = each_bytes = await source.memory.ask(options.pull_bytes_max)
            try:
                calls = [self._pop.receive(broker_group, count, options.pop_invisible_ms)]
                while len(calls) < min(call_count, room // count) and source.memory.try_ask(
                    each_bytes
                ):
                    asked_bytes += each_bytes
                    calls.append(self._pop.receive(broker_group, count, options.pop_invisible_ms))
                source.asking = asyncio.create_task(_all_of(calls))
                answers, error = await asyncio.shield(source.asking)
            finally:
                source.memory.answered(asked_bytes)
            source.asking = None
            for run in (run for answer in answers for run in answer.runs):
                self._take(source, run)
            if error is not None:
                call_count = 1
                self._refused(broker_group, error)
                await self._calls.wait(failures.next_s())
                continue
            failures.reset()
            # While there is plenty some calls are on their way at a time.
            is_plenty = all(answer.has_more for answer in answers)
            call_count = min(2 * call_count, CALLS_MAX) if is_plenty else 1
            source.received_s = asyncio.get_running_loop().time()
            last = answers[-1]
            source.is_blocked = last.is_blocked
            if not any(answer.runs or answer.has_more for answer in answers):
                await self._arrivals.wait({broker_group: last}, IDLE_S, source.sooner)

    def _refused(self, broker_group: str, error: CometError) -> None:
        """Told at once, and once a minute, if no retry mends it."""
        now_s = asyncio.get_running_loop().time()
        is_due = now_s - self._told_s.get(broker_group, -TELL_EVERY_S) >= TELL_EVERY_S
        if error.retry is Retry.NEVER and is_due:
            self._told_s[broker_group] = now_s
            _log.warning(
                "nothing can be received",
                extra=fields(group=self._calls.group, broker_group=broker_group, error=error),
            )

    def _take(self, source: _Source, leased: LeasedRun) -> None:
        kept = self._pop.kept(leased)
        source.settler.add(leased.lease)
        tally = self._workers.rates.of(leased.lease.queue.topic)
        tally.pulled += len(kept)
        if len(kept) < len(leased.messages):
            passed = {one.queue_offset for one in leased.messages}
            source.settler.done(leased.lease, passed - {one.queue_offset for one in kept})
        if kept:
            received = _Received(source, leased, kept, tally)
            source.take(received)
            self._workers.push(Work(received, received.run, kept))

    # --- what the listener could not do -----------------------------------------------------------

    def _not_done(self, work: Work, start: int, stop: int, later: Later) -> None:
        assert isinstance(work.queue, _Received)
        work.queue.fail(start, stop, later)

    def _took_too_long(self, work: Work, start: int, stop: int, delay_level: int) -> None:
        assert isinstance(work.queue, _Received)
        work.queue.fail(start, stop, Later(delay_level=delay_level))
