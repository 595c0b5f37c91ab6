"""``MemberService`` of the writer: copies of the log, the hand-over."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from cometmq.errors import InvalidRequest, VersionUnsupported
from cometmq.member.checksum import checksum_log
from cometmq.native import crc32
from cometmq.replication.follower import FORMAT_VERSION, PROTOCOL_VERSION, LogView, check_view
from cometmq.rpc.gate import Gate
from cometmq.v1 import member_pb2
from services.broker.handover import HandOver
from services.broker.replicas import Frame, Replicas, Sender

Context = Any  # grpc.aio.ServicerContext, whose message types differ from method to method


class ReplicationServicer:
    """The part of ``cometmq.v1.MemberService`` that only a writer serves."""

    def __init__(
        self,
        replicas: Replicas,
        hand_over: HandOver,
        broker_group: str,
        log_file_bytes: int,
        gate: Gate,
    ) -> None:
        self._replicas = replicas
        self._hand_over = hand_over
        self._broker_group = broker_group
        self._log_file_bytes = log_file_bytes
        self._gate = gate
        self._store = replicas.storage.store

    async def Replicate(self, request_iterator: object, context: Context) -> None:
        first = await context.read()
        if first is grpc.aio.EOF:
            return
        if first.WhichOneof("kind") != "hello":
            raise InvalidRequest("hello: must come first")
        follower = self._checked(first.hello)
        start = await self._replicas.start_of_copy(follower)
        await context.write(member_pb2.ReplicateResponse(hello=self._hello(start)))
        if start != follower.log_end:
            return  # it cuts its log, and comes again
        with self._replicas.join(first.hello.member_id, first.hello.store_id, start) as sender:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read_acks(sender, context))
                tasks.create_task(self._end_when_draining())
                while (frame := await sender.next_frame()) is not None:
                    await context.write(member_pb2.ReplicateResponse(chunk=self._chunk(frame)))
                raise InvalidRequest("member_id: another stream of this member has come")

    async def _read_acks(self, sender: Sender, context: Context) -> None:
        while (request := await context.read()) is not grpc.aio.EOF:
            if request.WhichOneof("kind") != "ack":
                raise InvalidRequest("ack: nothing else may come after the hello")
            sender.acked(request.ack.appended_offset, request.ack.flushed_offset)

    async def _end_when_draining(self) -> None:
        await self._gate.wait_draining()
        self._gate.check()

    def _checked(self, hello: member_pb2.FollowerHello) -> LogView:
        if hello.protocol_version != PROTOCOL_VERSION or hello.format_version != FORMAT_VERSION:
            raise VersionUnsupported(
                f"the follower speaks protocol {hello.protocol_version} and format "
                f"{hello.format_version}, the writer {PROTOCOL_VERSION} and {FORMAT_VERSION}"
            )
        if hello.broker_group != self._broker_group:
            raise InvalidRequest(f"broker_group: this is {self._broker_group}")
        if not 0 <= hello.log_min_offset <= hello.log_end_offset:
            raise InvalidRequest("log_min_offset: must be within 0 and log_end_offset")
        view = LogView(
            tuple((epoch.epoch, epoch.start_offset) for epoch in hello.epochs),
            hello.log_min_offset,
            hello.log_end_offset,
            hello.last_record_offset,
            hello.last_record_crc32,
        )
        check_view(view)
        return view

    def _hello(self, start: int) -> member_pb2.WriterHello:
        return member_pb2.WriterHello(
            protocol_version=PROTOCOL_VERSION,
            format_version=FORMAT_VERSION,
            epochs=[
                member_pb2.EpochStart(epoch=number, start_offset=offset)
                for number, offset in self._store.epochs
            ],
            start_offset=start,
            log_file_bytes=self._log_file_bytes,
        )

    def _chunk(self, frame: Frame) -> member_pb2.LogChunk:
        return member_pb2.LogChunk(
            epoch=self._store.epoch,
            offset=frame.offset,
            data=frame.data,
            data_crc32=crc32(frame.data),
            writer_end_offset=frame.writer_end,
            visible_async_offset=frame.visible_async,
            visible_sync_offset=frame.visible_others,
            sent_ms=self._replicas.clock.wall_ms(),
        )

    async def StepDown(
        self, request: member_pb2.StepDownRequest, context: Context
    ) -> member_pb2.StepDownResponse:
        wanted = request.member_id if request.HasField("member_id") else None
        done = await self._hand_over.step_down(wanted)
        return member_pb2.StepDownResponse(member_id=done.member_id, log_end_offset=done.log_end)

    async def ChecksumLog(
        self, request: member_pb2.ChecksumLogRequest, context: Context
    ) -> member_pb2.ChecksumLogResponse:
        return await checksum_log(self._store, request)
