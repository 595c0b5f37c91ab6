"""Members of a broker group in the test's own loop, one App after the other: the same ports, the
same folder. In a process each has an event loop of its own.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import grpc

from cometmq.clock import Clock
from cometmq.errors import StoreFailed
from cometmq.member.app import MemberApp
from cometmq.member.config import MemberConfig
from cometmq.member.main import bound, with_ports
from cometmq.member.role_change import FOLLOWER_MODULE, RoleChange
from cometmq.member.state import opening
from cometmq.member.state.follower import FollowerStorage
from cometmq.member.storage.member_storage import MemberStorage
from cometmq.rpc.channels import open_channel
from cometmq.store.base import BaseStore
from cometmq.v1 import member_pb2, member_pb2_grpc
from services.broker import app as broker_app
from services.broker.replication.insync import InSyncSet
from services.haslave import app as haslave_app
from tests.support.cluster.broker import BrokerClient, config_for
from tests.support.waiting import until, until_async

APPS: dict[str, type[MemberApp]] = {
    "services.broker": broker_app.App,
    "services.haslave": haslave_app.App,
}


class LiveMember:
    """One member. ``changes``: the roles it took, oldest first."""

    def __init__(self, config: MemberConfig) -> None:
        self.config = config
        self.clock: Clock | None = None  # of its machine; None: the right one
        self.changes: list[RoleChange] = []
        self.store: BaseStore | None = None
        self.role = ""
        self.metrics_address = ""
        self._running: asyncio.Task[None] | None = None
        self._client: BrokerClient | None = None
        self._channel: grpc.aio.Channel | None = None
        self._stop = asyncio.Event()
        self._crashed = False
        self._app: MemberApp | None = None
        self._internal_address = ""

    async def start(self, role: str = "") -> None:
        """Be born, and wait until it serves, in ``role`` if that is given."""
        self._stop.clear()
        self._crashed = False
        self._running = asyncio.create_task(self._live())
        await self.until_role(role)

    async def until_role(self, role: str = "") -> None:
        assert self._running is not None
        running = self._running
        await until(lambda: running.done() or (self.role and role in ("", self.role)))
        if running.done():
            running.result()
            raise AssertionError("the member has ended")

    async def _live(self) -> None:
        before: RoleChange | None = None
        module = FOLLOWER_MODULE
        while True:
            ports = await bound(self.config, rebinding=self._internal_address != "")
            try:
                app = APPS[module](self.config, ports, before=before, clock=self.clock)
                change = await self._play(app, ports.clients.address, ports.internal.address)
            finally:
                self.role = ""
                await ports.stop(0)
                if before is not None:
                    await asyncio.to_thread(before.close_store)
            if change is None:
                return
            before = change
            self.changes.append(change)
            module = change.module
            # Not the port of the metrics: between two lives in one process it may be taken.
            self.config = replace(
                with_ports(self.config, change.ports), metrics_port=self.config.metrics_port
            )

    async def _play(self, app: MemberApp, *addresses: str) -> RoleChange | None:
        try:
            async with app:
                self._app = app
                self._internal_address = addresses[1]
                self.config = replace(
                    self.config, internal_port=int(addresses[1].rpartition(":")[2])
                )
                if app._change is None:
                    await self._forget_clients()
                    self._client = BrokerClient(*addresses)
                    self._channel = open_channel(addresses[1])
                    self.metrics_address = app.metrics_address
                    self.role = app.role
                waits = [asyncio.ensure_future(w) for w in (app.ended(), self._stop.wait())]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for wait in waits:
                    wait.cancel()
                self.role = ""
        except* StoreFailed:
            if not self._crashed:
                raise
        if self._stop.is_set():
            if app.change is not None:
                await asyncio.to_thread(app.change.close_store)
            return None
        return app.change

    def reconfigure(self, **options: Any) -> None:
        """Options of the next life."""
        self.config = replace(self.config, **options)

    @property
    def opened(self) -> BaseStore:
        """The store of its present life, or of its last."""
        assert self.store is not None
        return self.store

    @property
    def internal_address(self) -> str:
        """Where other members reach it, in this life and the next."""
        assert self._internal_address
        return self._internal_address

    @property
    def client(self) -> BrokerClient:
        assert self._client is not None
        return self._client

    @property
    def members(self) -> member_pb2_grpc.MemberServiceAsyncStub:
        assert self._channel is not None
        return member_pb2_grpc.MemberServiceStub(self._channel)

    async def retire(self) -> None:
        """As by SIGTERM, with what a role does for others first."""
        assert self._app is not None
        await self._app._retire()
        await self.stop()

    async def stop(self) -> None:
        """As by SIGTERM, but for that."""
        self._stop.set()
        if self._running is not None:
            await self._running
            self._running = None
        await self._forget_clients()

    async def crash(self) -> None:
        """As by SIGKILL: nothing is written any more."""
        assert self.store is not None
        self._crashed = True
        self.store.abandon()
        with mock.patch.object(self.store, "abandon"):
            await self.stop()

    async def _forget_clients(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None
        if self._channel is not None:
            await self._channel.close()
            self._channel = None


class LiveGroup:
    """Members 0, 1, … of one group, with a lease in a file."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.directory = directory
        self.lease = directory / "lease.json"
        self._options = options
        self._members: dict[int, LiveMember] = {}

    def __getitem__(self, member_id: int) -> LiveMember:
        if member_id not in self._members:
            config = config_for(
                self.directory / str(member_id),
                **{
                    "member_id": member_id,
                    "lease": self.lease.as_uri(),
                    "lease_renew_s": 0.1,
                    "lease_poll_s": 0.05,
                    **self._options,
                },
            )
            self._members[member_id] = LiveMember(config)
        return self._members[member_id]

    async def stop(self) -> None:
        for member in self._members.values():
            with suppress(StoreFailed):
                await member.stop()

    def lease_record(self) -> dict[str, Any]:
        record: dict[str, Any] = json.loads(self.lease.read_text())["record"]
        return record

    def in_sync(self) -> list[int]:
        """Who may take over, as the lease says."""
        return [replica_id[0] for replica_id in self.lease_record()["in_sync"]]

    async def all_in_sync(self, *members: int) -> None:
        """Wait until the lease says so, and its writer knows: it goes by that a moment later."""
        await until_async(lambda: self._known_in_sync(list(members)))

    async def _known_in_sync(self, members: list[int]) -> bool:
        if self.in_sync() != members:
            return False
        writers = [member for member in self._members.values() if member.role == "writer"]
        told = [
            await one.members.DescribeReplica(member_pb2.DescribeReplicaRequest())
            for one in writers
        ]
        return [list(status.writer_status.in_sync) for status in told] == [members]

    async def in_step(self) -> None:
        """Wait until all logs end at the same place."""
        await until(lambda: len({m.store.appended_offset for m in self._open()}) == 1)

    def _open(self) -> list[Any]:
        return [member for member in self._members.values() if member.store is not None]


