from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.errors import StoreDamaged, StoreForeignFile
from cometmq.messaging.adoption import Queues, Tables, adopt_tables, read
from cometmq.messaging.changes import DelaysReached, GroupPolicyPut, GroupPut, OffsetsCommitted
from cometmq.messaging.group_policy import (
    ConsumeMode,
    CustomizedRetry,
    ExponentialRetry,
    GroupPolicy,
)
from cometmq.messaging.groups import GroupSettings
from cometmq.messaging.offsets import CommittedOffset
from cometmq.messaging.quotas import Quota
from cometmq.messaging.rocketmq_tables import DELAYS, GROUPS, OFFSETS, TOPICS, SnapshotMark, export
from cometmq.messaging.state import BrokerState
from cometmq.model import FlushMode, MessageType, Position, ReplicationMode, TopicConfig

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
        "shut": TopicConfig("shut", 0, 16, 0, is_ordered=True),
    }
    assert tables.silent == {"plain", "shut"}
    assert tables.groups == {"g": GroupSettings("g", consume_enable=False)}
    assert tables.offsets == {("b", "a", 0): 0, ("b", "a", 1): 7}


def test_types_and_attributes_of_topics() -> None:
    def of(**attributes: Any) -> dict[str, Any]:
        return {"attributes": attributes}

    tables = read(
        {
            TOPICS: topics_json(
                fifo=of(**{"+message.type": "FIFO", "cleanup.policy": "DELETE"}),
                later=of(**{"message.type": "LITE"}),
                long=of(**{"message.type": "DELAY", "x": "y" * 10_000}),
                none=of(),
            )
        }
    )
    assert tables.topics is not None
    assert {name: (c.message_type, c.attributes) for name, c in tables.topics.items()} == {
        "fifo": (MessageType.FIFO, (("cleanup.policy", "DELETE"),)),
        "later": (MessageType.UNSPECIFIED, (("message.type", "LITE"),)),
        "long": (MessageType.DELAY, ()),
        "none": (MessageType.UNSPECIFIED, ()),
    }
    assert tables.silent == frozenset()
    assert [("LITE" in one, "10001" in one) for one in tables.left_out] == [
        (True, False),
        (False, True),
    ]


def test_a_type_survives_a_program_that_knows_none() -> None:
    """RocketMQ 4.9 writes no attributes; 5.x does, and what it says counts."""
    state = BrokerState()
    ours = TopicConfig(
        "a", 1, 1, message_type=MessageType.FIFO, is_ordered=True, attributes=(("x", "y"),)
    )
    for change in (state.plan_topic(ours), *state.plan_extras(ours)):
        state.apply(change)
    for_49 = read({TOPICS: topics_json(a={"order": False})})
    adopt_tables(state, for_49, queues(), FlushMode.ASYNC)
    of_49 = state.topics.get("a")
    assert (of_49.message_type, of_49.attributes) == (MessageType.FIFO, (("x", "y"),))
    assert not of_49.is_ordered, "which 4.9 does know"
    for_5 = read({TOPICS: topics_json(a={"attributes": {}, "order": True})})
    adopt_tables(state, for_5, queues(), FlushMode.ASYNC)
    of_5 = state.topics.get("a")
    assert (of_5.message_type, of_5.attributes, of_5.is_ordered) == (
        MessageType.UNSPECIFIED,
        (),
        True,
    )


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


def test_a_topic_keeps_its_durability_on_the_way_back() -> None:
    """RocketMQ's tables have none."""
    ours = replace(ORDERS, replication_mode=ReplicationMode.FLUSHED)
    state = state_with(ours)
    adopt_tables(state, Tables(topics={"orders": TopicConfig("orders")}), queues(), FlushMode.ASYNC)
    found = state.topics.get("orders")
    assert (found.flush_mode, found.replication_mode) == (ours.flush_mode, ours.replication_mode)


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


# --- RocketMQ 5's fields of groups ----------------------------------------------------------------

FIVE = {
    "groupName": "billing",
    "retryMaxTimes": 3,
    "consumeMessageOrderly": True,
    "consumeTimeoutMinute": 30,
    "groupSysFlag": 1,
    "attributes": {"priority.factor": "1"},
    "groupRetryPolicy": {
        "type": "EXPONENTIAL",
        "exponentialRetryPolicy": {"initial": 1000, "max": 60000, "multiplier": 3},
        "customizedRetryPolicy": {"next": [1, 2, 3]},
    },
    "subscriptionDataSet": [{"topic": "orders"}],
}
POLICY = GroupPolicy(
    is_orderly=True,
    retry=ExponentialRetry(1_000, 3, 60_000),
    consume_timeout_min=30,
    system_flag=1,
    attributes=(("priority.factor", "1"),),
)
OURS = GroupPolicy(mode=ConsumeMode.POP, read_quota=Quota(7), dlq_reserve_ms=9)


