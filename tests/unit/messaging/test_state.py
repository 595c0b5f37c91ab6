"""The state, its records, and its way back from the log."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from cometmq.errors import (
    CometError,
    GroupNameInvalid,
    InvalidRequest,
    LimitExceeded,
    NoPermission,
    PositionFenced,
    QueueCountInvalid,
    StateTooNew,
    StoreDamaged,
    TopicNameInvalid,
    TopicNotFound,
)
from cometmq.messaging import topics
from cometmq.messaging.changes import (
    Change,
    DelaysDropped,
    DelaysReached,
    GenerationsRaised,
    OffsetsCommitted,
    QueuesCounted,
    TopicPut,
    TopicReserved,
    TopicSnapshot,
    TopicTyped,
    decode,
    encode,
)
from cometmq.messaging.generations import History
from cometmq.messaging.groups import GroupSettings
from cometmq.messaging.offsets import CommittedOffset
from cometmq.messaging.state import (
    CHANGE,
    RECORD_BYTES_MAX,
    SNAPSHOT_FIRST,
    SNAPSHOT_LAST,
    SNAPSHOT_ONLY,
    SNAPSHOT_PART,
    BrokerState,
    StateLoader,
    StateRecord,
    change_records,
    find_copy_start,
)
from cometmq.model import MessageType, Position, TopicConfig


def created(state: BrokerState, topic: str, queue_count: int = 1) -> BrokerState:
    state.apply(state.plan_topic(TopicConfig(topic, queue_count, queue_count)))
    return state


def commit(state: BrokerState, group: str, topic: str, offset: int, readable: int = 1000) -> None:
    history = state.generations.of(topic, 0)
    state.offsets.commit(group, (topic, 0), Position(0, offset), history, readable)


def same(one: BrokerState, other: BrokerState) -> bool:
    """Also by the tables themselves: two states that lost the same have the same changes."""
    tables = [(list(state.topics), state.groups, list(state.offsets)) for state in (one, other)]
    return tables[0] == tables[1] and list(one.as_changes()) == list(other.as_changes())


def loaded(records: Iterable[StateRecord], base: BrokerState | None = None) -> BrokerState:
    loader = StateLoader(base)
    for record in records:
        loader.feed(record.tag, record.body)
    return loader.state


# --- plans --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "error"),
    [
        (TopicConfig("../x"), TopicNameInvalid),
        (TopicConfig("orders", 0), QueueCountInvalid),
        (TopicConfig("%RETRY%billing"), NoPermission),
        (TopicConfig("rmq_sys_x"), NoPermission),
    ],
)
def test_topics_that_are_refused(config: TopicConfig, error: type[CometError]) -> None:
    state = BrokerState()
    with pytest.raises(error):
        state.plan_topic(config)
    assert state.generations.allocate() == 1  # nothing was used up


def test_the_system_makes_its_own_topics() -> None:
    state = BrokerState()
    state.apply(state.plan_topic(TopicConfig("TBW102"), by_system=True))
    assert "TBW102" in state.topics
    with pytest.raises(NoPermission):
        state.plan_drop("TBW102")
    state.apply(state.plan_drop("TBW102", by_system=True))
    assert "TBW102" not in state.topics


@pytest.mark.parametrize(("topic", "error"), [("x\n", TopicNameInvalid), ("x", TopicNotFound)])
def test_deletions_that_are_refused(topic: str, error: type[CometError]) -> None:
    with pytest.raises(error):
        BrokerState().plan_drop(topic)


def test_limits_of_topics_and_groups() -> None:
    state = BrokerState(topics_max=1, groups_max=1)
    created(state, "orders")
    created(state, "orders", 4)
    with pytest.raises(LimitExceeded, match="topics_max"):
        state.plan_topic(TopicConfig("bills"))
    state.apply(state.plan_group(GroupSettings("billing")))
    state.apply(state.plan_group(GroupSettings("billing", consume_enable=False)))
    with pytest.raises(LimitExceeded, match="groups_max"):
        state.plan_group(GroupSettings("shipping"))
    with pytest.raises(GroupNameInvalid):
        state.plan_group(GroupSettings(""))


def test_a_topic_created_twice_at_once_keeps_its_first_generation() -> None:
    state = BrokerState()
    plans = [state.plan_topic(TopicConfig("orders", 2, 2)) for _ in range(2)]
    for plan in plans:
        state.apply(plan)
    assert state.generations.of("orders", 0).pairs == ((1, 0),)


def test_a_topic_created_again_fences_all_that_is_older() -> None:
    state = created(BrokerState(), "orders")
    commit(state, "billing", "orders", 40)
    state.apply(state.plan_drop("orders"))
    created(state, "orders")
    assert state.offsets.get("billing", ("orders", 0)) is None
    with pytest.raises(PositionFenced) as caught:
        state.generations.of("orders", 0).validate(Position(1, 40))
    assert caught.value.fence == (2, 0)


def test_an_unclean_start_raises_every_queue_at_its_maximum() -> None:
    state = created(created(BrokerState(), "a", 2), "b")
    maxima = {("a", 0): 5, ("a", 1): 0, ("b", 0): 9}
    plans = state.plan_raise(lambda topic, queue_id: maxima[topic, queue_id])
    assert plans == [GenerationsRaised(3, {"a": (5, 0), "b": (9,)})]
    state.apply(plans[0])
    assert state.generations.of("a", 0).pairs == ((1, 0), (3, 5))
    assert BrokerState().plan_raise(lambda *_: 0) == []


def test_a_raise_too_large_for_a_record_is_several_of_one_generation() -> None:
    state = BrokerState()
    for n in range(30):
        created(state, f"t{n}", 1024)
    plans = state.plan_raise(lambda *_: 2**63 - 1)
    assert len(plans) > 1
    assert {plan.generation for plan in plans} == {31}
    assert all(len(encode([plan])) <= RECORD_BYTES_MAX for plan in plans)
    for plan in plans:
        state.apply(plan)
    assert {state.generations.of(*key).current for key in state.generations.queues()} == {31}


def test_commits_are_planned_until_all_are_written() -> None:
    state = created(BrokerState(), "orders")
    assert state.plan_offsets() is None
    commit(state, "billing", "orders", 40)
    plan = state.plan_offsets()
    assert plan is not None
    assert state.plan_offsets() == plan  # the append was refused: nothing is lost
    state.offsets.written(plan.commits)
    assert state.plan_offsets() is None


# --- apply --------------------------------------------------------------------------------------


def test_a_commit_that_entered_the_log_behind_its_topics_deletion_is_dropped() -> None:
    late = OffsetsCommitted((CommittedOffset("billing", "orders", 0, Position(1, 40)),))
    state = created(BrokerState(), "orders")
    state.apply(state.plan_drop("orders"))
    state.apply(late)
    assert list(state.offsets) == []
    created(state, "orders")
    state.apply(late)
    assert list(state.offsets) == []


@pytest.mark.parametrize(
    "change",
    [
        TopicPut(TopicConfig("bills"), 1),
        GenerationsRaised(1, {"orders": (3,)}),
        GenerationsRaised(2, {"orders": (3, 4)}),
        TopicSnapshot(TopicConfig("bills", 2, 1), (History(((5, 0),)),)),
    ],
)
def test_changes_that_do_not_fit_are_damage(change: Change) -> None:
    state = created(BrokerState(), "orders")
    with pytest.raises(StoreDamaged):
        state.apply(change)


# --- records ------------------------------------------------------------------------------------


def test_a_small_state_is_copied_in_one_record() -> None:
    state = created(BrokerState(), "orders")
    (record,) = state.snapshot_records()
    assert record.tag == SNAPSHOT_ONLY
    assert same(loaded([record]), state)


def test_a_large_state_is_copied_in_many() -> None:
    state = BrokerState()
    for n in range(8):
        created(state, f"topic-{n}", 1024)
    copy = state.snapshot_records(bytes_max=20_000)
    assert [r.tag for r in copy] == [
        SNAPSHOT_FIRST,
        *[SNAPSHOT_PART] * (len(copy) - 2),
        SNAPSHOT_LAST,
    ]
    assert len(copy) > 2
    assert all(len(r.body) <= 20_000 for r in copy)
    assert same(loaded(copy), state)


@pytest.mark.parametrize("count", [0, 1, 100, 2_000])
def test_the_size_of_a_copy_is_known_without_making_one(count: int) -> None:
    state = BrokerState()
    for number in range(count):
        created(state, f"a-topic-of-{number}", 1 + number % 8)
        state.apply(state.plan_group(GroupSettings(f"a-group-of-{number}")))
        commit(state, f"a-group-of-{number}", f"a-topic-of-{number}", 1_000)
    copied = sum(len(one.body) for one in state.snapshot_records(next_offset_of=lambda *_: 10**9))
    assert copied <= state.copy_bytes() <= 4 * copied + 8192


def test_what_is_in_flight_is_part_of_the_copy() -> None:
    state = created(BrokerState(), "orders")
    plan = state.plan_drop("orders")
    copy = state.snapshot_records(in_flight=[plan])
    state.apply(plan)
    assert same(loaded(copy), state)


def reserve(state: BrokerState, topic: str, reserve_time_ms: int) -> list[Change]:
    """The changes that give a topic a reserve time, applied."""
    config = TopicConfig(topic, 1, 1, reserve_time_ms=reserve_time_ms)
    changes: list[Change] = [state.plan_topic(config), *state.plan_extras(config)]
    for change in changes:
        state.apply(change)
    return changes


def test_a_reserve_time_lasts_until_it_is_changed() -> None:
    state = BrokerState()
    changes = reserve(state, "orders", 5_000)
    assert [type(change) for change in changes] == [TopicPut, TopicReserved]
    assert state.topics.get("orders").reserve_time_ms == 5_000
    assert same(loaded(state.snapshot_records()), state)
    assert same(loaded(change_records(changes), BrokerState()), state)
    assert len(reserve(state, "orders", 5_000)) == 1, "nothing new to say of it"
    reserve(state, "orders", 0)
    assert state.topics.get("orders").reserve_time_ms == 0
    state.apply(state.plan_drop("orders"))
    with pytest.raises(StoreDamaged):
        state.apply(TopicReserved("orders", 1))


def typed(state: BrokerState, topic: str, **fields: Any) -> list[Change]:
    config = TopicConfig(topic, 1, 1, **fields)
    changes: list[Change] = [state.plan_topic(config), *state.plan_extras(config)]
    for change in changes:
        state.apply(change)
    return changes


def test_type_order_and_attributes_last_until_they_are_changed() -> None:
    state = BrokerState()
    kept = (("cleanup.policy", "DELETE"),)
    as_said: dict[str, Any] = {
        "message_type": MessageType.FIFO,
        "is_ordered": True,
        "attributes": kept,
    }
    changes = typed(state, "orders", **as_said)
    assert [type(change) for change in changes] == [TopicPut, TopicTyped]
    assert changes[0] == TopicPut(TopicConfig("orders", 1, 1), 1), "an old kind says nothing new"
    assert state.topics.get("orders") == TopicConfig("orders", 1, 1, **as_said)
    assert same(loaded(state.snapshot_records()), state)
    assert same(loaded(change_records(changes), BrokerState()), state)
    reserve(state, "orders", 5_000)  # whose settings say nothing of types
    assert state.topics.get("orders") == TopicConfig("orders", 1, 1, reserve_time_ms=5_000)
    state.apply(state.plan_drop("orders"))
    with pytest.raises(StoreDamaged):
        state.apply(TopicTyped("orders"))


def test_a_copy_of_typed_topics_is_not_longer_than_expected() -> None:
    state = BrokerState()
    most = tuple((f"n{n:02d}", "v" * 124) for n in range(32))
    for n in range(20):
        typed(state, f"t{n}", message_type=MessageType.TRANSACTION, attributes=most)
    copied = sum(len(one.body) for one in state.snapshot_records())
    assert copied <= state.copy_bytes() <= 4 * copied


@pytest.mark.parametrize(
    "attributes",
    [
        (("a", "x" * 10_000),),
        tuple((f"n{n:02d}", "") for n in range(33)),
        (("b", ""), ("a", "")),
        (("", "x"),),
        (("a", 'x"'),),
        (("a", "\\"),),
        (("a", "\x01"),),
        (("é", "x"),),
    ],
)
def test_attributes_that_cannot_be_kept_are_refused(
    attributes: tuple[tuple[str, str], ...],
) -> None:
    with pytest.raises(InvalidRequest):
        BrokerState().plan_topic(TopicConfig("orders", 1, 1, attributes=attributes))
    with pytest.raises(StoreDamaged):
        decode(encode([TopicTyped("orders", attributes=attributes)]))


@pytest.mark.parametrize(
    ("reserve_time_ms", "told"),
    [(-3_600_000, "-1 h"), (topics.RESERVE_TIME_MS_MAX + 1_800_000, "876000.5 h")],
)
def test_no_other_reserve_time_is_taken(reserve_time_ms: int, told: str) -> None:
    with pytest.raises(InvalidRequest, match=f"0 .none. to 876000 h, not {told}"):
        BrokerState().plan_topic(TopicConfig("orders", 1, 1, reserve_time_ms=reserve_time_ms))


def test_a_copy_tells_how_far_queues_have_counted() -> None:
    state = created(created(BrokerState(), "orders", 2), "unused")
    copy = state.snapshot_records(next_offset_of=lambda topic, n: 7 * n if topic == "orders" else 0)
    counted = [c for r in copy for c in decode(r.body) if isinstance(c, QueuesCounted)]
    assert counted == [QueuesCounted("orders", (0, 7))]
    assert same(loaded(copy), state)


@pytest.mark.parametrize(
    ("oldest_first", "start"),
    [
        ([], None),
        ([CHANGE, CHANGE], None),
        ([SNAPSHOT_ONLY], 0),
        ([SNAPSHOT_ONLY, CHANGE, CHANGE], 0),
        ([SNAPSHOT_ONLY, CHANGE, SNAPSHOT_ONLY, CHANGE], 2),
        ([SNAPSHOT_FIRST, SNAPSHOT_LAST, CHANGE], 0),
        (
            [
                SNAPSHOT_FIRST,
                CHANGE,
                SNAPSHOT_PART,
                SNAPSHOT_LAST,
                SNAPSHOT_FIRST,
                SNAPSHOT_PART,
                CHANGE,
            ],
            0,
        ),  # the later is cut
        ([SNAPSHOT_FIRST, SNAPSHOT_PART, SNAPSHOT_FIRST, SNAPSHOT_LAST], 2),  # the earlier is cut
        ([SNAPSHOT_PART, SNAPSHOT_LAST, CHANGE], None),  # its beginning is gone
        ([SNAPSHOT_ONLY, SNAPSHOT_FIRST, SNAPSHOT_PART], 0),
    ],
)
def test_where_the_newest_complete_copy_begins(oldest_first: list[str], start: int | None) -> None:
    back = find_copy_start(reversed(oldest_first))
    assert (None if back is None else len(oldest_first) - 1 - back) == start


def test_without_copy_or_base_there_is_no_state() -> None:
    state = created(BrokerState(), "orders")
    tail = state.snapshot_records(bytes_max=1)[1:] + change_records([state.plan_drop("orders")])
    with pytest.raises(StoreDamaged):
        loaded(tail)


def test_a_copy_knows_what_waits_for_deleted_topics() -> None:
    state = BrokerState()
    for change in (DelaysReached({1: 4}), DelaysDropped("T", {1: 9, 5: 3})):
        state.apply(change)
    copy = loaded(state.snapshot_records())
    assert copy.delay_drops.dropped == {"T": {1: 9, 5: 3}}
    copy.apply(DelaysReached({1: 9, 5: 2}))
    assert copy.delay_drops.dropped == {"T": {5: 3}}


def test_a_copy_cut_short_does_no_harm() -> None:
    old = created(BrokerState(), "orders")
    new = created(created(BrokerState(), "bills"), "orders")
    records = [*old.snapshot_records(), *new.snapshot_records(bytes_max=1)[:-1]]
    assert same(loaded(records), old)


def test_an_unknown_tag_is_refused() -> None:
    with pytest.raises(StateTooNew):
        StateLoader().feed("COPY_DELTA", encode([]))


# --- the model: a broker that crashes, against what its log says -------------------------------

TOPICS, GROUPS = st.sampled_from(["a", "b", "c"]), st.sampled_from(["g", "h"])


class StateMachine(RuleBasedStateMachine):
    """A writer whose records are acknowledged late, and whose log must always rebuild its state."""

    def __init__(self) -> None:
        super().__init__()
        self.state = BrokerState()
        self.log: list[tuple[StateRecord, Change | None]] = []
        self.applied = 0  # records of the log that are acknowledged
        self.copy: list[StateRecord] = []  # the rest of a copy that is being written

    def append(self, change: Change) -> None:
        (record,) = change_records([change])
        self.log.append((record, change))

    def in_flight(self) -> list[Change]:
        return [change for _, change in self.log[self.applied :] if change is not None]

    @rule(topic=TOPICS, queue_count=st.integers(1, 3))
    def put_topic(self, topic: str, queue_count: int) -> None:
        self.append(self.state.plan_topic(TopicConfig(topic, queue_count, 1)))

    @rule(topic=TOPICS)
    def drop_topic(self, topic: str) -> None:
        if topic in self.state.topics:
            self.append(self.state.plan_drop(topic))

    @rule(group=GROUPS, enable=st.booleans())
    def put_group(self, group: str, enable: bool) -> None:
        self.append(self.state.plan_group(GroupSettings(group, consume_enable=enable)))

    @rule(group=GROUPS, topic=TOPICS, offset=st.integers(0, 1000))
    def commit(self, group: str, topic: str, offset: int) -> None:
        if topic in self.state.topics:
            commit(self.state, group, topic, offset)

    @rule()
    def write_offsets(self) -> None:
        plan = self.state.plan_offsets()
        if plan is not None:
            self.append(plan)
            self.state.offsets.written(plan.commits)

    @rule(count=st.integers(1, 9))
    def acknowledge(self, count: int) -> None:
        for _, change in self.log[self.applied : self.applied + count]:
            if change is not None:
                self.state.apply(change)
        self.applied = min(self.applied + count, len(self.log))
        self.state.validate()

    @precondition(lambda self: not self.copy)
    @rule(bytes_max=st.sampled_from([1, 300, RECORD_BYTES_MAX]))
    def begin_copy(self, bytes_max: int) -> None:
        self.copy = self.state.snapshot_records(self.in_flight(), bytes_max)
        self.continue_copy()

    @precondition(lambda self: self.copy)
    @rule()
    def continue_copy(self) -> None:
        self.log.append((self.copy.pop(0), None))

    @rule(lost=st.integers(0, 9), unclean=st.booleans())
    def crash(self, lost: int, unclean: bool) -> None:
        del self.log[max(self.applied, len(self.log) - lost) :]
        self.state = self.rebuilt()
        self.applied = len(self.log)
        self.copy = []
        if unclean:
            for plan in self.state.plan_raise(lambda topic, queue_id: 500):
                self.append(plan)
            self.acknowledge(1)

    @rule()
    def compare(self) -> None:
        self.write_offsets()
        self.acknowledge(len(self.log))
        assert same(self.rebuilt(), self.state)

    def rebuilt(self) -> BrokerState:
        """From the beginning of the log, which must be the same as from its newest copy."""
        records = [record for record, _ in self.log]
        whole = loaded(records, BrokerState())
        whole.validate()
        back = find_copy_start(record.tag for record in reversed(records))
        if back is not None:
            assert same(loaded(records[len(records) - 1 - back :]), whole)
        return whole


TestState = StateMachine.TestCase


@given(st.lists(st.tuples(TOPICS, st.integers(1, 4)), max_size=10), st.integers(1, 500))
def test_copies_of_any_chunk_size_are_equal(topics: list[tuple[str, int]], bytes_max: int) -> None:
    state = BrokerState()
    for topic, queue_count in topics:
        created(state, topic, queue_count)
        commit(state, "g", topic, queue_count)
    assert same(loaded(state.snapshot_records(bytes_max=bytes_max)), state)
