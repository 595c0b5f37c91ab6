from __future__ import annotations

import pytest

from cometmq.messaging import groups as messaging
from cometmq.messaging.groups import MemberDetails, MemberTable
from services.broker.groups.changed_ids import ChangedIds
from services.broker.groups.membership import Groups

STATIC = MemberDetails(session_ms=60_000)


async def test_each_deploy_with_other_client_ids_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messaging, "BACK_S", 0.0)
    groups = Groups(MemberTable())
    changed = ChangedIds(groups)
    for deploy in (1, 2):
        groups.join("g", f"old-{deploy}", [], STATIC).leave()
        new = groups.join("g", f"new-{deploy}", [], STATIC)
        changed.look()
        changed.look()
        assert caplog.text.count("client ids of a group seem to change") == deploy
        assert f"old-{deploy} is away" in caplog.text
        new.leave(for_good=True)
        groups.remove_away("g", [f"old-{deploy}"])
        changed.look()
