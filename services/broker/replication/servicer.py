"""``MemberService`` of the writer: replication of the log, the hand-over."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from cometmq.errors import InvalidRequest, NotFollower
from cometmq.member.clocks import member_name
from cometmq.member.context import MemberContext, MemberCore
from cometmq.member.read.group_progress import GroupReads
from cometmq.member.rpc.member_servicer import MemberServicer, Pull
from cometmq.messaging.changes import KINDS, KINDS_OF_PROTOCOL_3
from cometmq.replication.follower import Ack, LogView
from cometmq.replication.handshake import FollowerIdentity, Handshake
from cometmq.replication.lease import ReplicaId
from cometmq.replication.refusals import Reason
from cometmq.replication.versions import Agreed, Release, introduced, own_release
from cometmq.v1 import common_pb2, member_pb2
from services.broker.replication.frames import pack
from services.broker.replication.handover import HandOver
from services.broker.replication.insync import InSyncSet
from services.broker.replication.replicas import Replicas, Sender

BOOT_MS_MAX = 2**53  # since the boot of a machine

Context = Any  # grpc.aio.ServicerContext, whose message types differ from method to method


class ReplicationServicer(MemberServicer):
    """Streams to followers, the in-sync set, and the hand-over."""

    def __init__(
        self,
        context: MemberContext,
        core: MemberCore,
        groups: GroupReads,
        pull: Pull,
        replicas: Replicas,
        in_sync: InSyncSet,
        hand_over: HandOver,
    ) -> None:
        super().__init__(context, core, groups, pull)
        config, identity = context.config, context.identity
        self._replicas = replicas
        self._in_sync = in_sync
        self._hand_over = hand_over
        self._log_file_bytes = config.mapped_file_size_commit_log
        self._promise_ms = round(config.lease_duration_s * 1000) if config.lease else 0
        self._state = core.state
        self._release = own_release(KINDS)
        self._handshake = Handshake(
            self._release,
            identity.cluster,
            identity.broker_group,
            config.member_id,
            config.peer_addresses(),
            replicas.refusals,
        )

    async def Replicate(  # type: ignore[override]  # answers with context.write
        self, request_iterator: object, context: Context
    ) -> None:
        first = await context.read()
        if first is grpc.aio.EOF:
            return
        with self._replicas.refusals.counting(Reason.ORDER):
            if first.WhichOneof("kind") != "hello":
                raise InvalidRequest("hello: must come first")
        replica_id = ReplicaId(first.hello.member_id, first.hello.store_id)
        release = self._release_of(first.hello)
        agreed, follower = self._checked(first.hello, release, replica_id)
        start = await self._replicas.start_of_copy(follower)
        # Before our hello: a follower that is refused must not adopt our epochs.
        self._check_free(replica_id, release)
        await context.write(member_pb2.ReplicateResponse(hello=self._hello(start, agreed)))
        if start != follower.log_end:
            return  # the follower cuts its log, and opens another stream
        # Two streams may have opened at once, and a new kind come into the log.
        self._check_free(replica_id, release)
        with self._replicas.join(replica_id, start, release.state_kinds) as sender:
            async with asyncio.TaskGroup() as tasks:
                reading = tasks.create_task(self._read_acks(sender, context))
                draining = tasks.create_task(self._gate.when_draining(self._gate.check))
                while (frame := await sender.next_frame()) is not None:
                    now_ms = self._replicas.clock.wall_ms()
                    answers_ms = sender.answers_boot_ms(self._clocks.boot_ms())
                    await context.write(pack(frame, self._store.epoch, now_ms, answers_ms))
                if not sender.has_let_go:
                    raise InvalidRequest("member_id: another stream of this member has come")
                reading.cancel()
                draining.cancel()

    def _release_of(self, hello: member_pb2.FollowerHello) -> Release:
        with self._replicas.refusals.counting(Reason.VERSION):
            return introduced(
                hello.protocol_version,
                hello.protocol_version_max,
                hello.format_version,
                hello.features,
                hello.state_kinds,
                KINDS_OF_PROTOCOL_3,
            )

    def _check_free(self, replica_id: ReplicaId, release: Release) -> None:
        self._handshake.check_state(release, self._state.kinds_used)
        self._handshake.check_free(
            replica_id, self._replicas.connected(), self._replicas.clock.boottime_s()
        )

    async def _read_acks(self, sender: Sender, context: Context) -> None:
        while (request := await context.read()) is not grpc.aio.EOF:
            with self._replicas.refusals.counting(Reason.ORDER):
                if request.WhichOneof("kind") != "ack":
                    raise InvalidRequest("ack: nothing else may come after the hello")
            ack = request.ack
            self._compare_clocks(sender, ack)
            sender.acked(
                Ack(
                    ack.appended_offset,
                    ack.flushed_offset,
                    ack.answers_boot_ms,
                    min(ack.no_election_ms, self._promise_ms),
                    ack.leaving,
                )
            )

    def _compare_clocks(self, sender: Sender, ack: member_pb2.ReplicaAck) -> None:
        """Raises InvalidRequest for times that no clock shows."""
        with self._replicas.refusals.counting(Reason.ACK):
            if ack.sent_ms < 0 or not 0 <= ack.sent_boot_ms <= BOOT_MS_MAX:
                raise InvalidRequest(f"ack: sent at {ack.sent_ms}, {ack.sent_boot_ms} since boot")
        if ack.HasField("sent_ms") and ack.answers_boot_ms:
            name = member_name(sender.replica.member_id)
            self._clocks.note(name, ack.answers_boot_ms, ack.sent_ms)
            sender.came(ack.sent_boot_ms, self._clocks.boot_ms())

    def _checked(
        self, hello: member_pb2.FollowerHello, release: Release, replica_id: ReplicaId
    ) -> tuple[Agreed, LogView]:
        agreed = self._handshake.check(
            FollowerIdentity(release, hello.cluster, hello.broker_group, replica_id)
        )
        return agreed, self._handshake.checked_log(
            ((epoch.epoch, epoch.start_offset) for epoch in hello.epochs),
            hello.log_min_offset,
            hello.log_end_offset,
            hello.last_record_offset,
            hello.last_record_crc32,
        )

    def _hello(self, start: int, agreed: Agreed) -> member_pb2.WriterHello:
        return member_pb2.WriterHello(
            protocol_version=agreed.protocol,
            format_version=self._release.format_version,
            features=sorted(self._release.features),
            epochs=[
                member_pb2.EpochStart(epoch=number, start_offset=offset)
                for number, offset in self._store.epochs
            ],
            start_offset=start,
            log_file_bytes=self._log_file_bytes,
            no_election_ms=self._promise_ms,
            member_id=self._config.member_id,
        )

    async def StepDown(
        self, request: member_pb2.StepDownRequest, context: Context
    ) -> member_pb2.StepDownResponse:
        wanted = request.member_id if request.HasField("member_id") else None
        done = await self._hand_over.step_down(wanted)
        return member_pb2.StepDownResponse(member_id=done.member_id, log_end_offset=done.log_end)

    async def DescribeReplica(
        self, request: member_pb2.DescribeReplicaRequest, context: Context
    ) -> member_pb2.DescribeReplicaResponse:
        status = self._replica_status(common_pb2.MEMBER_ROLE_WRITER, self._in_sync.record)
        if (writer_status := self._in_sync.writer_status()) is not None:
            status.writer_status.CopyFrom(writer_status)
        return status

    async def Elect(
        self, request: member_pb2.ElectRequest, context: Context
    ) -> member_pb2.ElectResponse:
        raise NotFollower("this member is the writer: step down to let another lead")
