from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.errors import StoreDamaged, StoreForeignFile
from cometmq.messaging.adoption import Queues, Tables, adopt_tables, read
from cometmq.messaging.changes import DelaysReached, GroupPut, OffsetsCommitted
from cometmq.messaging.groups import GroupSettings
from cometmq.messaging.offsets import CommittedOffset
from cometmq.messaging.rocketmq_tables import DELAYS, GROUPS, OFFSETS, TOPICS, SnapshotMark, export
from cometmq.messaging.state import BrokerState
from cometmq.model import FlushMode, Position, TopicConfig

ORDERS = TopicConfig("orders", 2, 2, flush_mode=FlushMode.SYNC)


def queues(verified: int = 5, maximum: int = 8, *known: tuple[str, int]) -> Queues:
    return Queues(known, lambda *_: verified, lambda *_: maximum)


def state_with(*configs: TopicConfig) -> BrokerState:
    state = BrokerState()
    for config in configs:
        state.apply(state.plan_topic(config))
    state.apply(GroupPut(GroupSettings("billing", retry_times_max=3)))
    for config in configs:
        commit = CommittedOffset("billing", config.name, 0, Position(1, 4))
        state.apply(OffsetsCommitted((commit,)))
    return state


def topics_json(**topics: dict[str, Any]) -> bytes:
    return json.dumps({"dataVersion": {}, "topicConfigTable": topics}).encode()


# --- reading --------------------------------------------------------------------------------------


def test_our_own_exports_read_as_what_they_were() -> None:
    state = state_with(ORDERS, TopicConfig("bills", 3, 1, 4))
    state.apply(DelaysReached({3: 17}))
    tables = read(export(state, SnapshotMark(1, 2), 3))
    assert tables.topics == {
        "orders": TopicConfig("orders", 2, 2),
        "bills": TopicConfig("bills", 3, 1, 4),
    }
    assert tables.groups == state.groups
    assert tables.offsets == {("billing", "orders", 0): 4}
    assert tables.delays == {3: 17}
    assert tables.left_out == ()


def test_only_the_files_that_are_there_count() -> None:
    assert read({}) == Tables()
    assert read({OFFSETS: b'{"offsetTable":{"a@b":{0:1}}}'}) == Tables(offsets={("b", "a", 0): 1})
    assert read({DELAYS: b"{}"}) == Tables(delays={})


def test_rocketmqs_defaults_and_its_signs() -> None:
    tables = read(
        {
            TOPICS: topics_json(
                TBW102={"perm": 7}, plain={}, shut={"perm": 1, "readQueueNums": 0, "order": True}
            ),
            GROUPS: b'{"subscriptionGroupTable":{"g":{"consumeEnable":false,"groupSysFlag":1}}}',
            OFFSETS: b'{"offsetTable":{"a@b":{0:-1,"1":"7"}}}',
        }
    )
    assert tables.topics == {
        "plain": TopicConfig("plain", 16, 16, 6),
        "shut": TopicConfig("shut", 0, 16, 0),
    }
    assert tables.groups == {"g": GroupSettings("g", consume_enable=False)}
    assert tables.offsets == {("b", "a", 0): 0, ("b", "a", 1): 7}


def test_names_that_are_none_are_left_out() -> None:
    tables = read(
        {TOPICS: topics_json(**{"a.b": {}, "ab": {}}), OFFSETS: b'{"offsetTable":{7:{}}}'}
    )
    assert tables.topics == {"ab": TopicConfig("ab", 16, 16)}
    assert tables.offsets == {}
    assert len(tables.left_out) == 2


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"readQueueNums": 1025}, "1025 queues"),
        ({"attributes": {"queue.type": "BatchCQ"}}, "many messages each"),
    ],
)
def test_topics_that_cannot_be_kept_are_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(StoreForeignFile, match=why):
        read({TOPICS: topics_json(a=settings)})


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (TOPICS, b""),
        (TOPICS, b"[]"),
        (TOPICS, b'{"topicConfigTable":[1]}'),
        (TOPICS, b'{"topicConfigTable":{"a":7}}'),
        (TOPICS, b'{"topicConfigTable":{"a":{"perm":"x"}}}'),
        (TOPICS, b'{"topicConfigTable":{"a":{"perm":true}}}'),
        (GROUPS, b'{"subscriptionGroupTable":{"a":{"consumeEnable":1}}}'),
        (OFFSETS, b'{"offsetTable":{"a@b":{"x":1}}}'),
        (OFFSETS, b'{"offsetTable":{"a@b":{0:9223372036854775808}}}'),
        (DELAYS, b'{"offsetTable":{1:{}}}'),
    ],
)
def test_what_is_no_table_is_damage(name: str, content: bytes) -> None:
    with pytest.raises(StoreDamaged, match=name):
        read({name: content})


