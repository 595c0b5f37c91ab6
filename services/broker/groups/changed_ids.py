"""A warning when the client ids of a group change at restarts: static members then stay behind."""

from __future__ import annotations

from cometmq.messaging.groups import BACK_S, changed_ids
from cometmq.rpc.ticks import tick
from cometmq.telemetry import fields, logger
from services.broker.groups.membership import Groups

_log = logger(__name__)


class ChangedIds:
    """Logs each group once, until none of its members is away. Belongs to the event loop."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._logged: set[str] = set()

    async def watch(self) -> None:
        """Runs as long as the broker does."""
        while True:
            await tick(BACK_S)
            self.look()

    def look(self) -> None:
        """Log what is new."""
        away = self._groups.with_away()
        self._logged &= set(away)
        for group in away:
            if group in self._logged:
                continue
            if why := changed_ids(self._groups.stays(group)):
                self._logged.add(group)
                _log.warning(
                    "client ids of a group seem to change at restarts",
                    extra=fields(group=group, why=why),
                )
