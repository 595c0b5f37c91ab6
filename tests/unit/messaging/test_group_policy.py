from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from cometmq.errors import CometError, ConfigInvalid, DelayInvalid, InvalidRequest
from cometmq.format import delayed
from cometmq.messaging import group_policy, retry
from cometmq.messaging.group_policy import DEFAULT, CustomizedRetry, ExponentialRetry, GroupPolicy
from cometmq.messaging.quotas import Quota
from cometmq.messaging.retry import Wait

LONGEST_MS = 40 * 86_400_000


@pytest.fixture(autouse=True)
def _levels() -> Iterator[None]:
    yield
    delayed.use_levels(delayed.parse_levels(delayed.DEFAULT_LEVELS))


def test_customized_steps_are_counted_as_rocketmq_counts_them() -> None:
    """Its CustomizedRetryPolicy takes the third step first, and the last one from then on."""
    levels_ms = tuple(1000 * s for s in delayed.parse_levels(delayed.DEFAULT_LEVELS))
    policy = CustomizedRetry(levels_ms)
    assert [policy.delay_ms(times) for times in (0, 10, 100)] == [10_000, 540_000, 7_200_000]
    assert CustomizedRetry((7,)).delay_ms(0) == CustomizedRetry((5, 7)).delay_ms(9) == 7


def test_steps_that_a_user_gives_begin_with_the_first() -> None:
    policy = CustomizedRetry.of_steps((1_000, 60_000, 5_000))
    assert [policy.delay_ms(times) for times in range(5)] == [1_000, 60_000, 5_000, 5_000, 5_000]
    assert policy.steps_ms == (1_000, 60_000, 5_000)


def test_exponential_steps_double_to_two_hours() -> None:
    policy = ExponentialRetry()
    assert [policy.delay_ms(times) for times in range(4)] == [5_000, 10_000, 20_000, 40_000]
    assert [policy.delay_ms(times) for times in (10, 11)] == [5_120_000, 7_200_000]
    assert policy.delay_ms(1_000_000) == 7_200_000


def test_a_step_waits_exactly_so_long_on_its_level_if_there_is_one() -> None:
    steps_ms = (999, 1_000, 1_001, 30_000, 99_999_999)
    policy = CustomizedRetry.of_steps(steps_ms)
    waits = [retry.wait_after(times, 0, 16, policy) for times in range(5)]
    assert waits == [Wait(level, ms) for level, ms in zip((0, 1, 0, 4, 0), steps_ms, strict=True)]
    assert retry.wait_after(16, 0, 16, policy) is None
    # What the consumer asks for comes first.
    assert retry.wait_after(0, 4, 16, policy) == Wait(4, 30_000)
    assert retry.wait_after(0, 0, 16, policy, 7) == Wait(0, 7)
    exponential = [retry.wait_after(times, 0, 16, ExponentialRetry()) for times in range(4)]
    assert exponential == [Wait(2, 5_000), Wait(3, 10_000), Wait(0, 20_000), Wait(0, 40_000)]
    delayed.use_levels((60, 5, 20))  # need not rise
    assert retry.wait_after(2, 0, 16, ExponentialRetry()) == Wait(3, 20_000)


@pytest.mark.parametrize(
    ("level", "asked_ms", "error"),
    [
        (3, 5, InvalidRequest),
        (0, -1, DelayInvalid),
        (0, 40 * 86_400_000 + 1, DelayInvalid),
    ],
)
def test_a_wrong_wait_is_refused(level: int, asked_ms: int, error: type[CometError]) -> None:
    with pytest.raises(error):
        retry.wait_after(0, level, 16, None, asked_ms)


@pytest.mark.parametrize(
    "wrong",
    [
        GroupPolicy(retry=CustomizedRetry(())),
        GroupPolicy(retry=CustomizedRetry((1,) * 65)),
        GroupPolicy(retry=CustomizedRetry((1, 1, 0))),
        GroupPolicy(retry=CustomizedRetry((1, 1, LONGEST_MS + 1))),
        GroupPolicy(retry=ExponentialRetry(initial_ms=0)),
        GroupPolicy(retry=ExponentialRetry(initial_ms=9, max_ms=8)),
        GroupPolicy(retry=ExponentialRetry(max_ms=40 * 86_400_000 + 1)),
        GroupPolicy(retry=ExponentialRetry(multiplier=0)),
        GroupPolicy(retry=ExponentialRetry(multiplier=1_001)),
        GroupPolicy(consume_timeout_min=0),
        GroupPolicy(consume_timeout_min=10_081),
        GroupPolicy(dlq_reserve_ms=-1),
        GroupPolicy(read_quota=Quota(messages_per_s=-1)),
        GroupPolicy(read_quota=Quota(bytes_per_s=(1 << 40) + 1)),
    ],
)
def test_a_policy_out_of_its_range_is_refused(wrong: GroupPolicy) -> None:
    with pytest.raises(InvalidRequest):
        group_policy.check_policy(wrong)
    group_policy.check_policy(replace(DEFAULT, retry=ExponentialRetry()))
    group_policy.check_policy(replace(DEFAULT, retry=CustomizedRetry((1, 1, LONGEST_MS))))


def test_attributes_that_are_kept_have_limits() -> None:
    many = {f"{n:04}": "x" for n in range(100)}
    hostile = {"a" * 1_025: "x", "b": "x" * 1_025, "c": "\n", "d": "\ud800", "e": "kept"}
    kept = group_policy.kept_attributes(many | hostile)
    assert len(kept) == 64
    assert kept[0] == ("0000", "x")
    assert group_policy.kept_attributes(hostile) == (("e", "kept"),)


def test_a_list_of_levels() -> None:
    assert delayed.parse_levels("1s  2m 3h 40d") == (1, 120, 10_800, 40 * 86_400)
    delayed.use_levels(delayed.parse_levels("1s " * 64))
    assert delayed.level_count() == 64
    wait = retry.wait_after(80, 0, 100)
    assert wait is not None
    assert wait.level == 64


@pytest.mark.parametrize(
    "wrong", ["", "1s " * 65, "1", "s", "0s", "-1s", "1w", "41d", "1.5h", "\u0661s"]
)
def test_a_wrong_list_of_levels_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigInvalid):
        delayed.parse_levels(wrong)
