"""Leases, as a writer and its successors know them, against one entry for each message."""

from __future__ import annotations

from dataclasses import dataclass, field
from dataclasses import replace as changed

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from cometmq.errors import HandleInvalid
from cometmq.messaging.changes import (
    GenerationsRaised,
    GroupPolicyPut,
    GroupPut,
    OffsetsCommitted,
    OffsetsReset,
    PopsMoved,
    TopicDropped,
    decode,
    encode,
)
from cometmq.messaging.group_policy import ConsumeMode, GroupPolicy
from cometmq.messaging.groups import GroupSettings
from cometmq.messaging.handle_secrets import HandleSecrets, Secret
from cometmq.messaging.offsets import CommittedOffset
from cometmq.messaging.pop import acking, handles
from cometmq.messaging.pop.handles import Handle
from cometmq.messaging.pop.leases import Done, Given
from cometmq.messaging.pop.masks import dense, offsets_of, trimmed
from cometmq.messaging.pop.ordering import QueueKeys
from cometmq.messaging.state import BrokerState, pop_changes
from cometmq.model import Position, TopicConfig

GROUP, KEY = "G", ("T", 0)
SECRETS = HandleSecrets()
SECRETS.add(Secret(0, bytes(32)))
COUNTS = st.integers(1, 6)
MASKS = st.integers(0, 255)


@dataclass
class Copy:
    """What is known of one message of the queue."""

    holder: str = ""  # the newest handle; empty: nobody has received it
    until_ms: int = 0
    tries: int = 0
    is_done: bool = False
    is_safe: bool = False  # done, and written: nothing but a reset brings it back


@dataclass
class Queue:
    """The naive model: ``seen`` are the messages that were looked at."""

    copies: list[Copy] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    seen: int = 0


