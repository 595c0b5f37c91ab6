"""One broker group loses its writer while everybody works: kill -9, and nobody is asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL

from cometmq.admin import group_status, local
from cometmq.admin.connection import Connection, until
from cometmq.admin.local import LocalCluster
from cometmq.admin.views import GroupStatusView
from examples.roundtrip.handover import now_ms
from examples.roundtrip.tally import Tally

IN_SYNC_S_MAX = 30.0
TAKEN_OVER_S_MAX = 60.0


@dataclass(frozen=True, slots=True)
class Failover:
    """A writer's death and what followed, in milliseconds since 1970."""

    broker_group: str
    killed_member: int
    new_member: int
    epoch: int
    lease_s: float
    killed_ms: int
    seen_ms: int  # the new writer told that it is one

    @property
    def text(self) -> str:
        """One line."""
        seconds = (self.seen_ms - self.killed_ms) / 1000
        return (
            f"member {self.killed_member}, the writer, was killed; member {self.new_member} took "
            f"over: epoch {self.epoch} after {seconds:.1f} s, {self.lease_s:g} s of lease included"
        )

    def pause_ms(self, tally: Tally) -> int | None:
        """See :meth:`examples.roundtrip.handover.HandOver.pause_ms`."""
        return tally.pause_ms(self.broker_group, self.killed_ms, self.seen_ms)


async def kill_writer(
    connection: Connection, cluster: LocalCluster, broker_group: str, lease_s: float
) -> Failover:
    """Kill the writer once every member is in sync; returns when another has taken over. Errors:
    TimeoutError, and those of the catalogue.
    """
    members = [p for p in cluster.brokers if p.broker_group == broker_group]
    before = await _reaches(
        connection,
        broker_group,
        lambda group: group.in_sync is not None and len(group.in_sync) == len(members),
        IN_SYNC_S_MAX,
    )
    writer = next(p for p in members if p.member_id == before.writer)
    writer.id.signal(SIGKILL)
    killed_ms = now_ms()
    after = await _reaches(
        connection, broker_group, lambda group: group.epoch > before.epoch, TAKEN_OVER_S_MAX
    )
    assert after.writer is not None
    return Failover(
        broker_group,
        writer.member_id,
        after.writer,
        after.epoch,
        lease_s,
        killed_ms,
        now_ms(),
    )


async def _reaches(
    connection: Connection,
    broker_group: str,
    wanted: Callable[[GroupStatusView], bool],
    seconds_max: float,
) -> GroupStatusView:
    """The group as soon as it has a writer and is as wanted."""
    found: list[GroupStatusView] = []

    async def reached() -> bool:
        groups = await group_status.describe(connection)
        found.extend(
            group
            for group in groups
            if group.broker_group == broker_group and group.writer is not None and wanted(group)
        )
        return bool(found)

    if not await until(reached, seconds_max):
        raise TimeoutError(f"{broker_group} is not as it should be after {seconds_max:.0f} s")
    return found[-1]


async def bring_back(folder: Path) -> LocalCluster:
    """Start the killed member again: a follower now. Errors: those of the catalogue."""
    return await local.up(folder)
