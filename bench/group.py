"""Broker groups with slaves, for measurements: who writes and who is in sync by their leases, how
to lose a member and to get it back.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from signal import SIGKILL, Signals

import grpc

from bench.stage import QUEUE_COUNT
from cometmq.admin import local, ops
from cometmq.admin.connection import Connection
from cometmq.admin.local import LocalProcess
from cometmq.model import FlushMode, ReplicationMode
from cometmq.replication.lease import LeaseRecord, record_from
from cometmq.v1 import member_pb2, member_pb2_grpc

READY_S_MAX = 60.0
ANSWER_S_MAX = 2.0
POLL_S = 0.01


class Groups:
    """The broker groups of a running cluster."""

    def __init__(self, folder: Path, namesrv: str) -> None:
        self.namesrv = namesrv
        self._folder = folder

    def lease(self, group: str = "g1") -> LeaseRecord:
        """What the group's lease says now."""
        path = self._folder / local.LEASES / f"{group}.json"
        return record_from(json.loads(path.read_text())["record"])

    def member(self, member_id: int, group: str = "g1") -> LocalProcess:
        found = self._find(member_id, group)
        assert found is not None, (group, member_id)
        return found

    def _find(self, member_id: int, group: str) -> LocalProcess | None:
        """None: it is about to be started."""
        running = local.status(self._folder)
        assert running is not None
        names = (f"{group}-{member_id}", group)  # who stands alone has no number
        return next((process for process in running.processes if process.name in names), None)

    def log_of(self, member_id: int, group: str = "g1") -> Path:
        return self._folder / self.member(member_id, group).name / "log.txt"

    def in_sync(self, group: str = "g1") -> set[int]:
        return {replica_id.member_id for replica_id in self.lease(group).in_sync}

    def log_end(self, member_id: int, group: str = "g1") -> int:
        """The end of its log on its disk; 0 when it does not answer."""
        process = self._find(member_id, group)
        if process is None or not process.internal_address:
            return 0
        with grpc.insecure_channel(process.internal_address) as channel:
            stub = member_pb2_grpc.MemberServiceStub(channel)
            try:
                answer = stub.DescribeReplica(
                    member_pb2.DescribeReplicaRequest(), timeout=ANSWER_S_MAX
                )
            except grpc.RpcError:
                return 0
        return answer.log_end_offset

    def signal(self, member_id: int, number: Signals, group: str = "g1") -> None:
        self.member(member_id, group).id.signal(number)

    def kill(self, member_id: int, group: str = "g1") -> float:
        """kill -9; when, in seconds since 1970."""
        process = self.member(member_id, group)
        process.id.signal(SIGKILL)
        killed_s = time.time()
        wait_for(lambda: not process.alive, f"the end of {process.name}")
        return killed_s

    def wipe(self, member_id: int, group: str = "g1") -> None:
        """A new disk for a member that does not run."""
        shutil.rmtree(self.store_of(member_id, group))

    def store_of(self, member_id: int, group: str = "g1") -> Path:
        return self._folder / f"{group}-{member_id}" / "store"

    def start(self) -> None:
        """The members that do not run."""
        asyncio.run(local.up(self._folder))

    def wait_in_sync(self, *members: int, group: str = "g1") -> float:
        """Until these are in sync and nobody else; seconds that it took. TimeoutError."""
        started_s = time.monotonic()
        wait_for(lambda: self.in_sync(group) == set(members), f"members {members} in sync")
        return time.monotonic() - started_s


def wait_for(
    condition: Callable[[], bool], what: str, poll_s: float = POLL_S, s_max: float = READY_S_MAX
) -> None:
    """TimeoutError."""
    deadline_s = time.monotonic() + s_max
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{what}: not within {s_max:.0f} s")
        time.sleep(poll_s)


@contextmanager
def groups(
    folder: Path, slaves: int, *, count: int = 1, options: Mapping[str, str] | None = None
) -> Iterator[Groups]:
    """A name server and broker groups with so many slaves, all in sync; gone afterwards."""
    asyncio.run(local.down(folder, purge=True))  # what an interrupted run may have left
    try:
        running = asyncio.run(
            local.up(folder, broker_count=count, slave_count=slaves, options=options or {})
        )
        found = Groups(folder, running.namesrv)
        for number in range(1, count + 1):
            if slaves:
                found.wait_in_sync(*range(slaves + 1), group=f"g{number}")
        yield found
    finally:
        asyncio.run(local.down(folder, purge=True))


def create_topic(
    namesrv: str, name: str, replication: ReplicationMode, *broker_groups: str
) -> None:
    """With flush mode async."""

    async def create() -> None:
        async with Connection(namesrv) as connection:
            await ops.create_topic(
                connection,
                name,
                read_queue_count=QUEUE_COUNT,
                write_queue_count=QUEUE_COUNT,
                flush_mode=FlushMode.ASYNC,
                replication_mode=replication,
                broker_groups=broker_groups,
            )

    asyncio.run(create())
