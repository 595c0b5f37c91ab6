"""What every member answers on its internal port about itself: reads. A writer adds changes."""

from __future__ import annotations

from typing import Any

from cometmq.clock import SystemClock
from cometmq.member.context import MemberCore
from cometmq.member.read.group_progress import GroupReads, Progress
from cometmq.member.rpc import convert
from cometmq.member.rpc.broker_servicer import not_writer
from cometmq.member.rpc.offset_snapshot import PIECE_ROWS_MAX, OffsetSnapshot, queue_proto
from cometmq.messaging.groups import check_name
from cometmq.messaging.quotas import NO_QUOTA, Way
from cometmq.messaging.resends import ResentKey
from cometmq.model import DLQ_PREFIX
from cometmq.telemetry import version
from cometmq.v1 import broker_pb2, broker_pb2_grpc

ROW_BYTES_USUAL = 96  # of a snapshot, on the wire

Context = Any  # grpc.aio.ServicerContext, whose message types differ from method to method


class AdminReadServicer(broker_pb2_grpc.BrokerAdminServiceServicer):
    """``cometmq.v1.BrokerAdminService`` of a follower: NOT_WRITER for every change."""

    def __init__(self, core: MemberCore, group_reads: GroupReads) -> None:
        self._identity = core.identity
        self._store = core.storage.store
        self._state = core.state
        self._reader = core.reader
        self._group_reads = group_reads
        self._members = core.members
        self._retention = core.retention
        self._storage = core.storage
        self._started_ms = core.started_ms
        self._clocks = core.clocks

    async def PutTopic(
        self, request: broker_pb2.PutTopicRequest, context: Context
    ) -> broker_pb2.PutTopicResponse:
        raise not_writer(self._identity)

    async def PutQuota(
        self, request: broker_pb2.PutQuotaRequest, context: Context
    ) -> broker_pb2.PutQuotaResponse:
        raise not_writer(self._identity)

    async def DropQuota(
        self, request: broker_pb2.DropQuotaRequest, context: Context
    ) -> broker_pb2.DropQuotaResponse:
        raise not_writer(self._identity)

    async def DeleteTopic(
        self, request: broker_pb2.DeleteTopicRequest, context: Context
    ) -> broker_pb2.DeleteTopicResponse:
        raise not_writer(self._identity)

    async def DeleteGroup(
        self, request: broker_pb2.DeleteGroupRequest, context: Context
    ) -> broker_pb2.DeleteGroupResponse:
        raise not_writer(self._identity)

    async def ListClients(
        self, request: broker_pb2.ListClientsRequest, context: Context
    ) -> broker_pb2.ListClientsResponse:
        raise not_writer(self._identity)

    async def DescribeClient(
        self, request: broker_pb2.DescribeClientRequest, context: Context
    ) -> broker_pb2.DescribeClientResponse:
        raise not_writer(self._identity)

    async def VerifyMessage(
        self, request: broker_pb2.VerifyMessageRequest, context: Context
    ) -> broker_pb2.VerifyMessageResponse:
        raise not_writer(self._identity)

    async def PutGroup(
        self, request: broker_pb2.PutGroupRequest, context: Context
    ) -> broker_pb2.PutGroupResponse:
        raise not_writer(self._identity)

    async def ForgetOffsets(
        self, request: broker_pb2.ForgetOffsetsRequest, context: Context
    ) -> broker_pb2.ForgetOffsetsResponse:
        raise not_writer(self._identity)

    async def RemoveMembers(
        self, request: broker_pb2.RemoveMembersRequest, context: Context
    ) -> broker_pb2.RemoveMembersResponse:
        raise not_writer(self._identity)

    async def ResetOffsets(
        self, request: broker_pb2.ResetOffsetsRequest, context: Context
    ) -> broker_pb2.ResetOffsetsResponse:
        raise not_writer(self._identity)

    async def ResendDeadLetters(
        self, request: broker_pb2.ResendDeadLettersRequest, context: Context
    ) -> broker_pb2.ResendDeadLettersResponse:
        raise not_writer(self._identity)

    async def ResendMessages(
        self, request: broker_pb2.ResendMessagesRequest, context: Context
    ) -> broker_pb2.ResendMessagesResponse:
        raise not_writer(self._identity)

    async def QueryHalves(
        self, request: broker_pb2.QueryHalvesRequest, context: Context
    ) -> broker_pb2.QueryHalvesResponse:
        raise not_writer(self._identity)

    async def ResumeChecks(
        self, request: broker_pb2.ResumeChecksRequest, context: Context
    ) -> broker_pb2.ResumeChecksResponse:
        raise not_writer(self._identity)

    async def DropHalves(
        self, request: broker_pb2.DropHalvesRequest, context: Context
    ) -> broker_pb2.DropHalvesResponse:
        raise not_writer(self._identity)

    async def PurgeDeadLetters(
        self, request: broker_pb2.PurgeDeadLettersRequest, context: Context
    ) -> broker_pb2.PurgeDeadLettersResponse:
        raise not_writer(self._identity)

    async def ListDelayed(
        self, request: broker_pb2.ListDelayedRequest, context: Context
    ) -> broker_pb2.ListDelayedResponse:
        raise not_writer(self._identity)

    async def DescribeDeadLetters(
        self, request: broker_pb2.DescribeDeadLettersRequest, context: Context
    ) -> broker_pb2.DescribeDeadLettersResponse:
        check_name(request.group)
        group = request.group
        ranges = self._state.resent.of(ResentKey(DLQ_PREFIX + group, 0, group))
        return broker_pb2.DescribeDeadLettersResponse(
            resent=[broker_pb2.OffsetRange(first=first, end=end) for first, end in ranges]
        )

    async def ListTopics(
        self, request: broker_pb2.BrokerAdminServiceListTopicsRequest, context: Context
    ) -> broker_pb2.BrokerAdminServiceListTopicsResponse:
        return broker_pb2.BrokerAdminServiceListTopicsResponse(
            topics=[convert.topic_proto(config) for config in self._state.topics],
            send_quotas={
                topic: convert.quota_proto(quota)
                for topic, quota in self._state.quotas.of_clients[Way.SEND].items()
            },
        )

    async def ListQuotas(
        self, request: broker_pb2.ListQuotasRequest, context: Context
    ) -> broker_pb2.ListQuotasResponse:
        limits = [convert.limits_proto(*one) for one in self._state.quotas]
        return broker_pb2.ListQuotasResponse(limits=limits)

    async def DescribeTopic(
        self, request: broker_pb2.DescribeTopicRequest, context: Context
    ) -> broker_pb2.DescribeTopicResponse:
        config = self._state.topics.get(request.topic)
        count = len(self._state.generations.topic(config.name))
        await self._reader.show_appended((config.name, queue_id) for queue_id in range(count))
        return broker_pb2.DescribeTopicResponse(
            topic=convert.topic_proto(config),
            queues=[await self._queue(config.name, queue_id) for queue_id in range(count)],
            send_quota=convert.quota_proto(
                self._state.quotas.of_clients[Way.SEND].get(config.name, NO_QUOTA)
            ),
        )

    async def _queue(self, topic: str, queue_id: int) -> broker_pb2.QueueStatus:
        view = self._reader.queue(topic, queue_id)
        return broker_pb2.QueueStatus(
            queue_id=queue_id,
            generation=view.generation,
            min_offset=view.min_offset,
            max_offset=view.max_offset,
            appended_offset=view.appended_offset,
            last_store_time_ms=await self._reader.last_store_time_ms(topic, queue_id),
        )

    async def ListGroups(
        self, request: broker_pb2.ListGroupsRequest, context: Context
    ) -> broker_pb2.ListGroupsResponse:
        return broker_pb2.ListGroupsResponse(groups=sorted(self._state.groups))

    async def DescribeGroup(
        self, request: broker_pb2.DescribeGroupRequest, context: Context
    ) -> broker_pb2.DescribeGroupResponse:
        check_name(request.group)
        progress = await self._group_reads.progress(request.group, request.topic)
        settings = self._state.groups.get(request.group)
        return broker_pb2.DescribeGroupResponse(
            members=convert.members_proto(self._members.view(request.group)),
            progress=[_progress(entry) for entry in progress],
            settings=convert.group_settings_proto(settings) if settings else None,
        )

    async def DescribeBroker(
        self, request: broker_pb2.DescribeBrokerRequest, context: Context
    ) -> broker_pb2.DescribeBrokerResponse:
        store = self._store
        return broker_pb2.DescribeBrokerResponse(
            cluster=self._identity.cluster,
            broker_group=self._identity.broker_group,
            version=version(),
            epoch=store.epoch,
            store_id=store.store_id,
            log_min_offset=store.min_offset,
            log_appended_offset=store.appended_offset,
            log_flushed_offset=store.flushed_offset,
            started_ms=self._started_ms,
            refusal=self._storage.send_refusal,
            clock_skew_ms=self._clocks.skew_ms,
        )

    async def CleanStore(
        self, request: broker_pb2.CleanStoreRequest, context: Context
    ) -> broker_pb2.CleanStoreResponse:
        removed = await self._retention.clean()
        return broker_pb2.CleanStoreResponse(
            log_file_count=sum(removed.log_files.values()),
            log_bytes=removed.log_bytes,
            queue_file_count=removed.queue_files,
            log_min_offset=self._store.min_offset,
        )

    async def SnapshotOffsets(  # type: ignore[override]  # answers with context.write
        self, request: broker_pb2.SnapshotOffsetsRequest, context: Context
    ) -> None:
        header = broker_pb2.SnapshotHeader(
            cluster=self._identity.cluster,
            broker_group=self._identity.broker_group,
            epoch=self._store.epoch,
            taken_ms=SystemClock().wall_ms(),
            log_end_offset=self._store.appended_offset,
        )
        await context.write(broker_pb2.SnapshotOffsetsResponse(header=header))
        snapshot = OffsetSnapshot(self._store, self._reader, self._state, self._members)
        async for rows in snapshot.pieces():
            await context.room(PIECE_ROWS_MAX * ROW_BYTES_USUAL)
            queues = [queue_proto(row) for row in rows]
            await context.write(broker_pb2.SnapshotOffsetsResponse(queues=queues))


def _progress(entry: Progress) -> broker_pb2.GroupProgress:
    committed = None if entry.committed is None else convert.position_proto(entry.committed)
    return broker_pb2.GroupProgress(
        queue=convert.queue_proto(*entry.key),
        generation=entry.queue.generation,
        committed=committed,
        min_offset=entry.queue.min_offset,
        max_offset=entry.queue.max_offset,
    )
