"""Acknowledgements of a writer against a model: which batch has its answer, after each step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import reduce
from operator import or_
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cometmq.member.storage.authority import Replicated
from cometmq.member.storage.member_storage import MemberStorage, Segment, Ticket
from cometmq.replication.watermarks import DurabilityClass
from tests.support.cluster.broker import encoded
from tests.support.cluster.members import NEVER, SetAuthority
from tests.support.stores.small_stores import HOST, WallClock, open_store

CLASSES = [DurabilityClass(bits) for bits in range(8)]


class Acks(RuleBasedStateMachine):
    """A batch is answered exactly when its class is fulfilled and the authority says yes."""

    @initialize()
    def begin(self) -> None:
        self.loop, self.folder = asyncio.new_event_loop(), TemporaryDirectory()
        self.authority = SetAuthority()
        self.tickets: list[tuple[Ticket, int]] = []  # each with the bits that its segments demand
        self.done: set[int] = set()
        self.visible = [0] * len(CLASSES)
        store = open_store(Path(self.folder.name))
        self.marks = [store.flushed_offset] * 3  # as the model counts: a sole writer's at first
        self.found: tuple[int, int] | None = None
        self.is_sole = True
        self.storage = MemberStorage(store, NEVER, WallClock(), authority=self.authority)

    def step(self, work: Callable[[], object]) -> None:
        async def turn() -> None:
            work()
            await asyncio.sleep(0)

        self.loop.run_until_complete(turn())

    @rule(classes=st.lists(st.sampled_from(CLASSES), min_size=1, max_size=3, unique=True))
    def append(self, classes: list[DurabilityClass]) -> None:
        segments = [Segment(f"T{int(demands)}", 0, 1, demands) for demands in classes]
        records = b"".join(encoded(segment.topic, 0, b"x") for segment in segments)

        def work() -> None:
            ticket = self.storage.append(records, segments, born_host=HOST, store_host=HOST)
            assert ticket.acked is not None or self.authority.allowed
            self.tickets.append((ticket, reduce(or_, map(int, classes))))

        self.step(work)

    @rule()
    def flush(self) -> None:
        self.step(lambda: self.storage._synced(self.storage.store.flush_log(), 0.0))
        self.marks[0] = self.storage.store.flushed_offset
        self.count((self.marks[0], self.marks[0]) if self.is_sole else self.found)

    def count(self, found: tuple[int, int] | None) -> None:
        if found is not None:
            self.marks[1:] = map(max, self.marks[1:], found)

    @rule(part=st.floats(0, 1), flushed_part=st.floats(0, 1), alone=st.booleans())
    def followers_answer(self, part: float, flushed_part: float, alone: bool) -> None:
        marks = self.storage.watermarks
        appended = int(marks.appended * part)
        flushed = int(min(appended, marks.flushed) * flushed_part)
        if alone:
            appended = flushed = marks.flushed
        self.authority.set_replicated(Replicated(appended, flushed, is_alone=alone))
        self.step(self.storage.settle)
        self.is_sole, self.found = False, (appended, flushed)
        self.count(self.found)

    @rule()
    def too_few_are_in_sync(self) -> None:
        self.authority.set_replicated(None)
        self.step(self.storage.settle)
        self.is_sole, self.found = False, None

    @rule(allowed=st.booleans())
    def lease_is_seen(self, allowed: bool) -> None:
        self.authority.allowed = allowed
        self.step(self.storage.settle)

    def fulfilled(self, ticket: Ticket, demanded: int) -> bool:
        end = ticket.appended.end_offset
        conditions = zip((1, 2, 4), self.marks, strict=True)
        return all(end <= mark for bit, mark in conditions if bit & demanded)

    @invariant()
    def answers_are_true_and_in_time(self) -> None:
        if not hasattr(self, "storage"):
            return
        self.storage.validate()
        allowed = self.authority.allowed
        for number, (ticket, demanded) in enumerate(self.tickets):
            done = ticket.acked is None or ticket.acked.done()
            if done and number not in self.done:
                assert allowed or ticket.acked is None, "released without authority"
                self.done.add(number)
            assert self.fulfilled(ticket, demanded) or not done, "released too early"
            assert done or not allowed or not self.fulfilled(ticket, demanded), "not released"

    @invariant()
    def what_is_visible_stays_visible(self) -> None:
        if not hasattr(self, "storage"):
            return
        now = [self.storage.bounds((f"T{int(bits)}", 0))[1] for bits in CLASSES]
        assert all(new >= old for new, old in zip(now, self.visible, strict=True))
        assert self.authority.allowed or now == self.visible, "shown without authority"
        self.visible = now

    def teardown(self) -> None:
        if hasattr(self, "storage"):
            self.storage.close()
            self.loop.close()
            self.folder.cleanup()


TestAcks = Acks.TestCase
TestAcks.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
