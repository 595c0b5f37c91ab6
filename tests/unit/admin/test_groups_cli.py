"""What members of a group have to have in common."""

from __future__ import annotations

from dataclasses import replace

import click
import pytest

from cometmq.admin.group_members import disagreement
from cometmq.admin.group_settings_cli import QuotaType, RetryPolicy, retry_policy_text
from cometmq.admin.views import GroupMemberView
from cometmq.v1.broker_pb2 import Quota

ONE = GroupMemberView("a", {"T": []}, "clustering", "average", 2)


def test_what_members_do_not_agree_on_is_told() -> None:
    assert disagreement([]) == disagreement([ONE]) == ""
    assert disagreement([ONE, replace(ONE, allocation="")]) == ""  # a stub that does not tell
    assert disagreement([ONE, replace(ONE, subscriptions={"U": ["x"]})]) == ""
    for other, what in (
        (replace(ONE, allocation="circle"), "the allocation (all use average)"),
        (replace(ONE, message_model="broadcasting"), "the message model"),
        (replace(ONE, subscriptions={"T": ["x"]}), "the filter of T"),
    ):
        assert disagreement([ONE, other]) == f"members do not agree on {what}"


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("levels", "levels"),
        ("10s  90s 1h", "10s 90s 1h"),
        ("120s 1d", "2m 1d"),
        ("exponential 5s 2 2h", "exponential 5s 2 2h"),
    ],
)
def test_a_retry_policy_is_shown_as_the_option_takes_it(given: str, shown: str) -> None:
    policy = RetryPolicy().convert(given, None, None)
    assert retry_policy_text(policy) == shown
    assert RetryPolicy().convert(shown, None, None) == policy


@pytest.mark.parametrize("wrong", ["", "10", "10w", "exponential 5s", "exponential 5s x 2h", "x"])
def test_what_is_no_retry_policy_is_refused(wrong: str) -> None:
    with pytest.raises(click.BadParameter):
        RetryPolicy().convert(wrong, None, None)


def test_a_quota_has_messages_and_bytes() -> None:
    assert QuotaType().convert("100/5", None, None) == Quota(messages_per_s=100, bytes_per_s=5)
    assert QuotaType().convert("7", None, None) == Quota(messages_per_s=7)
    for wrong in ("", "/5", "1/2/3", "x"):
        with pytest.raises(click.BadParameter):
            QuotaType().convert(wrong, None, None)
