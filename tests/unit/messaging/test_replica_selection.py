"""Who is sent to a follower, to which one, and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.messaging.groups import GroupSettings
from cometmq.messaging.replica_selection import FOLLOWER_BEHIND_BYTES_MAX, ReadReplica, suggest

MEMORY = 1000
FAR, NEAR = MEMORY + 1, MEMORY
DEFAULTS = GroupSettings("G")
LAGS = FOLLOWER_BEHIND_BYTES_MAX + 1


def group(normally: int, slow: int) -> GroupSettings:
    return GroupSettings("G", broker_id=normally, broker_id_when_slow=slow)


def test_a_group_far_behind_is_sent_to_member_1_and_back() -> None:
    copies = [ReadReplica(1, 0), ReadReplica(2, 0)]
    assert suggest(FAR, MEMORY, DEFAULTS, copies) == 1
    assert suggest(NEAR, MEMORY, DEFAULTS, copies) is None
    assert suggest(0, MEMORY, DEFAULTS, copies) is None


def test_without_the_named_member_the_best_follower_serves() -> None:
    assert (
        suggest(FAR, MEMORY, DEFAULTS, [ReadReplica(0, 9), ReadReplica(2, 5), ReadReplica(3, 5)])
        == 2
    )
    assert suggest(FAR, MEMORY, DEFAULTS, [ReadReplica(1, LAGS), ReadReplica(2, 5)]) == 2


@pytest.mark.parametrize("copies", [[], [ReadReplica(1, LAGS)]])
def test_without_a_follower_that_is_near_everybody_stays(copies: list[ReadReplica]) -> None:
    assert suggest(FAR, MEMORY, DEFAULTS, copies) is None


def test_a_group_may_stay_with_the_writer_however_slow_it_is() -> None:
    assert suggest(FAR, MEMORY, group(0, 0), [ReadReplica(1, 0)]) is None


def test_a_group_may_always_be_served_by_a_follower() -> None:
    copies = [ReadReplica(1, 0), ReadReplica(2, 0)]
    assert suggest(0, MEMORY, group(2, 1), copies) == 2
    assert suggest(FAR, MEMORY, group(2, 1), copies) == 1
    assert suggest(0, MEMORY, group(3, 1), copies) is None, "another follower is not what it named"


@given(
    st.integers(0, 3 * MEMORY),
    st.integers(0, 4),
    st.integers(0, 4),
    st.dictionaries(st.integers(0, 4), st.integers(0, 2 * LAGS), max_size=5),
)
def test_only_followers_that_are_near_are_suggested(
    backlog: int, normally: int, slow: int, behind: dict[int, int]
) -> None:
    copies = [ReadReplica(*item) for item in behind.items()]
    found = suggest(backlog, MEMORY, group(normally, slow), copies)
    near = {member for member, lag in behind.items() if lag <= FOLLOWER_BEHIND_BYTES_MAX}
    if found is not None:
        assert found in near
    elif backlog > MEMORY:
        assert not slow or not near
    else:
        assert not normally or normally not in near


@given(st.integers(0, 3 * MEMORY), st.integers(0, 4), st.integers(0, 4), st.integers(1, 4))
def test_a_follower_keeps_whom_the_writer_sent(
    backlog: int, normally: int, slow: int, here: int
) -> None:
    """Asked the same question, the two agree as far as the follower knows: nobody goes to and fro
    with each pull.
    """
    settings = group(normally, slow)
    if suggest(backlog, MEMORY, settings, [ReadReplica(here, 0)]) == here:
        at_writer = suggest(backlog, MEMORY, settings, [ReadReplica(here, 7), ReadReplica(4, LAGS)])
        assert at_writer == here