@given(st.sampled_from([TOPICS, GROUPS, OFFSETS, DELAYS]), st.binary())
def test_nothing_else_comes_of_garbage(name: str, garbage: bytes) -> None:
    with suppress(StoreDamaged, StoreForeignFile):
        read({name: garbage})


# --- taking over ----------------------------------------------------------------------------------


def test_its_tables_replace_ours() -> None:
    state = state_with(ORDERS, TopicConfig("gone"))
    tables = Tables(
        topics={"orders": TopicConfig("orders", 4, 4), "new": TopicConfig("new", 1, 1)},
        groups={"fresh": GroupSettings("fresh")},
        offsets={("billing", "orders", 0): 7, ("billing", "orders", 3): 99, ("x", "gone", 0): 1},
        delays={2: 9},
    )
    adopt_tables(state, tables, queues(), FlushMode.ASYNC)
    assert list(state.topics) == [
        TopicConfig("new", 1, 1),
        TopicConfig("orders", 4, 4, flush_mode=FlushMode.SYNC),
    ]
    assert state.groups == tables.groups
    current = state.generations.of("orders", 0).current
    born = state.generations.of("orders", 3).current
    assert state.offsets.of_group("billing") == {
        ("orders", 0): Position(current, 7),
        ("orders", 3): Position(born, 8),  # no further than the queue
    }
    assert state.delays == {2: 9}
    state.validate()


def test_positions_hold_as_far_as_the_log_is_ours() -> None:
    state = state_with(ORDERS)
    adopt_tables(state, Tables(), queues(verified=5), FlushMode.ASYNC)
    history = state.generations.of("orders", 0)
    assert history.settle(Position(1, 5)).offset == 5
    assert history.fence(Position(1, 6)) == Position(history.current, 5)
    kept = state.offsets.get("billing", ("orders", 0))
    assert kept == Position(1, 4), "tables that RocketMQ has not written stay"
    assert state.groups["billing"].retry_times_max == 3


def test_a_group_that_is_kept_loses_what_rocketmq_dropped() -> None:
    state = state_with(ORDERS)
    adopt_tables(state, Tables(offsets={}), queues(), FlushMode.ASYNC)
    assert list(state.offsets) == []
    assert state.groups["billing"].retry_times_max == 3


def test_topics_without_settings_get_some_when_the_file_is_lost() -> None:
    state = state_with(ORDERS)
    known = [("lost", 2), ("lost", 0), ("orders", 0), ("SCHEDULE_TOPIC_XXXX", 17)]
    adopt_tables(state, Tables(), queues(5, 8, *known), FlushMode.SYNC)
    assert state.topics.find("lost") == TopicConfig("lost", 3, 3, flush_mode=FlushMode.SYNC)
    assert "SCHEDULE_TOPIC_XXXX" not in state.topics
    adopt_tables(state, Tables(topics={}), queues(5, 8, *known), FlushMode.SYNC)
    assert len(state.topics) == 0, "where there is a file, what it lacks was deleted"


def test_the_full_copy_has_it_all() -> None:
    state = state_with(ORDERS)
    adopt_tables(state, Tables(delays={1: 2}), queues(), FlushMode.ASYNC)
    copy = BrokerState()
    for change in state.as_changes():
        copy.apply(change)
    assert list(copy.as_changes()) == list(state.as_changes())
    assert copy.delays == {1: 2}
