"""Consumer groups: names, and who is in them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.errors import (
    ClientIdInUse,
    CometError,
    GroupNameInvalid,
    InvalidRequest,
    LimitExceeded,
    TopicNameInvalid,
)
from cometmq.messaging.groups import (
    REPLACED_MAX,
    SESSION_MS_MAX,
    SESSIONS_NOTED_MIN,
    Member,
    MemberDetails,
    Membership,
    MemberTable,
    check_name,
)
from cometmq.model import Subscription

ORDERS = Subscription("orders")
BILLS = Subscription("bills", frozenset({"paid"}))


def clients(table: MemberTable, group: str = "billing") -> list[str]:
    return [member.client_id for member in table.view(group).members]


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
    assert table.put("billing", "b", 1, [ORDERS])
    assert table.put("billing", "a", 2, [ORDERS])
    assert clients(table) == ["a", "b"]
    assert table.count("billing") == 2
    assert table.groups() == ["billing"]
    assert table.leave("billing", "b", 1)
    assert clients(table) == ["a"]
    assert table.leave("billing", "a", 2)
    assert clients(table) == []
    assert table.groups() == []
    assert table.view("billing") == Membership(0, ())


def test_subscriptions_are_replaced() -> None:
    table = MemberTable()
    table.put("billing", "a", 1, [ORDERS])
    table.put("billing", "a", 1, [BILLS])
    assert table.view("billing").members == (Member("a", 1, (BILLS,)),)


def test_saying_the_same_again_is_no_change() -> None:
    table = MemberTable()
    table.put("billing", "a", 1, [ORDERS])
    view = table.view("billing")
    table.put("billing", "a", 1, [ORDERS])
    assert table.view("billing") is view


def test_the_newer_stream_of_a_client_wins() -> None:
    table = MemberTable()
    table.put("billing", "a", 1, [ORDERS])
    table.put("billing", "a", 2, [BILLS])
    assert not table.put("billing", "a", 1, [ORDERS])
    assert not table.leave("billing", "a", 1)
    assert table.view("billing").members == (Member("a", 2, (BILLS,)),)


def test_leaving_without_membership_changes_nothing() -> None:
    assert not MemberTable().leave("billing", "a", 1)


def test_versions_rise_even_when_a_group_was_empty_in_between() -> None:
    table = MemberTable()
    table.put("billing", "a", 1, [ORDERS])
    first = table.view("billing")
    table.leave("billing", "a", 1)
    table.put("billing", "a", 2, [ORDERS])
    assert table.view("billing").version > first.version


def test_limits_hold_for_new_members_only() -> None:
    table = MemberTable(groups_max=1, members_max=1)
    table.put("billing", "a", 1, [ORDERS])
    assert table.put("billing", "a", 2, [BILLS])
    with pytest.raises(LimitExceeded, match="members_max"):
        table.put("billing", "b", 3, [ORDERS])
    with pytest.raises(LimitExceeded, match="groups_max"):
        table.put("shipping", "a", 4, [ORDERS])
    table.leave("billing", "a", 2)
    assert table.put("shipping", "a", 5, [ORDERS])


def static(session_ms: int = 10_000, instance_id: str = "1") -> MemberDetails:
    return MemberDetails(instance_id, session_ms=session_ms)


def test_a_static_member_is_away_for_its_session_and_then_gone() -> None:
    table = MemberTable()
    table.put("billing", "a", 1, [ORDERS], static())
    assert table.leave("billing", "a", 1, now_s=100.0)
    assert table.is_away("billing", "a")
    assert clients(table) == ["a"]
    assert table.next_session_s == 110.0
    assert table.end_sessions(109.9) == []
    assert clients(table) == ["a"]
    assert table.end_sessions(110.0) == [("billing", "a")]
    assert table.groups() == []


def test_a_static_member_that_comes_back_is_there_again() -> None:
    table = MemberTable()
    table.put("billing", "a", 1, [ORDERS], static())
    table.leave("billing", "a", 1, now_s=100.0)
    table.put("billing", "a", 2, [ORDERS], static(instance_id="2"))
    assert not table.is_away("billing", "a")
    assert table.end_sessions(1_000.0) == []
    assert clients(table) == ["a"]
    table.leave("billing", "a", 2, now_s=2_000.0, for_good=True)
    assert table.groups() == []


def test_the_last_word_of_a_stream_counts() -> None:
    table = MemberTable()
    table.put("billing", "a", 1, [ORDERS], static())
    table.put("billing", "a", 1, [ORDERS], static(session_ms=0))
    table.leave("billing", "a", 1)
    assert table.groups() == []


def test_an_instance_that_was_replaced_may_not_come_back() -> None:
    """A process that was stopped while another one was started in its place."""
    table = MemberTable()
    for stream, instance_id in enumerate("12", start=1):
        table.put("billing", "a", stream, [ORDERS], static(instance_id=instance_id))
    with pytest.raises(ClientIdInUse):
        table.put("billing", "a", 3, [ORDERS], static(instance_id="1"))
    assert table.put("billing", "a", 4, [ORDERS], static(instance_id="2"))
    for stream in range(5, 5 + 2 * REPLACED_MAX):
        table.put("billing", "a", stream, [ORDERS], static(instance_id=f"i{stream}"))
    member = table.member("billing", "a")
    assert member is not None
    assert len(member.replaced) == REPLACED_MAX


@pytest.mark.parametrize("session_ms", [-1, SESSION_MS_MAX + 1, 2**32 - 1])
def test_a_session_has_a_limit(session_ms: int) -> None:
    with pytest.raises(InvalidRequest):
        MemberTable().put("billing", "a", 1, [ORDERS], static(session_ms=session_ms))


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["join", "static", "leave", "time"]),
        st.sampled_from("ab"),
        st.integers(1, 4),
    ),
    max_size=40,
)


@given(STEPS)
def test_membership_is_each_clients_newest_stream(steps: list[tuple[str, str, int]]) -> None:
    table, now_s = MemberTable(), 0.0
    naive: dict[str, tuple[int, bool, float | None]] = {}  # stream, is static, away until
    versions = [0]
    for step, client, number in steps:
        stream, is_static, _ = naive.get(client, (0, False, None))
        if step in ("join", "static"):
            details = static() if step == "static" else static(session_ms=0)
            assert table.put("g", client, number, [ORDERS], details) == (number >= stream)
            if number >= stream:
                naive[client] = number, step == "static", None
        elif step == "leave":
            assert table.leave("g", client, number, now_s) == (number == stream)
            if number == stream and is_static:
                naive[client] = stream, True, now_s + 10.0
            elif number == stream:
                del naive[client]
        else:
            now_s += number
            gone = {c for c, (_, _, until) in naive.items() if until is not None and until <= now_s}
            assert {c for _, c in table.end_sessions(now_s)} == gone
            naive = {c: one for c, one in naive.items() if c not in gone}
        view = table.view("g")
        told = {m.client_id: (m.stream, m.away_until_s) for m in view.members}
        assert told == {c: (stream, until) for c, (stream, _, until) in naive.items()}
        if view.members:
            versions.append(view.version)
    assert versions == sorted(versions)


def test_a_static_member_that_comes_and_goes_leaves_nothing_behind() -> None:
    table, details = MemberTable(), MemberDetails(session_ms=SESSION_MS_MAX)
    for number in range(10):
        table.put("billing", f"away{number}", number, [ORDERS], details)
        table.leave("billing", f"away{number}", number)
    for number in range(10, 20_000):
        table.put("billing", "c", number, [ORDERS], details)
        table.leave("billing", "c", number, number / 1e6)
        assert len(table._sessions) <= SESSIONS_NOTED_MIN
    assert len(table.end_sessions(2 * SESSION_MS_MAX / 1000)) == 11
