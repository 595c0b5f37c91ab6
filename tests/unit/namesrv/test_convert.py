"""proto ↔ route table: nothing is lost, unknown enums are refused."""

from __future__ import annotations

import pytest

from cometmq.errors import InvalidRequest
from cometmq.model import FlushMode, TopicConfig
from cometmq.v1 import common_pb2, namesrv_pb2
from services.namesrv import convert
from services.namesrv.routes import DataVersion, GroupRoute, LiveMember, Member, Role

MEMBER = Member("c", "g", 2, Role.FOLLOWER, "a:1", "a:2", 7)
TOPIC = TopicConfig("t", 3, 5, 4, FlushMode.SYNC)


def test_members_and_topics_survive() -> None:
    assert convert.member_from_proto(convert.member_to_proto(MEMBER)) == MEMBER
    assert convert.topic_from_proto(convert.topic_to_proto(TOPIC)) == TOPIC


@pytest.mark.parametrize("role", list(Role))
def test_roles_have_the_values_of_the_wire(role: Role) -> None:
    assert common_pb2.MemberRole.Value(f"MEMBER_ROLE_{role.name}") == role.value


@pytest.mark.parametrize("mode", list(FlushMode))
def test_flush_modes_have_the_values_of_the_wire(mode: FlushMode) -> None:
    assert common_pb2.FlushMode.Value(f"FLUSH_MODE_{mode.name}") == mode.value


@pytest.mark.parametrize("role", [0, 9])
def test_an_unknown_role_is_refused(role: int) -> None:
    proto = namesrv_pb2.Member()
    proto.MergeFromString(bytes([4 << 3, role]))
    with pytest.raises(InvalidRequest, match="role"):
        convert.member_from_proto(proto)


def test_a_topic_without_flush_mode_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="'t' has no flush mode"):
        convert.topic_from_proto(common_pb2.TopicConfig(name="t"))


def test_permission_zero_means_both() -> None:
    proto = convert.topic_to_proto(TOPIC)
    proto.permission = 0
    assert convert.topic_from_proto(proto).permission == 6


def test_a_route_carries_settings_and_members() -> None:
    proto = convert.route_to_proto("t", [GroupRoute("g", TOPIC, (MEMBER,))])

    assert proto.topic == "t"
    assert proto.groups[0].topic == convert.topic_to_proto(TOPIC)
    assert list(proto.groups[0].members) == [convert.member_to_proto(MEMBER)]


def test_a_status_tells_when_it_was_heard() -> None:
    proto = convert.status_to_proto(LiveMember(MEMBER, DataVersion(3, 4), 5, 1.0, 99))
    assert (proto.last_heard_ms, proto.topic_count) == (99, 5)
    assert (proto.data_version.epoch, proto.data_version.counter) == (3, 4)
