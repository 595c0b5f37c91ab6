"""The writer towards its clients: takes messages of producers, and lets consumers have them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from functools import partial

from cometmq.errors import CometError
from cometmq.format.trace import TRACE_TOPIC
from cometmq.member.config import MemberConfig
from cometmq.member.context import MemberContext
from cometmq.member.metrics import MemberCollector
from cometmq.member.read.replica_selector import ReplicaSelector
from cometmq.messaging.state import BrokerState
from cometmq.model import QueueKey
from cometmq.rpc.shares import Buckets
from cometmq.telemetry import fields, logger
from services.broker.groups.changed_ids import ChangedIds
from services.broker.groups.clients import ClientList, Senders
from services.broker.groups.coordinator import GroupCoordinator
from services.broker.groups.live_clients import LiveClients
from services.broker.groups.membership import Groups
from services.broker.groups.questions import Questions
from services.broker.groups.resets import OffsetResets
from services.broker.pop.acks import AckService
from services.broker.pop.receive import ReceiveService
from services.broker.pop.servicer import PopServices
from services.broker.replication.replication import Replication
from services.broker.replies import Replies
from services.broker.sending.produce import ProduceHandler, ProducePolicy
from services.broker.sending.send_calls import SendCalls
from services.broker.sending.structured import StructuredEncoder
from services.broker.servicer import BrokerServicer, StreamShares
from services.broker.writer_core import WriterCore

HOUR_S = 3_600.0
FORGET_S = 600.0
TRACE_TOPIC_S = 1.0  # between two tries

_log = logger(__name__)


def _notifies_members(state: BrokerState, group: str) -> bool:
    settings = state.groups.get(group)
    return settings is None or settings.notify_members_enable


def policy_of(config: MemberConfig) -> ProducePolicy:
    """The policy that a broker's options ask for."""
    return ProducePolicy(
        in_flight_bytes_max=config.send_in_flight_bytes_max,
        auto_create_topics=config.auto_create_topic_enable,
        new_topic=config.new_topic,
        immunity_s=config.check_rules().immunity_s,
        dedup=config.message_dedup_enable,
        sync_flush_timeout_s=config.sync_flush_timeout / 1000,
        slave_timeout_s=config.slave_timeout / 1000,
        topic_creations_max=config.topic_creations_per_peer_max,
        topic_creation_interval_s=config.topic_creation_interval_s,
    )


class ClientApi:
    """Everything behind the client port."""

    def __init__(
        self, context: MemberContext, writer: WriterCore, replication: Replication
    ) -> None:
        config, identity = context.config, context.identity
        clock, metrics = context.clock, context.metrics
        core, storage, keeper = writer.core, writer.storage, writer.keeper
        self.policy = policy = policy_of(config)
        self._traces, self._keeper = config.trace_topic_enable, keeper
        self._reserved_s = config.file_reserved_time * HOUR_S
        shares = StreamShares(config.streams_per_peer_max)
        groups = Groups(
            core.members,
            partial(_notifies_members, core.state),
            lambda origin: shares.members.give_back(origin.host),
        )
        self.changed_ids = ChangedIds(groups)
        senders = Senders()
        self.clients = ClientList(groups, senders)
        questions = Questions(metrics)
        self.live_clients = LiveClients(identity, self.clients, questions, core.reader)
        self.coordinator = GroupCoordinator(
            keeper,
            storage,
            core.reader,
            groups,
            ReplicaSelector(
                config.slave_read_enable,
                config.access_message_in_memory_max_ratio,
                replication.replicas.copies,
            ),
            Buckets(
                config.group_creations_per_peer_max,
                config.group_creation_interval_s,
                "consumer groups",
                "group_creations_per_peer_max, group_creation_interval_s",
            ),
            clock,
            auto_create_groups=config.auto_create_subscription_group,
            leaving_pop=writer.pop.leaving,
            throttled=metrics.throttled,
        )
        receives = ReceiveService(writer.pop, storage, core.reader)

        def was_reset(group: str, keys: Sequence[QueueKey]) -> None:
            groups.notify(group)
            writer.pop.was_reset(group, keys)

        self.resets = OffsetResets(keeper, storage, core.reader, metrics, groups.table, was_reset)
        host = identity.store_host
        replies = Replies(storage.store, keeper, core.reader, identity.cluster, metrics, clock)
        produce = ProduceHandler(
            storage, keeper, policy, host, metrics, writer.time, replies, writer.timer_slots
        )
        encoder = StructuredEncoder(
            core.state.topics,
            policy.auto_created_queues,
            host,
            identity.batch_limits,
            clock,
            random.Random(),
        )
        self.collector = MemberCollector(metrics, storage, core.state, groups, produce)
        self.servicer = BrokerServicer(
            identity,
            produce,
            SendCalls(storage.store, produce, encoder, core.state.sent_ids, clock),
            core.reader,
            self.coordinator,
            PopServices(receives, AckService(writer.pop)),
            writer.retries,
            writer.recalls,
            writer.queue_locks,
            writer.transactions,
            writer.checks,
            replies,
            context.ports.gate,
            metrics,
            shares,
            senders,
            questions,
            clock,
            writer.described,
        )

    async def make_trace_topic(self) -> None:
        """Makes the topic of trace records, if an option asks for it."""
        while self._traces:
            try:
                await self._keeper.create_system_topic(TRACE_TOPIC, 1)
            except CometError as error:  # a full disk, no follower: soon again
                _log.warning("the trace topic is not made", extra=fields(error=error))
                await asyncio.sleep(TRACE_TOPIC_S)
            else:
                return

    async def forget_broadcasters(self) -> None:
        """Runs as long as the broker does: forgets broadcasting clients for which there can be no
        message left that they have read.
        """
        while True:
            await asyncio.sleep(FORGET_S)
            try:
                for group in await self.coordinator.drop_idle_broadcasters(self._reserved_s):
                    _log.info(
                        "offsets of a broadcasting client are forgotten", extra=fields(group=group)
                    )
            except CometError as error:  # a full disk, no follower: the next time
                _log.warning("broadcasting clients are not forgotten", extra=fields(error=error))
