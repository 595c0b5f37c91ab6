"""Consumer groups: names, and who is in them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.errors import (
    CometError,
    GroupNameInvalid,
    InvalidRequest,
    LimitExceeded,
    TopicNameInvalid,
)
from cometmq.messaging.groups import Member, Membership, MemberTable, check_name
from cometmq.model import Subscription

ORDERS = Subscription("orders")
BILLS = Subscription("bills", frozenset({"paid"}))


def clients(view: Membership | None) -> list[str]:
    assert view is not None
    return [member.client_id for member in view.members]


@pytest.mark.parametrize("name", ["", "a" * 256, "a\n", "a.b", "../g"])
def test_bad_names(name: str) -> None:
    with pytest.raises(GroupNameInvalid):
        check_name(name)
    with pytest.raises(GroupNameInvalid):
        MemberTable().put(name, "c", 1, [])


@pytest.mark.parametrize(
    ("client_id", "subscriptions", "error"),
    [
        ("", [ORDERS], InvalidRequest),
        ("c" * 256, [ORDERS], InvalidRequest),
        ("c\n", [ORDERS], InvalidRequest),
        ("c", [ORDERS, ORDERS], InvalidRequest),
        ("c", [Subscription("../x")], TopicNameInvalid),
        ("c", [Subscription(f"t{n}") for n in range(1001)], LimitExceeded),
    ],
)
def test_bad_requests_change_nothing(
    client_id: str, subscriptions: list[Subscription], error: type[CometError]
) -> None:
    table = MemberTable()
    with pytest.raises(error):
        table.put("billing", client_id, 1, subscriptions)
    assert table.groups() == []


def test_members_join_and_leave() -> None:
    table = MemberTable()
    assert clients(table.put("billing", "b", 1, [ORDERS])) == ["b"]
    assert clients(table.put("billing", "a", 2, [ORDERS])) == ["a", "b"]
    assert clients(table.view("billing")) == ["a", "b"]
    assert table.groups() == ["billing"]
    assert clients(table.leave("billing", "b", 1)) == ["a"]
    assert clients(table.leave("billing", "a", 2)) == []
    assert table.groups() == []
    assert table.view("billing") == Membership(0, ())


def test_subscriptions_are_replaced() -> None:
    table = MemberTable()
    table.put("billing", "a", 1, [ORDERS])
    view = table.put("billing", "a", 1, [BILLS])
    assert view is not None
    assert view.members == (Member("a", 1, (BILLS,)),)


def test_saying_the_same_again_is_no_change() -> None:
    table = MemberTable()
    assert table.put("billing", "a", 1, [ORDERS]) == table.put("billing", "a", 1, [ORDERS])


def test_the_newer_stream_of_a_client_wins() -> None:
    table = MemberTable()
    table.put("billing", "a", 1, [ORDERS])
    table.put("billing", "a", 2, [BILLS])
    assert table.put("billing", "a", 1, [ORDERS]) is None
    assert table.leave("billing", "a", 1) is None
    assert table.view("billing").members == (Member("a", 2, (BILLS,)),)


def test_leaving_without_membership_changes_nothing() -> None:
    assert MemberTable().leave("billing", "a", 1) is None


def test_versions_rise_even_when_a_group_was_empty_in_between() -> None:
    table = MemberTable()
    first = table.put("billing", "a", 1, [ORDERS])
    table.leave("billing", "a", 1)
    second = table.put("billing", "a", 2, [ORDERS])
    assert first is not None
    assert second is not None
    assert second.version > first.version


def test_limits_hold_for_new_members_only() -> None:
    table = MemberTable(groups_max=1, members_max=1)
    table.put("billing", "a", 1, [ORDERS])
    assert clients(table.put("billing", "a", 2, [BILLS])) == ["a"]
    with pytest.raises(LimitExceeded, match="members_max"):
        table.put("billing", "b", 3, [ORDERS])
    with pytest.raises(LimitExceeded, match="groups_max"):
        table.put("shipping", "a", 4, [ORDERS])
    table.leave("billing", "a", 2)
    assert clients(table.put("shipping", "a", 5, [ORDERS])) == ["a"]


STEPS = st.lists(st.tuples(st.booleans(), st.sampled_from("ab"), st.integers(1, 4)), max_size=30)


@given(STEPS)
def test_membership_is_each_clients_newest_stream(steps: list[tuple[bool, str, int]]) -> None:
    table = MemberTable()
    naive: dict[str, int] = {}
    versions = [0]
    for joins, client, stream in steps:
        if joins:
            answer = table.put("g", client, stream, [ORDERS])
            naive[client] = max(stream, naive.get(client, 0))
            assert (answer is None) == (naive[client] != stream)
        else:
            answer = table.leave("g", client, stream)
            assert (answer is not None) == (naive.get(client) == stream)
            if answer is not None:
                del naive[client]
        if answer is not None:
            assert {m.client_id: m.stream for m in answer.members} == naive
            versions.append(answer.version)
        assert {m.client_id: m.stream for m in table.view("g").members} == naive
    assert versions == sorted(versions)
