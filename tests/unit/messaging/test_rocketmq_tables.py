"""Exports in RocketMQ's form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.errors import StoreDamaged
from cometmq.messaging import adoption
from cometmq.messaging.groups import GroupSettings
from cometmq.messaging.rocketmq_tables import SnapshotMark, export, mark_of, parse
from cometmq.messaging.state import BrokerState
from cometmq.model import MessageType, Position, TopicConfig

MARK = SnapshotMark(epoch=3, position=4711)

# The examples of docs/format/snapshots.md.
TOPICS_JSON = """\
{
\t"cometmq":{
\t\t"epoch":3,
\t\t"position":4711
\t},
\t"dataVersion":{
\t\t"counter":1,
\t\t"stateVersion":0,
\t\t"timestamp":1700000000000
\t},
\t"topicConfigTable":{
\t\t"orders":{
\t\t\t"attributes":{},
\t\t\t"order":false,
\t\t\t"perm":6,
\t\t\t"readQueueNums":4,
\t\t\t"topicFilterType":"SINGLE_TAG",
\t\t\t"topicName":"orders",
\t\t\t"topicSysFlag":0,
\t\t\t"writeQueueNums":2
\t\t}
\t}
}"""
OFFSETS_JSON = """\
{
\t"cometmq":{
\t\t"epoch":3,
\t\t"position":4711
\t},
\t"dataVersion":{
\t\t"counter":1,
\t\t"stateVersion":0,
\t\t"timestamp":1700000000000
\t},
\t"offsetTable":{
\t\t"orders@billing":{
\t\t\t0:251,
\t\t\t1:250
\t\t}
\t}
}"""


def commit(state: BrokerState, queue_id: int, offset: int) -> None:
    history = state.generations.of("orders", queue_id)
    state.offsets.commit("billing", ("orders", queue_id), Position(0, offset), history, 10**6)


@pytest.fixture
def state() -> BrokerState:
    state = BrokerState()
    state.apply(state.plan_topic(TopicConfig("orders", 4, 2)))
    state.apply(state.plan_group(GroupSettings("billing", retry_times_max=3)))
    commit(state, 1, 250)
    commit(state, 0, 251)
    return state


def test_golden_files(state: BrokerState) -> None:
    files = export(state, MARK, 1_700_000_000_000)
    assert files["topics.json"].decode() == TOPICS_JSON
    assert files["consumerOffset.json"].decode() == OFFSETS_JSON


def test_types_are_attributes(state: BrokerState) -> None:
    config = TopicConfig(
        "orders",
        4,
        2,
        message_type=MessageType.FIFO,
        is_ordered=True,
        attributes=(("cleanup.policy", "DELETE"), ("trace", "1")),
    )
    for change in state.plan_extras(config):
        state.apply(change)
    content = export(state, MARK, 0)["topics.json"]
    table = parse(content)["topicConfigTable"]["orders"]
    assert table["order"] is True
    assert table["attributes"] == {
        "cleanup.policy": "DELETE",
        "message.type": "FIFO",
        "trace": "1",
    }
    [again] = (adoption.read({"topics.json": content}).topics or {}).values()
    assert again == config, "what was kept comes back"


def test_the_document_shows_the_form() -> None:
    document = Path(__file__).resolve().parents[3] / "docs/format/snapshots.md"
    assert TOPICS_JSON in document.read_text(encoding="utf-8")


def test_each_file_is_marked_and_can_be_read(state: BrokerState) -> None:
    files = export(state, MARK, 0)
    names = {"topics.json", "subscriptionGroup.json", "consumerOffset.json", "delayOffset.json"}
    assert files.keys() == names
    assert {mark_of(parse(data)) for data in files.values()} == {MARK}
    assert parse(files["delayOffset.json"])["offsetTable"] == {}


def test_groups_have_rocketmqs_fields(state: BrokerState) -> None:
    table = parse(export(state, MARK, 0)["subscriptionGroup.json"])["subscriptionGroupTable"]
    assert table == {
        "billing": {
            "groupName": "billing",
            "consumeEnable": True,
            "consumeFromMinEnable": True,
            "consumeBroadcastEnable": True,
            "retryQueueNums": 1,
            "retryMaxTimes": 3,
            "brokerId": 0,
            "whichBrokerWhenConsumeSlowly": 1,
            "notifyConsumerIdsChangedEnable": True,
        }
    }


def test_the_pattern_of_topics_created_on_demand_is_inherited(state: BrokerState) -> None:
    state.apply(state.plan_topic(TopicConfig("TBW102"), by_system=True))
    table = parse(export(state, MARK, 0)["topics.json"])["topicConfigTable"]
    assert (table["TBW102"]["perm"], table["orders"]["perm"]) == (7, 6)


def test_offsets_are_given_as_they_hold_now(state: BrokerState) -> None:
    for plan in state.plan_raise(lambda topic, queue_id: 100):
        state.apply(plan)
    table = parse(export(state, MARK, 0)["consumerOffset.json"])["offsetTable"]
    assert table == {"orders@billing": {"0": 100, "1": 100}}


def test_files_of_rocketmq_have_no_mark() -> None:
    table = parse(b'{\n\t"offsetTable":{"a@b":{0:1,1:2\n\t,-3 :4}}\n}')
    assert table == {"offsetTable": {"a@b": {"0": 1, "1": 2, "-3": 4}}}
    assert mark_of(table) is None


@pytest.mark.parametrize("mark", [None, 7, {}, {"epoch": 1}, {"epoch": "1", "position": 2}])
def test_what_is_no_mark(mark: Any) -> None:
    assert mark_of({"cometmq": mark}) is None


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff", b"{0}", b'{"a":}'])
def test_damaged_files_are_refused(data: bytes) -> None:
    with pytest.raises(StoreDamaged):
        parse(data)


@given(st.dictionaries(st.text(max_size=20), st.text(max_size=20), max_size=5))
def test_strings_are_left_alone(strings: dict[str, str]) -> None:
    tricky = {**strings, '{0:1,"': ',2:"\\'}
    assert parse(json.dumps(tricky, ensure_ascii=False).encode()) == tricky
