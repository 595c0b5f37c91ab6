"""What members of a group have to have in common."""

from __future__ import annotations

from dataclasses import replace

from cometmq.admin.groups import disagreement
from cometmq.admin.views import GroupMemberView

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
