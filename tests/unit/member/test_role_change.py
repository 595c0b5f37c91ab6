from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cometmq.member import role_change
from cometmq.member.role_change import RoleChange


def changes(*times_s: float) -> RoleChange:
    change: RoleChange | None = None
    for time_s in times_s:
        change = RoleChange("m", "r").after(change, time_s)
    assert change is not None
    return change


def test_three_changes_a_minute_cost_nothing() -> None:
    assert role_change.delay_s(None, 0.0) == 0.0
    assert role_change.delay_s(changes(0.0, 1.0, 2.0), 2.0) == 0.0
    assert role_change.delay_s(changes(0.0, 1.0, 2.0, 61.5), 61.5) == 0.0


def test_more_wait_longer_each_time() -> None:
    delays = [role_change.delay_s(changes(*map(float, range(n))), float(n)) for n in range(4, 12)]
    assert delays[:4] == [2.0, 4.0, 8.0, 16.0]
    assert delays[4:] == [role_change.DELAY_MAX_S] * 4


@given(st.lists(st.floats(0.1, 30.0), min_size=1, max_size=60))
def test_a_member_that_waits_as_told_changes_ever_more_rarely(gaps_s: list[float]) -> None:
    """However eager, no minute sees more than three changes and those that were waited for."""
    now_s, change, times_s = 0.0, None, []
    for gap_s in gaps_s:
        now_s += min(gap_s, 0.1) + role_change.delay_s(change, now_s)
        change = RoleChange("m", "r").after(change, now_s)
        times_s.append(now_s)
        assert len(change.changed_s) <= role_change.CHANGES_KEPT_MAX
        assert role_change.recent(change, now_s) == sum(
            now_s - 60.0 < at <= now_s for at in times_s
        )
        assert role_change.recent(change, now_s) <= 8
