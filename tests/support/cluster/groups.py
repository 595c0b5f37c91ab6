"""Broker groups with slaves, as real processes: the local cluster of the command, with what tests
do to it.
"""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

from cometmq.admin import brokers, local, ops, processes
from cometmq.admin.connection import Connection, until
from cometmq.admin.views import BrokerMemberView, HandoverView
from cometmq.errors import CometError
from tests.support.cluster.broker import ANY_DISK, BrokerClient

DEADLINE_S = 30.0
# Small files, so that copies cross their ends; short intervals, so that nothing waits.
OPTIONS = {
    "mapped_file_size_commit_log": str(1024 * 1024),
    "mapped_file_size_consume_queue": "4000",
    "max_hash_slot_num": "64",
    "max_index_num": "256",
    **{name: str(ratio) for name, ratio in ANY_DISK.items()},
    "flush_interval_commit_log": "20",
    "flush_commit_log_least_pages": "0",
    "offset_record_interval_s": "0.05",
    "lease_poll_s": "0.2",
    "lease_renew_s": "0.5",
}


class LocalGroup:
    """One broker group, ``g1``, of members 0, 1, …; :meth:`client` gives stubs for one of them."""

    def __init__(
        self, directory: Path, slaves: int, connection: Connection, options: dict[str, str]
    ) -> None:
        self.connection = connection
        self._options = options
        self._directory = directory
        self._slaves = slaves
        self._clients: dict[int, BrokerClient] = {}

    @property
    def cluster(self) -> local.LocalCluster:
        found = local.status(self._directory)
        assert found is not None
        return found

    @property
    def namesrv(self) -> str:
        return self.cluster.namesrv

    def process(self, member_id: int) -> local.LocalProcess:
        return next(p for p in self.cluster.brokers if p.member_id == member_id)

    def log(self, member_id: int) -> str:
        return self.cluster.log(self.process(member_id).name).read_text()

    def client(self, member_id: int) -> BrokerClient:
        if member_id not in self._clients:
            process = self.process(member_id)
            self._clients[member_id] = BrokerClient(process.address, process.internal_address)
        return self._clients[member_id]

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()

    async def start(self) -> Self:
        """Start what does not run."""
        await local.up(
            self._directory, broker_count=1, slave_count=self._slaves, options=self._options
        )
        return self

    async def kill(self, member_id: int) -> None:
        """SIGKILL, then wait until it is gone."""
        process = self.process(member_id)
        process.id.signal(signal.SIGKILL)
        await processes.stop([process.id], grace_s=5.0)

    async def stop(self, member_id: int) -> None:
        """SIGTERM, then wait until it is gone."""
        await processes.stop([self.process(member_id).id], grace_s=DEADLINE_S)

    async def members(self) -> dict[int, BrokerMemberView]:
        return {view.member_id: view for view in await brokers.describe(self.connection)}

    async def writer(self) -> int:
        """Wait for a writer that answers; its member id."""
        found: list[int] = []

        async def there() -> bool:
            members = await self.members()
            found[:] = [n for n, m in members.items() if m.role == "writer" and m.reachable]
            return bool(found)

        assert await until(there, DEADLINE_S), await self.members()
        return found[0]

    async def in_step(self) -> None:
        """Wait until every member has all that the writer has, on its disk."""

        async def equal() -> bool:
            members = list((await self.members()).values())
            ends = {member.log_flushed_offset for member in members}
            ends |= {member.log_appended_offset for member in members}
            roles = sorted(member.role for member in members)
            wanted = ["follower"] * self._slaves + ["writer"]
            return roles == wanted and len(ends) == 1 and None not in ends

        assert await until(equal, DEADLINE_S), await self.members()

    async def step_down(self) -> HandoverView:
        """A hand-over; tried again while the follower is not there yet."""
        done: list[HandoverView] = []

        async def handed_over() -> bool:
            try:
                done.append(await brokers.step_down(self.connection, "g1"))
            except CometError:
                return False
            return True

        assert await until(handed_over, DEADLINE_S), self.log(0) + self.log(1)
        return done[0]

    async def assert_logs_equal(self) -> int:
        """Every member has the same bytes, from the highest minimum to the common end; how many."""
        sums = await brokers.compare_logs(self.connection)
        assert len(sums) == self._slaves + 1
        assert all(view.equal for view in sums), sums
        return sums[0].to_offset - sums[0].from_offset


@asynccontextmanager
async def local_group(directory: Path, slaves: int = 1, **more: str) -> AsyncIterator[LocalGroup]:
    """A name server and a broker group that is complete and in step; all gone at the end. ``more``:
    options of the members.
    """
    options = OPTIONS | more
    try:
        cluster = await local.up(directory, broker_count=1, slave_count=slaves, options=options)
        async with Connection(cluster.namesrv) as connection:
            await ops.wait_for_brokers(connection, ("g1",), deadline_s=DEADLINE_S)
            group = LocalGroup(directory, slaves, connection, options)
            try:
                await group.in_step()
                yield group
            finally:
                await group.close()
    finally:
        await local.down(directory, grace_s=10.0)
