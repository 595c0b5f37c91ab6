"""Names that are made: each derived name is a name, and what is odd or the system's is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq import names
from cometmq.admin import groups as group_commands
from cometmq.client import ProducerOptions, PushConsumerOptions
from cometmq.client.names import own_group
from cometmq.client.namespaces import Namespace
from cometmq.client.requests import requester
from cometmq.errors import ConfigInvalid, GroupNameInvalid, TopicNameInvalid
from cometmq.format.request_reply import reply_topic
from cometmq.messaging import retry, topics
from cometmq.model import GROUP_NAME, TOPIC_NAME
from cometmq.v1 import broker_pb2

SCHEMA = Path(__file__).parents[2] / "deploy/helm/cometmq/values.schema.json"
ODD = [
    "",
    "%",
    "|",
    "%%",
    "_",
    "-",
    "|-_",
    "%a",
    "a%",
    "a%%b",
    "a%|",
    "%RETRY%",
    "%RETRY%g",
    "%DLQ%g",
]
ODD += ["%BROADCAST%g", "../g", "a b", "a\n", "ä", "a.b"]
SYSTEM_GROUPS = ["CID_RMQ_SYS_TRANS", "CID_RMQ_SYS_", "n%CID_RMQ_SYS_REVIVE_GROUP"]

texts = st.text("%|_-aZ09", max_size=130)
namespaces = st.text("_-aZ09", max_size=64).filter(
    lambda name: not name or names.is_namespace(name)
)


@given(texts, namespaces, st.text("ab@.-", min_size=1, max_size=255))
def test_every_name_made_from_a_group_is_a_name(group: str, namespace: str, client_id: str) -> None:
    wire = Namespace(namespace).wire(group)
    try:
        names.check_new_group(wire)
    except GroupNameInvalid:
        return
    assert names.is_client_id(client_id)
    assert GROUP_NAME.fullmatch(wire)
    for topic in (retry.retry_topic(wire), retry.dlq_topic(wire)):
        assert TOPIC_NAME.fullmatch(topic)
        assert Namespace(namespace).wire(Namespace(namespace).shown(topic)) == topic
    own = own_group(wire, client_id)
    assert GROUP_NAME.fullmatch(own)
    names.check_new_group(own)


@given(texts, namespaces)
def test_every_topic_of_a_namespace_is_a_topic_of_a_user(topic: str, namespace: str) -> None:
    wire = Namespace(namespace).wire(topic)
    try:
        names.check_new_topic(wire)
    except TopicNameInvalid:
        return
    assert TOPIC_NAME.fullmatch(wire)
    assert topics.is_system(wire) == topics.is_system(topic)


@pytest.mark.parametrize("name", ODD)
def test_odd_names_are_refused(name: str) -> None:
    with pytest.raises(GroupNameInvalid):
        names.check_new_group(name)
    with pytest.raises(GroupNameInvalid):
        names.check_new_producer_group(name)
    with pytest.raises(TopicNameInvalid):
        names.check_new_topic(name)
    with pytest.raises(ConfigInvalid):
        names.check_cluster(name)


@pytest.mark.parametrize("name", SYSTEM_GROUPS)
def test_groups_of_the_system_are_refused(name: str) -> None:
    for check in (names.check_new_group, names.check_new_producer_group):
        with pytest.raises(GroupNameInvalid, match="the system's"):
            check(name)


def test_lengths_hold_to_the_last_one() -> None:
    names.check_new_group("g" * 120)
    names.check_new_topic("t" * 127)
    names.check_new_producer_group("p" * 255)
    names.check_cluster("c" * 115)
    assert TOPIC_NAME.fullmatch(reply_topic("c" * 115))
    for check, name in (
        (names.check_new_group, "g" * 121),
        (names.check_new_topic, "t" * 128),
        (names.check_new_producer_group, "p" * 256),
        (names.check_cluster, "c" * 116),
    ):
        with pytest.raises((GroupNameInvalid, TopicNameInvalid, ConfigInvalid), match="allowed"):
            check(name)


@pytest.mark.parametrize(
    "name", ["-", "_", "a%b", "a|b", "n" * 65, "rmq_sys_a", "CID_RMQ_SYS_a", "ä"]
)
def test_bad_namespaces(name: str) -> None:
    for kind in (ProducerOptions, PushConsumerOptions):
        with pytest.raises(ConfigInvalid, match="namespace"):
            kind(namespace=name)


def test_client_ids() -> None:
    longest = "c" * names.CLIENT_ID_LENGTH_MAX
    assert ProducerOptions(client_id=longest).client_id == longest
    derived = f"{longest[: requester.CLIENT_ID_LENGTH_MAX]}@{'0' * 16}"
    assert names.is_client_id(derived)
    for bad in ("", longest + "c", "a\n", "a\x00"):
        for kind in (ProducerOptions, PushConsumerOptions):
            with pytest.raises(ConfigInvalid, match="client_id"):
                kind(client_id=bad)


def test_the_chart_has_the_same_rule() -> None:
    found = json.loads(SCHEMA.read_text())["properties"]["clusterName"]
    assert found["pattern"] == f"^{names.NAME.pattern}$"
    assert found["maxLength"] == names.CLUSTER_LENGTH_MAX


async def test_the_command_has_the_same_rule() -> None:
    for name in (*ODD, *SYSTEM_GROUPS, "g" * 121):
        settings = broker_pb2.GroupSettings(group=name)
        with pytest.raises(GroupNameInvalid):
            await group_commands.create_group(None, settings)  # type: ignore[arg-type]