def groups_json(**groups: Any) -> bytes:
    return json.dumps({"subscriptionGroupTable": groups}).encode()


def adopted(state: BrokerState, *files: bytes, **others: bytes) -> GroupPolicy:
    for content in files:
        adopt_tables(state, read({GROUPS: content, **others}), queues(), FlushMode.ASYNC)
    state.validate()
    return state.groups["billing"].policy


def test_rocketmq_5s_policy_is_taken_over_and_comes_back() -> None:
    state = state_with(ORDERS)
    assert adopted(state, groups_json(billing=FIVE)) == POLICY
    back = json.loads(export(state, SnapshotMark(1, 2), 3)[GROUPS])
    kept = back["subscriptionGroupTable"]["billing"]
    for name in ("consumeMessageOrderly", "consumeTimeoutMinute", "groupSysFlag", "attributes"):
        assert kept[name] == FIVE[name], name
    assert kept["groupRetryPolicy"] == {
        "type": "EXPONENTIAL",
        "exponentialRetryPolicy": {"initial": 1000, "max": 60000, "multiplier": 3},
    }
    assert adopted(state, json.dumps(back).encode()) == POLICY
    customized = {"type": "CUSTOMIZED", "customizedRetryPolicy": {"next": [1, 2, 3]}}
    assert adopted(state, groups_json(billing=FIVE | {"groupRetryPolicy": customized})) == replace(
        POLICY, retry=CustomizedRetry((1, 2, 3))
    )
    exported = json.loads(export(state, SnapshotMark(1, 2), 3)[GROUPS])
    kept = exported["subscriptionGroupTable"]["billing"]
    assert kept["groupRetryPolicy"] == customized
    default = FIVE | {"groupRetryPolicy": {"type": "CUSTOMIZED"}}
    assert adopted(state, groups_json(billing=default)).retry is None


def test_what_rocketmq_does_not_have_stays_ours() -> None:
    """4.9 has nothing of a policy; 5 neither mode, quota nor the time of dead letters. A group
    whose offsets are taken over is dropped and put again: it keeps its policy, too.
    """
    state = state_with(ORDERS)
    state.apply(GroupPolicyPut("billing", OURS))
    four = groups_json(billing={"groupName": "billing"})
    assert adopted(state, four) == OURS
    offsets = b'{"offsetTable":{}}'
    assert adopted(state, four, **{OFFSETS: offsets}) == OURS
    five = adopted(state, groups_json(billing=FIVE), **{OFFSETS: offsets})
    assert five == replace(POLICY, mode=OURS.mode, read_quota=OURS.read_quota, dlq_reserve_ms=9)
    plain = {"consumeMessageOrderly": False, "consumeTimeoutMinute": 15, "groupSysFlag": 0}
    plain_five = plain | {"attributes": {}, "groupRetryPolicy": {"type": "CUSTOMIZED"}}
    assert adopted(state, groups_json(billing=plain_five)) == OURS
    adopt_tables(state, read({GROUPS: groups_json()}), queues(), FlushMode.ASYNC)
    assert "billing" not in state.groups


@pytest.mark.parametrize(
    "wrong",
    [
        {"type": "CUSTOMIZED", "customizedRetryPolicy": {"next": [0]}},
        {"type": "CUSTOMIZED", "customizedRetryPolicy": {"next": [1] * 65}},
        {"type": "EXPONENTIAL", "exponentialRetryPolicy": {"initial": 10**12}},
    ],
)
def test_a_policy_that_cannot_be_kept_is_left_out_and_told(wrong: dict[str, Any]) -> None:
    tables = read({GROUPS: groups_json(billing=FIVE | {"groupRetryPolicy": wrong})})
    assert tables.groups is not None
    assert tables.groups["billing"].retry_times_max == 3
    assert not tables.policies
    [told] = tables.left_out
    assert "of group billing" in told


def test_a_policy_of_the_wrong_kind_stops_the_takeover() -> None:
    wrongs: list[dict[str, Any]] = [
        {"groupRetryPolicy": 7},
        {"attributes": []},
        {"consumeMessageOrderly": "x"},
    ]
    for wrong in wrongs:
        with pytest.raises(StoreDamaged):
            read({GROUPS: groups_json(billing=FIVE | wrong)})
