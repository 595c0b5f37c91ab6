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
    BACK_S,
    INSTANCE_NUMBER_MAX,
    REPLACED_MAX,
    SESSION_MS_MAX,
    SESSIONS_NOTED_MIN,
    Member,
    MemberDetails,
    Membership,
    MemberTable,
    Stay,
    changed_ids,
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


def away(client_id: str, member_s: float, away_s: float) -> Stay:
    return Stay(client_id, member_s, away_s)


@pytest.mark.parametrize(
    ("stays", "is_changed"),
    [
        ([away("old-1", 900, 60), Stay("new-1", 50)], True),  # one stops, then one starts
        ([away("old-1", 900, 60), Stay("new-1", 90)], True),  # one starts, then one stops
        ([away("old-1", 900, BACK_S), Stay("new-1", 1)], True),
        ([away("pod-1", 900, BACK_S - 1), Stay("pod-9", 1)], False),  # it may be back soon
        ([away("pod-1", 900, 60), Stay("pod-2", 890)], False),  # one crashed
        ([away("pod-1", 90, 60), Stay("pod-2", 80)], False),  # all have just begun
        ([away("pod-1", 900, 60)], False),
        ([Stay("pod-1", 900), Stay("pod-2", 1)], False),
        ([], False),
    ],
)
def test_client_ids_that_change_at_restarts_are_noticed(
    stays: list[Stay], is_changed: bool
) -> None:
    assert bool(changed_ids(stays)) == is_changed


def test_what_is_said_of_many_members_is_short() -> None:
    stays = [away(f"old-{n:04}", 900, 60) for n in range(5_000)]
    said = changed_ids([*stays, *(Stay(f"new-{n:04}", 50) for n in range(5_000))])
    assert "old-0004 and 4995 more are away" in said
    assert len(said) < 1_000


def numbered(instance_id: str, number: int = 0) -> MemberDetails:
    return MemberDetails(instance_id, session_ms=10_000, instance_number=number)


def number_of(table: MemberTable) -> int:
    member = table.member("billing", "a")
    assert member is not None
    return member.instance_number


def test_each_instance_has_a_higher_number_than_the_one_before_it_and_keeps_it() -> None:
    """Also while the broker's clock stands still, or goes back."""
    table = MemberTable()
    numbers = []
    for stream, (instance_id, wall_ms) in enumerate([("1", 500), ("2", 500), ("3", 100)]):
        table.put("billing", "a", stream, [ORDERS], numbered(instance_id), wall_ms=wall_ms)
        numbers.append(number_of(table))
    assert numbers == [500, 501, 502]
    view = table.view("billing")
    table.put("billing", "a", 2, [ORDERS], numbered("3", 502), wall_ms=900)
    assert table.view("billing") is view, "its number is no change"


@pytest.mark.parametrize("is_older_first", [True, False])
def test_an_instance_that_was_replaced_does_not_come_back_at_a_new_writer(
    is_older_first: bool,
) -> None:
    table = MemberTable()
    if is_older_first:
        table.put("billing", "a", 1, [ORDERS], numbered("old", 500), wall_ms=900)
    table.put("billing", "a", 2, [ORDERS], numbered("new", 501), wall_ms=901)
    table.leave("billing", "a", 2)  # also while it is away
    with pytest.raises(ClientIdInUse):
        table.put("billing", "a", 3, [ORDERS], numbered("old", 500), wall_ms=902)
    assert number_of(table) == 501


def test_of_two_instances_with_one_number_one_stays() -> None:
    table = MemberTable()
    table.put("billing", "a", 1, [ORDERS], numbered("x", 500))
    with pytest.raises(ClientIdInUse):
        table.put("billing", "a", 2, [ORDERS], numbered("w", 500))
    assert table.put("billing", "a", 3, [ORDERS], numbered("y", 500))


@pytest.mark.parametrize("number", [-1, INSTANCE_NUMBER_MAX + 1])
def test_an_instance_number_has_a_limit(number: int) -> None:
    with pytest.raises(InvalidRequest):
        MemberTable().put("billing", "a", 1, [ORDERS], numbered("x", number))


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