@contextmanager
def validated() -> Iterator[None]:
    """Each storage keeps its promises after each turn of the loop that moved its positions, and so
    does the in-sync set that it asks.
    """
    broken: list[AssertionError] = []
    settle, show = MemberStorage.settle, FollowerStorage._show

    def check(storage: MemberStorage | FollowerStorage) -> None:
        try:
            storage.validate()
            if isinstance(storage, MemberStorage) and isinstance(storage.authority, InSyncSet):
                storage.authority.validate(storage.watermarks)
        except AssertionError as error:
            broken.append(error)

    def settle_and_check(storage: MemberStorage) -> None:
        settle(storage)
        asyncio.get_running_loop().call_soon(check, storage)

    def show_and_check(storage: FollowerStorage) -> None:
        show(storage)
        asyncio.get_running_loop().call_soon(check, storage)

    with (
        mock.patch.object(MemberStorage, "settle", settle_and_check),
        mock.patch.object(FollowerStorage, "_show", show_and_check),
    ):
        yield
    if broken:
        raise broken[0]


@asynccontextmanager
async def live_group(directory: Path, members: int = 2, **options: Any) -> AsyncIterator[LiveGroup]:
    """A group whose member 0 writes, the others follow. Not among the options but taken all the
    same: ``clocks`` of members that have another than the machine's, and the ``kind`` of group.
    """
    clocks: Mapping[int, Clock] = options.pop("clocks", {})
    kind: type[LiveGroup] = options.pop("kind", LiveGroup)
    group = kind(directory, **options)
    for member_id, clock in clocks.items():
        group[member_id].clock = clock

    def keep(opened: Any) -> Any:
        for member in group._members.values():
            if opened.store._opened.paths.root == member.config.store_path:
                member.store = opened.store
        return opened

    def open_writer(*arguments: Any, **more: Any) -> Any:
        return keep(opening.open_writer(*arguments, **more))

    def open_copy(*arguments: Any, **more: Any) -> Any:
        return keep(opening.open_copy(*arguments, **more))

    with (
        mock.patch.object(broker_app, "open_writer", open_writer),
        mock.patch.object(haslave_app, "open_copy", open_copy),
        validated(),
    ):
        try:
            await group[0].start("writer")
            for member_id in range(1, members):
                await group[member_id].start("follower")
            yield group
        finally:
            await group.stop()
