"""A whole cluster for a chaos run: two name servers, a broker group, a pullhold,
clients that write a history, and the lease, which is an object of a Kubernetes API (a model of
one) at an address of its own, so that it can be cut off from anybody.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Collection
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import grpc

from cometmq.admin import brokers
from cometmq.admin.connection import Connection
from cometmq.admin.views import BrokerMemberView
from cometmq.errors import CometError, TopicNotFound
from cometmq.messaging.retry import retry_topic
from cometmq.rpc.interceptors import error_from
from tests.chaos import consumers
from tests.chaos.later import Later, all_have_ended, all_is_received
from tests.chaos.machines import (
    AnyNetwork,
    Clients,
    Machine,
    Member,
    Server,
    Service,
    write_kubeconfig,
)
from tests.chaos.topics import GROUP, queues_of
from tests.support.cluster.broker import ANY_DISK, BrokerClient
from tests.support.cluster.network import Network
from tests.support.cluster.proxies import ProxyNetwork
from tests.support.faults.history import Recorder
from tests.support.kube.lease_api import lease_api
from tests.support.waiting import until_async

CLIENTS, BRIEF, LEASE = "clients", "brief", "lease"
CONSUMERS = 2  # processes with a member of each consumer group: as many as queues of a topic
STEADY_S = 4.0  # longer than a message waits that was sent back
PREFIX = "cometmq.io/"  # of the lease's annotations
FLOWING_COUNT = 50  # acknowledged messages
QUIET_S = 200.0  # within which clients come to the end
HEALED_S = 120.0  # within which all must be well again when nothing is wrong any more
NEAR_BYTES = 64 * 1024  # a copy so near to its writer's end is in step
# Small files, so that logs cross their ends; short intervals, so that nothing waits.
OPTIONS: dict[str, object] = {
    "broker_group": GROUP,
    "lease": f"kubernetes://chaos/{GROUP}",
    "register_namesrv_period": 2_000,
    "mapped_file_size_commit_log": 512 * 1024,
    "mapped_file_size_consume_queue": 40_000,
    "max_hash_slot_num": 1_000,
    "max_index_num": 4_000,
    "flush_interval_commit_log": 300,
    "flush_commit_log_least_pages": 0,
    "offset_record_interval_s": 0.2,
    "transaction_check_interval": 4_000,
    "transaction_check_max": 100,
    **ANY_DISK,
}


class Size(NamedTuple):
    """Of a broker group: how many members, and how many of them have to be in sync."""

    members: int
    in_sync_min: int


class Cluster:
    """Use as an async context manager; at its end nothing of it runs."""

    def __init__(
        self,
        directory: Path,
        size: Size,
        *,
        namespaces: bool,
        own_disks: bool,
        has_groups: bool = False,
        has_later: bool = False,
        own_clocks: bool = False,
    ) -> None:
        """``namespaces``: each node gets one, else all are behind proxies. ``has_groups``: the
        groups of :mod:`tests.chaos.consumers` are there. ``has_later``: those of messages that come
        later (:mod:`tests.chaos.later`). ``own_clocks``: those of members may be wrong.
        """
        self.has_groups = has_groups
        self.has_later = has_later
        self.directory = directory
        self._size = size
        self._options = {**OPTIONS, "min_in_sync_replicas": size.in_sync_min}
        self._history = directory / "clients.jsonl"
        self._own_disks = own_disks
        self._own_clocks = own_clocks
        self.network: AnyNetwork = Network() if namespaces else ProxyNetwork()
        self._stack = ExitStack()
        self.fallen: list[str] = []  # processes that ended by themselves
        self.damage_found = 0  # places that `store verify` was to find

    async def __aenter__(self) -> Self:
        self._stack.enter_context(self.network)
        self.leases = self._stack.enter_context(lease_api(self.network.add_address(LEASE)))
        port = int(self.leases.address.rpartition(":")[2])
        api = f"http://{self.network.forward(LEASE, port)}:{port}"
        write_kubeconfig(self.directory / "kubeconfig.json", api)
        self.recorder = self._stack.enter_context(Recorder(self.directory / "faults.jsonl"))
        self.namesrvs = [self._namesrv(name) for name in ("n0", "n1")]
        self.namesrv = ";".join(f"{server.address}:9876" for server in self.namesrvs)
        self.pullhold = Server(
            *(self.directory, self.network, "p0", "pullhold"), namesrv=self.namesrv, port=10921
        )
        self.pullhold.advertise()
        self.members = [
            Member(self.directory, self.network, number, own_disk=self._own_disks)
            for number in range(self._size.members)
        ]
        self.clients = Machine(self.directory, self.network, CLIENTS)
        self.brief = Clients(self.directory, self.network, BRIEF)
        count = CONSUMERS + 1 if self.has_groups else 0
        self.consumers = [
            Clients(self.directory, self.network, f"c{number}", "consumers")
            for number in range(count)
        ]
        self.later = Later(self.directory, self.network) if self.has_later else None
        peers = ";".join(f"{m.member_id}@{m.address}:{m.internal_port}" for m in self.members)
        for member in self.members:
            member.options = {"namesrv": self.namesrv, "peers": peers, **self._options}
            if self._own_clocks:
                member.have_own_clock()
        self.connection = Connection(self.namesrv)
        for server in self.servers():
            server.start()
        await self.healed()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.connection.__aexit__()
        with self._stack:  # its threads end however this does: else the process would not
            for machine in self.machines():
                machine.kill()
            for member in self.members:
                if member.disk is not None:
                    member.disk.unmount()

    def _namesrv(self, name: str) -> Server:
        values = self.directory / f"{name}.json"
        return Server(
            *(self.directory, self.network, name, "namesrv"), port=9876, kv_config_path=values
        )

    def servers(self) -> list[Service]:
        return [*self.namesrvs, *self.members, self.pullhold]

    def machines(self) -> list[Machine]:
        later = [] if self.later is None else self.later.machines()
        return [self.clients, self.brief, *self.consumers, *later, *self.servers()]

    def consuming(self) -> list[Clients]:
        """The consumers that are always there. The last one joins and leaves."""
        return self.consumers[:-1]

    # --- who is who -------------------------------------------------------------------------------

    async def views(self) -> list[BrokerMemberView]:
        try:
            return await brokers.describe(self.connection)
        except CometError:
            return []

    def writer(self) -> Member:
        """The member that writes, by the lease."""
        holder_id: int = self._lease()["holder_id"]
        return self.members[holder_id]

    def in_sync(self) -> set[int]:
        """The members that are in sync, by the lease."""
        return {member_id for member_id, _ in self._lease()["in_sync"]}

    async def note_darkness(self, members: Collection[Member]) -> None:
        """These are about to lose their power: note what has to outlive that if nobody in sync is
        left.
        """
        in_sync = self.in_sync()
        if in_sync <= {member.member_id for member in members}:
            views = [view for view in await self.views() if view.member_id in in_sync]
            self.recorder.dark(max((view.log_flushed_offset or 0 for view in views), default=0))

    def followers(self) -> list[Member]:
        writer = self.writer()
        return [member for member in self.members if member is not writer]

    def names(self, *machines: Machine) -> list[str]:
        return [machine.name for machine in machines]

    def others(self, machine: Machine) -> list[str]:
        """All names in the network but a machine's own."""
        every = [LEASE, *(other.name for other in self.machines())]
        return [name for name in every if name != machine.name]

    # --- waiting ----------------------------------------------------------------------------------

    async def healed(self) -> None:
        """Wait until one member writes, and the others follow it closely, and count for it; and
        until clients, if there are any, hear from it.
        """
        before = self._history.stat().st_size if self.clients.running else 0

        async def is_well() -> bool:
            return await self._is_well() and (
                not self.clients.running or _acknowledged(self._history, before) >= FLOWING_COUNT
            )

        await self.until("all members serve, in sync", is_well)

    async def _is_well(self) -> bool:
        for server in self.servers():  # what has ended by itself starts, as in Kubernetes
            if server.process is not None and not server.running:
                self.fallen.append(f"{server.name}: {server.process.returncode}")
                server.revive()
        views = await self.views()
        roles = sorted(view.role for view in views if view.reachable and not view.refusal)
        behind = [NEAR_BYTES if v.behind_bytes is None else v.behind_bytes for v in views]
        wanted = ["follower"] * (self._size.members - 1) + ["writer"]
        if roles != wanted or max(behind) >= NEAR_BYTES:
            return False
        return len(self.in_sync()) == self._size.members

    async def until(
        self, what: str, condition: Callable[[], Awaitable[bool]], within_s: float = HEALED_S
    ) -> None:
        try:
            await until_async(condition, within_s, pause_s_max=0.1)
        except TimeoutError:
            raise AssertionError(
                f"{what}: not within {within_s:g} s; {await self.views()}"
            ) from None

    # --- clients ----------------------------------------------------------------------------------

    async def load(self, topics: list[str]) -> None:
        """Start the clients; they know the topics already."""
        command = [sys.executable, "-m", "tests.chaos.workload"]
        self._history.touch()
        self.clients.spawn(*command, self.namesrv, str(self._history), *topics)
        self.brief.arguments = [self.namesrv, *topics]
        self.brief.start()
        for consumer in self.consumers:
            consumer.arguments = [self.namesrv, *consumers.TOPICS]
        for consumer in self.consuming():
            consumer.start()
        if self.later is not None:
            self.later.start(self.namesrv)

    def refusals(self, name: str) -> int:
        """How many sends were refused with this error by now."""
        return self._history.read_bytes().count(f'"{name}"'.encode())

    async def quiet(self) -> None:
        """Let the producers end, and the readers come to the end of everything. The brief clients
        first: what they leave unread the others read.
        """
        await self.finish(self.brief)
        await self.healed()
        await self.finish(self.clients)
        if self.has_groups:
            await self.until("the groups come to the end", self._groups_are_done, QUIET_S)
        for consumer in self.consuming():
            await self.finish(consumer)
        if self.later is not None:
            await self._quiet_later(self.later)

    async def _quiet_later(self, clients: Later) -> None:
        """No more questions; no new transactions; when all have ended, no new messages; when all
        are received, the end.
        """
        await self.finish(clients.operator)
        for decider in clients.deciders:
            decider.tell()
        await self.until("all transactions end", partial(all_have_ended, self.connection), QUIET_S)
        for each in (*clients.deciders, clients.timed):
            await self.finish(each)
        await self.until("all messages are received", self._all_is_received, QUIET_S)
        for receiver in clients.receivers:
            await self.finish(receiver)

    async def _all_is_received(self) -> bool:
        client = self.client(self.writer())
        try:
            return await all_is_received(client)
        except (CometError, grpc.aio.AioRpcError):
            return False
        finally:
            await client.close()

    async def _groups_are_done(self) -> bool:
        """Both groups have committed everything, and nothing comes again."""
        before = await self._ahead()
        if before is None:
            return False
        await asyncio.sleep(STEADY_S)
        return before == await self._ahead()

    async def _ahead(self) -> list[int] | None:
        """The ends of all queues that groups read; None: one of them is not at the end."""
        client = self.client(self.writer())
        ends = []
        try:
            for group in (consumers.ORDERED, consumers.RETRIED):
                queues = queues_of(consumers.TOPICS)
                if group == consumers.RETRIED:
                    queues.append((retry_topic(group), 0))
                for topic, number in queues:
                    end = await end_of(client, topic, number)
                    at = await client.committed(group, topic, number)
                    if end and (at is None or at.offset < end):
                        return None
                    ends.append(end)
        except (CometError, grpc.aio.AioRpcError):
            return None
        finally:
            await client.close()
        return ends

    async def finish(self, clients: Machine) -> None:
        """Let them come to their end."""
        assert clients.process is not None
        assert clients.running, clients.log.read_text()[-4000:]
        clients.tell()

        async def ended() -> bool:
            return not clients.running

        await self.until("the clients end", ended, QUIET_S)
        assert clients.process.returncode == 0, clients.log.read_text()[-4000:]

    def client(self, member: Member) -> BrokerClient:
        return BrokerClient(
            f"{member.address}:{member.port}", f"{member.address}:{member.internal_port}"
        )

    # --- the lease --------------------------------------------------------------------------------

    def lease_records(self) -> list[dict[str, Any]]:
        """The lease as it was written, oldest first."""
        return [_record(body) for body in self.leases.accepted]

    def _lease(self) -> dict[str, Any]:
        return _record(self.leases.accepted[-1])


async def end_of(client: BrokerClient, topic: str, queue_id: int) -> int:
    """0 also for a topic that is not there: nothing was sent back yet."""
    try:
        return (await client.status(topic, queue_id)).max_offset
    except grpc.aio.AioRpcError as error:
        if isinstance(error_from(error), TopicNotFound):
            return 0
        raise


def _record(body: dict[str, Any]) -> dict[str, Any]:
    """What a Lease object says in its annotations."""
    notes = body["metadata"]["annotations"].items()
    ours = {k.removeprefix(PREFIX): text for k, text in notes if k.startswith(PREFIX)}
    return {key: json.loads(text) for key, text in ours.items()}


def _acknowledged(history: Path, start: int) -> int:
    """How many sends were answered well in what was written from ``start`` on."""
    with history.open("rb") as file:
        file.seek(start)
        return file.read().count(b'"ok"')