class _Leases(RuleBasedStateMachine):
    """``is_ordered``: by message group."""

    is_ordered = False

    def __init__(self) -> None:
        super().__init__()
        self.now_ms, self.epoch = 1_000_000, 1
        self.state = BrokerState()
        self.log: list[bytes] = []
        self.append(self.state.plan_topic(TopicConfig("T", 1, 1)))
        self.append(GroupPut(GroupSettings(GROUP)))
        self.append(GroupPolicyPut(GROUP, GroupPolicy(mode=ConsumeMode.POP)))
        self.model = Queue()
        self.handles: list[str] = []
        self.cut: set[str] = set()  # handles that a crash, or a deletion, took a message of
        self.keys = QueueKeys()
        self.resets = 0

    def append(self, *changes: object) -> None:
        body = encode(changes)  # type: ignore[arg-type]
        self.log.append(body)
        for change in decode(body):
            self.state.apply(change)

    @property
    def generation(self) -> int:
        return self.state.generations.of(*KEY).current

    # --- what happens ---

    @initialize(keys=st.lists(st.sampled_from([b"a", b"b", b""]), min_size=12, max_size=12))
    def begin(self, keys: list[bytes]) -> None:
        self.send(keys)
        self.receive(4, 255, 30)
        self.receive(4, 0b1011, 10)

    @rule(count=COUNTS)
    def receive_all(self, count: int) -> None:
        self.receive(count, 255, 10)

    @rule(keys=st.lists(st.sampled_from([b"a", b"b", b""]), min_size=1, max_size=8))
    def send(self, keys: list[bytes]) -> None:
        self.model.copies += [Copy() for _ in keys]
        self.model.keys += keys

    @rule(count=COUNTS, wanted=MASKS, seconds=st.sampled_from([10, 30]))
    def receive(self, count: int, wanted: int, seconds: int) -> None:
        queue = self.state.pops.open(GROUP, KEY, self.committed())
        visible_ms = self.now_ms + seconds * 1000
        if self.is_ordered:
            self.receive_in_order(count, wanted, visible_ms)
        elif (part := acking.next_part(queue, self.now_ms, count)) is not None:
            source, first, mask, attempt = part
            self.give(source, first, mask, visible_ms, attempt)
        else:
            first, window = queue.next_offset, len(self.model.copies) - queue.next_offset
            mask = wanted & dense(min(count, max(0, window)))
            for offset in range(first, first + min(count, max(0, window))):
                self.model.copies[offset].is_done = not mask >> (offset - first) & 1
            if mask:
                self.give(0, *trimmed(first, mask), visible_ms, 1)
            self.state.pops.skip(GROUP, KEY, first + min(count, max(0, window)))
            self.model.seen = queue.next_offset

    def receive_in_order(self, count: int, wanted: int, visible_ms: int) -> None:
        queue = self.state.pops.open(GROUP, KEY, self.committed())
        missing = self.keys.missing(queue)
        self.keys.learn((offset, self.model.keys[offset]) for offset in missing)
        blocked = self.keys.blocked(queue, self.now_ms)
        taken = self.keys.take_visible(queue, self.now_ms, blocked, count)
        for lease, offsets in taken:
            mask = sum(1 << (offset - offsets[0]) for offset in offsets)
            self.give(lease.number, offsets[0], mask, visible_ms, lease.attempt + 1)
        left = count - sum(len(offsets) for _, offsets in taken)
        if left > 0:
            visible = [lease for lease in queue if lease.visible_ms <= self.now_ms]
            waiting = [o for lease in visible for o in offsets_of(lease.mask, lease.first)]
            assert all(self.model.keys[o] for o in waiting), "without a key none waits for others"
        new = [
            (offset, self.model.keys[offset])
            for offset in range(queue.next_offset, len(self.model.copies))
        ]
        split = self.keys.split_new(new, blocked, left)
        if split is None:
            return
        for mask, time_ms, attempt in ((split.taken, visible_ms, 1), (split.waiting, 0, 0)):
            if mask:
                self.give(0, *trimmed(split.first, mask), time_ms, attempt)
        self.model.seen = queue.next_offset

    def give(
        self,
        source: int,
        first: int,
        mask: int,
        visible_ms: int,
        attempt: int,
        *,
        back: bool = False,
    ) -> str:
        pops = self.state.pops
        number = pops.next_number(self.epoch)
        pops.give(GROUP, KEY, Given(number, source, first, mask, visible_ms, attempt))
        handle = Handle(KEY, self.generation, number, first, mask.bit_length(), visible_ms)
        text = handles.encode(SECRETS, GROUP, handle)
        assert handles.decode(SECRETS, GROUP, text) == handle
        if not attempt or back:
            return text
        self.handles.append(text)
        for offset in offsets_of(mask, first):
            copy = self.model.copies[offset]
            assert not copy.is_done, "an acknowledged message came again"
            assert copy.until_ms <= self.now_ms or copy.tries == attempt, "two have the message"
            assert attempt in (copy.tries, copy.tries + 1)
            if self.is_ordered and attempt > copy.tries:
                self.check_order(offset)
            copy.holder, copy.until_ms, copy.tries = text, visible_ms, attempt
        return text

    def check_order(self, offset: int) -> None:
        earlier = zip(self.model.copies[:offset], self.model.keys, strict=False)
        key = self.model.keys[offset]
        if key:
            its = [one for one, its_key in earlier if its_key == key]
            assert all(one.is_done for one in its), "not in order"

    def named(self, data: st.DataObject) -> tuple[str, Handle, int, int]:
        text = data.draw(st.sampled_from(self.handles))
        handle = handles.decode(SECRETS, GROUP, text)
        count = data.draw(st.integers(0, handle.width))
        first = handle.first + data.draw(st.integers(0, handle.width - count)) if count else 0
        return text, handle, first, count

    def held(self, handle: Handle, first: int, count: int) -> int:
        queue = self.state.pops.find(GROUP, KEY)
        return acking.held_part(queue, self.state.generations.of(*KEY), handle, first, count)

    def mine(self, text: str, handle: Handle, first: int, count: int) -> list[int] | None:
        """What the model says that the handle's member still has; None: it is refused."""
        if self.state.pops.find(GROUP, KEY) is None or text in self.cut:
            return None
        named = range(first, first + count) if count else range(handle.first, handle.end)
        if named.stop > self.model.seen:
            return None
        mine = [offset for offset in named if self.model.copies[offset].holder == text]
        mine = [offset for offset in mine if not self.model.copies[offset].is_done]
        others = [
            offset
            for offset in named
            if self.model.copies[offset].holder != text and not self.model.copies[offset].is_done
        ]
        return None if others and not (mine and not count) else mine

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        text, handle, first, count = self.named(data)
        mine = self.mine(text, handle, first, count)
        if mine is None:
            with pytest.raises(HandleInvalid):
                self.held(handle, first, count)
            return
        held = self.held(handle, first, count)
        assert list(offsets_of(held, handle.first)) == mine
        if held:
            done = Done(handle.number, *trimmed(handle.first, held))
            assert self.state.pops.finish(GROUP, KEY, done) == len(mine)
            assert self.state.pops.finish(GROUP, KEY, done) == 0
        for offset in mine:
            self.model.copies[offset].is_done = True

    @precondition(lambda self: self.handles)
    @rule(data=st.data(), seconds=st.sampled_from([10, 60]))
    def change_invisible_time(self, data: st.DataObject, seconds: int) -> None:
        text, handle, first, count = self.named(data)
        mine = self.mine(text, handle, first, count)
        if not mine:
            return
        lease = self.state.pops.find(GROUP, KEY).find(handle.number)  # type: ignore[union-attr]
        assert lease is not None
        held = self.held(handle, first, count)
        visible_ms = self.now_ms + seconds * 1000
        self.give(handle.number, *trimmed(handle.first, held), visible_ms, lease.attempt)

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        """A member did not get the answer: the delivery does not count."""
        text = data.draw(st.sampled_from(self.handles))
        handle = handles.decode(SECRETS, GROUP, text)
        if not self.mine(text, handle, 0, 0):
            return
        lease = self.state.pops.find(GROUP, KEY).find(handle.number)  # type: ignore[union-attr]
        assert lease is not None
        attempt, offsets = lease.attempt - 1, list(offsets_of(lease.mask, lease.first))
        visible_ms = self.now_ms if attempt else 0
        self.give(lease.number, lease.first, lease.mask, visible_ms, attempt, back=True)
        for offset in offsets:
            copy = self.model.copies[offset]
            copy.holder, copy.until_ms, copy.tries = "waits", visible_ms, attempt

    @rule(seconds=st.sampled_from([1, 9, 31]))
    def wait(self, seconds: int) -> None:
        before_ms, queue = self.now_ms, self.state.pops.find(GROUP, KEY)
        if queue is not None:
            queue.take_returned(before_ms)
        self.now_ms += seconds * 1000
        if queue is not None:
            came = [one.count for one in queue if before_ms < one.visible_ms <= self.now_ms]
            assert queue.take_returned(self.now_ms) == sum(came)
            coming = [one.visible_ms for one in queue if one.visible_ms > self.now_ms]
            assert queue.next_return_ms(self.now_ms) == min(coming, default=None)

    @rule()
    def end_turn(self) -> None:
        for change in pop_changes(self.state.pops.unwritten(self.state.pop_generation)):
            self.log.append(encode([change]))
            self.state.written(change)
        for copy in self.model.copies:
            copy.is_safe = copy.is_done

    def restart(self, take_back: bool, from_copy: bool) -> None:
        """What was not written, and so not answered, is gone with the writer."""
        if not take_back:
            self.end_turn()
        if from_copy:
            self.end_turn()
            bodies = [encode([change]) for change in self.state.as_changes()]
            self.log = bodies
        self.state, self.epoch, self.keys = BrokerState(), self.epoch + 1, QueueKeys()
        for body in self.log:
            for change in decode(body):
                self.state.apply(change)
        self.learn()

    def learn(self) -> None:
        """The model takes what the new writer knows: it may have lost the last turn."""
        queue = self.state.pops.find(GROUP, KEY)
        self.model.seen = self.committed() if queue is None else queue.next_offset
        open_now = {o: lease for lease in queue or () for o in offsets_of(lease.mask, lease.first)}
        for offset, copy in enumerate(self.model.copies):
            lease = open_now.get(offset)
            if copy.is_safe or offset >= self.model.seen:
                assert lease is None, "an acknowledged message came again"
            elif not copy.is_done:
                assert lease is not None, "a message is gone"
            copy.is_done = lease is None and offset < self.model.seen
            if lease is None:
                self.model.copies[offset] = changed(copy, holder="", until_ms=0, tries=0)
            elif copy.holder:
                if copy.holder == "waits" or _number(copy.holder) != lease.number:
                    copy.holder = next(
                        (t for t in self.handles if _number(t) == lease.number), "waits"
                    )
                copy.until_ms, copy.tries = lease.visible_ms, lease.attempt

    def reset(self, where: int) -> None:
        self.end_turn()
        offset = min(where, len(self.model.copies))
        self.resets += 1
        commit = CommittedOffset(GROUP, *KEY, Position(self.generation, offset))
        self.append(OffsetsReset(self.resets, (commit,)))
        self.begin_again(offset)

    def begin_again(self, offset: int) -> None:
        self.keys = QueueKeys()
        self.model.seen = offset
        self.model.copies = [Copy(is_done=n < offset) for n in range(len(self.model.copies))]

    def lose_the_end(self, lost: int) -> None:
        """A crash takes messages back; others get their offsets."""
        self.end_turn()
        start = max(0, len(self.model.copies) - lost)
        generation = self.state.generations.allocate()
        self.append(GenerationsRaised(generation, {"T": (start,)}))
        del self.model.copies[start:], self.model.keys[start:]
        self.cut |= {t for t in self.handles if handles.decode(SECRETS, GROUP, t).end > start}
        self.keys = QueueKeys()
        self.model.seen = min(self.model.seen, start)

    def pull_for_a_while(self, count: int) -> None:
        """Another mode and back: what is done stays done, and the rest comes in order."""
        self.end_turn()
        self.append(GroupPolicyPut(GROUP, GroupPolicy()))
        offset = self.committed()
        for _ in range(count):
            start, stop = self.state.pops.left_over(GROUP, KEY, offset)
            passed = self.model.copies[offset:start]
            assert all(copy.is_done for copy in passed), "a message is gone"
            if start >= len(self.model.copies):
                break
            assert (
                not stop
                or self.model.copies[stop : stop + 1] == []
                or (self.model.copies[stop].is_done)
            )
            copy = self.model.copies[start]
            assert not copy.is_done, "an acknowledged message came again"
            copy.is_done = copy.is_safe = True
            offset = start + 1
            self.append(
                OffsetsCommitted((CommittedOffset(GROUP, *KEY, Position(self.generation, offset)),))
            )
        settings = GroupSettings(GROUP, policy=GroupPolicy(mode=ConsumeMode.POP))
        self.append(*self.state.plan_policy(settings, self.epoch))
        queue = self.state.pops.find(GROUP, KEY)
        self.model.seen = offset if queue is None else queue.next_offset
        for number, copy in enumerate(self.model.copies):
            if not copy.is_done:
                self.model.copies[number] = Copy()
        self.keys = QueueKeys()

    @rule(kind=st.integers(0, 6), number=st.integers(0, 15))
    def trouble(self, kind: int, number: int) -> None:
        """One rule, so that most steps are of members."""
        match kind:
            case 0:
                self.reset(number)
            case 1:
                self.lose_the_end(number % 6)
            case 2 if not number:
                self.make_the_topic_anew()
            case 3 if self.is_ordered:
                self.pull_for_a_while(number % 5)
            case _:
                self.restart(take_back=number % 2 > 0, from_copy=number % 3 == 0)

    def make_the_topic_anew(self) -> None:
        self.end_turn()
        self.append(TopicDropped("T"))
        assert self.state.pops.unwritten(self.state.pop_generation) == []
        self.append(self.state.plan_topic(TopicConfig("T", 1, 1)))
        self.model = Queue()
        self.keys = QueueKeys()
        self.cut.update(self.handles)

    def committed(self) -> int:
        position = self.state.offsets.get(GROUP, KEY)
        if position is None:
            return 0
        return self.state.generations.of(*KEY).settle(position).offset

    @invariant()
    def the_floor_is_the_first_message_that_is_not_done(self) -> None:
        queue = self.state.pops.find(GROUP, KEY)
        if queue is None:
            return
        self.state.validate()
        assert queue.next_offset == self.model.seen or not queue.next_offset
        seen = self.model.copies[: self.model.seen]
        open_now = [offset for offset, copy in enumerate(seen) if not copy.is_done]
        assert queue.floor == min(open_now, default=self.model.seen)
        assert queue.open_count == len(open_now)

    def teardown(self) -> None:
        """Each message that is not done comes again, and then all are done."""
        self.now_ms += 100_000
        for _ in range(4 * len(self.model.copies) + 4):
            before = len(self.handles)
            self.receive(6, 255, 10)
            for text in self.handles[before:]:
                handle = handles.decode(SECRETS, GROUP, text)
                held = self.held(handle, 0, 0)
                done = Done(handle.number, *trimmed(handle.first, held))
                self.state.pops.finish(GROUP, KEY, done)
                for offset in offsets_of(held, handle.first):
                    self.model.copies[offset].is_done = True
        assert all(copy.is_done for copy in self.model.copies)
        self.end_turn()
        assert self.committed() == len(self.model.copies)


def _number(text: str) -> int:
    return handles.decode(SECRETS, GROUP, text).number


class InOrder(_Leases):
    is_ordered = True


TestLeases = _Leases.TestCase
TestInOrder = InOrder.TestCase


def test_a_change_holds_what_it_says() -> None:
    """The state machine's log has nothing but what is read back."""
    machine = _Leases()
    machine.send([b"a"] * 8)
    machine.receive(6, 0b101101, 10)
    [change] = pop_changes(machine.state.pops.unwritten(machine.state.pop_generation))
    assert decode(encode([change])) == (change,)
    assert isinstance(change, PopsMoved)
    [queue] = change.queues
    assert [(one.first, one.mask, one.attempt) for one in queue.given] == [(0, 0b101101, 1)]
    assert queue.next_offset == 6
