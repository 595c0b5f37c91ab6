"""A broker group whose members are processes of two releases, and what clients have in it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGTERM
from typing import Any

from cometmq.format import record
from cometmq.rpc.channels import open_channel
from cometmq.v1 import broker_pb2 as pb
from cometmq.v1 import common_pb2 as common
from cometmq.v1 import member_pb2, member_pb2_grpc
from scripts.releases import Program
from tests.support.cluster.broker import SYNC, BrokerClient
from tests.support.cluster.groups import OPTIONS
from tests.support.cluster.processes import Processes
from tests.support.waiting import PROCESSES_S, until, until_async

COMMIT = pb.TRANSACTION_RESOLUTION_COMMIT
TIMER_S = 4.0
INVISIBLE_MS = 300_000


class MixedGroup:
    """Members 0 and 1 of the group ``g1``, with a lease in a file."""

    def __init__(self, processes: Processes, directory: Path, namesrv: str) -> None:
        self.namesrv = namesrv
        self._processes = processes
        self._directory = directory
        self._lease = directory / "lease.json"
        self._clients: dict[int, BrokerClient] = {}
        self._starts: dict[int, int] = {0: 0, 1: 0}

    async def start(self, member_id: int, program: Program) -> None:
        """A member of this release, on its store; wait until it serves."""
        self._starts[member_id] += 1
        service = await asyncio.to_thread(
            self._processes.service_of,
            program,
            self._name(member_id),
            "haslave",
            **self._flags(member_id),
        )
        await self._forget(member_id)
        self._clients[member_id] = BrokerClient(service.address, service.internal_address)

    async def start_in_vain(self, member_id: int, program: Program, says: str) -> None:
        """A member that waits instead of serving; wait until its log says why."""
        self._starts[member_id] += 1
        flags = {**self._flags(member_id), "port": 0, "metrics_port": 0}
        words = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
        name = self._name(member_id)
        process = self._processes.spawn(
            name, [str(program.python), "-m", "services.haslave", *words], program.tree
        )
        log = self._processes.log(name)
        await until(lambda: says in log.read_text() or process.poll() is not None, PROCESSES_S)
        assert process.poll() is None, log.read_text()

    def _flags(self, member_id: int) -> dict[str, Any]:
        return {
            "internal_port": 0,
            "member_id": member_id,
            "broker_group": "g1",
            "store_path": self._directory / str(member_id),
            "lease": self._lease.as_uri(),
            "lease_duration_s": 2,
            "namesrv": self.namesrv,
            **OPTIONS,
        }

    async def kill(self, member_id: int) -> None:
        await asyncio.to_thread(self._processes.kill, self._name(member_id))

    async def end(self, member_id: int) -> None:
        """SIGTERM, as by Kubernetes: a writer hands its role over first."""
        await asyncio.to_thread(self._processes.end, self._name(member_id), SIGTERM)

    def __getitem__(self, member_id: int) -> BrokerClient:
        return self._clients[member_id]

    def _name(self, member_id: int) -> str:
        return f"member-{member_id}-{self._starts[member_id]}"

    async def until_writer(self, member_id: int) -> BrokerClient:
        """Wait until this member writes, alone or with the other."""

        def leads() -> bool:
            record = self.lease_record()
            return bool(record["opened"] and record["holder_id"] == member_id)

        await until(leads, PROCESSES_S)
        await until_async(lambda: self._writes(member_id), PROCESSES_S)
        return self[member_id]

    async def describe(self, member_id: int) -> member_pb2.DescribeReplicaResponse:
        async with open_channel(self[member_id].internal_address) as channel:
            stub = member_pb2_grpc.MemberServiceStub(channel)
            return await stub.DescribeReplica(
                member_pb2.DescribeReplicaRequest(), wait_for_ready=True, timeout=PROCESSES_S
            )

    async def _writes(self, member_id: int) -> bool:
        return (await self.describe(member_id)).role == common.MEMBER_ROLE_WRITER

    async def step_down(self, member_id: int) -> None:
        async with open_channel(self[member_id].internal_address) as channel:
            stub = member_pb2_grpc.MemberServiceStub(channel)
            await stub.StepDown(member_pb2.StepDownRequest())

    async def in_sync(self, *members: int) -> None:
        """Wait until these are."""
        wanted = list(members)
        await until(
            lambda: [one[0] for one in self.lease_record()["in_sync"]] == wanted, PROCESSES_S
        )

    def lease_record(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._lease.read_text())["record"]
        return found

    async def same_logs(self) -> None:
        """Wait until both members have the same bytes."""
        await until_async(self._are_equal, PROCESSES_S, pause_s_max=0.2)

    async def _are_equal(self) -> bool:
        sums = []
        for member_id in (0, 1):
            async with open_channel(self[member_id].internal_address) as channel:
                stub = member_pb2_grpc.MemberServiceStub(channel)
                status = await stub.DescribeReplica(member_pb2.DescribeReplicaRequest())
                whole = member_pb2.ChecksumLogRequest(to_offset=status.log_end_offset)
                sums.append((status.log_end_offset, (await stub.ChecksumLog(whole)).sha256))
        return sums[0] == sums[1]

    def errors(self) -> list[str]:
        """What members have logged as errors, but for commits that a hand-over leaves to the next
        writer's clients.
        """
        lines = [
            line
            for path in self._directory.glob("member-*.log")
            for line in path.read_text().splitlines()
        ]
        return [
            line
            for line in lines
            if ("Traceback" in line or " ERROR " in line) and "offsets are not written" not in line
        ]

    async def close(self) -> None:
        for member_id in list(self._clients):
            await self._forget(member_id)

    async def _forget(self, member_id: int) -> None:
        if (client := self._clients.pop(member_id, None)) is not None:
            await client.close()


@asynccontextmanager
async def mixed_group(directory: Path, name_server: Program) -> AsyncIterator[MixedGroup]:
    """No member runs yet; the name server is of that release."""
    with Processes(directory) as processes:
        namesrv = await asyncio.to_thread(
            processes.service_of,
            name_server,
            "namesrv",
            "namesrv",
            kv_config_path=directory / "kvConfig.json",
        )
        group = MixedGroup(processes, directory, namesrv.address)
        try:
            yield group
        finally:
            await group.close()


@dataclass
class Pending:
    """What clients have begun at one writer, to be ended at another. ``number`` names the round:
    each has topics of its own.
    """

    number: int
    due_ms: int = 0
    half: pb.HalfRef = field(default_factory=pb.HalfRef)
    run: pb.ReceivedRun = field(default_factory=pb.ReceivedRun)

    def topic(self, name: str) -> str:
        return f"{name}{self.number}"

    async def begin(self, writer: BrokerClient) -> None:
        """Messages, a commit, timers, a half, and leases of a group that receives."""
        for name in ("T", "D", "X", "P"):
            config = common.TopicConfig(
                name=self.topic(name),
                read_queue_count=1,
                write_queue_count=1,
                flush_mode=SYNC,
                replication_mode=common.REPLICATION_MODE_APPENDED,
            )
            await writer.admin.PutTopic(pb.PutTopicRequest(topic=config))
        await writer.send(self.topic("T"), 0, *(b"%d" % n for n in range(20)))
        generation = (await writer.status(self.topic("T"), 0)).generation
        [done] = await writer.commit(self._group, (self.topic("T"), 0, generation, 7))
        assert not done.HasField("error"), done
        self.due_ms = int((time.time() + TIMER_S) * 1000)
        timers = [
            pb.OutgoingMessage(topic=self.topic("D"), body=b"%d" % n, deliver_at_ms=self.due_ms)
            for n in range(3)
        ]
        await writer.stub.Send(pb.SendRequest(messages=timers))
        half = pb.OutgoingMessage(topic=self.topic("X"), body=b"half", producer_group="producers")
        [one] = (await writer.stub.Send(pb.SendRequest(messages=[half]))).sent
        self.half = one.half
        await writer.send(self.topic("P"), 0, *(b"%d" % n for n in range(4)))
        [self.run] = (await self._receive(writer, 3)).runs
        assert self.run.count == 3
        await self._ack(writer, pb.AckItem(handle=self.run.handle, first_offset=1, count=1))

    async def end(self, writer: BrokerClient) -> None:
        """All of it is as it was left."""
        assert await writer.bodies(self.topic("T"), 0) == [b"%d" % n for n in range(20)]
        position = await writer.committed(self._group, self.topic("T"), 0)
        assert position is not None
        assert position.offset == 7
        [left] = (await self._receive(writer, 9)).runs
        assert [one.body for one in record.decode_all(left.records)] == [b"3"]
        await self._ack(writer, pb.AckItem(handle=self.run.handle, first_offset=0, count=1))
        await self._ack(writer, pb.AckItem(handle=self.run.handle, first_offset=2, count=1))
        assert await writer.bodies(self.topic("X"), 0) == []
        ends = [pb.TransactionEnd(half=self.half, resolution=COMMIT)]
        await writer.stub.EndTransactions(
            pb.EndTransactionsRequest(producer_group="producers", ends=ends)
        )
        assert await writer.bodies(self.topic("X"), 0) == [b"half"]
        await until_async(lambda: self._has_timers(writer), PROCESSES_S)
        found = await writer.read_queue(self.topic("D"), 0)
        assert sorted(one.body for one in found) == [b"0", b"1", b"2"]
        assert all(one.store_time_ms >= self.due_ms for one in found)

    @property
    def _group(self) -> str:
        return f"G{self.number}"

    async def _has_timers(self, writer: BrokerClient) -> bool:
        return (await writer.status(self.topic("D"), 0)).appended_offset >= 3

    async def _receive(self, writer: BrokerClient, count: int) -> pb.ReceiveResponse:
        return await writer.stub.Receive(
            pb.ReceiveRequest(
                group=f"R{self.number}",
                subscriptions=[pb.Subscription(topic=self.topic("P"), filter=common.Filter())],
                max_count=count,
                invisible_ms=INVISIBLE_MS,
            )
        )

    async def _ack(self, writer: BrokerClient, item: pb.AckItem) -> None:
        request = pb.AckMessagesRequest(group=f"R{self.number}", items=[item])
        [result] = (await writer.stub.AckMessages(request)).results
        assert not result.HasField("error"), result
