"""Resets and commits of a group, through take-overs and lost ends of the log, against the promise:
a reset is final, and a commit that does not know it changes nothing.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cometmq.errors import OffsetReset
from cometmq.messaging.changes import Change, OffsetsReset, TopicPut
from cometmq.messaging.offsets import CommittedOffset
from cometmq.messaging.state import BrokerState
from cometmq.model import Position, QueueKey, TopicConfig

KEYS: list[QueueKey] = [("T", 0), ("T", 1)]
KEY = st.sampled_from(KEYS)
OFFSET = st.integers(0, 9)
MAXIMUM = 10
CLIENTS = 2


class Resets(RuleBasedStateMachine):
    """Each client goes on where it heard that the group is, with the number that it heard then."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 1
        self.state = BrokerState()
        self.log: list[Change] = []
        self._write(TopicPut(TopicConfig("T", 2, 2), self.state.generations.allocate()))
        self.floor = 1  # changes that nothing takes away: a snapshot is whole
        # What a client knows of each queue: the number of its newest reset.
        self.known: list[dict[QueueKey, int]] = [dict.fromkeys(KEYS, 0) for _ in range(CLIENTS)]
        # The model: the number of the newest reset, and the group's offset; None = none yet.
        self.newest: dict[QueueKey, int] = dict.fromkeys(KEYS, 0)
        self.offset: dict[QueueKey, int | None] = dict.fromkeys(KEYS)
        self.given: set[int] = set()

    def _write(self, change: Change) -> None:
        self.log.append(change)
        self.state.apply(change)

    def _position(self, key: QueueKey, offset: int) -> Position:
        return Position(self.state.generations.of(*key).current, offset)

    @rule(keys=st.lists(KEY, min_size=1, unique=True), offset=OFFSET)
    def reset(self, keys: list[QueueKey], offset: int) -> None:
        number = self.state.resets.next_number(self.epoch)
        assert number not in self.given
        assert number > max(self.newest.values())
        self.given.add(number)
        commits = tuple(CommittedOffset("G", *key, self._position(key, offset)) for key in keys)
        self._write(OffsetsReset(number, commits))
        for key in keys:
            self.newest[key], self.offset[key] = number, offset

    @rule(client=st.integers(0, CLIENTS - 1), key=KEY, offset=OFFSET)
    def commit(self, client: int, key: QueueKey, offset: int) -> None:
        number, state = self.known[client][key], self.state
        before = state.offsets.get("G", key)
        try:
            state.resets.check("G", key, number, before)
        except OffsetReset as error:
            fence = error.fence
        else:
            fence = None
        assert (fence is not None) == (number < self.newest[key])
        if fence is not None:
            assert fence == (before and (before.generation, before.offset))
            return
        history = state.generations.of(*key)
        kept = state.offsets.commit("G", key, self._position(key, offset), history, MAXIMUM)
        self.offset[key] = max(offset, self.offset[key] or 0)
        assert kept.offset == self.offset[key]
        change = state.plan_offsets()
        if change is not None:
            self.log.append(change)
            state.offsets.written(change.commits)

    @rule(client=st.integers(0, CLIENTS - 1), key=KEY)
    def go_on(self, client: int, key: QueueKey) -> None:
        """It asks where the group is."""
        self.known[client][key] = self.state.resets.number("G", key)

    @rule(lost=st.integers(0, 2), is_snapshot=st.booleans())
    def take_over(self, lost: int, is_snapshot: bool) -> None:
        """A successor that lacks the log's end, or reads a snapshot of all of it."""
        if is_snapshot:
            self._snapshot()
        else:
            self.log = self.log[: max(self.floor, len(self.log) - lost)]
        self.state, self.epoch = BrokerState(), self.epoch + 1
        for change in self.log:
            self.state.apply(change)
        if not is_snapshot and lost:
            self._relearn()

    def _snapshot(self) -> None:
        self.log = list(self.state.as_changes())
        self.floor = len(self.log)

    def _relearn(self) -> None:
        """What was lost is no promise any more."""
        for key in KEYS:
            position = self.state.offsets.get("G", key)
            self.newest[key] = self.state.resets.number("G", key)
            self.offset[key] = None if position is None else position.offset

    @precondition(lambda self: self.given)
    @rule()
    def forget(self) -> None:
        """The group is deleted; its numbers are not given again."""
        self.state.resets.forget_group("G")
        self.state.offsets.forget_group("G")
        self._snapshot()
        self.newest, self.offset = dict.fromkeys(KEYS, 0), dict.fromkeys(KEYS)

    @invariant()
    def the_tables_are_the_model(self) -> None:
        for key in KEYS:
            position = self.state.offsets.get("G", key)
            assert (None if position is None else position.offset) == self.offset[key]
            assert self.state.resets.number("G", key) == self.newest[key]
        assert self.state.resets.newest("G") == max(self.newest.values())


TestResets = Resets.TestCase
